"""Sends the requests: in open loop when each is due, in closed loop as soon as one of C users is free.

Open loop asks what users see who do not wait for each other: a request's time counts from the moment it was
due, so a server that stalls, or a generator that comes late, cannot hide it (no coordinated omission). In closed
loop a request is due when its user is free.

Life of a run: `open_loop` or `closed_loop` until the plan ends; `stop` ends it early, at any time.
"""

from __future__ import annotations

import asyncio
import gc
import math
from array import array
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from bench.load.stream import INTERRUPTED, StreamRecord
from bench.load.workload import Planned

LAG_INTERVAL_S = 0.05
PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
"""A user whose request failed waits as long as ``Retry-After`` says, within these: a server that refuses at
once is not to be asked thousands of times a second."""

Clock = Callable[[], float]


class Ask(Protocol):
    """Sends one request and fills its record; must not raise but when it is cancelled."""

    def __call__(self, planned: Planned, record: StreamRecord) -> Awaitable[None]: ...


class LoadRun:
    """``records``: one for each request that was sent, in order."""

    def __init__(self, ask: Ask, clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._tasks: dict[asyncio.Task[None], None] = {}  # ordered
        self._stopped = False
        self._failure: BaseException | None = None
        self.records: list[StreamRecord] = []
        self.num_running = 0
        self.start_s = math.nan
        self.lags_s = array("d")
        """By how much timers came late: what the generator's own event loop adds to a time stamp at worst."""

    @property
    def stopped(self) -> bool:
        return self._stopped

    async def open_loop(self, plan: Iterator[Planned]) -> None:
        """Every request at its ``at_s``, whatever has become of the earlier ones."""
        await self._to_the_end(self._arrivals(plan))

    async def closed_loop(self, plan: Iterator[Planned], concurrency: int, duration_s: float | None = None) -> None:
        """``concurrency`` users; after ``duration_s`` they finish what they began."""
        await self._to_the_end(*(self._user(plan, duration_s) for _ in range(concurrency)))

    def stop(self) -> None:
        """Nothing more is sent, and what is under way is broken off."""
        self._stopped = True
        for task in list(self._tasks):
            task.cancel()

    async def _to_the_end(self, *parts: Awaitable[None]) -> None:
        gc.collect()
        gc.freeze()  # what is there by now is not looked through while streams are timed
        monitor = asyncio.ensure_future(self._watch_lag())
        self.start_s = self._clock()
        for part in parts:
            self._keep(asyncio.ensure_future(part))
        while self._tasks:
            await asyncio.wait(list(self._tasks))
        monitor.cancel()
        gc.unfreeze()
        if self._failure is not None:
            raise self._failure

    async def _arrivals(self, plan: Iterator[Planned]) -> None:
        for planned in plan:
            due_s = self.start_s + planned.at_s
            await asyncio.sleep(max(0.0, due_s - self._clock()))
            self._keep(asyncio.ensure_future(self._one(planned, due_s)))

    async def _user(self, plan: Iterator[Planned], duration_s: float | None) -> None:
        while duration_s is None or self._clock() - self.start_s < duration_s:
            if (planned := next(plan, None)) is None:
                return
            record = await self._one(planned, self._clock())
            if record.error is not None:
                pause_s = PAUSE_S if record.retry_after_s is None else record.retry_after_s
                await asyncio.sleep(min(max(pause_s, PAUSE_S), MAX_PAUSE_S))

    async def _one(self, planned: Planned, due_s: float) -> StreamRecord:
        record = StreamRecord(due_s, planned.output_tokens)
        self.records.append(record)
        self.num_running += 1
        try:
            await self._ask(planned, record)
        except asyncio.CancelledError:
            record.fail(INTERRUPTED, "ended by this side", self._clock())
            raise
        finally:
            self.num_running -= 1
        return record

    async def _watch_lag(self) -> None:
        while True:
            due_s = self._clock() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.lags_s.append(self._clock() - due_s)

    def _keep(self, task: asyncio.Future[None] | asyncio.Future[StreamRecord]) -> None:
        assert isinstance(task, asyncio.Task)
        self._tasks[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = self._failure or failure
            self.stop()
