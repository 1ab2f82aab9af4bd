"""The router's queue: requests that wait for workers, by priority, then by arrival.

Only the head may be placed, so nobody is overtaken by a later request of the same or a lower priority.
A request that comes back (a worker refused it, or died) takes its old place. Waiting costs nothing: an
entry sleeps until it becomes the head, or, as the head, until there is news of capacity.

Knows nothing of workers; how many may wait is the caller's decision.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Iterator
from contextlib import contextmanager


class Turn:
    """One place in the queue."""

    __slots__ = ("_queue", "_woken", "order")

    def __init__(self, queue: AdmissionQueue, order: tuple[int, int]) -> None:
        self.order = order
        self._queue = queue
        self._woken = asyncio.Event()

    @property
    def is_head(self) -> bool:
        return self._queue.head is self

    def wake(self) -> None:
        self._woken.set()

    async def woken(self, retry_s: float) -> None:
        """Returns when this turn is the head and there may be capacity: on news, and every ``retry_s``."""
        while True:
            if not self.is_head:
                await self._woken.wait()
            elif not self._woken.is_set():
                try:
                    async with asyncio.timeout(retry_s):
                        await self._woken.wait()
                except TimeoutError:
                    pass
            self._woken.clear()
            if self.is_head:
                return


class AdmissionQueue:
    """Turns in order. The number of waiting requests is ``len``."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def head(self) -> Turn | None:
        return self._turns[0] if self._turns else None

    @contextmanager
    def turn(self, priority: int, arrival: int) -> Iterator[Turn]:
        """A place in the queue for the length of the block; leaving it wakes the next one."""
        turn = Turn(self, (priority, arrival))
        bisect.insort(self._turns, turn, key=lambda other: other.order)
        try:
            yield turn
        finally:
            was_head = turn.is_head
            self._turns.remove(turn)
            if was_head:
                self.news()

    def news(self) -> None:
        """There may be capacity: the head looks again."""
        if self._turns:
            self._turns[0].wake()
