"""Room in a staging area, handed out as a ring. Pure; knows offsets only."""

from __future__ import annotations


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
