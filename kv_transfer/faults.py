"""The failpoint `piece`: pieces of KV that are delayed, lost, damaged, doubled or overtaken on their way.

It wraps the sender's end of a channel of any transport, and only where that failpoint is configured.
"""

from __future__ import annotations

from common.failpoints import Failpoints
from kv_transfer.channel import Bytes, FrameChannel, Staged
from kv_transfer.frames import Frame, Piece


class FaultyFrames:
    """A FrameChannel over ``channel``. The one that sends stages a piece right before it sends it."""

    def __init__(self, channel: FrameChannel, failpoints: Failpoints) -> None:
        self.capacity_bytes = channel.capacity_bytes
        self._channel = channel
        self._failpoints = failpoints
        self._staged: Staged | None = None
        self._held: Piece | None = None

    def stage(self, num_bytes: int) -> Staged | None:
        self._staged = self._channel.stage(num_bytes)
        return self._staged

    def release(self, staged: Staged) -> None:
        self._channel.release(staged)

    async def send(self, frame: Frame) -> None:
        damage = await self._failpoints.reach("piece") if isinstance(frame, Piece) else ""
        held, self._held = self._held, None
        match damage:
            case "drop":
                pass
            case "reorder" if isinstance(frame, Piece):
                self._held = frame
            case _:
                if damage == "corrupt" and self._staged is not None:
                    self._flip_a_bit(self._staged.buffer)
                await self._channel.send(frame)
                if damage == "duplicate":
                    await self._channel.send(frame)
        if held is not None:
            await self._channel.send(held)

    def _flip_a_bit(self, payload: Bytes) -> None:
        rng = self._failpoints.rng
        payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)

    async def receive(self) -> Frame | None:
        return await self._channel.receive()

    def payload(self, piece: Piece, num_bytes: int) -> Bytes:
        return self._channel.payload(piece, num_bytes)

    async def close(self) -> None:
        await self._channel.close()
