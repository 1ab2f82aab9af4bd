"""Both ends of handoffs as workers have them, without engines: books of blocks, reservations with leases, handoffs,
failpoints, and the transports of real workers over real sockets.

    decode = DecodeEnd("shm"); await decode.start()
    prefill = PrefillEnd("shm"); await prefill.start()
    ticket = decode.reserve("r1", num_blocks=4)
    await prefill.hand_off("r1", ticket)            # raises what broke it
    decode.check("r1")                              # joined, with the bytes that belong to r1

Blocks of nobody hold `FREE` bytes on both sides, so that at the end a late write shows in the receiver's pool, and
a late read in what arrives.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, get_args

import numpy as np

from common.config import TransferConfig
from common.config import Transport as TransportName
from common.errors import BatonError
from common.failpoints import Failpoints
from common.handoff import HandoffCommit, HandoffReceipt, KVLayout, Ticket
from common.hashing import HASH_UNIT_TOKENS
from common.lifecycle import Tasks
from common.messages import GenerationRequest, SamplingParams
from common.metrics import WorkerMetrics
from common.workers import ModelInfo, Role, WorkerInfo
from decode_worker.reservation import Reservations
from engine.blocks import BlockPool, BlockState
from engine.sequence import Sequence as EngineSequence
from engine.sequence import SequenceOutput
from kv_transfer.host import host_id
from kv_transfer.pool import NumpyPool
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transport import Transport
from kv_transfer.transports.available import make_transports
from prefill_worker.handoff import Handoff
from rpc import kv_channel
from rpc.servers import WorkerServer
from tests.kv_transfer.groups import Hub

LAYOUT = KVLayout(model="tiny", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
FREE = 170
VOCAB_SIZE = 1000
LEASE_S = 1.0
LEASES_S = {"gloo": 2.0}
"""Where the way itself takes a busy machine a while to make."""


def _made(name: str, address: str) -> tuple[Transport, ...]:
    config = TransferConfig(transports=(name,))
    return make_transports(config, host_id(), address, partial(kv_channel.connect, timeout_s=2.0))


TRANSPORTS = ["memory", *(name for name in get_args(TransportName) if name != "nixl" and _made(name, "127.0.0.1:1"))]
"""Those that there are, and work here. Making NIXL's agents takes longer than the leases here; see test_kv_nixl.py."""


def content(name: str, num_blocks: int) -> np.ndarray[Any, Any]:
    """What belongs into the blocks of request ``name``, uint8 [layers, blocks, bytes]."""
    rng = np.random.default_rng(list(name.encode()))
    return rng.integers(0, 256, (LAYOUT.num_layers, num_blocks, LAYOUT.block_layer_bytes), dtype=np.uint8)


def token_of(name: str) -> int:
    return sum(name.encode()) % VOCAB_SIZE


def _sequence(name: str, num_blocks: int) -> EngineSequence:
    request = GenerationRequest(name, (1,) * (num_blocks * LAYOUT.block_size), SamplingParams(max_tokens=2))
    return EngineSequence(request, "tiny", 0.0)


class _End:
    """What both have."""

    def __init__(
        self,
        transport: str,
        num_blocks: int = 64,
        failpoints: Mapping[str, str] | None = None,
        hub: Hub | None = None,
        **settings: Any,
    ) -> None:
        self.transport = transport
        self.config = TransferConfig(**{"lease_s": LEASES_S.get(transport, LEASE_S)} | settings)
        self.failpoints = Failpoints(failpoints, random.Random(f"{transport} {failpoints}"))
        self.pool = NumpyPool(LAYOUT, num_blocks)
        self.pool.data[:] = FREE
        self.books = BlockPool(num_blocks, LAYOUT.block_size)
        self.server = WorkerServer()
        self.hub = hub

    def _transports(self, address: str) -> tuple[Transport, ...]:
        if self.transport == "memory":
            assert self.hub is not None
            return (self.hub,)
        config = self.config.model_copy(update={"transports": (self.transport,)})
        return make_transports(config, host_id(), address, partial(kv_channel.connect, timeout_s=2.0))

    def _take(self, sequence: EngineSequence, state: BlockState) -> None:
        num_blocks = self.books.blocks_for(sequence.num_context)
        holding = self.books.allocate(sequence.key, num_blocks, state, asyncio.get_running_loop().time())
        assert holding is not None, "the pool is full"
        sequence.block_ids = holding.block_ids

    def _give_back(self, sequence: EngineSequence) -> None:
        self.pool.data[:, sequence.block_ids] = FREE
        self.books.release(sequence.key)

    @property
    def at_baseline(self) -> bool:
        return self.books.num_free == self.books.num_blocks


