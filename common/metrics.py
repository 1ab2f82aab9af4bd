"""Every metric of Baton, declared once, with unit and help.

One `Metrics` a process. Names follow Prometheus conventions: base units, `_total` for counters.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from common.handoff import TransferCounters

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)


class RouterMetrics:
    """What a router counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter("baton_requests_total", "Requests by how they ended.", ["reason"], registry=r)
        self.requests_running = Gauge("baton_requests_running", "Requests that have not ended.", registry=r)
        self.requests_queued = Gauge("baton_requests_queued", "Requests waiting for a worker.", registry=r)
        self.attempts = Counter(
            "baton_attempts_total", "Placements of requests, by why they were made.", ["reason"], registry=r
        )
        self.prompt_tokens = Counter("baton_prompt_tokens_total", "Prompt tokens of ended requests.", registry=r)
        self.cached_tokens = Counter(
            "baton_cached_prompt_tokens_total", "Prompt tokens found in a prefill worker's prefix cache.", registry=r
        )
        self.pulled_tokens = Counter(
            "baton_pulled_prompt_tokens_total", "Prompt tokens whose KV the prefill side pulled.", registry=r
        )
        self.generated_tokens = Counter("baton_generated_tokens_total", "Tokens sent to clients.", registry=r)
        self.duplicate_tokens = Counter(
            "baton_duplicate_tokens_total", "Tokens from workers that the router already had.", registry=r
        )
        self.ttft = Histogram(
            "baton_time_to_first_token_seconds", "From arrival to the first token.", buckets=_SECONDS, registry=r
        )
        self.itl = Histogram(
            "baton_inter_token_latency_seconds", "Between two frames of one answer.", buckets=_GAPS, registry=r
        )
        self.e2e = Histogram(
            "baton_request_duration_seconds", "From arrival to the last token.", buckets=_SECONDS, registry=r
        )
        self.queue = Histogram("baton_queue_seconds", "From arrival to a reservation.", buckets=_SECONDS, registry=r)
        self.workers = Gauge("baton_workers", "Known workers by role and state.", ["role", "state"], registry=r)
        self.http_responses = Counter("baton_http_responses_total", "HTTP responses.", ["route", "status"], registry=r)

    def render(self) -> bytes:
        """The text exposition of all metrics."""
        return generate_latest(self.registry)


class WorkerMetrics:
    """What a prefill or decode worker counts; the label ``role`` is the worker's own."""

    def __init__(self, role: str) -> None:
        self.registry = CollectorRegistry()
        r = self.registry

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["role"], registry=r).labels(role)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["role"], registry=r).labels(role)

        self.steps = counter("baton_engine_steps_total", "Forward passes.")
        self.decode_steps = counter("baton_engine_decode_steps_total", "Forward passes with a decoding sequence.")
        self.context_tokens = counter("baton_engine_context_tokens_total", "Context tokens computed.")
        self.cached_tokens = counter("baton_engine_cached_tokens_total", "Context tokens found in the prefix cache.")
        self.generated_tokens = counter("baton_engine_generated_tokens_total", "Tokens sampled.")
        self.preemptions = counter("baton_engine_preemptions_total", "Sequences put back for want of blocks.")
        self.sequences_running = gauge("baton_engine_sequences_running", "Sequences in the batch.")
        self.sequences_waiting = gauge("baton_engine_sequences_waiting", "Sequences not in the batch yet.")
        self.kv_bytes_sent = counter("baton_kv_sent_bytes_total", "KV bytes sent to peers.")
        self.kv_bytes_received = counter("baton_kv_received_bytes_total", "KV bytes received and verified.")
        self.handoffs_failed = counter("baton_handoffs_failed_total", "Handoffs that ended in an error.")
        self.pulled_tokens = counter("baton_pulled_tokens_total", "Context tokens whose KV another worker sent.")
        self.pulls = counter("baton_pulls_total", "Prefixes that were pulled from another worker.")
        self.pulls_failed = counter("baton_pulls_failed_total", "Pulls that failed: the prefix was computed instead.")
        self.tickets_expired = counter("baton_tickets_expired_total", "Tickets that ran out of lease.")
        self._blocks = Gauge("baton_kv_blocks", "KV blocks by state.", ["role", "state"], registry=r)
        self._role = role

    def export_transfers(self, sending: TransferCounters, receiving: TransferCounters) -> None:
        """From now on what both ends of the worker's transfers count is among its metrics."""
        self.registry.register(_Transfers(self._role, {"send": sending, "receive": receiving}))

    def set_blocks(self, counts: dict[str, int]) -> None:
        """``counts``: block state → number of blocks."""
        for state, count in counts.items():
            self._blocks.labels(self._role, state).set(count)

    def render(self) -> bytes:
        """The text exposition of all metrics."""
        return generate_latest(self.registry)


_TRANSFERS = {
    "pieces": "Pieces of KV (a block of one layer) that were sent, or that arrived intact.",
    "handoffs": "Handoffs that went well.",
    "failures": "Handoffs that did not.",
    "duplicates": "Pieces that came again, and were not written again.",
    "stale": "Pieces that came when their handoff was over, and were not written.",
    "corrupt": "Pieces that did not verify, and were not written.",
    "resent": "Pieces that were lost or damaged, and sent again.",
    "fallbacks": "Times that a preferred transport did not work and the next one was tried.",
}
"""Fields of TransferCounters and what they count."""


class _Transfers(Collector):
    """Reads the counters of a worker's transfers whenever its metrics are asked for."""

    def __init__(self, role: str, ends: dict[str, TransferCounters]) -> None:
        self._role = role
        self._ends = ends

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, text in _TRANSFERS.items():
            family = CounterMetricFamily(f"baton_kv_transfer_{name}", text, labels=["role", "direction"])
            for direction, counters in self._ends.items():
                family.add_metric([self._role, direction], getattr(counters, name))
            yield family
