"""When requests are sent: open and closed loop on the virtual clock, against servers that are a line of code."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable

import pytest

from bench.load.driver import PAUSE_S, LoadRun
from bench.load.stream import INTERRUPTED, StreamRecord
from bench.load.workload import Planned, bounded, synthetic
from sim import loop as virtual

Server = Callable[[Planned, StreamRecord], Awaitable[None]]


def plan(*at_s: float) -> list[Planned]:
    return [Planned(at, 8, 4, (number,), 8) for number, at in enumerate(at_s)]


def clock() -> float:
    return asyncio.get_running_loop().time()


def answering(service_s: float) -> Server:
    """Answers each request after a while, all at once if need be."""

    async def ask(planned: Planned, record: StreamRecord) -> None:
        record.sent_s = clock()
        await asyncio.sleep(service_s)
        record.times_s.append(clock())
        record.take(b"[DONE]", clock())

    return ask


def run_on_virtual_time(work: Callable[[LoadRun], Awaitable[None]], ask: Server) -> LoadRun:
    async def main() -> LoadRun:
        run = LoadRun(ask, clock)
        await work(run)
        return run

    return virtual.run(main())


def test_open_loop_sends_each_request_when_it_is_due() -> None:
    run = run_on_virtual_time(lambda run: run.open_loop(iter(plan(0.0, 0.25, 0.25, 7.0))), answering(100.0))
    assert [record.sent_s for record in run.records] == [0.0, 0.25, 0.25, 7.0]  # none waits for an answer
    assert all(record.ok for record in run.records)


def test_open_loop_hides_no_stall() -> None:
    """A server that serves one at a time and stalls once: those who came meanwhile waited, and it shows.

    A loop that sends the next request only when the last is answered would see one slow request of ten.
    """
    free_at = 0.0

    async def stalling(planned: Planned, record: StreamRecord) -> None:
        nonlocal free_at
        record.sent_s = clock()
        free_at = max(free_at, clock()) + (10.0 if planned.pieces == (0,) else 0.0)
        await asyncio.sleep(free_at - clock())
        record.times_s.append(clock())
        record.take(b"[DONE]", clock())

    run = run_on_virtual_time(lambda run: run.open_loop(iter(plan(*range(10)))), stalling)
    assert [record.ttft_s for record in run.records] == [10.0 - number for number in range(10)]


def test_time_that_the_generator_lost_counts() -> None:
    """A request that is sent late is late for its user: its time starts when it was due."""

    async def slow_to_send(planned: Planned, record: StreamRecord) -> None:
        await asyncio.sleep(0.5)
        await answering(1.0)(planned, record)

    run = run_on_virtual_time(lambda run: run.open_loop(iter(plan(0.0, 1.0))), slow_to_send)
    assert [record.sent_s - record.intended_s for record in run.records] == [0.5, 0.5]
    assert [record.ttft_s for record in run.records] == [1.5, 1.5]


@pytest.mark.parametrize("users", [1, 3, 8])
def test_closed_loop_keeps_as_many_under_way_as_there_are_users(users: int) -> None:
    under_way = []
    run: LoadRun

    async def ask(planned: Planned, record: StreamRecord) -> None:
        under_way.append(run.num_running)
        await answering(random.Random(planned.pieces[0]).uniform(1, 2))(planned, record)

    async def main() -> None:
        nonlocal run
        run = LoadRun(ask, clock)
        await run.closed_loop(iter(plan(*[0.0] * 40)), users)

    virtual.run(main())
    assert len(run.records) == 40
    assert under_way == [*range(1, users + 1), *[users] * (40 - users)]
    # Each but the first of a user is due when another has ended.
    ends = {record.end_s for record in run.records}
    assert all(record.intended_s in ends for record in run.records[users:])


def test_closed_loop_finishes_what_it_began() -> None:
    work = lambda run: run.closed_loop(synthetic(8, 4, 0), 2, duration_s=3.5)  # noqa: E731
    run = run_on_virtual_time(work, answering(1.0))
    assert [record.intended_s for record in run.records] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert max(record.end_s for record in run.records) == 4.0


def test_a_refused_user_waits_and_the_request_is_not_sent_again() -> None:
    seen: list[int] = []

    async def refusing(planned: Planned, record: StreamRecord) -> None:
        seen.append(planned.pieces[0])
        record.sent_s = clock()
        record.retry_after_s = {0: 2.0, 1: None, 2: 3600.0}[planned.pieces[0]]
        record.fail("http_429", "", clock())

    run = run_on_virtual_time(lambda run: run.closed_loop(iter(plan(0, 0, 0)), 1), refusing)
    assert seen == [0, 1, 2]
    assert [record.intended_s for record in run.records] == [0.0, 2.0, 2.0 + PAUSE_S]
    assert clock_of_last(run) < 10.0


def clock_of_last(run: LoadRun) -> float:
    return run.records[-1].end_s


def test_stop_ends_all_of_it_and_keeps_what_was_measured() -> None:
    async def work(run: LoadRun) -> None:
        asyncio.get_running_loop().call_later(2.5, run.stop)
        await run.open_loop(synthetic(8, 4, 0, rate=10.0))

    run = run_on_virtual_time(work, answering(1.0))
    assert run.stopped
    due = list(itertools.takewhile(lambda at: at < 2.5, (planned.at_s for planned in synthetic(8, 4, 0, rate=10.0))))
    assert [record.intended_s for record in run.records] == due
    assert [record.ok for record in run.records] == [at <= 1.5 for at in due]
    assert {record.error for record in run.records if not record.ok} == {INTERRUPTED}
    assert run.num_running == 0


def test_what_goes_wrong_in_the_generator_itself_is_no_figure() -> None:
    async def broken(planned: Planned, record: StreamRecord) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_on_virtual_time(lambda run: run.open_loop(iter(plan(0.0, 1.0))), broken)


def test_bounds_are_by_number_and_by_due_time() -> None:
    assert len(list(bounded(synthetic(8, 4, 0, rate=1.0), 5, None))) == 5
    within = list(bounded(synthetic(8, 4, 0, rate=100.0), None, 2.0))
    assert 150 < len(within) < 250
    assert max(planned.at_s for planned in within) < 2.0
    assert bounded(synthetic(8, 4, 0, rate=100.0), 10**9, 2.0) is not None
