"""Tasks that belong to somebody, and the end of a process.

asyncio's TaskGroup keeps its tasks in a set, so the order in which it cancels them differs from run
to run; `Tasks` keeps them in the order of their birth. Under the virtual clock that is what makes the
same seed give the same event log.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from common.errors import BatonError

log = logging.getLogger(__name__)


class Tasks:
    """The background tasks of one owner: spawned by name, ended together, newest first.

    A task that fails is logged and handed to ``on_failure`` (a process's owner ends the process, law
    5: nothing dies in silence). A BatonError that is handed on is not logged here: whoever gets it
    says it, once.
    """

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._next_id = 0
        self._on_failure = on_failure

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        task_id = self._next_id
        self._next_id += 1
        self._tasks[task_id] = task
        task.add_done_callback(lambda done: self._finished(task_id, done))
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    def _finished(self, task_id: int, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task_id, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        handed_on = self._on_failure is not None and isinstance(error, BatonError)
        log.log(
            logging.DEBUG if handed_on else logging.ERROR, "task %s failed: %s", task.get_name(), error, exc_info=error
        )
        if self._on_failure is not None:
            self._on_failure(error)

    async def settle(self, timeout_s: float) -> None:
        """Waits until every task has ended by itself, or for ``timeout_s``."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=timeout_s)

    async def close(self) -> None:
        """Cancels every task, newest first, and waits until each has ended."""
        while self._tasks:
            tasks = list(reversed(self._tasks.values()))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)


def stop_on_signals(stop: asyncio.Event) -> None:
    """Sets ``stop`` on SIGINT and SIGTERM. Only for the main thread of a process."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)


def freeze_heap() -> None:
    """What is there when a process begins to serve (modules, a model, tables) lives as long as it does: the
    garbage collector need not look through all of it, for tens of milliseconds, while streams wait."""
    gc.collect()
    gc.freeze()


async def end_within(timeout_s: float, *steps: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """The last steps of a process, one after the other. What does not end in time (it hangs in a thread,
    say) is left behind: the process ends all the same."""

    async def end() -> None:
        for step in steps:
            await step()

    ending = asyncio.get_running_loop().create_task(end(), name="the end")
    await asyncio.wait([ending], timeout=timeout_s)
    if ending.done():
        ending.result()
    else:
        log.error("the end takes longer than %g s; what hangs is left behind", timeout_s)
        ending.cancel()


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Waits for the first of several to end, cancels the others, and raises what the first raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
