"""What is remembered of each request, while it lives and for a while after: the answer to "why was this
one slow?", as `GET /requests/{id}` tells it.

Times are those of the event loop, spans are seconds. Knows nothing of how requests are served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from common.messages import ContextTokens
from router.answer import Usage
from router.placement import Choice, Decision, Pull


@dataclass(slots=True)
class AttemptRecord:
    """One placement. ``reason``: why it was made; ``outcome``: how it ended."""

    prefill: str | None
    decode: str
    reason: str
    outcome: str = "running"


@dataclass(slots=True)
class RequestRecord:
    """One request. The last attempt's numbers replace those of earlier ones."""

    id: str
    prompt_tokens: int
    arrived_at: float
    priority: int = 0
    slo: Mapping[str, float] | None = None
    state: str = "queued"
    """queued, prefill, decode; at the end finished, cancelled, rejected or failed"""
    finish_reason: str | None = None
    error: str | None = None
    waiting_for: str | None = None
    attempts: list[AttemptRecord] = field(default_factory=list)
    decision: Decision | None = None
    emitted: int = 0
    duplicates: int = 0
    resumed_at: int = 0
    """Tokens that were accepted before the last attempt: its context is the prompt and these."""
    prefill_context: ContextTokens = field(default_factory=ContextTokens)
    decode_context: ContextTokens = field(default_factory=ContextTokens)
    preemptions: int = 0
    transport: str | None = None
    kv_bytes: int = 0
    queue_s: float = 0.0
    reserve_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self._of_prompt(self.prefill_context).cached, self.emitted)

    @property
    def pulled_tokens(self) -> int:
        return self._of_prompt(self.prefill_context).moved

    def started_attempt(self, decision: Decision, reason: str, resumed_at: int) -> AttemptRecord:
        attempt = AttemptRecord(
            decision.prefill.worker_id if decision.prefill is not None else None, decision.decode.worker_id, reason
        )
        self.attempts.append(attempt)
        self.decision = decision
        self.resumed_at = resumed_at
        self.prefill_context = self.decode_context = ContextTokens()
        self.waiting_for = None
        return attempt

    def to_json(self, now: float) -> dict[str, Any]:
        """The body of `GET /requests/{id}`; spans of what is under way end now."""
        prefill, decode = self._of_prompt(self.prefill_context), self._of_prompt(self.decode_context)
        end = self.ended_at if self.ended_at is not None else now
        first = self.first_token_at
        decode_s = (self.last_token_at or first) - first if first is not None else None
        phases_s = {
            "queue": self.queue_s,
            "reserve": self.reserve_s,
            "prefill": self.prefill_s,
            "transfer": self.transfer_s,
            "first_token": first - self.arrived_at if first is not None else None,
            "decode": decode_s,
            "total": end - self.arrived_at,
        }
        return {
            "id": self.id,
            "state": self.state,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "waiting_for": self.waiting_for,
            "priority": self.priority,
            "slo": dict(self.slo) if self.slo is not None else None,
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "tokens": {
                "prompt": self.prompt_tokens,
                "cached_prefill": prefill.cached,
                "pulled": prefill.moved,
                "computed_prefill": prefill.computed,
                "cached_decode": decode.cached,
                "received": decode.moved,
                "computed_decode": decode.computed,
                "emitted": self.emitted,
                "resumed_at": self.resumed_at,
                "duplicates": self.duplicates,
            },
            "phases_s": {name: _microseconds(seconds) for name, seconds in phases_s.items()},
            "handoff": {"transport": self.transport, "kv_bytes": self.kv_bytes, "preemptions": self.preemptions},
            "decision": _decision(self.decision),
        }

    def _of_prompt(self, context: ContextTokens) -> ContextTokens:
        """The part of an attempt's context that is the prompt. A resumed attempt's context goes on with
        accepted tokens; where a context came from is in order (held, moved, computed), so it can be cut.
        """
        cached = min(context.cached, self.prompt_tokens)
        moved = min(context.moved, self.prompt_tokens - cached)
        computed = min(context.computed, self.prompt_tokens - cached - moved)
        return ContextTokens(cached, moved, computed)


class Records:
    """The live requests, and the last ``capacity`` of those that ended."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._live: dict[str, RequestRecord] = {}
        self._recent: dict[str, RequestRecord] = {}

    @property
    def num_live(self) -> int:
        return len(self._live)

    def open(self, record: RequestRecord) -> None:
        self._live[record.id] = record

    def close(self, record: RequestRecord) -> None:
        self._live.pop(record.id, None)
        self._recent[record.id] = record
        if len(self._recent) > self._capacity:
            del self._recent[next(iter(self._recent))]

    def find(self, request_id: str) -> RequestRecord | None:
        return self._live.get(request_id) or self._recent.get(request_id)


def _microseconds(seconds: float | None) -> float | None:
    """To the microsecond: beyond that the figures are noise."""
    return seconds if seconds is None else round(seconds, 6)


def attempt_fields(record: RequestRecord) -> dict[str, Any]:
    """Who serves or served a request, for a log line."""
    if not record.attempts:
        return {}
    last = record.attempts[-1]
    return {"prefill": last.prefill, "decode": last.decode}


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """One request that ended, for a log line: who, how much, how long; nothing of what was said."""
    first, end = record.first_token_at, record.ended_at
    usage = record.usage
    return {
        "request_id": record.id,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "ttft_s": _microseconds(first - record.arrived_at) if first is not None else None,
        "total_s": _microseconds(end - record.arrived_at) if end is not None else None,
        "attempts": len(record.attempts),
        **attempt_fields(record),
    }


def _decision(decision: Decision | None) -> dict[str, Any] | None:
    if decision is None:
        return None
    return {
        "prefill": _choice(decision.prefill),
        "decode": _choice(decision.decode),
        "reason": decision.reason,
    }


def _choice(choice: Choice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    return {
        "worker": choice.worker_id,
        "work_tokens": choice.work,
        "load_tokens": choice.load_tokens,
        "hit_tokens": choice.hit_tokens,
        "candidates": dict(choice.scores),
        "pull": _pull(choice.pull),
    }


def _pull(pull: Pull | None) -> dict[str, Any] | None:
    """Expected when it was decided; `tokens.pulled` says what came."""
    if pull is None:
        return None
    return {"from": pull.worker_id, "tokens": pull.num_tokens, "cost_tokens": pull.cost_tokens}
