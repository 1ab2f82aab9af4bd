"""The numbers of a run, from its records alone.

Definitions. A *token event* is an event of the stream that has text in it; an event with only a role, a reason or
usage is none. The *gaps* of a stream are the times between its successive token events. Only streams that ended
well are measured, all others are counted by kind in ``errors``. Percentiles interpolate linearly, as numpy's.

    ttft          from when the request was due to its first token event
    itl           each gap of each stream, so a long stream weighs more than a short one
    tpot          per stream of at least two tokens: (last - first token event) / (tokens - 1)
    e2e           from when the request was due to [DONE]
    stall_share   of the time in gaps of all streams, the share that lies in gaps over 200 ms, whole gaps:
                  a p99 over gaps hides stalls that are long and rare
    tokens        by the server's usage where it sends one, else one per token event (``tokens_from``)
    duration_s    from the start of the run until the last request has ended, the tail included
    output_tok_s  tokens of streams that ended well, over duration_s
    goodput_rps   streams that ended well and met every given target (TTFT, TPOT), over duration_s

In open loop a request is due when the arrival process says so; in closed loop when its user is free. So
``ttft`` has in it whatever the generator itself was late by, and the making of a connection where no fresh one was
left; ``client.late_ms`` shows how much that was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.load.stream import INTERRUPTED, StreamRecord

STALL_S = 0.2
MS = 1000.0

TAILS = (50, 90, 99)
GAP_TAILS = (50, 90, 99, 99.9)


@dataclass(frozen=True, slots=True)
class Targets:
    """What a stream must meet to be counted as good; None: whatever."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met_by(self, record: StreamRecord) -> bool:
        tpot_s = record.tpot_s
        return (self.ttft_s is None or record.ttft_s <= self.ttft_s) and (
            self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s
        )


def distribution(
    values: Sequence[float] | NDArray[np.float64], tails: Iterable[float] = TAILS, largest: bool = False
) -> dict[str, float | None]:
    """Mean and percentiles, each None when there are no values. 99.9 is called ``p999``."""
    names = {f"p{tail:g}".replace(".", ""): tail for tail in tails}
    keys = ["mean", *names, *(["max"] if largest else [])]
    if len(values) == 0:
        return dict.fromkeys(keys)
    array = np.asarray(values, dtype=np.float64)
    numbers = [array.mean(), *np.percentile(array, list(names.values())), *([array.max()] if largest else [])]
    return {key: round(float(number), 6) for key, number in zip(keys, numbers, strict=True)}


def gaps_s(records: Iterable[StreamRecord]) -> NDArray[np.float64]:
    """The gaps of all streams, one after another."""
    gaps = [np.diff(np.frombuffer(record.times_s, dtype=np.float64)) for record in records if record.times_s]
    return np.concatenate(gaps) if gaps else np.empty(0)


def stall_share(gaps: NDArray[np.float64]) -> float:
    """The share of the gaps' time that is in long ones; 0 when there are none."""
    total = float(gaps.sum())
    return float(gaps[gaps > STALL_S].sum()) / total if total > 0 else 0.0


def load_figures(records: Sequence[StreamRecord], start_s: float, targets: Targets) -> dict[str, Any]:
    """The result of a run, with the keys of the contract first."""
    ok = [record for record in records if record.ok]
    errors = Counter(record.error for record in records if record.error not in (None, INTERRUPTED))
    unfinished = sum(record.error == INTERRUPTED for record in records)
    duration_s = max((record.end_s for record in records), default=start_s) - start_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    gaps = gaps_s(ok)
    tokens = sum(record.num_tokens for record in ok)
    return {
        "requests": len(records) - unfinished,
        "ok": len(ok),
        "errors": dict(errors.most_common()),
        "duration_s": round(duration_s, 6),
        "ttft_ms": distribution([record.ttft_s * MS for record in ok], largest=True),
        "itl_ms": distribution(gaps * MS, GAP_TAILS, largest=True),
        "stall_share": round(stall_share(gaps), 6),
        "tpot_ms": distribution([tpot_s * MS for record in ok if (tpot_s := record.tpot_s) is not None], largest=True),
        "e2e_ms": distribution([record.e2e_s * MS for record in ok], largest=True),
        "output_tok_s": round(tokens * per_s, 6),
        "goodput_rps": round(sum(targets.met_by(record) for record in ok) * per_s, 6),
        "request_rps": round(len(ok) * per_s, 6),
        "targets": {"ttft_s": targets.ttft_s, "tpot_s": targets.tpot_s},
        "unfinished": unfinished,
        "error_samples": _samples(records),
        "output_tokens": {
            "total": tokens,
            "mean": round(tokens / len(ok), 3) if ok else None,
            "asked_mean": round(sum(record.num_asked for record in ok) / len(ok), 3) if ok else None,
        },
        "prompt_tokens": {"mean": _mean_prompt(ok)},
        "tokens_from": _source(ok),
        "token_events": sum(len(record.times_s) for record in ok),
    }


def _samples(records: Iterable[StreamRecord]) -> dict[str, str]:
    """What the first error of each kind said."""
    samples: dict[str, str] = {}
    for record in records:
        if record.error is not None and record.error != INTERRUPTED and record.error not in samples:
            wait = "" if record.retry_after_s is None else f" (Retry-After: {record.retry_after_s:g} s)"
            samples[record.error] = record.error_text + wait
    return samples


def _mean_prompt(ok: Sequence[StreamRecord]) -> float | None:
    counts = [record.usage["prompt_tokens"] for record in ok if "prompt_tokens" in record.usage]
    return round(sum(counts) / len(counts), 3) if counts else None


def _source(ok: Sequence[StreamRecord]) -> str:
    with_usage = sum("completion_tokens" in record.usage for record in ok)
    return "usage" if with_usage == len(ok) else "events" if with_usage == 0 else "mixed"
