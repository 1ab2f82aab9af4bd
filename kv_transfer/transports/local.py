"""Both ends in one process: frames are passed as they are, payloads by reference.

    sender                                       receiver
      copy blocks into a buffer, piece ─────────▶ copy into the pool, verify
      buffer is used again ◀───── acknowledgement

The address of an offer means something only to the event loop that listens, so nobody else is let in.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from dataclasses import dataclass

import numpy as np

from common.errors import HandoffError, WorkerLostError
from common.handoff import TransportOffer
from common.lifecycle import Tasks
from kv_transfer.channel import Bytes, FrameChannel, Staged
from kv_transfer.frames import Frame, Piece
from kv_transfer.transport import Serve
from kv_transfer.transports.staging import Buffers


class LocalFrames:
    """One end. Made in pairs by `frames_pair`."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._peer = self
        self._inbox: deque[Frame] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._closed_here = False
        self._buffers = Buffers(capacity_bytes)

    def join(self, peer: LocalFrames) -> None:
        self._peer, peer._peer = peer, self

    def stage(self, num_bytes: int) -> Staged | None:
        return self._buffers.stage(num_bytes)

    def release(self, staged: Staged) -> None:
        self._buffers.release(staged)

    async def send(self, frame: Frame) -> None:
        # Where copies run in line nothing else here waits: others have to have their turn.
        await asyncio.sleep(0)
        if self._ended:
            raise WorkerLostError("the other end of this channel is closed")
        self._peer._inbox.append(frame)
        self._peer._changed.set()

    async def receive(self) -> Frame | None:
        while not self._inbox:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        return None if self._closed_here else self._inbox.popleft()

    async def payload(self, piece: Piece, num_bytes: int) -> Bytes:
        if len(piece.payload) != num_bytes:
            raise HandoffError(f"a piece of {num_bytes} bytes came with {len(piece.payload)}")
        payload = np.frombuffer(piece.payload, dtype=np.uint8)
        payload.flags.writeable = False
        return payload

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        self._closed_here = True
        for end in (self, self._peer):
            end._ended = True
            end._changed.set()


def frames_pair(capacity_bytes: int) -> tuple[LocalFrames, LocalFrames]:
    """(sender's end, receiver's end) of a new channel."""
    sender, receiver = LocalFrames(capacity_bytes), LocalFrames(0)
    sender.join(receiver)
    return sender, receiver


@dataclass(frozen=True, slots=True)
class _Listener:
    loop: asyncio.AbstractEventLoop
    serve: Serve
    tasks: Tasks


_listeners: dict[str, _Listener] = {}
"""Of this process, by address."""


class Local:
    """The Transport."""

    name = "local"

    def __init__(self, staging_bytes: int) -> None:
        self._staging_bytes = staging_bytes
        self._address = ""

    def reaches(self, offer: TransportOffer) -> bool:
        return offer.name == self.name and _listening(offer.address) is not None

    async def listen(self, serve: Serve) -> str | None:
        self._address = f"local-{secrets.token_hex(16)}"
        _listeners[self._address] = _Listener(asyncio.get_running_loop(), serve, Tasks())
        return self._address

    async def connect(self, address: str) -> FrameChannel:
        listener = _listening(address)
        if listener is None:
            raise WorkerLostError("nobody in this process listens at that local address any more")
        near, far = frames_pair(self._staging_bytes)
        serving = listener.tasks.spawn(_serve(listener.serve, far), "kv local channel")
        serving.add_done_callback(lambda _: far.end())  # also when it broke, or was cancelled before it had begun
        return near

    async def close(self) -> None:
        listener = _listeners.pop(self._address, None)
        if listener is not None:
            await listener.tasks.close()


async def _serve(serve: Serve, channel: FrameChannel) -> None:
    await serve(channel)


def _listening(address: str) -> _Listener | None:
    listener = _listeners.get(address)
    return listener if listener is not None and listener.loop is asyncio.get_running_loop() else None
