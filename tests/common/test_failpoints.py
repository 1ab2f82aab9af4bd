"""Failpoints: how they are written, what they do, what is refused."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys

import pytest

from common.config import load_config
from common.errors import ConfigError, NoCapacityError, WorkerLostError
from common.failpoints import CRASH_STATUS, FAILPOINTS, Failpoints
from sim.loop import DeadlockError, run


def test_without_any_nothing_happens_anywhere() -> None:
    none = Failpoints()
    assert not none

    async def main() -> float:
        for name in FAILPOINTS:
            await none.reach(name)
        none.reach_now("join")
        return asyncio.get_running_loop().time()

    assert run(main()) == 0.0


def test_an_error_is_raised_as_its_own_class_and_names_the_failpoint() -> None:
    points = Failpoints({"reserve": "error:no_capacity", "join": "error:worker_lost"})
    assert points

    async def main() -> None:
        with pytest.raises(NoCapacityError, match="reserve"):
            await points.reach("reserve")
        await points.reach("commit")

    run(main())
    with pytest.raises(WorkerLostError, match="join"):
        points.reach_now("join")


def test_a_count_runs_out() -> None:
    points = Failpoints({"commit": "2*error:ticket"})

    async def failures(times: int) -> int:
        failed = 0
        for _ in range(times):
            try:
                await points.reach("commit")
            except Exception:
                failed += 1
        return failed

    assert run(failures(10)) == 2


def test_a_chance_is_thrown_by_the_given_dice() -> None:
    async def failures(seed: int) -> list[int]:
        points = Failpoints({"push": "30%error:handoff"}, random.Random(seed))
        failed = []
        for number in range(1000):
            try:
                await points.reach("push")
            except Exception:
                failed.append(number)
        return failed

    first = run(failures(1))
    assert 200 < len(first) < 400
    assert first == run(failures(1)) != run(failures(2))


def test_a_chance_and_a_count_together() -> None:
    async def failures() -> list[int]:
        points = Failpoints({"push": "50%3*error:handoff"}, random.Random(0))
        failed = []
        for number in range(100):
            try:
                await points.reach("push")
            except Exception:
                failed.append(number)
        return failed

    failed = run(failures())
    assert len(failed) == 3
    assert failed != [0, 1, 2]


def test_delay_and_hang() -> None:
    async def delayed() -> float:
        await Failpoints({"prefill_step": "delay:2.5"}).reach("prefill_step")
        return asyncio.get_running_loop().time()

    assert run(delayed()) == 2.5
    with pytest.raises(DeadlockError):
        run(Failpoints({"decode_step": "hang"}).reach("decode_step"))


def test_a_crash_ends_the_process_at_once() -> None:
    program = (
        "import asyncio, atexit\n"
        "from common.failpoints import Failpoints\n"
        "atexit.register(lambda: print('a clean end'))\n"
        "asyncio.run(Failpoints({'push': 'crash'}).reach('push'))\n"
        "print('it went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (CRASH_STATUS, ""), done.stderr


@pytest.mark.parametrize(
    ("name", "action", "text"),
    [
        ("reserv", "hang", "nearest known: 'reserve'"),
        ("decode_steps", "hang", "nearest known: 'decode_step'"),
        ("reserve", "error:worker_list", "nearest known: 'worker_lost'"),
        ("reserve", "eror:worker_lost", "nearest known: 'error'"),
        ("reserve", "delay:soon", "seconds"),
        ("reserve", "hang:1", "no argument"),
        ("reserve", "two*hang", "must be"),
        ("join", "delay:1", "cannot wait"),
        ("join", "3*hang", "cannot wait"),
    ],
)
def test_what_does_not_exist_is_refused_when_the_configuration_is_read(name: str, action: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(None, [f"failpoints.{name}={action}"])


def test_the_command_line_can_set_one() -> None:
    config = load_config(None, ["failpoints.reserve=10%2*error:worker_lost", "failpoints.push=delay:0.5"])
    assert config.failpoints == {"reserve": "10%2*error:worker_lost", "push": "delay:0.5"}
