"""Pieces that are damaged, lost, doubled or overtaken on their way, over every transport there is: none is served,
all are counted, and what cannot be made good ends in an error.

The failpoint `piece` does it (`kv_transfer/faults.py`); here one frame carries one piece, so that the numbers of
both can be compared.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from common.errors import BatonError, IntegrityError
from kv_transfer.channel import ByteChannel
from tests.kv_transfer.ends import LAYOUT, TRANSPORTS, DecodeEnd, PrefillEnd, both, until
from tests.kv_transfer.groups import CAPACITY

NUM_BLOCKS = 20
PIECES = NUM_BLOCKS * LAYOUT.num_layers


@pytest.fixture(autouse=True)
def one_piece_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.link.FRAME_BYTES", LAYOUT.block_layer_bytes)
    monkeypatch.setattr("kv_transfer.copies.DIRECT_BYTES", 1)  # TCP's way of large blocks


async def serve(prefill: PrefillEnd, decode_end: DecodeEnd, names: list[str]) -> None:
    """Handoffs of ``names``, three at a time; each has to end well, with its own bytes."""

    async def one(name: str) -> None:
        await prefill.hand_off(name, decode_end.reserve(name, NUM_BLOCKS))
        decode_end.check(name)

    for first in range(0, len(names), 3):
        await asyncio.gather(*(one(name) for name in names[first : first + 3]))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_thousand_flips_losses_and_doubles_are_made_good_and_counted(transport: str) -> None:
    faults = {"piece": "8%corrupt | 8%drop | 8%duplicate"}
    async with both(transport, faults, retries=9, lease_s=10) as (prefill, decode_end):
        happened = prefill.failpoints.happened
        count = 0
        while happened.total() < 1000:
            await serve(prefill, decode_end, [f"r{count + number}" for number in range(6)])
            count += 6
        flips, losses, doubles = (happened["piece", kind] for kind in ("corrupt", "drop", "duplicate"))
        assert min(flips, losses, doubles) > 200
        sent, received = prefill.sender.counters, decode_end.receiver.counters
        assert received.corrupt == flips
        assert received.duplicates == doubles
        assert sent.resent == flips + losses
        assert received.pieces == count * PIECES == sent.pieces - sent.resent
        assert (received.stale, received.failures, sent.failures, sent.fallbacks) == (0, 0, 0, 0)
        assert received.handoffs == sent.handoffs == count
        assert prefill.at_baseline
        assert decode_end.at_baseline


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_pieces_that_overtake_each_other_do_no_harm(transport: str) -> None:
    """One that the commit overtakes is taken for lost, and comes twice."""
    faults = {"piece": "12%reorder | 3%corrupt | 3%drop | 3%duplicate"}
    async with both(transport, faults, retries=9, lease_s=10) as (prefill, decode_end):
        happened = prefill.failpoints.happened
        count = 0
        while happened["piece", "reorder"] < 300:
            await serve(prefill, decode_end, [f"r{count + number}" for number in range(6)])
            count += 6
        # The last of them may still be on their way.
        sent, received = prefill.sender.counters, decode_end.receiver.counters
        arrived = sent.pieces - happened["piece", "drop"] + happened["piece", "duplicate"]
        await until(lambda: received.pieces + received.duplicates + received.corrupt + received.stale == arrived)
        assert received.pieces == count * PIECES == sent.pieces - sent.resent
        assert received.duplicates >= happened["piece", "duplicate"] - received.stale
        assert sent.resent >= received.corrupt
        assert (received.failures, sent.failures) == (0, 0)
        assert received.handoffs == sent.handoffs == count


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("damage", ["corrupt", "drop"])
async def test_when_nothing_comes_through_the_handoff_fails_on_both_sides(transport: str, damage: str) -> None:
    async with both(transport, {"piece": f"{3 * PIECES}*{damage}"}, retries=2, lease_s=10) as (prefill, decode_end):
        ticket = decode_end.reserve("lost", NUM_BLOCKS)
        with pytest.raises(IntegrityError, match=f"needs {PIECES} pieces, .* 0 arrived intact in 3 tries"):
            await prefill.hand_off("lost", ticket)
        await until(lambda: "lost" in decode_end.ended)
        assert isinstance(decode_end.ended["lost"], IntegrityError)
        assert not decode_end.joined
        received = decode_end.receiver.counters
        assert (received.corrupt, received.pieces) == (3 * PIECES if damage == "corrupt" else 0, 0)
        assert prefill.sender.counters.resent == 2 * PIECES
        assert (decode_end.pool.data == 170).all()  # nothing was written
        assert prefill.at_baseline
        assert decode_end.at_baseline
        # The way is as good as new.
        await serve(prefill, decode_end, ["next"])


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_room_of_pieces_that_were_lost_comes_back(transport: str) -> None:
    """All that staging holds is lost, then the handoff is given up: the next one finds room at once."""
    in_flight = CAPACITY // LAYOUT.block_layer_bytes
    faults = {"piece": f"{in_flight}*drop"}
    async with both(transport, faults, num_blocks=1024, lease_s=5, staging_bytes=CAPACITY) as (prefill, decode_end):
        going = asyncio.ensure_future(prefill.hand_off("lost", decode_end.reserve("lost", in_flight // 2)))
        await until(lambda: prefill.failpoints.happened["piece", "drop"] == in_flight)
        going.cancel()
        await asyncio.wait([going])
        await until(lambda: decode_end.at_baseline)
        async with asyncio.timeout(2):
            await serve(prefill, decode_end, ["next"])
        assert (prefill.sender.counters.failures, prefill.sender.counters.fallbacks) == (1, 0)


class OneBit:
    """A byte channel on which one bit of one message turns over, whichever way the message goes."""

    def __init__(self, channel: ByteChannel, rng: random.Random) -> None:
        self._channel = channel
        self._rng = rng
        self._left = rng.randrange(2 + 3 * 4 + 3)  # the opening, pieces and their acknowledgements, the commit

    async def send(self, data: bytes) -> None:
        await self._channel.send(self._pass(data))

    async def receive(self) -> bytes:
        return self._pass(await self._channel.receive())

    async def close(self) -> None:
        await self._channel.close()

    def _pass(self, data: bytes) -> bytes:
        self._left -= 1
        if self._left != -1 or not data:
            return data
        damaged = bytearray(data)
        damaged[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return bytes(damaged)


async def test_any_bit_of_any_message_may_turn_over(make_pair: Any) -> None:
    """Not the payload alone: then the handoff ends in an error, or with the right bytes, and other blocks are
    never touched."""
    rng = random.Random(3)
    ends = Counter[str]()
    for number in range(300):
        pair = await make_pair(num_blocks=4)
        pair.wrap = lambda channel: OneBit(channel, rng)
        ticket, listener = pair.expect([1, 2], lease_s=0.5)
        try:
            push = await pair.sender.open(ticket, [3, 0])
            for block in (0, 1):
                for layer in range(3):
                    push.push(layer, block, 1)
                await asyncio.sleep(0)
            await push.commit(pair.commit(ticket))
            ends["committed"] += 1
        except BatonError as error:
            ends[error.code] += 1
        if listener.all("committed"):
            assert listener.all("committed") == [pair.commit(ticket)], number
            pair.assert_moved([3, 0], [1, 2])
        await pair.receiver.forget(ticket.ticket_id)
        assert not pair.target.data[:, [0, 3]].any(), number
    assert ends["committed"] > 30
    assert ends["handoff"] > 30
