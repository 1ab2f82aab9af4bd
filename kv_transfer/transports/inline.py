"""Frames over a byte channel, each piece's payload inside its message."""

from __future__ import annotations

import numpy as np

from common.errors import HandoffError
from kv_transfer.channel import ByteChannel, Bytes, Staged
from kv_transfer.frames import INLINE, Frame, Piece, decode, encode


class InlineFrames:
    """A FrameChannel over ``channel``. ``capacity_bytes`` bounds the payload that is not acknowledged."""

    def __init__(self, channel: ByteChannel, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._channel = channel
        self._staged_bytes = 0

    def stage(self, num_bytes: int) -> Staged | None:
        if self._staged_bytes + num_bytes > self.capacity_bytes:
            return None
        self._staged_bytes += num_bytes
        return Staged(np.empty(num_bytes, dtype=np.uint8), INLINE)

    def release(self, staged: Staged) -> None:
        self._staged_bytes -= len(staged.buffer)

    async def send(self, frame: Frame) -> None:
        await self._channel.send(encode(frame))

    async def receive(self) -> Frame | None:
        data = await self._channel.receive()
        return decode(data) if data else None

    async def payload(self, piece: Piece, num_bytes: int) -> Bytes:
        if piece.offset != INLINE:
            raise HandoffError(f"this transport has no shared memory, a piece claims to lie at offset {piece.offset}")
        if len(piece.payload) != num_bytes:
            raise HandoffError(f"a piece of {num_bytes} bytes came with {len(piece.payload)}")
        return np.frombuffer(piece.payload, dtype=np.uint8)

    async def close(self) -> None:
        await self._channel.close()
