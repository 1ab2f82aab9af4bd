"""Room for payloads on their way: a ring in a staging area, or buffers that are used again and again.

Knows no channels.
"""

from __future__ import annotations

import numpy as np

from kv_transfer.channel import Bytes, Staged
from kv_transfer.frames import INLINE


class Ring:
    """Contiguous pieces of ``capacity`` bytes, taken in order and given back in any order.

    Room comes back to use in the order in which it was taken, as acknowledgements do.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken: dict[int, int] = {}
        """offset → size, oldest first; a size below zero has been given back already."""
        self._head = 0

    def allocate(self, size: int) -> int | None:
        """The offset of ``size`` free bytes, or None when there are not as many in one piece."""
        if not self._taken:
            self._head = 0
        offset = self._head
        tail = next(iter(self._taken), None)
        if tail is not None and offset <= tail:
            if offset + size > tail:
                return None
        elif offset + size > self.capacity:
            offset = 0
            if size > (self.capacity if tail is None else tail):
                return None
        self._taken[offset] = size
        self._head = offset + size
        return offset

    def release(self, offset: int) -> None:
        """Gives back what `allocate` gave."""
        self._taken[offset] = -self._taken[offset]
        while self._taken:
            oldest = next(iter(self._taken))
            if self._taken[oldest] > 0:
                return
            del self._taken[oldest]


class Buffers:
    """Reusable buffers for payloads that leave in their messages: the one given back last is lent first, while it
    still lies in the cache. ``capacity_bytes`` bounds what is staged and not released.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._staged_bytes = 0
        self._free: list[Bytes] = []
        self._lent: dict[int, tuple[Bytes, Bytes]] = {}
        """id of the view that was lent → it, and the buffer behind it."""

    def stage(self, num_bytes: int) -> Staged | None:
        """As `FrameChannel.stage`; the content is any."""
        if self._staged_bytes + num_bytes > self._capacity_bytes:
            return None
        self._staged_bytes += num_bytes
        buffer = self._free.pop() if self._free else _EMPTY
        if len(buffer) < num_bytes:
            buffer = np.empty(num_bytes, dtype=np.uint8)
        view = buffer[:num_bytes]
        self._lent[id(view)] = view, buffer
        return Staged(view, INLINE)

    def release(self, staged: Staged) -> None:
        """As `FrameChannel.release`."""
        self._staged_bytes -= len(staged.buffer)
        self.take_back(staged.buffer)

    def take_back(self, view: object) -> None:
        """What was staged in ``view`` has been copied: it may be lent again, before its release. Harmless for
        anything else, and for the second time.
        """
        entry = self._lent.pop(id(view), None)
        if entry is not None:
            self._free.append(entry[1])


_EMPTY: Bytes = np.empty(0, dtype=np.uint8)
