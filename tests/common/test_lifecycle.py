"""Background tasks and the end of a process, also of one in which something hangs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from common.lifecycle import end_within
from sim.loop import run


def test_the_last_steps_come_one_after_the_other() -> None:
    async def main() -> list[str]:
        done: list[str] = []

        async def step(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            done.append(name)

        await end_within(10.0, lambda: step("long", 3.0), lambda: step("short", 1.0))
        assert asyncio.get_running_loop().time() == 4.0
        return done

    assert run(main()) == ["long", "short"]


def test_what_hangs_is_left_behind() -> None:
    async def main() -> float:
        let_go = asyncio.Event()

        async def deaf() -> None:
            """Cancelling does not help."""
            while not let_go.is_set():
                with suppress(asyncio.CancelledError):
                    await let_go.wait()

        await end_within(10.0, deaf)
        ended_s = asyncio.get_running_loop().time()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert [task.get_name() for task in left] == ["the end"]
        let_go.set()  # a task that outlives its loop is complained about later, in the middle of another test
        await asyncio.wait(left)
        return ended_s

    assert run(main()) == 10.0


def test_a_last_step_that_fails_is_heard() -> None:
    async def broken() -> None:
        raise OSError("no")

    async def main() -> None:
        with pytest.raises(OSError, match="no"):
            await end_within(10.0, broken)

    run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_with_a_thread_that_hangs_ends_in_time(fails: bool) -> None:
    """As when a model's step never ends: the worker's end is bounded, and then the interpreter's."""
    program = f"""
import asyncio, threading, sys
from concurrent.futures import ThreadPoolExecutor
import common.process
from common.errors import EngineError
common.process.EXIT_TIMEOUT_S = 0.5
async def role(config, name, ready, stop, progress):
    pool = ThreadPoolExecutor(1)
    asyncio.get_running_loop().run_in_executor(pool, threading.Event().wait)
    ready("here")
    if {fails}:
        raise EngineError("it broke down")
common.process.main("role", "role-0", role)
print("the end", flush=True)
"""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "ready here" in done.stdout
    assert ("it broke down" in done.stderr) is fails
    assert time.monotonic() - started < 30.0
