"""The engine's loop: schedule, execute, update, tell; again.

It is the same for every role. What to run is the scheduler's business, how to run it the executor's,
whom to tell the worker's; the loop knows only the order. It sleeps while there is nothing to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from common.errors import BatonError, EngineError
from engine.plan import Executor, LayerHook, StepOutput, StepPlan, StepResult
from engine.sequence import SequenceOutput

log = logging.getLogger(__name__)


class Scheduler(Protocol):
    """Decides what the next step computes. Pure: time is an argument, nothing waits."""

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run."""
        ...

    def update(self, plan: StepPlan, output: StepOutput, now: float) -> list[SequenceOutput]:
        """Takes in what the step gave. Every scheduled sequence that was aborted meanwhile ends here."""
        ...


class EngineLoop:
    """Drives one scheduler and one executor.

    ``planned`` sees each plan before it runs, ``deliver`` the outputs of each step; ``on_layer`` is
    passed to the executor. ``scheduled`` is called whenever the scheduler has looked, also when there is nothing
    to run. ``before_step`` may hold a step up, or fail it. A step that takes longer than
    ``step_timeout_s`` is taken for hung; nothing can be done about it here but say so.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        planned: Callable[[StepPlan], None],
        deliver: Callable[[Sequence[SequenceOutput]], None],
        on_layer: LayerHook | None = None,
        *,
        scheduled: Callable[[], None] | None = None,
        before_step: Callable[[], Awaitable[object]] | None = None,
        step_timeout_s: float = float("inf"),
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._planned = planned
        self._deliver = deliver
        self._on_layer = on_layer
        self._scheduled = scheduled
        self._before_step = before_step
        self._step_timeout_s = step_timeout_s
        self._work = asyncio.Event()
        self._step_started: float | None = None

    def wake(self) -> None:
        """Something changed that may give the scheduler work."""
        self._work.set()

    def step_age_s(self, now: float) -> float:
        """For how long the present step has been running; 0 when idle."""
        return 0.0 if self._step_started is None else now - self._step_started

    def hangs(self) -> bool:
        """Whether the present step has been running for longer than the timeout."""
        return self.step_age_s(asyncio.get_running_loop().time()) > self._step_timeout_s

    async def run(self) -> None:
        """Runs until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._work.clear()
            plan = self._scheduler.schedule(loop.time())
            if self._scheduled is not None:
                self._scheduled()
            if plan is None:
                await self._work.wait()
                continue
            self._planned(plan)
            self._step_started = loop.time()
            try:
                if self._before_step is not None:
                    await self._before_step()
                output = await self._executor.execute(plan, self._on_layer)
            except BatonError as error:
                log.error("step %d failed: %s", plan.step_id, error, extra={"error_code": error.code})
                output = _failed(plan, error)
            finally:
                self._step_started = None
            self._deliver(self._scheduler.update(plan, output, loop.time()))


def _failed(plan: StepPlan, error: BatonError) -> StepOutput:
    """A whole step failed: each of its sequences did."""
    code = error.code if isinstance(error, EngineError) else EngineError.code
    return StepOutput(plan.step_id, tuple(StepResult(None, code, error.message) for _ in plan.steps))
