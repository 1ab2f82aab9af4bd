"""What a worker tells all routers: its load, and which prefixes it holds, as numbered events.

Every subscriber starts with a snapshot and then sees every event; one that is too slow is cut off and
starts again with a snapshot. Reports are bundled: at most one per ``report_interval_s`` while things
change, one per ``heartbeat_s`` while nothing does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from common.config import WorkerConfig
from common.workers import WorkerEvent, WorkerLoad
from engine.prefix_cache import PrefixCache

_MAX_PENDING = 256
"""Events that a subscriber may lag behind."""


class _Subscriber:
    def __init__(self) -> None:
        self.pending: deque[WorkerEvent] = deque()
        self.ready = asyncio.Event()
        self.cut_off = False

    def put(self, event: WorkerEvent) -> None:
        if len(self.pending) >= _MAX_PENDING:
            self.cut_off = True
        else:
            self.pending.append(event)
        self.ready.set()


class Reporter:
    """``load`` gives the present numbers, ``prefix_cache`` collects what changed in it."""

    def __init__(self, config: WorkerConfig, load: Callable[[], WorkerLoad], prefix_cache: PrefixCache | None) -> None:
        self._report_interval_s = config.report_interval_s
        # One report may be late without an idle worker being suspected.
        self._heartbeat_s = min(config.heartbeat_s, config.suspect_after_s / 2)
        self._load = load
        self._prefix_cache = prefix_cache
        self._sequence = 0
        self._subscribers: dict[int, _Subscriber] = {}
        self._next_subscriber = 0
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Load or prefixes are not what the last report said."""
        self._changed.set()

    async def run(self) -> None:
        """Reports until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self.report()
            await asyncio.sleep(self._report_interval_s)

    def report(self) -> None:
        """One event to all subscribers, now."""
        self._changed.clear()
        stored: tuple[bytes, ...] = ()
        removed: tuple[bytes, ...] = ()
        if self._prefix_cache is not None:
            stored, removed = _net(self._prefix_cache.stored, self._prefix_cache.removed)
            self._prefix_cache.stored.clear()
            self._prefix_cache.removed.clear()
        self._sequence += 1
        event = WorkerEvent(self._sequence, self._load(), stored=stored, removed=removed)
        for subscriber in self._subscribers.values():
            subscriber.put(event)

    async def watch(self) -> AsyncGenerator[WorkerEvent, None]:
        """A snapshot, then every event. Ends when the subscriber lags too far behind."""
        self.report()
        subscriber = _Subscriber()
        subscriber_id = self._next_subscriber
        self._next_subscriber += 1
        self._subscribers[subscriber_id] = subscriber
        known = tuple(self._prefix_cache.unit_hashes()) if self._prefix_cache is not None else ()
        try:
            yield WorkerEvent(self._sequence, self._load(), snapshot=True, stored=known)
            while not subscriber.cut_off:
                await subscriber.ready.wait()
                subscriber.ready.clear()
                while subscriber.pending:
                    yield subscriber.pending.popleft()
        finally:
            del self._subscribers[subscriber_id]


def _net(stored: list[bytes], removed: list[bytes]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """What remains of a bundle of changes: a hash that came and went is neither, in the order of events.

    The cache appends to both lists as things happen; a hash stored again after its removal appears
    once more in ``stored``, so counting occurrences tells the outcome.
    """
    if not removed:
        return tuple(stored), ()
    balance: dict[bytes, int] = {}
    for item in stored:
        balance[item] = balance.get(item, 0) + 1
    for item in removed:
        balance[item] = balance.get(item, 0) - 1
    return (
        tuple(item for item, count in balance.items() if count > 0),
        tuple(item for item, count in balance.items() if count < 0),
    )
