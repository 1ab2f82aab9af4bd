"""The one place where a transfer leaves the event loop: copies between a pool and staging memory.

A `RunBlocking` is injected, so that a simulation can run the copies in line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class RunBlocking(Protocol):
    def __call__(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]: ...


class CopyThread:
    """One thread of its own, so that copies neither wait for nor disturb each other's order."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def __call__(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def run_inline(function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """Runs ``function`` at once, on the loop itself.

    For pools in host memory: a piece is at most a few MiB, whose copy takes less time than a thread needs to
    begin and to say that it is done.
    """
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    try:
        future.set_result(function(*args))
    except BaseException as error:  # whoever waits for the outcome gets it
        future.set_exception(error)
    return future


async def uninterrupted(copy: asyncio.Future[T]) -> T:
    """Waits to the end even when the waiting task is cancelled, then lets the cancellation through.

    A copy in a thread cannot be stopped: whoever waits for it to be over must not believe that a
    cancelled task has ended it. One that is over already costs nothing.
    """
    if copy.done():
        return copy.result()
    cancelled: asyncio.CancelledError | None = None
    while not copy.done():
        try:
            await asyncio.wait([copy])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not copy.cancelled():
            copy.exception()  # seen: the caller leaves for another reason
        raise cancelled
    return copy.result()
