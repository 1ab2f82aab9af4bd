"""The engine's loop on virtual time: its order, its rest, and a step that fails as a whole."""

from __future__ import annotations

import asyncio

from common.config import load_config
from common.errors import EngineError
from common.workers import WorkerLoad
from engine.blocks import BlockPool, BlockState
from engine.loop import EngineLoop
from engine.plan import LayerHook, StepOutput, StepPlan, StepResult
from engine.prefix_cache import PrefixCache
from engine.reporting import Reporter
from engine.sequence import SequenceOutput
from prefill_worker.scheduler import PrefillScheduler
from sim.loop import run
from tests.schedule_harness import MODEL, sequence

STEP_S = 0.5


class Executor:
    """Takes half a second a step; fails those whose number is in ``failing``."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.failing = failing
        self.plans: list[StepPlan] = []

    async def execute(self, plan: StepPlan, on_layer: LayerHook | None = None) -> StepOutput:
        self.plans.append(plan)
        await asyncio.sleep(STEP_S)
        if plan.step_id in self.failing:
            raise EngineError("the device is on fire")
        return StepOutput(plan.step_id, tuple(StepResult(7 if step.sampling else None) for step in plan.steps))

    async def close(self) -> None:
        return None


def drive(executor: Executor, names: list[str]) -> tuple[list[SequenceOutput], BlockPool, float]:
    async def main() -> tuple[list[SequenceOutput], BlockPool, float]:
        pool = BlockPool(64, 4, PrefixCache(4))
        scheduler = PrefillScheduler(pool, MODEL, 8, 1)
        outputs: list[SequenceOutput] = []
        engine = EngineLoop(scheduler, executor, lambda plan: None, outputs.extend)
        task = asyncio.ensure_future(engine.run())
        await asyncio.sleep(10.0)
        for name in names:
            scheduler.add(sequence(name, [ord(name)] * 12, 1))
        engine.wake()
        await asyncio.sleep(0.7)
        age = engine.step_age_s(asyncio.get_running_loop().time())
        await asyncio.sleep(100.0)
        task.cancel()
        for output in outputs:
            scheduler.release(output.sequence)
        return outputs, pool, age

    return run(main())


def test_it_rests_until_woken_and_runs_one_step_at_a_time() -> None:
    executor = Executor()
    outputs, pool, age = drive(executor, ["a", "b"])
    assert [(output.sequence.key, output.token, output.error) for output in outputs] == [
        ("a#0", 7, None),
        ("b#0", 7, None),
    ]
    assert [plan.num_tokens for plan in executor.plans] == [8, 4, 8, 4]
    assert abs(age - 0.2) < 1e-9
    assert pool.num_available == 64


def test_a_step_that_fails_ends_its_sequences_and_no_others() -> None:
    outputs, pool, _ = drive(Executor(failing=(1,)), ["a", "b"])
    (failed, fine) = outputs
    assert isinstance(failed.error, EngineError)
    assert "on fire" in failed.error.message
    assert (fine.sequence.key, fine.token) == ("b#0", 7)
    assert pool.num_available == 64


def test_reports_are_bundled_and_start_with_a_snapshot() -> None:
    config = load_config(
        None, ["worker.report_interval_s=1", "worker.heartbeat_s=60", "worker.suspect_after_s=200"]
    ).worker

    async def main() -> None:
        cache = PrefixCache(16)
        pool = BlockPool(8, 16, cache)
        reporter = Reporter(config, lambda: WorkerLoad(free_blocks=pool.num_free), cache)
        task = asyncio.ensure_future(reporter.run())
        tokens = list(range(48))
        pool.allocate("a", 3, BlockState.RUNNING, 0.0)
        pool.publish("a", tokens, b"root", 16)
        watch = reporter.watch()
        snapshot = await anext(watch)
        assert snapshot.snapshot
        assert snapshot.stored == tuple(cache.unit_hashes())
        assert snapshot.load.free_blocks == 5

        pool.publish("a", tokens, b"root", 48)
        reporter.changed()
        event = await anext(watch)
        assert event.sequence == snapshot.sequence + 1
        assert event.stored == tuple(cache.unit_hashes())[1:]

        # What came and went between two reports is not told at all.
        started = asyncio.get_running_loop().time()
        pool.allocate("b", 2, BlockState.RUNNING, 0.0)
        pool.publish("b", list(range(100, 132)), b"root", 32)
        pool.release("b")
        pool.drop_cached()
        reporter.changed()
        event = await anext(watch)
        assert (event.stored, event.removed) == ((), ())
        assert asyncio.get_running_loop().time() - started <= 1.0

        pool.release("a")
        pool.drop_cached()
        reporter.changed()
        assert len((await anext(watch)).removed) == 3

        # Idle: a heartbeat.
        started = asyncio.get_running_loop().time()
        await anext(watch)
        assert 60.0 <= asyncio.get_running_loop().time() - started <= 61.0
        task.cancel()
        await watch.aclose()

    run(main())


def test_a_watcher_that_lags_is_cut_off() -> None:
    async def main() -> None:
        reporter = Reporter(load_config().worker, WorkerLoad, None)
        watch = reporter.watch()
        await anext(watch)
        for _ in range(1000):
            reporter.report()
        received = [event async for event in watch]
        assert len(received) < 1000
        assert [event.sequence for event in received] == list(range(2, 2 + len(received)))

    run(main())


def test_an_idle_worker_speaks_before_it_is_suspected() -> None:
    """Whatever the heartbeat is set to: silence has to mean something."""
    config = load_config(None, ["worker.heartbeat_s=60", "worker.suspect_after_s=1"]).worker

    async def main() -> None:
        reporter = Reporter(config, WorkerLoad, None)
        task = asyncio.ensure_future(reporter.run())
        watch = reporter.watch()
        for _ in range(20):
            heard_at = asyncio.get_running_loop().time()
            await anext(watch)
            assert asyncio.get_running_loop().time() - heard_at < 0.9
        task.cancel()
        await watch.aclose()

    run(main())
