"""The failpoint `piece`: pieces of KV that are delayed, lost, damaged, doubled or overtaken on their way.

It wraps the sender's end of a channel of any transport, and only where that failpoint is configured.
"""

from __future__ import annotations

from common.failpoints import Failpoints
from kv_transfer.channel import Bytes, FrameChannel, Staged
from kv_transfer.frames import Frame, Piece, PieceAck


class FaultyFrames:
    """A FrameChannel over ``channel``. The one that sends stages a piece right before it sends it.

    An acknowledgement says that the pieces before it have come, too, or never will. Of one that was overtaken
    that is not true: its room, which the receiver has yet to read, is given back with its own acknowledgement, or
    with a later one that is not its overtaker's (a channel may leave out those that a later one speaks for).
    """

    def __init__(self, channel: FrameChannel, failpoints: Failpoints) -> None:
        self.capacity_bytes = channel.capacity_bytes
        self._channel = channel
        self._failpoints = failpoints
        self._staged: Staged | None = None
        self._held: Piece | None = None
        self._overtaken: dict[int, Staged] = {}
        """Sequence → room, until they are acknowledged."""
        self._overtakers: dict[int, int] = {}
        """Sequence → that of the piece which came before it."""
        self._released: dict[int, Staged] = {}
        """Those of them that the sender has released meanwhile."""

    def stage(self, num_bytes: int) -> Staged | None:
        self._staged = self._channel.stage(num_bytes)
        return self._staged

    def release(self, staged: Staged) -> None:
        for sequence, room in self._overtaken.items():
            if room is staged:
                self._released[sequence] = room
                return
        self._channel.release(staged)

    async def send(self, frame: Frame) -> None:
        damage = await self._failpoints.reach("piece") if isinstance(frame, Piece) else ""
        held, self._held = self._held, None
        match damage:
            case "drop":
                pass
            case "reorder" if isinstance(frame, Piece):
                assert self._staged is not None
                self._held, self._overtaken[frame.sequence] = frame, self._staged
            case _:
                if damage == "corrupt" and self._staged is not None:
                    self._flip_a_bit(self._staged.buffer)
                await self._channel.send(frame)
                if damage == "duplicate":
                    await self._channel.send(frame)
        if held is not None:
            if isinstance(frame, Piece):
                self._overtakers[held.sequence] = frame.sequence
            await self._channel.send(held)

    def _flip_a_bit(self, payload: Bytes) -> None:
        rng = self._failpoints.rng
        payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)

    async def receive(self) -> Frame | None:
        frame = await self._channel.receive()
        if isinstance(frame, PieceAck):
            for sequence in [number for number in self._overtaken if number <= frame.sequence]:
                if self._overtakers.get(sequence) != frame.sequence:
                    self._give_back(sequence)
        return frame

    def _give_back(self, sequence: int) -> None:
        del self._overtaken[sequence]
        self._overtakers.pop(sequence, None)
        room = self._released.pop(sequence, None)
        if room is not None:
            self._channel.release(room)

    async def payload(self, piece: Piece, num_bytes: int) -> Bytes:
        return await self._channel.payload(piece, num_bytes)

    async def close(self) -> None:
        await self._channel.close()
