"""What every worker is, whatever its role: an engine that runs steps, a life, a voice, and a ledger.

A role adds which requests come in and what becomes of a step's outputs. Prefixes go from any worker to any
other (`prefix_push`, `prefix_pull`). Knows no handoffs, no streams and no network.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Items
from functools import partial
from typing import Protocol

from common.config import TransferConfig, WorkerConfig
from common.failpoints import Failpoints
from common.handoff import PrefixReply, PrefixRequest
from common.metrics import WorkerMetrics
from common.workers import WorkerEvent, WorkerInfo, WorkerLedger, WorkerLoad, WorkerState
from engine.blocks import BlockPool
from engine.life import Life
from engine.loop import EngineLoop, Scheduler
from engine.plan import Executor, LayerHook, StepPlan
from engine.ports import Exchange
from engine.prefix_pull import PrefixPulls
from engine.prefix_push import PrefixPushes
from engine.reporting import Reporter
from engine.sequence import Sequence, SequenceOutput


class PullingScheduler(Scheduler, Protocol):
    """A scheduler whose sequences may wait for a part of their KV."""

    def take_pulls(self) -> list[Sequence]:
        """Sequences that have their blocks since the last call, and wait for `pulled`."""
        ...

    def pulled(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """The pull for a sequence has ended: ``num_tokens`` came. One that was aborted meanwhile gives its
        blocks back."""
        ...


class EngineWorker(abc.ABC):
    """`start` it inside a running loop, `close` it at the end.

    ``step_failpoint`` is passed before each step; a step that takes longer than ``step_timeout_s`` is taken
    for hung.
    """

    def __init__(
        self,
        info: WorkerInfo,
        config: WorkerConfig,
        transfer: TransferConfig,
        pool: BlockPool,
        scheduler: PullingScheduler,
        executor: Executor,
        exchange: Exchange,
        metrics: WorkerMetrics | None,
        failpoints: Failpoints | None,
        *,
        step_failpoint: str,
        step_timeout_s: float,
        on_layer: LayerHook | None = None,
    ) -> None:
        self.info = info
        self.metrics = metrics or WorkerMetrics(info.role)
        self.metrics.export_transfers(exchange.sender.counters, exchange.receiver.counters)
        self._pool = pool
        self._scheduling = scheduler
        self._executor = executor
        self._exchange = exchange
        self._failpoints = failpoints or Failpoints()
        before_step = partial(self._failpoints.reach, step_failpoint) if self._failpoints else None
        self._engine = EngineLoop(
            scheduler,
            executor,
            self._planned,
            self._deliver,
            on_layer,
            scheduled=self._scheduled,
            before_step=before_step,
            step_timeout_s=step_timeout_s,
        )
        self._life = Life(info.worker_id, self._engine.hangs, config.drain_timeout_s)
        self._reporter = Reporter(config, self.load, pool.prefix_cache)
        self._pushes = PrefixPushes(info, pool, exchange.sender, self.metrics, self._failpoints, self._changed)
        self._pulls = PrefixPulls(
            info, exchange, transfer.pull_patience_s, self._life.tasks, self.metrics, self._pull_ended
        )

    # ── what a role adds ──────────────────────────────────────────────────────────────────────────

    @property
    @abc.abstractmethod
    def num_requests(self) -> int:
        """Requests that are here."""

    @abc.abstractmethod
    def load(self) -> WorkerLoad:
        """The worker's numbers now."""

    @abc.abstractmethod
    def _planned(self, plan: StepPlan) -> None:
        """A step is about to run."""

    @abc.abstractmethod
    def _deliver(self, outputs: Items[SequenceOutput]) -> None:
        """A step has run."""

    @abc.abstractmethod
    def _pulled(self, sequence: Sequence) -> None:
        """The pull for a sequence has ended, and with it the sequence if it has an error."""

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

    async def send_prefix(self, request: PrefixRequest) -> PrefixReply:
        """See `PrefixPushes.send`; another worker asks."""
        self._life.check_ready()
        return await self._pushes.send(request)

    async def drained(self) -> None:
        await self._life.drained()

    async def failed(self) -> None:
        """Waits until the worker has broken down, and raises why."""
        await self._life.failed()

    @property
    def num_open(self) -> int:
        """What has to end before a draining worker may leave: requests, and pushes for others."""
        return self.num_requests + self._pushes.num_open

    @property
    def state(self) -> WorkerState:
        return self._life.state

    # ── prefixes from elsewhere ───────────────────────────────────────────────────────────────────

    def _scheduled(self) -> None:
        """The scheduler has looked at what there is, and perhaps found something to pull."""
        for sequence in self._scheduling.take_pulls():
            self._pulls.begin(sequence)

    def _pull_ended(self, sequence: Sequence, num_tokens: int) -> None:
        self._scheduling.pulled(sequence, num_tokens, asyncio.get_running_loop().time())
        self._pulled(sequence)
        self._changed()

    def _changed(self) -> None:
        """Blocks, sequences or requests are not what they were."""
        self._life.note_open(self.num_open)
        self._engine.wake()
        self._reporter.changed()
