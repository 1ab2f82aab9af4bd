"""The figures, against plain arithmetic on streams whose times are written down."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from bench.load.figures import Targets, distribution, gaps_s, load_figures, stall_share
from bench.load.stream import INTERRUPTED, StreamRecord

CONTRACT = ["requests", "ok", "errors", "duration_s", "ttft_ms", "itl_ms", "stall_share", "tpot_ms", "e2e_ms"]
CONTRACT += ["output_tok_s", "goodput_rps"]


def stream(due_s: float, times_s: list[float], end_s: float, tokens: int | None = None, asked: int = 4) -> StreamRecord:
    record = StreamRecord(due_s, asked)
    record.times_s.extend(times_s)
    record.usage = {} if tokens is None else {"completion_tokens": tokens, "prompt_tokens": 10}
    record.done, record.end_s = True, end_s
    return record


def failure(due_s: float, kind: str, end_s: float, text: str = "why") -> StreamRecord:
    record = StreamRecord(due_s, 4)
    record.fail(kind, text, end_s)
    return record


def percentile(values: list[float], share: float) -> float:
    """Linear interpolation between the closest ranks, from its definition."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 1001])
def test_a_distribution_is_its_mean_and_percentiles(count: int) -> None:
    rng = random.Random(count)
    values = [rng.expovariate(0.01) for _ in range(count)]
    found = distribution(values, (50, 90, 99, 99.9), largest=True)
    expected = {"mean": statistics.fmean(values), "max": max(values)}
    expected |= {f"p{name}": percentile(values, share) for name, share in (("50", 0.5), ("90", 0.9), ("99", 0.99))}
    expected |= {"p999": percentile(values, 0.999)}
    assert found == pytest.approx(expected, abs=1e-6)


def test_of_nothing_there_is_no_distribution() -> None:
    assert distribution([], largest=True) == {"mean": None, "p50": None, "p90": None, "p99": None, "max": None}


def test_gaps_lie_within_streams_never_between_them() -> None:
    records = [stream(0, [1.0, 1.5, 1.5, 3.0], 4.0), stream(0, [9.0], 9.5), stream(0, [5.0, 6.0], 7.0)]
    assert gaps_s(records).tolist() == [0.5, 0.0, 1.5, 1.0]
    assert gaps_s([]).tolist() == []


def test_stall_share_is_time_not_number_of_gaps() -> None:
    # 99 gaps of 10 ms and one of 1.01 s: the p99 hardly sees it, half of the time is in it.
    times = [0.01 * number for number in range(100)]
    gaps = gaps_s([stream(0, [*times, times[-1] + 1.01], 3.0)])
    assert stall_share(gaps) == pytest.approx(1.01 / 2.0)
    assert stall_share(gaps_s([stream(0, [0.0, 0.2, 0.25], 1.0)])) == 0.0  # 200 ms is not over 200 ms
    assert stall_share(gaps_s([])) == 0.0


def test_the_figures_of_a_small_run() -> None:
    records = [
        stream(10.0, [10.5, 10.6, 10.9], 11.0, tokens=4),
        stream(11.0, [11.1, 11.2], 11.4, tokens=2),
        stream(12.0, [13.0], 13.0, tokens=1),
        failure(12.0, "http_429", 12.1),
        failure(12.5, "http_429", 12.6, "later"),
        failure(13.0, "reset", 20.0),
        failure(14.0, INTERRUPTED, 15.0),
    ]
    figures = load_figures(records, 10.0, Targets(ttft_s=0.6, tpot_s=0.11))
    assert list(figures)[: len(CONTRACT)] == CONTRACT
    assert (figures["requests"], figures["ok"], figures["unfinished"]) == (6, 3, 1)
    assert figures["errors"] == {"http_429": 2, "reset": 1}
    assert figures["error_samples"] == {"http_429": "why", "reset": "why"}
    assert figures["duration_s"] == 10.0  # until the last failure, the tail included
    assert figures["ttft_ms"]["mean"] == pytest.approx((500 + 100 + 1000) / 3)
    largest = {"ttft_ms": 1000.0, "itl_ms": 300.0, "tpot_ms": 400 / 3, "e2e_ms": 1000.0}
    assert {key: figures[key]["max"] for key in largest} == pytest.approx(largest)
    assert figures["itl_ms"]["mean"] == pytest.approx((100 + 300 + 100) / 3)
    assert set(figures["itl_ms"]) == {"mean", "p50", "p90", "p99", "p999", "max"}
    assert figures["stall_share"] == pytest.approx(0.3 / 0.5)
    # (10.9 - 10.5) / 3 and (11.2 - 11.1) / 1; a single token has none.
    assert figures["tpot_ms"]["mean"] == pytest.approx((400 / 3 + 100) / 2)
    assert figures["e2e_ms"]["mean"] == pytest.approx((1000 + 400 + 1000) / 3)
    assert figures["output_tok_s"] == pytest.approx(7 / 10)
    # The first misses the TPOT target, the third the one for TTFT.
    assert figures["goodput_rps"] == pytest.approx(1 / 10)
    assert figures["tokens_from"] == "usage"
    assert figures["output_tokens"] == {"total": 7, "mean": pytest.approx(7 / 3, abs=1e-3), "asked_mean": 4.0}


def test_without_targets_all_that_ends_well_is_good() -> None:
    figures = load_figures([stream(0.0, [1.0, 2.0], 2.0), failure(0.0, "closed", 4.0)], 0.0, Targets())
    assert figures["goodput_rps"] == 0.25
    assert figures["tokens_from"] == "events"
    assert figures["output_tokens"]["total"] == 2


def test_a_run_without_any_answer_has_figures_too() -> None:
    assert load_figures([], 5.0, Targets())["output_tok_s"] == 0.0
    figures = load_figures([failure(1.0, "connect", 1.0)], 1.0, Targets())
    assert (figures["requests"], figures["ok"], figures["goodput_rps"]) == (1, 0, 0.0)
    assert figures["ttft_ms"] == {"mean": None, "p50": None, "p90": None, "p99": None, "max": None}
