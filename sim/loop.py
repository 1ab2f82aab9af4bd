"""An event loop whose clock jumps.

When nothing is ready the clock moves to the next timer at once, so an hour of waiting takes as long as
its events. When nothing is ready and no timer is left, nobody can ever go on: that is a deadlock, and
it is an exception here, not a hang. A timer beyond ``horizon_s`` counts as none.

The order of callbacks depends on nothing but the program: no I/O, no threads.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Every task waits for something that cannot happen."""


class _NoIO(selectors.SelectSelector):
    """Knows only the loop's own wake-up socket; "waiting" moves the clock."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self.loop.jump()
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """``time()`` starts at 0. ``horizon_s``: no scenario runs longer than this."""

    def __init__(self, horizon_s: float = 1e7) -> None:
        self._now = 0.0
        self._horizon_s = horizon_s
        selector = _NoIO()
        selector.loop = self
        super().__init__(selector)
        self._set(0.0)

    def time(self) -> float:
        return self._now

    def jump(self) -> None:
        """Moves the clock to the next timer. Raises DeadlockError when there is none."""
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if not timers or timers[0].when() > self._horizon_s:
            waiting = [task for task in asyncio.all_tasks(self) if not task.done()]
            names = ", ".join(sorted(task.get_name() for task in waiting)[:20])
            raise DeadlockError(f"at {self._now:.6f} s nothing is ready and no timer is set; waiting: {names}")
        self._set(max(self._now, timers[0].when()))

    def _set(self, now: float) -> None:
        self._now = now
        # asyncio fires timers early by up to this; here it makes "not before now" of it.
        self._clock_resolution = math.ulp(now)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("no threads under the virtual clock: work that leaves the loop is a seam, run it inline")


def run(main: Coroutine[Any, Any, T], horizon_s: float = 1e7) -> T:
    """Runs ``main`` on a fresh virtual-time loop and closes the loop, with whatever is left on it."""
    loop = VirtualTimeLoop(horizon_s)
    try:
        return loop.run_until_complete(main)
    finally:
        _cancel_all(loop)
        loop.close()


def _cancel_all(loop: VirtualTimeLoop) -> None:
    tasks = sorted((task for task in asyncio.all_tasks(loop) if not task.done()), key=lambda task: task.get_name())
    for task in tasks:
        task.cancel()
    try:
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(loop.shutdown_asyncgens())
    except DeadlockError:
        # What deadlocked may not be cancellable either; the loop is closed under it.
        pass
