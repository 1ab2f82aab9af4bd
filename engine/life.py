"""The life of a worker, whatever its role: its state, its background tasks, its ways to end.

    starting ──▶ ready ◀──▶ suspect (the engine hangs in a step)
                   │
                   └─ drain ──▶ draining ──nothing left, or no more time──▶ drained

A background task that fails ends the worker (`failed`): a process that serves on without its engine, or
without telling its load, would be worse than none. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from common.errors import BatonError, DrainingError, UnavailableError
from common.lifecycle import Tasks
from common.workers import WorkerState


class Life:
    """``hangs()`` tells whether the engine is taken for hung; ``drain_timeout_s``: what has not ended by
    then is left to others."""

    def __init__(self, worker_id: str, hangs: Callable[[], bool], drain_timeout_s: float) -> None:
        self.tasks = Tasks(on_failure=self._fail)
        self.failure: BatonError | None = None
        """Why it broke down."""
        self._worker_id = worker_id
        self._hangs = hangs
        self._drain_timeout_s = drain_timeout_s
        self._state = WorkerState.STARTING
        self._drained = asyncio.Event()
        self._failed = asyncio.Event()

    @property
    def state(self) -> WorkerState:
        if self._state is WorkerState.READY and self._hangs():
            return WorkerState.SUSPECT
        return self._state

    def begin(self) -> None:
        self._state = WorkerState.READY

    def check_ready(self) -> None:
        """Raises what a request that comes now is refused with."""
        state = self.state
        if state is WorkerState.SUSPECT:
            raise UnavailableError(f"worker {self._worker_id} is suspect: its engine hangs in a step")
        if state is not WorkerState.READY:
            raise DrainingError(f"worker {self._worker_id} is {state}")

    def drain(self) -> None:
        """Nothing new from now on; `note_open` tells how much there still is."""
        if self._state is not WorkerState.DRAINING:
            self._state = WorkerState.DRAINING
            asyncio.get_running_loop().call_later(self._drain_timeout_s, self._drained.set)

    def note_open(self, num_open: int) -> None:
        """So many requests have not ended yet."""
        if self._state is WorkerState.DRAINING and not num_open:
            self._drained.set()

    async def drained(self) -> None:
        """Returns when a draining worker may leave, and when it is closed."""
        await self._drained.wait()

    async def failed(self) -> NoReturn:
        """Waits until a background task has failed, and raises that."""
        await self._failed.wait()
        assert self.failure is not None
        raise self.failure

    def leave(self) -> None:
        """Nothing new any more, whatever there still is."""
        self._state = WorkerState.DEAD
        self._drained.set()

    async def end(self) -> None:
        self.leave()
        await self.tasks.close()

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            if not isinstance(error, BatonError):
                error = BatonError(f"worker {self._worker_id} broke down: {error!r}")
            self.failure = error
            self._state = WorkerState.DEAD
            self._failed.set()
