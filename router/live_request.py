"""A request that has not ended: its answer so far, its record, its place and its deadline.

The attempts bring tokens (`accept`), the end (`finish`), and the decode worker's last word (`settle`);
whoever reads the answer may end it earlier (`end_at`). Here each is written down once, for the client, for
the record and for the metrics.

Knows neither workers nor how they are talked to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from common.errors import BatonError, RequestCancelledError
from common.messages import Finish, FinishReason, FirstToken, GenerationRequest, HandoffDone, Logprobs
from common.metrics import RouterMetrics
from router.answer import Answer
from router.attempt import Attempt
from router.placement import Decision, Demand
from router.records import RequestRecord

SETTLE_TIMEOUT_S = 5.0
"""The client has its answer; the workers' last words are awaited this long."""


@dataclass(slots=True)
class Pulse:
    """When real traffic last proved that a handoff, and that decoding, works (event loop time)."""

    handed_off_at: float = float("-inf")
    decoded_at: float = float("-inf")


class LiveRequest:
    """``arrival`` counts requests; ``timeout`` is entered by the request's task. ``hashes`` are the
    prompt's prefix hashes. ``leader``: a request with the same prompt, whose KV this one is to share.
    """

    def __init__(
        self,
        request: GenerationRequest,
        hashes: list[bytes],
        arrival: int,
        deadline: float,
        metrics: RouterMetrics,
        pulse: Pulse,
        slo: Mapping[str, float] | None = None,
        leader: LiveRequest | None = None,
    ) -> None:
        now = asyncio.get_running_loop().time()
        self.request = request
        self.hashes = hashes
        self.arrival = arrival
        self.timeout = asyncio.timeout_at(deadline)
        num_scored = len(request.prompt) - 1 if request.sampling.score_prompt else 0
        self.answer = Answer(request.sampling.num_logprobs is not None, num_scored)
        self.leader = leader
        self.kv_ready = asyncio.Event()
        """The prompt's KV is where it decodes, or will never be: its followers need not wait any more."""
        self.on_stop: Callable[[], None] | None = None
        """Tells the attempt under way that no more tokens are wanted."""
        self.record = RequestRecord(request.request_id, len(request.prompt), now, request.priority, slo)
        self.admitted = False
        """It passed the queue once, and is not turned away any more."""
        self.failures = 0
        self.avoid: tuple[str, ...] = ()
        """Addresses of workers that failed it."""
        self.reason = "new"
        """Why the next attempt is made."""
        self._next_attempt = 0
        self._deadline = deadline
        self._metrics = metrics
        self._pulse = pulse
        metrics.requests_running.inc()

    @property
    def demand(self) -> Demand:
        num_prompt = len(self.request.prompt)
        num_accepted = len(self.answer.tokens)
        scored = self.request.sampling.score_prompt and not num_accepted
        return Demand(num_prompt + num_accepted, num_prompt + self.request.sampling.max_tokens, scored)

    @property
    def places(self) -> list[str]:
        """Addresses of the workers that hold the prompt's KV, as far as this request knows."""
        decision = self.record.decision
        if decision is None or not self.answer.tokens:
            return []
        return [choice.address for choice in (decision.prefill, decision.decode) if choice is not None]

    # ── attempts ──────────────────────────────────────────────────────────────────────────────────

    def begin_attempt(self, decision: Decision) -> Attempt:
        """The next attempt, which goes on after the tokens that the answer has."""
        now = asyncio.get_running_loop().time()
        request = replace(
            self.request,
            attempt=self._next_attempt,
            generated=tuple(self.answer.tokens),
            timeout_s=max(0.0, self._deadline - now),
            prefix_source=decision.prefix_source,
        )
        self._next_attempt += 1
        if decision.prefill is not None:
            self.answer.expect_twice(len(request.generated))
        self.record.started_attempt(decision, self.reason, len(request.generated))
        return Attempt(request, self.accept)

    def count_attempt(self) -> None:
        """The attempt holds its reservation: it is one."""
        if not self.answer.tokens:
            self._metrics.queue.observe(self.record.queue_s)
        self._metrics.attempts.labels(self.reason).inc()
        self.record.state = "prefill"

    def drop_attempt(self, error: BatonError, *, reserved: bool) -> None:
        """A worker had no capacity: that was no attempt. Its number is free again unless D had taken it."""
        if not reserved:
            self._next_attempt -= 1
        self.record.attempts.pop()
        self.record.waiting_for = error.message

    def fail_attempt(self, error: BatonError, culprits: Sequence[str]) -> None:
        self.record.attempts[-1].outcome = error.code
        self.answer.restart()
        self.record.emitted = len(self.answer.tokens)
        self.failures += 1
        self.reason = error.code
        self.avoid = (*self.avoid, *culprits)

    # ── what an attempt brings ────────────────────────────────────────────────────────────────────

    def accept(
        self,
        first_index: int,
        tokens: Sequence[int],
        logprobs: Sequence[Logprobs] = (),
        prompt_logprobs: Sequence[Logprobs] = (),
    ) -> None:
        """Tokens from whichever worker. Raises HandoffError when they do not continue the answer."""
        self.answer.accept_prompt(prompt_logprobs)
        num_new = self.answer.accept(first_index, tokens, logprobs)
        if not num_new:
            return
        now = asyncio.get_running_loop().time()
        record = self.record
        record.emitted += num_new
        self._metrics.generated_tokens.inc(num_new)
        if record.last_token_at is None:
            record.first_token_at = now
            record.state = "decode"
            self._metrics.ttft.observe(now - record.arrived_at)
        else:
            self._metrics.itl.observe(now - record.last_token_at)
            self._pulse.decoded_at = now
        record.last_token_at = now
        if record.decision is not None and record.decision.prefill is None:
            self.kv_ready.set()

    def first_token(self, event: FirstToken) -> None:
        """The prefill worker's token, ahead of the KV."""
        record = self.record
        record.prefill_context = event.context
        record.prefill_s = event.queue_s + event.prefill_s
        logprobs = () if event.logprobs is None else (event.logprobs,)
        self.accept(event.index, (event.token,), logprobs, event.prompt_logprobs)
        if event.finish is not None:
            self.finish(event.finish)

    def handed_off(self, event: HandoffDone) -> None:
        self._pulse.handed_off_at = asyncio.get_running_loop().time()
        self.kv_ready.set()
        self.record.transfer_s = event.transfer_s
        self.record.transport = event.transport
        self.record.kv_bytes = event.num_bytes

    def settle(self, finish: Finish, *, alone: bool, colocated: bool) -> None:
        """The decode worker's last word: the answer is complete, and this is what it took. ``alone``: it computed
        the prompt too; ``colocated``: as every worker does."""
        record = self.record
        record.decode_context = finish.context
        if finish.prefill_context.total:
            record.prefill_context = finish.prefill_context
        record.preemptions += finish.preemptions
        if alone:  # one worker was both sides
            record.prefill_context = finish.context
        if colocated:
            self._pulse.handed_off_at = self._pulse.decoded_at = asyncio.get_running_loop().time()
        record.attempts[-1].outcome = finish.reason.value
        self.finish(finish.reason)

    def finish(self, reason: FinishReason) -> None:
        """The answer is complete. What is still under way is for the record, and has little time."""
        if self.answer.ended:
            return
        self.record.finish_reason = reason.value
        self.answer.finish(reason, self.record.usage)
        self._settle_soon()

    def end_at(self, num_tokens: int) -> None:
        """The answer is complete after its first ``num_tokens`` tokens (a stop string is there): what the
        workers made beyond is dropped, and they are told."""
        record = self.record
        if record.finish_reason is not None and not self.answer.complete:
            return  # it failed meanwhile
        record.finish_reason = FinishReason.STOP.value
        record.emitted = num_tokens
        self.answer.cut(num_tokens, record.usage)
        if record.ended_at is None:
            self._settle_soon()
            if self.on_stop is not None:
                self.on_stop()

    def _settle_soon(self) -> None:
        """The client has all; the workers' last words have little time."""
        settled_at = asyncio.get_running_loop().time() + SETTLE_TIMEOUT_S
        if not self.timeout.expired():  # in the very moment of the deadline
            self.timeout.reschedule(min(self._deadline, settled_at))

    # ── the end ───────────────────────────────────────────────────────────────────────────────────

    def close(self, error: BatonError | None) -> None:
        """Ends the request, once; ``error`` counts only when the answer is not complete."""
        record = self.record
        if record.ended_at is not None:
            return
        record.ended_at = asyncio.get_running_loop().time()
        self.kv_ready.set()
        record.duplicates = self.answer.duplicates
        record.waiting_for = None
        if record.finish_reason is not None or error is None:
            record.state = "finished"
            self._metrics.e2e.observe(record.ended_at - record.arrived_at)
        else:
            record.error, record.finish_reason = error.message, error.code
            if isinstance(error, RequestCancelledError):
                record.state = "cancelled"
            else:
                record.state = "failed" if record.attempts else "rejected"
            self.answer.fail(error)
        if record.attempts and record.attempts[-1].outcome == "running":
            record.attempts[-1].outcome = record.finish_reason or ""
        metrics = self._metrics
        metrics.requests_running.dec()
        metrics.requests.labels(record.finish_reason or "").inc()
        metrics.prompt_tokens.inc(record.prompt_tokens)
        metrics.cached_tokens.inc(record.usage.cached_tokens)
        metrics.pulled_tokens.inc(record.pulled_tokens)
        metrics.duplicate_tokens.inc(record.duplicates)
