"""The decode role: promises blocks, takes over handoffs, generates, streams.

It can also compute a context itself (always in colocated mode, role ``BOTH``; in adaptive mode a short one):
that is the scheduler's ability, this module only lets requests in by another door (`submit`).

It knows routers' calls and tickets; what is computed next is the scheduler's business, how KV arrives
the receiver's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from common.config import TransferConfig, WorkerConfig
from common.errors import BatonError, DeadlineError, InvalidRequestError, RequestCancelledError
from common.failpoints import Failpoints
from common.handoff import HandoffCommit, Ticket
from common.messages import ContextTokens, Finish, FinishReason, GenerationRequest, Logprobs, TokenBatch
from common.metrics import WorkerMetrics
from common.workers import WorkerInfo, WorkerLoad
from decode_worker.reservation import Reservations
from decode_worker.scheduler import DecodeScheduler
from decode_worker.streams import RouterStream, RouterStreams, gone
from engine.blocks import BlockPool
from engine.engine_worker import EngineWorker
from engine.plan import Executor, StepPlan
from engine.ports import Exchange
from engine.sequence import Sequence, SequenceOutput

log = logging.getLogger(__name__)

EARLY_CANCELS = 1024
"""Attempts that were cancelled before they came; so many are remembered."""


@dataclass(slots=True)
class _Attempt:
    """A request that is here: where its tokens go, and its deadline."""

    sequence: Sequence
    stream: RouterStream
    joined_at: float | None = None
    prefill_context: ContextTokens = field(default_factory=ContextTokens)
    deadline: asyncio.TimerHandle | None = None


class DecodeWorker(EngineWorker):
    """One decode worker (see `EngineWorker`)."""

    def __init__(
        self,
        info: WorkerInfo,
        config: WorkerConfig,
        transfer: TransferConfig,
        pool: BlockPool,
        scheduler: DecodeScheduler,
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
            step_failpoint="decode_step",
            step_timeout_s=step_timeout_s,
        )
        self._scheduler = scheduler
        self._attempts: dict[str, _Attempt] = {}
        self._early_cancels: dict[str, None] = {}
        self._streams = RouterStreams()
        self._prefill_steps = 0
        self._decode_steps = 0
        self._context_tokens = 0
        self._decoded_tokens = 0
        self._preemptions_seen = 0
        self._reservations = Reservations(
            info,
            exchange.receiver,
            transfer.lease_s,
            self._joined,
            self._handoff_ended,
            self._life.tasks,
            self.metrics,
            self._failpoints,
        )

    @property
    def num_requests(self) -> int:
        return len(self._attempts)

    async def close(self) -> None:
        self._life.leave()
        self._streams.close_all()
        await self._exchange.receiver.close()
        await self._life.end()
        await self._exchange.peers.close()
        await self._exchange.sender.close()
        await self._executor.close()

    # ── what routers ask ──────────────────────────────────────────────────────────────────────────

    async def tokens(self, router_id: str) -> AsyncGenerator[TokenBatch, None]:
        """See `router.clients.DecodeClient.tokens`: when it ends, or is replaced by another one, all that
        was asked for over it ends."""
        stream, replaced = self._streams.open(router_id)
        if replaced is not None:
            self._end_all(replaced)
        try:
            async for batch in stream.batches():
                yield batch
        finally:
            self._streams.close(stream)
            self._end_all(stream)

    async def reserve(self, router_id: str, request: GenerationRequest) -> Ticket:
        attempt = await self._admit(router_id, request)
        self._scheduler.reserve(attempt.sequence, attempt.sequence.arrival)
        try:
            ticket = self._reservations.add(attempt.sequence)
        except BaseException as error:
            self._scheduler.abort(attempt.sequence, RequestCancelledError(f"not reserved: {error!r}"))
            raise
        self._enter(attempt)
        return ticket

    async def submit(self, router_id: str, request: GenerationRequest) -> None:
        attempt = await self._admit(router_id, request)
        self._scheduler.submit(attempt.sequence, attempt.sequence.arrival)
        attempt.joined_at = attempt.sequence.arrival
        self._enter(attempt)
        self._scheduled()  # a pull need not wait for the end of the step that is running
        self._engine.wake()

    async def cancel(self, request_id: str, attempt: int) -> None:
        """Ends an attempt; one that is not here yet is refused when it comes."""
        key = f"{request_id}#{attempt}"
        if key in self._attempts:
            self._end(key, RequestCancelledError(f"{key} was cancelled"))
            return
        self._early_cancels[key] = None
        if len(self._early_cancels) > EARLY_CANCELS:
            del self._early_cancels[next(iter(self._early_cancels))]

    # ── one request ───────────────────────────────────────────────────────────────────────────────

    async def _admit(self, router_id: str, request: GenerationRequest) -> _Attempt:
        """Checks what only this worker can know; nothing is held yet."""
        if self._failpoints:
            await self._failpoints.reach("reserve")
        self._life.check_ready()
        stream = self._streams.of(router_id)
        if request.key in self._early_cancels:
            raise RequestCancelledError(f"{request.key} was cancelled before it came to {self.info.worker_id}")
        if request.key in self._attempts:
            raise InvalidRequestError(f"attempt {request.key} is on {self.info.worker_id} already")
        tokens = len(request.prompt) + request.sampling.max_tokens
        if not request.prompt or not 1 < tokens <= self.info.max_sequence_tokens:
            raise InvalidRequestError(
                f"prompt and max_tokens together may be 2 to {self.info.max_sequence_tokens} tokens, got {tokens}"
            )
        return _Attempt(Sequence(request, self.info.model.fingerprint, asyncio.get_running_loop().time()), stream)

    def _enter(self, attempt: _Attempt) -> None:
        """The attempt holds its blocks: from here on `_finish` is its way out."""
        sequence = attempt.sequence
        self._attempts[sequence.key] = attempt
        timeout_s = sequence.request.timeout_s
        if timeout_s is not None:
            error = DeadlineError(f"{sequence.key} exceeded its {timeout_s:.3f} s on {self.info.worker_id}")
            attempt.deadline = asyncio.get_running_loop().call_later(timeout_s, self._end, sequence.key, error)
        self.metrics.cached_tokens.inc(sequence.context.cached)
        self._reporter.changed()

    def _end_all(self, stream: RouterStream) -> None:
        """Nobody listens to ``stream`` any more."""
        for key in [key for key, attempt in self._attempts.items() if attempt.stream is stream]:
            self._end(key, gone(stream.router_id))

    def _end(self, key: str, error: BatonError) -> None:
        """Ends an attempt at whatever stage it is; unknown ones are ignored."""
        attempt = self._attempts.get(key)
        if attempt is None or self._reservations.end(key, error):
            return
        if self._scheduler.abort(attempt.sequence, error):
            self._finish(attempt, FinishReason.ERROR, error)
        else:
            self._pulls.cancel(key)
        self._engine.wake()

    def _finish(
        self,
        attempt: _Attempt,
        reason: FinishReason,
        error: BatonError | None = None,
        *,
        index: int = 0,
        tokens: tuple[int, ...] = (),
        logprobs: Logprobs | None = None,
    ) -> None:
        """The one way out: the router hears why, the books forget the attempt."""
        sequence = attempt.sequence
        del self._attempts[sequence.key]
        if attempt.deadline is not None:
            attempt.deadline.cancel()
        if isinstance(error, RequestCancelledError):
            reason = FinishReason.CANCELLED
        elif error is not None:
            log.warning("request failed: %s", error, extra=sequence.log_fields | {"error_code": error.code})
        now = asyncio.get_running_loop().time()
        joined = attempt.joined_at if attempt.joined_at is not None else now
        finish = Finish(
            reason,
            sequence.context,
            sequence.preemptions,
            error.code if error is not None else "",
            error.message if error is not None else "",
            handoff_s=joined - sequence.arrival,
            decode_s=now - joined,
            prefill_context=attempt.prefill_context,
        )
        prompt_logprobs = sequence.prompt_logprobs if index == 0 and tokens else ()
        attempt.stream.put(sequence.request, index, tokens, finish, logprobs, prompt_logprobs)
        self._life.note_open(self.num_open)
        self._reporter.changed()

    # ── what the handoff tells ────────────────────────────────────────────────────────────────────

    def _joined(self, sequence: Sequence, commit: HandoffCommit) -> None:
        attempt = self._attempts[sequence.key]
        attempt.joined_at = asyncio.get_running_loop().time()
        attempt.prefill_context = commit.context
        # The first token goes out here too: this stream is whole, even if the prefill worker's word to the
        # router is late or lost.
        self._emit(attempt, self._scheduler.join(sequence, commit.token, attempt.joined_at, commit.logprobs))
        self._engine.wake()
        self._reporter.changed()

    def _handoff_ended(self, sequence: Sequence, error: BatonError) -> None:
        self._scheduler.abort(sequence, error)
        if not isinstance(error, RequestCancelledError):
            self.metrics.handoffs_failed.inc()
        self._finish(self._attempts[sequence.key], FinishReason.ERROR, error)
        self._engine.wake()

    def _pulled(self, sequence: Sequence) -> None:
        if sequence.error is not None:
            self._finish(self._attempts[sequence.key], FinishReason.ERROR, sequence.error)

    # ── what the engine tells ─────────────────────────────────────────────────────────────────────

    def _planned(self, plan: StepPlan) -> None:
        decoding = context_tokens = 0
        for step in plan.steps:
            sequence = self._attempts[step.sequence_id].sequence
            if sequence.is_decoding:
                decoding += 1
            else:
                context_tokens += len(step.token_ids)
        self._context_tokens += context_tokens
        self._decoded_tokens += decoding
        self._decode_steps += decoding > 0
        self._prefill_steps += decoding < len(plan.steps)
        self.metrics.steps.inc()
        self.metrics.decode_steps.inc(decoding > 0)
        self.metrics.context_tokens.inc(context_tokens)
        self.metrics.preemptions.inc(self._scheduler.preemptions - self._preemptions_seen)
        self._preemptions_seen = self._scheduler.preemptions

    def _deliver(self, outputs: Items[SequenceOutput]) -> None:
        for output in outputs:
            attempt = self._attempts[output.sequence.key]
            if output.error is not None:
                self._finish(attempt, FinishReason.ERROR, output.error)
                continue
            self._emit(attempt, output)
            self.metrics.generated_tokens.inc()
        self._reporter.changed()

    def _emit(self, attempt: _Attempt, output: SequenceOutput) -> None:
        """One token to its router, with the end if it is the last one."""
        assert output.token is not None
        if output.finish is not None:
            self._finish(attempt, output.finish, index=output.index, tokens=(output.token,), logprobs=output.logprobs)
            return
        sequence = output.sequence
        prompt_logprobs = sequence.prompt_logprobs if output.index == 0 else ()
        attempt.stream.put(sequence.request, output.index, (output.token,), None, output.logprobs, prompt_logprobs)

    def load(self) -> WorkerLoad:
        scheduler = self._scheduler
        return WorkerLoad(
            state=self.state,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            waiting_tokens=scheduler.waiting_tokens,
            running_tokens=scheduler.running_tokens,
            total_blocks=self._pool.num_blocks,
            free_blocks=self._pool.num_free,
            cached_blocks=self._pool.num_cached,
            prefill_steps=self._prefill_steps,
            decode_steps=self._decode_steps,
            computed_context_tokens=self._context_tokens,
            decoded_tokens=self._decoded_tokens,
            preemptions=scheduler.preemptions,
            kv_bytes_sent=self._pushes.sent_bytes,
            kv_bytes_received=self._reservations.received_bytes + self._pulls.received_bytes,
            sending=replace(self._exchange.sender.counters),
            receiving=replace(self._exchange.receiver.counters),
        )
