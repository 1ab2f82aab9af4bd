"""Payloads inside messages: from pool to pool, in one part or several, and acknowledgements that wait for company."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from common.errors import HandoffError
from kv_transfer.channel import DirectFrames, PartsChannel
from kv_transfer.frames import INLINE, Abort, Commit, Frame, Piece, PieceAck, Receipt, encode
from kv_transfer.transports.inline import ACKS_TOGETHER, InlineFrames
from kv_transfer.transports.memory import MemoryChannel, channel_pair

BLOCK_BYTES, NUM_BLOCKS = 1000, 8
SIZE = BLOCK_BYTES * NUM_BLOCKS


class Cutting:
    """A PartsChannel that brings messages in parts of ``part_bytes``, like gRPC's large ones."""

    def __init__(self, channel: MemoryChannel, part_bytes: int) -> None:
        self.send = channel.send
        self.receive = channel.receive
        self.close = channel.close
        self._part_bytes = part_bytes

    async def send_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        await self.send(b"".join(parts))

    async def receive_parts(self) -> list[memoryview]:
        data = memoryview(await self.receive())
        return [data[start : start + self._part_bytes] for start in range(0, len(data), self._part_bytes)]


def ends(part_bytes: int) -> tuple[InlineFrames, InlineFrames]:
    near, far = channel_pair()
    cutting = Cutting(far, part_bytes)
    assert isinstance(cutting, PartsChannel)
    return InlineFrames(near, 2 * SIZE), InlineFrames(cutting, 0)


def piece(sequence: int = 1, payload: bytes | memoryview = b"") -> Piece:
    return Piece(1, sequence, 0, 0, NUM_BLOCKS, 99, INLINE, payload)


def blocks(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)


@pytest.mark.parametrize("part_bytes", [7, 100, 999, 1000, 1 << 20])
async def test_from_pool_to_pool(part_bytes: int) -> None:
    near, far = ends(part_bytes)
    assert isinstance(near, DirectFrames)
    source, target = blocks(1), blocks(2)
    staged = near.stage(SIZE)
    assert staged is not None
    await near.send_parts(piece(), staged, [row.data for row in source])
    assert await far.receive() == piece()
    assert await far.receive_parts(piece(), [row.data for row in target], lambda: True)
    assert (target == source).all()


@pytest.mark.parametrize("part_bytes", [999, 1 << 20])
async def test_by_way_of_staging(part_bytes: int) -> None:
    near, far = ends(part_bytes)
    source = blocks(1)
    staged = near.stage(SIZE)
    assert staged is not None
    staged.buffer[:] = source.reshape(-1)
    await near.send(piece(payload=staged.buffer.data))
    assert await far.receive() == piece()
    payload = await far.payload(piece(), SIZE)
    assert not payload.flags.writeable
    assert (payload == source.reshape(-1)).all()


async def test_a_void_ticket_is_not_written_for() -> None:
    near, far = ends(1 << 20)
    target = blocks(2)
    await near.send(piece(payload=blocks(1).tobytes()))
    assert await far.receive() == piece()
    assert not await far.receive_parts(piece(), [row.data for row in target], lambda: False)
    assert (target == blocks(2)).all()
    await near.send(Abort(1, "bye"))
    assert await far.receive() == Abort(1, "bye")


async def test_a_payload_of_another_length() -> None:
    near, far = ends(100)
    await near.send(piece(payload=bytes(SIZE - 1)))
    assert await far.receive() == piece()
    with pytest.raises(HandoffError, match=f"a piece of {SIZE} bytes came with {SIZE - 1}"):
        await far.payload(piece(), SIZE)
    with pytest.raises(HandoffError, match=f"a piece of {SIZE} bytes came with {SIZE - 1}"):
        await far.receive_parts(piece(), [row.data for row in blocks(2)], lambda: True)


@pytest.mark.parametrize("parts", [[b""], [b"", b""], [b"\xf0"], [b"", b"\xf0" * 20]])
async def test_what_is_no_frame(parts: list[bytes]) -> None:
    _, far = channel_pair()
    cutting = Cutting(far, 1)

    async def receive_parts() -> list[memoryview]:
        return [memoryview(part) for part in parts]

    cutting.receive_parts = receive_parts  # type: ignore[method-assign]
    with pytest.raises(HandoffError, match=r"a frame (has 1 to|of kind 240 and)"):
        await InlineFrames(cutting, 0).receive()


async def test_staging_is_bounded_by_what_is_not_acknowledged() -> None:
    near, _ = ends(1 << 20)
    first, second = near.stage(SIZE), near.stage(SIZE)
    assert first is not None
    assert second is not None
    await near.send(piece(payload=first.buffer.data))
    assert near.stage(1) is None  # sent, and still not acknowledged
    near.release(first)
    assert near.stage(SIZE) is not None


async def acknowledged(frames: Sequence[Frame], wait: bool = False) -> list[bytes]:
    """What a receiver says that sends ``frames`` and then waits for a frame: at once, or ``wait`` for the first."""
    near, far = channel_pair()
    end = InlineFrames(far, 0)
    for frame in frames:
        await end.send(frame)
    receiving = asyncio.ensure_future(end.receive())
    said = [await asyncio.wait_for(near.receive(), 1)] if wait else []
    receiving.cancel()
    return [*said, *(near.receive_nowait() for _ in range(near.num_waiting))]


async def test_one_acknowledgement_speaks_for_several() -> None:
    acks = [PieceAck(number) for number in range(1, ACKS_TOGETHER + 1)]
    assert await acknowledged(acks) == [encode(acks[-1])]


async def test_an_acknowledgement_waits_only_a_while() -> None:
    assert await acknowledged([PieceAck(1), PieceAck(2)], wait=True) == [encode(PieceAck(2))]


async def test_nothing_but_a_receipt_overtakes_an_acknowledgement() -> None:
    commit, receipt = Commit(1, 2, 3, 4), Receipt(1, 2, 3)
    assert await acknowledged([PieceAck(1), commit]) == [encode(PieceAck(1)), encode(commit)]
    assert await acknowledged([PieceAck(1), receipt]) == [encode(receipt)]
