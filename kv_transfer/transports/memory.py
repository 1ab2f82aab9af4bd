"""Byte channels within one process: two ends joined by two queues."""

from __future__ import annotations

import asyncio
from collections import deque

from common.errors import WorkerLostError


class MemoryChannel:
    """One end of `channel_pair`. ``cut`` breaks the connection the way a dying peer does."""

    def __init__(self) -> None:
        self._peer = self
        self._inbox: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._broken = False

    def join(self, peer: MemoryChannel) -> None:
        self._peer, peer._peer = peer, self

    async def send(self, data: bytes) -> None:
        await asyncio.sleep(0)
        if self._broken or self._ended or self._peer._ended:
            raise WorkerLostError("the peer at the other end of this channel is gone")
        self._peer._inbox.append(data)
        self._peer._changed.set()

    async def receive(self) -> bytes:
        while True:
            if self._broken:
                raise WorkerLostError("the peer at the other end of this channel is gone")
            if self._inbox:
                return self._inbox.popleft()
            if self._ended:
                return b""
            self._changed.clear()
            await self._changed.wait()

    @property
    def num_waiting(self) -> int:
        """Messages that `receive_nowait` would give."""
        return len(self._inbox)

    def receive_nowait(self) -> bytes:
        return self._inbox.popleft()

    async def close(self) -> None:
        for end in (self, self._peer):
            end._ended = True
            end._changed.set()

    def cut(self) -> None:
        for end in (self, self._peer):
            end._broken = True
            end._changed.set()


def channel_pair() -> tuple[MemoryChannel, MemoryChannel]:
    """Both ends of a new connection."""
    left, right = MemoryChannel(), MemoryChannel()
    left.join(right)
    return left, right
