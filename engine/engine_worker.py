"""What every worker is, whatever its role: an engine that runs steps, a life, a voice, and a ledger.

A role adds which requests come in and what becomes of a step's outputs. Knows no tickets, no streams and
no network.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from common.config import WorkerConfig
from common.failpoints import Failpoints
from common.messages import WorkerEvent, WorkerInfo, WorkerLedger, WorkerLoad, WorkerState
from common.metrics import WorkerMetrics
from engine.blocks import BlockPool
from engine.life import Life
from engine.loop import EngineLoop, Scheduler
from engine.plan import Executor, LayerHook, StepPlan
from engine.reporting import Reporter
from engine.sequence import SequenceOutput


class EngineWorker(abc.ABC):
    """`start` it inside a running loop, `close` it at the end.

    ``step_failpoint`` is passed before each step; a step that takes longer than ``step_timeout_s`` is taken
    for hung.
    """

    def __init__(
        self,
        info: WorkerInfo,
        config: WorkerConfig,
        pool: BlockPool,
        scheduler: Scheduler,
        executor: Executor,
        metrics: WorkerMetrics | None,
        failpoints: Failpoints | None,
        *,
        step_failpoint: str,
        step_timeout_s: float,
        on_layer: LayerHook | None = None,
    ) -> None:
        self.info = info
        self.metrics = metrics or WorkerMetrics(info.role)
        self._pool = pool
        self._executor = executor
        self._failpoints = failpoints or Failpoints()
        before_step = partial(self._failpoints.reach, step_failpoint) if self._failpoints else None
        self._engine = EngineLoop(
            scheduler,
            executor,
            self._planned,
            self._deliver,
            on_layer,
            before_step=before_step,
            step_timeout_s=step_timeout_s,
        )
        self._life = Life(info.worker_id, self._engine.hangs, config.drain_timeout_s)
        self._reporter = Reporter(config, self.load, pool.prefix_cache)

    # ── what a role adds ──────────────────────────────────────────────────────────────────────────

    @property
    @abc.abstractmethod
    def num_open(self) -> int:
        """Requests that are here."""

    @abc.abstractmethod
    def load(self) -> WorkerLoad:
        """The worker's numbers now."""

    @abc.abstractmethod
    def _planned(self, plan: StepPlan) -> None:
        """A step is about to run."""

    @abc.abstractmethod
    def _deliver(self, outputs: Sequence[SequenceOutput]) -> None:
        """A step has run."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Ends everything, in the role's own order."""

    # ── what routers ask ──────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._life.begin()
        self._life.tasks.spawn(self._engine.run(), "engine")
        self._life.tasks.spawn(self._reporter.run(), "reporter")

    async def describe(self) -> WorkerInfo:
        return self.info

    def watch(self) -> AsyncGenerator[WorkerEvent, None]:
        return self._reporter.watch()

    async def ledger(self) -> WorkerLedger:
        return self._pool.ledger(self.info.worker_id, self.info.role, asyncio.get_running_loop().time())

    async def drain(self) -> None:
        """Takes nothing new from now on; `drained` returns when what is here has ended."""
        self._life.drain()
        self._reporter.report()
        self._life.note_open(self.num_open)

    async def drained(self) -> None:
        await self._life.drained()

    async def failed(self) -> None:
        """Waits until the worker has broken down, and raises why."""
        await self._life.failed()

    @property
    def state(self) -> WorkerState:
        return self._life.state
