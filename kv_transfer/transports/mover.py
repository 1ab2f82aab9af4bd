"""A thread of a channel's own, for libraries that move bytes between two staging areas and block meanwhile.

    loop                                        thread
      start ──────────────────────────────────▶ make the `Mover`; that may take until the peer is there
      move(offset, size) ─▶ a queue ──────────▶ post all that is queued, wait for the oldest
      ◀───────────────────────────── its future is done
      close ──────────────────────────────────▶ the mover is closed by the thread that used it

Several operations are under way at once, so the link does not idle while one is waited for. Nothing here
spins: an idle thread waits at its queue, a busy one in the library, for as long as that allows one
operation. One operation that fails ends all. Knows neither libraries nor frames.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from common.errors import WorkerLostError

CLOSE_S = 1.0
"""How long a close waits for the thread. One that is stuck in an operation ends with that operation's timeout,
and holds the staging memory until then."""


class Mover(Protocol):
    """Made, used and closed by one thread. All may raise what they like: the channel is lost then."""

    def post(self, offset: int, num_bytes: int) -> Any:
        """Begins to move ``num_bytes`` at ``offset`` of the staging area. Returns what `wait` takes."""
        ...

    def wait(self, operation: Any) -> None:
        """Returns when ``operation`` is complete. Raises when it takes too long."""
        ...

    def interrupt(self) -> None:
        """From another thread: a `wait` under way should raise, where the library has a way to do that."""
        ...

    def close(self) -> None:
        """Drops what is under way. From here on nothing reads or writes the staging area."""
        ...


class MoverThread:
    """The loop's face of a mover. ``on_lost`` hears, once, that it is of no use any more."""

    def __init__(self, name: str, make: Callable[[], Mover]) -> None:
        self.on_lost: Callable[[WorkerLostError], None] = lambda error: None
        self._name = name
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[int, int, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._error: WorkerLostError | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._mover: Mover | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def start(self) -> None:
        """Returns when the mover is made. Raises WorkerLostError when it cannot be."""
        self._thread.start()
        _living[id(self)] = self
        await asyncio.wait([self._ready, self._over], return_when=asyncio.FIRST_COMPLETED)
        if self._error is not None:
            raise self._error

    def move(self, offset: int, num_bytes: int) -> asyncio.Future[None]:
        """Done when the bytes have been moved; fails with WorkerLostError. Operations are begun in order."""
        moved: asyncio.Future[None] = self._loop.create_future()
        if self._error is not None or self._over.done():
            self._settle(moved, self._error or WorkerLostError(f"{self._name} is closed"))
        else:
            self._waiting[moved] = None
            self._jobs.put((offset, num_bytes, moved))
        return moved

    async def close(self) -> None:
        """Ends the thread, with what it has not begun; waits a while for it."""
        self.stop()
        if self._thread.ident is not None:
            await asyncio.wait([self._over], timeout=CLOSE_S)

    def stop(self) -> None:
        """As `close`, without waiting. Harmless when it has ended already."""
        if self._error is None:
            self._error = WorkerLostError(f"{self._name} is closed")
            self._cut_short()
            self._fail_waiting(self._error)

    def end(self) -> None:
        """At the end of the process, by when the loop is gone: waits for the thread as long as it takes."""
        self._cut_short()
        self._thread.join()

    def _cut_short(self) -> None:
        self._jobs.put(None)
        mover = self._mover
        if mover is not None:
            mover.interrupt()

    def _run(self) -> None:
        reason = ""
        mover: Mover | None = None
        pending: deque[tuple[Any, asyncio.Future[None]]] = deque()
        operation: Any = None
        try:
            mover = self._mover = self._make()
            self._tell(self._settle, self._ready)
            while self._take(mover, pending):
                operation, moved = pending.popleft()
                mover.wait(operation)
                operation = None
                self._tell(self._moved, moved)
        except Exception as error:  # the top of this thread: libraries raise what they like
            reason = f"{type(error).__name__}: {error}"
        self._mover = None
        operation = None  # a library may keep the connection as long as one of its operations is kept
        pending.clear()
        if mover is not None:
            mover.close()
            mover = None
        _living.pop(id(self), None)
        self._tell(self._ended, reason)

    def _take(self, mover: Mover, pending: deque[tuple[Any, asyncio.Future[None]]]) -> bool:
        """Posts all that is queued, waiting for it when nothing is under way; False at the end."""
        while True:
            try:
                job = self._jobs.get(block=not pending)
            except queue.Empty:
                return True
            if job is None:
                return False
            offset, num_bytes, moved = job
            pending.append((mover.post(offset, num_bytes), moved))

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop has ended, and with it whoever would want to know
            pass

    # on the loop

    def _moved(self, moved: asyncio.Future[None]) -> None:
        self._waiting.pop(moved, None)
        self._settle(moved)

    def _ended(self, reason: str) -> None:
        self._settle(self._over)
        if self._error is None:
            self._error = WorkerLostError(f"{self._name} broke down: {reason}")
            self._fail_waiting(self._error)
            self.on_lost(self._error)

    def _fail_waiting(self, error: WorkerLostError) -> None:
        waiting, self._waiting = self._waiting, {}
        for moved in waiting:
            self._settle(moved, error)

    @staticmethod
    def _settle(future: asyncio.Future[None], error: WorkerLostError | None = None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # seen: not everybody who moves waits for it


_living: dict[int, MoverThread] = {}


@atexit.register
def _end_all() -> None:
    """Python ends a daemon thread wherever it is; in the middle of a C++ library that aborts the process."""
    for mover in list(_living.values()):
        mover.end()
