"""The prefill role: computes the KV of prompts (or pulls its beginning), hands it to decode workers, says the
first token.

It knows tickets and routers' calls (`rpc/servers.py` or the simulation make them); which prompt is
computed next is the scheduler's business, how KV travels the sender's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Items
from dataclasses import replace

from common.config import TransferConfig, WorkerConfig
from common.errors import (
    BatonError,
    DeadlineError,
    InvalidRequestError,
    PeerLostError,
    RequestCancelledError,
    WorkerLostError,
)
from common.failpoints import Failpoints
from common.handoff import Ticket
from common.messages import GenerationRequest, PrefillEvent
from common.metrics import WorkerMetrics
from common.workers import WorkerInfo, WorkerLoad
from engine.blocks import BlockPool
from engine.engine_worker import EngineWorker
from engine.plan import Executor, StepPlan
from engine.ports import Exchange
from engine.sequence import Sequence, SequenceOutput
from prefill_worker.handoff import Handoff
from prefill_worker.scheduler import PrefillScheduler

log = logging.getLogger(__name__)


class PrefillWorker(EngineWorker):
    """One prefill worker (see `EngineWorker`)."""

    def __init__(
        self,
        info: WorkerInfo,
        config: WorkerConfig,
        transfer: TransferConfig,
        pool: BlockPool,
        scheduler: PrefillScheduler,
        executor: Executor,
        exchange: Exchange,
        metrics: WorkerMetrics | None = None,
        *,
        step_timeout_s: float = float("inf"),
        failpoints: Failpoints | None = None,
    ) -> None:
        super().__init__(
            info,
            config,
            transfer,
            pool,
            scheduler,
            executor,
            exchange,
            metrics,
            failpoints,
            step_failpoint="prefill_step",
            step_timeout_s=step_timeout_s,
            on_layer=self._layer_complete,
        )
        self._scheduler = scheduler
        self._handoffs: dict[str, Handoff] = {}
        self._steps = 0
        self._computed_tokens = 0
        self._sent_bytes = 0

    @property
    def num_requests(self) -> int:
        return len(self._handoffs)

    async def close(self) -> None:
        await self._life.end()
        await self._exchange.peers.close()
        await self._exchange.receiver.close()
        await self._exchange.sender.close()
        await self._executor.close()

    # ── what routers ask ──────────────────────────────────────────────────────────────────────────

    async def prefill(self, request: GenerationRequest, ticket: Ticket) -> AsyncGenerator[PrefillEvent, None]:
        """See `router.clients.PrefillClient.prefill`. Closing it cancels; the clean-up does not make
        the caller wait."""
        self._check(request, ticket)
        now = asyncio.get_running_loop().time()
        sequence = Sequence(request, self.info.model.fingerprint, now)
        layout = self.info.layout
        sender = self._exchange.sender
        handoff = Handoff(sequence, ticket, sender, layout.num_layers, layout.block_size, self._failpoints)
        self._handoffs[sequence.key] = handoff
        job = self._life.tasks.spawn(self._run(handoff), f"handoff {sequence.key}")
        try:
            while (event := await handoff.events.get()) is not None:
                if isinstance(event, BatonError):
                    raise event
                yield event
        finally:
            job.cancel()

    # ── one request ───────────────────────────────────────────────────────────────────────────────

    def _check(self, request: GenerationRequest, ticket: Ticket) -> None:
        self._life.check_ready()
        # The blocks of one that was cancelled are held until its last step has ended.
        if request.key in self._handoffs or self._pool.holds(request.key):
            raise InvalidRequestError(f"attempt {request.key} is under way on {self.info.worker_id} already")
        tokens = len(request.prompt) + len(request.generated)
        if not 0 < tokens <= self.info.max_sequence_tokens:
            raise InvalidRequestError(
                f"a context of 1 to {self.info.max_sequence_tokens} tokens fits {self.info.worker_id}, got {tokens}"
            )
        if ticket.context_tokens != tokens:
            raise InvalidRequestError(f"the ticket is for {ticket.context_tokens} context tokens, got {tokens}")

    async def _run(self, handoff: Handoff) -> None:
        """The life of one prompt here; ends with its blocks released, whatever happens."""
        sequence = handoff.sequence
        loop = asyncio.get_running_loop()
        error: BatonError | None = None
        self._scheduler.add(sequence, handoff.ticket.worker_id, handoff.ticket.cached_tokens)
        self._changed()
        try:
            async with asyncio.timeout(sequence.request.timeout_s):
                if self._failpoints:
                    await self._failpoints.reach("prefill_start")
                receipt = await handoff.run(loop.time)
            self._sent_bytes += receipt.num_bytes
            self.metrics.kv_bytes_sent.inc(receipt.num_bytes)
        except TimeoutError:
            error = DeadlineError(f"prefill of {sequence.key} exceeded its {sequence.request.timeout_s} s")
        except WorkerLostError as lost:
            error = PeerLostError(f"{self.info.worker_id} lost {handoff.ticket.worker_id}: {lost.message}")
        except BatonError as raised:
            error = raised
        except asyncio.CancelledError:
            error = RequestCancelledError(f"{sequence.key} was cancelled")
        except Exception as raised:  # the top of this request: its neighbours go on
            log.exception("handoff broke down", extra=sequence.log_fields)
            error = BatonError(f"internal error ({type(raised).__name__})")
        finally:
            # The push is over (`Handoff.run` sees to that), so only the engine or a pull may still use the blocks.
            if not self._scheduler.abort(sequence, error or RequestCancelledError("released")):
                self._pulls.cancel(sequence.key)
            del self._handoffs[sequence.key]
            handoff.events.put_nowait(error)
            if error is not None and not isinstance(error, RequestCancelledError):
                self.metrics.handoffs_failed.inc()
                log.warning("handoff failed: %s", error, extra=sequence.log_fields | {"error_code": error.code})
            self._changed()

    # ── what the engine tells ─────────────────────────────────────────────────────────────────────

    def _scheduled(self) -> None:
        super()._scheduled()
        for sequence in self._scheduler.take_admitted():
            self.metrics.cached_tokens.inc(sequence.context.cached)
            handoff = self._handoffs.get(sequence.key)
            if handoff is not None:
                handoff.admitted()

    def _planned(self, plan: StepPlan) -> None:
        self._steps += 1
        self._computed_tokens += plan.num_tokens
        self.metrics.steps.inc()
        self.metrics.context_tokens.inc(plan.num_tokens)

    def _layer_complete(self, plan: StepPlan, layer: int) -> None:
        for step in plan.steps:
            handoff = self._handoffs.get(step.sequence_id)
            if handoff is not None:
                handoff.layer_complete(layer, step.start + len(step.token_ids))

    def _deliver(self, outputs: Items[SequenceOutput]) -> None:
        now = asyncio.get_running_loop().time()
        for output in outputs:
            handoff = self._handoffs.get(output.sequence.key)
            if handoff is None:
                continue
            if output.error is None:
                handoff.first_token(output, now)
                self.metrics.generated_tokens.inc()
            handoff.computed(output)
        self._reporter.changed()

    def _pulled(self, sequence: Sequence) -> None:
        """Its handoff hears of it when it is admitted, or has ended by itself."""

    def load(self) -> WorkerLoad:
        scheduler = self._scheduler
        return WorkerLoad(
            state=self.state,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            waiting_tokens=scheduler.waiting_tokens,
            total_blocks=self._pool.num_blocks,
            free_blocks=self._pool.num_free,
            cached_blocks=self._pool.num_cached,
            prefill_steps=self._steps,
            computed_context_tokens=self._computed_tokens,
            kv_bytes_sent=self._sent_bytes + self._pushes.sent_bytes,
            kv_bytes_received=self._pulls.received_bytes,
            sending=replace(self._exchange.sender.counters),
            receiving=replace(self._exchange.receiver.counters),
            clogged=scheduler.clogged,
        )
