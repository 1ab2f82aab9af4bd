"""The clock that jumps, and deadlocks that raise."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from sim.loop import DeadlockError, run


def test_an_hour_takes_no_time_and_timers_fire_in_order() -> None:
    order: list[tuple[str, float]] = []

    async def nap(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append((name, asyncio.get_running_loop().time()))

    async def main() -> float:
        await asyncio.gather(nap("c", 3600.0), nap("a", 0.5), nap("b", 60.0))
        return asyncio.get_running_loop().time()

    started = time.perf_counter()
    assert run(main()) == 3600.0
    assert time.perf_counter() - started < 1.0
    assert order == [("a", 0.5), ("b", 60.0), ("c", 3600.0)]


def test_a_deadlock_raises_and_names_who_waits() -> None:
    async def wait_for(mine: asyncio.Event, theirs: asyncio.Event) -> None:
        await theirs.wait()
        mine.set()

    async def main() -> None:
        left, right = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            loop.create_task(wait_for(left, right), name="left hand"),
            loop.create_task(wait_for(right, left), name="right hand"),
        )

    with pytest.raises(DeadlockError, match=r"left hand.*right hand"):
        run(main())


def test_a_timer_beyond_the_horizon_counts_as_none() -> None:
    async def main() -> None:
        await asyncio.sleep(101.0)

    with pytest.raises(DeadlockError, match="no timer"):
        run(main(), horizon_s=100.0)


def test_no_timer_fires_early() -> None:
    """Not by a rounding error: who finds that it is not yet time would sleep again, and again, for ever."""

    async def until(due: float) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(3):
            if loop.time() >= due:
                return
            await asyncio.sleep(due - loop.time())
        raise AssertionError(f"still {due - loop.time()} s to go")

    async def main() -> None:
        # Timers that lie a few representable numbers apart, so that each is due just after another one.
        due = 3.0
        waiting = []
        for _ in range(50):
            waiting.append(until(due))
            due = math.nextafter(due, math.inf)
        await asyncio.gather(*waiting)

    run(main())


def test_timeouts_work() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(main()) == 5.0


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(RuntimeError, match="no threads"):
        run(main())