class DecodeEnd(_End):
    """Reserves, receives; a request that has joined is kept as its bytes, and its blocks are free at once."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.joined: dict[str, np.ndarray[Any, Any]] = {}
        self.commits: dict[str, HandoffCommit] = {}
        self.ended: dict[str, BatonError] = {}
        self._tasks = Tasks()

    async def start(self, port: int = 0) -> None:
        address = self.server.bind("127.0.0.1", port)
        self.receiver = Receiver(
            self.pool, self.config, host_id(), self._transports(address), failpoints=self.failpoints
        )
        await self.receiver.start()
        model = ModelInfo("tiny", "tiny", VOCAB_SIZE, 512, (0,))
        info = WorkerInfo(
            "decode-0",
            Role.DECODE,
            1,
            "here",
            host_id(),
            (),
            address,
            model,
            LAYOUT,
            self.books.num_blocks,
            512,
            HASH_UNIT_TOKENS,
        )
        self.reservations = Reservations(
            info,
            self.receiver,
            self.config.lease_s,
            self._joined,
            self._ended,
            self._tasks,
            WorkerMetrics("decode"),
            self.failpoints,
        )
        await self.server.start(self.receiver, kv=self.receiver)  # type: ignore[arg-type]

    @property
    def port(self) -> int:
        return int(self.server.address.rsplit(":", 1)[1])

    def reserve(self, name: str, num_blocks: int) -> Ticket:
        sequence = _sequence(name, num_blocks)
        self._take(sequence, BlockState.RESERVED)
        return self.reservations.add(sequence)

    def cancel(self, name: str, error: BatonError) -> None:
        self.reservations.end(f"{name}#0", error)

    def check(self, name: str) -> None:
        """It joined, with its own bytes in its blocks and its own first token."""
        got = self.joined[name]
        assert (got == content(name, got.shape[1])).all(), f"foreign bytes were served to {name}"
        assert self.commits[name].token == token_of(name)

    def _joined(self, sequence: EngineSequence, commit: HandoffCommit) -> None:
        name = sequence.request.request_id
        self.joined[name] = self.pool.data[:, sequence.block_ids].copy()
        self.commits[name] = commit
        self._give_back(sequence)

    def _ended(self, sequence: EngineSequence, error: BatonError) -> None:
        self.ended[sequence.request.request_id] = error
        self._give_back(sequence)

    async def close(self) -> None:
        await self.receiver.close()
        await self.server.stop(0)
        await self._tasks.close()


class PrefillEnd(_End):
    """Computes (copies in) the content of a request in chunks and hands it off."""

    async def start(self) -> None:
        address = self.server.bind("127.0.0.1", 0)
        transports = self._transports(address)
        self.sender = Sender(self.pool, self.config, transports, failpoints=self.failpoints)
        await self.server.start(self.sender)  # type: ignore[arg-type]  # nobody calls it

    async def hand_off(self, name: str, ticket: Ticket, timeout_s: float | None = None) -> HandoffReceipt:
        """All of it, chunk by chunk; its blocks are free when it returns. Raises what broke it, or TimeoutError."""
        sequence = _sequence(name, len(ticket.block_ids))
        self._take(sequence, BlockState.RUNNING)
        try:
            handoff = Handoff(sequence, ticket, self.sender, LAYOUT.num_layers, LAYOUT.block_size, self.failpoints)
            async with asyncio.timeout(timeout_s):
                running = asyncio.ensure_future(handoff.run(asyncio.get_running_loop().time))
                try:
                    handoff.admitted()
                    await self._compute(name, sequence, handoff)
                    return await running
                finally:
                    running.cancel()
                    await asyncio.wait([running])
        finally:
            self._give_back(sequence)

    async def _compute(self, name: str, sequence: EngineSequence, handoff: Handoff) -> None:
        blocks = sequence.block_ids
        whole = content(name, len(blocks))
        half = len(blocks) // 2
        for first, end in ((0, half), (half, len(blocks))):
            for layer in range(LAYOUT.num_layers):
                self.pool.data[layer, blocks[first:end]] = whole[layer, first:end]
                handoff.layer_complete(layer, end * LAYOUT.block_size)
            await asyncio.sleep(0)
        handoff.computed(SequenceOutput(sequence, 0, token_of(name)))

    async def close(self) -> None:
        await self.sender.close()
        await self.server.stop(0)


@asynccontextmanager
async def both(
    transport: str,
    prefill_failpoints: Mapping[str, str] | None = None,
    decode_failpoints: Mapping[str, str] | None = None,
    num_blocks: int = 64,
    **settings: Any,
) -> AsyncIterator[tuple[PrefillEnd, DecodeEnd]]:
    """Both, started, and closed at the end."""
    hub = Hub() if transport == "memory" else None
    prefill = PrefillEnd(transport, num_blocks, prefill_failpoints, hub, **settings)
    decode = DecodeEnd(transport, num_blocks, decode_failpoints, hub, **settings)
    await decode.start()
    await prefill.start()
    try:
        yield prefill, decode
    finally:
        await prefill.close()
        await decode.close()


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Polls: the other side's word for it comes over real sockets."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
