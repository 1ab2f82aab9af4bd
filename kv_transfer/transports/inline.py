"""Frames over a byte channel, each piece's payload inside its message.

Between the pools and the channel there is no copy of our own where blocks are large enough and alike on both sides:
the channel takes them where they lie, and what it brings is put where it belongs. Else they are copied together into
one buffer, and from one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from common.errors import HandoffError
from kv_transfer.channel import ByteChannel, Bytes, PartsChannel, Staged
from kv_transfer.frames import (
    INLINE,
    MAX_FRAME_BYTES,
    PIECE_HEADER_BYTES,
    Frame,
    Piece,
    Receipt,
    decode,
    encode,
    is_piece,
    piece_header,
)
from kv_transfer.transports.acknowledging import Acknowledgements
from kv_transfer.transports.staging import Buffers

ACKS_TOGETHER = 4
"""The sender always has room for as many pieces of several blocks (`link.FRAMES_IN_FLIGHT`)."""

ACK_DELAY_S = 0.005
"""An acknowledgement waits so long for the next piece. A message of its own takes as long as a good part of a MiB."""


class InlineFrames:
    """A DirectFrames over ``channel``. ``capacity_bytes`` bounds the payload that is not acknowledged."""

    def __init__(self, channel: ByteChannel, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._channel = channel if isinstance(channel, PartsChannel) else _WholeMessages(channel)
        self._buffers = Buffers(capacity_bytes)
        self._unsaid = Acknowledgements(ACKS_TOGETHER)
        self._payload: list[memoryview] = []
        """Of the piece that was received last, until it is taken."""

    def stage(self, num_bytes: int) -> Staged | None:
        return self._buffers.stage(num_bytes)

    def release(self, staged: Staged) -> None:
        self._buffers.release(staged)

    async def send(self, frame: Frame) -> None:
        if isinstance(frame, Receipt):  # the sender waits for it, and for the room of its pieces nobody yet
            await self._channel.send(encode(frame))
            return
        for due in self._unsaid.before(frame):
            if isinstance(due, Piece):
                await self._channel.send_parts((piece_header(due), due.payload))
                if isinstance(due.payload, memoryview):
                    self._buffers.take_back(due.payload.obj)  # the channel has its copy
            else:
                await self._channel.send(encode(due))

    async def send_parts(self, piece: Piece, staged: Staged, parts: Sequence[memoryview]) -> None:
        await self._channel.send_parts((piece_header(piece), *parts))
        self._buffers.take_back(staged.buffer)

    async def receive(self) -> Frame | None:
        self._payload = []
        parts = await self._next()
        if not parts:
            return None
        num_bytes = sum(map(len, parts))
        if num_bytes > MAX_FRAME_BYTES:
            raise HandoffError(f"a frame has 1 to {MAX_FRAME_BYTES} bytes, this one has {num_bytes}")
        if len(parts[0]) < PIECE_HEADER_BYTES:  # not the way in which our own messages are cut
            parts = [memoryview(b"".join(parts))]
        if not num_bytes or not is_piece(parts[0]):
            return decode(b"".join(parts))
        self._payload = [parts[0][PIECE_HEADER_BYTES:], *parts[1:]]
        return decode(parts[0][:PIECE_HEADER_BYTES])

    async def payload(self, piece: Piece, num_bytes: int) -> Bytes:
        check_inline(piece, num_bytes, sum(map(len, self._payload)))
        payload, self._payload = self._payload, []
        return np.frombuffer(payload[0] if len(payload) == 1 else b"".join(payload), dtype=np.uint8)

    async def receive_parts(self, piece: Piece, parts: Sequence[memoryview], live: Callable[[], bool]) -> bool:
        check_inline(piece, sum(map(len, parts)), sum(map(len, self._payload)))
        if not live():
            return False
        payload, self._payload = self._payload, []  # what follows uses its memory, while that is in the cache
        _copy(payload, parts)  # without a wait
        return True

    async def close(self) -> None:
        await self._channel.close()

    async def _next(self) -> list[memoryview]:
        """The next message. Acknowledgements that are kept leave before a longer wait."""
        if self._unsaid:
            try:
                async with asyncio.timeout(ACK_DELAY_S):
                    return await self._channel.receive_parts()
            except TimeoutError:
                for due in self._unsaid.take():
                    await self._channel.send(encode(due))
        return await self._channel.receive_parts()


def check_inline(piece: Piece, num_bytes: int, came_bytes: int) -> None:
    """Raises HandoffError unless the payload of ``piece`` came in its message and is ``num_bytes`` long."""
    if piece.offset != INLINE:
        raise HandoffError(f"this transport has no shared memory, a piece claims to lie at offset {piece.offset}")
    if came_bytes != num_bytes:
        raise HandoffError(f"a piece of {num_bytes} bytes came with {came_bytes}")


class _WholeMessages:
    """A PartsChannel over a channel that is none."""

    def __init__(self, channel: ByteChannel) -> None:
        self.send = channel.send
        self.receive = channel.receive
        self.close = channel.close

    async def send_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        await self.send(b"".join(parts))

    async def receive_parts(self) -> list[memoryview]:
        data = await self.receive()
        return [memoryview(data)] if data else []


def _copy(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """Both are as long, however they are cut."""
    parts = iter(source)
    part = memoryview(b"")
    for place in target:
        while len(place):
            if not len(part):
                part = next(parts)
            size = min(len(part), len(place))
            place[:size] = part[:size]
            part, place = part[size:], place[size:]
