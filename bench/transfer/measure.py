"""One case: the raw link and the engine in turn, and what checksums cost.

Knows one pool here and one peer; which cases there are and in which order is `session.py`'s.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any, cast

import numpy as np
import xxhash

from bench.transfer.cases import GIB, Case
from bench.transfer.ends import HOST
from bench.transfer.raw import Bytes
from bench.transfer.remote import Peer
from common.config import TransferConfig
from common.errors import IntegrityError
from common.handoff import HandoffCommit, Ticket
from common.lifecycle import freeze_heap
from engine.kv_cache import KVCache, host_cache
from kv_transfer.blocking import run_inline
from kv_transfer.host import host_id
from kv_transfer.sender import Sender
from kv_transfer.transports.available import make_transports
from rpc import kv_channel

TURNS = 5
"""How often verified and unverified rounds take turns, each with a link of its own."""


class SendingEnd:
    """A pool that holds ``source``, uint8 [case.num_bytes], and senders from it."""

    def __init__(self, case: Case, source: Bytes) -> None:
        self.case = case
        self.source = source
        self.pool: KVCache = host_cache(case.layout, case.blocks)
        self.block_ids = case.block_ids(3)
        rows = source.reshape(case.layout.num_layers, case.blocks, case.piece_bytes)
        for layer in range(case.layout.num_layers):
            self.pool.write_blocks(layer, self.block_ids, rows[layer])

    def sender(self, *, verify: bool = True) -> Sender:
        config = TransferConfig(transports=cast(Any, (self.case.transport,)), verify=verify)
        connect = partial(kv_channel.connect, secret=None)
        return Sender(self.pool, config, make_transports(config, host_id(), f"{HOST}:1", connect), run_inline)

    async def hand_off(self, sender: Sender, ticket: Ticket) -> tuple[float, float]:
        """Seconds to open, which an engine does before it computes the first layer, and from there to the receipt."""
        ids = self.block_ids.tolist()
        began = time.perf_counter()  # uvloop's clock counts milliseconds
        push = await sender.open(ticket, ids)
        opened = time.perf_counter()
        for layer in range(self.case.layout.num_layers):
            push.push(layer, 0, self.case.blocks)
        receipt = await push.commit(HandoffCommit(ticket.ticket_id, 0, 0, self.case.blocks))
        ended = time.perf_counter()
        if receipt.num_bytes != self.case.num_bytes or push.transport != self.case.transport:
            raise IntegrityError(f"{receipt.num_bytes} of {self.case.num_bytes} bytes moved over {push.transport}")
        return opened - began, ended - opened


async def measure(case: Case, source: Bytes, peer: Peer, rounds: int) -> dict[str, Any]:
    """One of the JSON's ``results``. Raises IntegrityError when what arrived is not ``source``."""
    end = SendingEnd(case, source)
    sender, offers = end.sender(), await peer.prepare(case, verify=True)
    open_s, engine_s, raw_s = [], [], []
    freeze_heap()  # as workers do
    try:
        for number in range(rounds + 1):
            raw_s.append(await _raw_round(case, peer, end))
            times = await _engine_round(end, sender, peer, case.ticket(number, offers), number)
            open_s.append(times[0])
            engine_s.append(times[1])
        await _check(end, peer)
    finally:
        await sender.close()
    # The first round meets memory that nobody has touched yet.
    gib_s, raw_gib_s = (case.num_bytes / GIB / statistics.median(times[1:]) for times in (engine_s, raw_s))
    return {
        "transport": case.transport,
        "size": case.size,
        "bytes": case.num_bytes,
        "blocks": case.blocks,
        "layers": case.layout.num_layers,
        "rounds": rounds,
        "gib_s": gib_s,
        "raw_gib_s": raw_gib_s,
        "ratio": gib_s / raw_gib_s,
        "open_s": statistics.median(open_s[1:]),
    }


async def checksum_share(case: Case, source: Bytes, peer: Peer, rounds: int) -> float:
    """Which part of a verified handoff's time goes away without verification: the median of `TURNS` comparisons, each
    of medians over ``rounds / TURNS`` rounds. Below 0 is noise.
    """
    end = SendingEnd(case, source)
    shares = []
    for _ in range(TURNS):
        verified_s, bare_s = [await _median_s(end, peer, -(-rounds // TURNS), verify) for verify in (True, False)]
        shares.append(1 - bare_s / verified_s)
    return statistics.median(shares)


async def _check(end: SendingEnd, peer: Peer) -> None:
    sent = xxhash.xxh3_64_hexdigest(end.source.data)
    for place, arrived in zip(("the pool", "the raw link's target"), await peer.digests(), strict=True):
        if arrived != sent:
            raise IntegrityError(
                f"{end.case.transport}, {end.case.num_bytes} bytes in {end.case.blocks} blocks: {place} has other "
                f"bytes than were sent (xxh3 {arrived}, sent {sent})"
            )


async def _median_s(end: SendingEnd, peer: Peer, rounds: int, verify: bool) -> float:
    """Of handoffs over a new link, whose first one does not count."""
    sender, offers = end.sender(verify=verify), await peer.prepare(end.case, verify=verify)
    try:
        times = [
            (await _engine_round(end, sender, peer, end.case.ticket(number, offers), number))[1]
            for number in range(rounds + 1)
        ]
    finally:
        await sender.close()
    return statistics.median(times[1:])


async def _engine_round(
    end: SendingEnd, sender: Sender, peer: Peer, ticket: Ticket, number: int
) -> tuple[float, float]:
    await peer.expect(number)
    times = await end.hand_off(sender, ticket)
    await peer.forget(number)
    return times


async def _raw_round(case: Case, peer: Peer, end: SendingEnd) -> float:
    await peer.raw_ready(case.transport)
    started = time.perf_counter()
    await peer.send_raw(case.transport, end.source)
    return time.perf_counter() - started


def random_bytes(count: int) -> Bytes:
    """uint8 [count], the same every time."""
    return np.random.default_rng(2).integers(0, 256, count, dtype=np.uint8)
