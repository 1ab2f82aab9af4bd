"""What people see of a run: the progress line, the table's warnings, the picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.load.driver import LoadRun
from bench.load.figures import Targets, load_figures
from bench.load.plots import draw
from bench.load.progress import Progress
from bench.load.session import LoadResult
from bench.load.stream import StreamRecord
from bench.load.summary import load_of, summary, warnings

SETUP: dict[str, Any] = {
    "url": "http://server",
    "model": "m",
    "loop": "closed",
    "rate": None,
    "concurrency": 2,
    "trace": None,
    "prompt_tokens": 10,
    "notes": [],
}
CLIENT: dict[str, Any] = {"cpu_share": 0.1, "cpu_us_per_token": 9.0, "behind": False}
CLIENT |= {"lag_ms": {"p99": 1.0}, "late_ms": {"p99": 2.0}}


def answered(due_s: float, *times_s: float, usage: bool = True) -> StreamRecord:
    record = StreamRecord(due_s, 3)
    record.times_s.extend(times_s)
    if usage:
        record.usage = {"completion_tokens": len(times_s), "prompt_tokens": 10}
    record.take(b"[DONE]", times_s[-1])
    return record


def failed(due_s: float) -> StreamRecord:
    record = StreamRecord(due_s, 3)
    record.fail("reset", "gone", due_s + 0.5)
    return record


def result(*records: StreamRecord, **changes: Any) -> LoadResult:
    figures = load_figures(records, 0.0, Targets(ttft_s=1.0)) | {"interrupted": False}
    figures |= {"client": CLIENT | changes.pop("client", {}), "setup": SETUP | changes.pop("setup", {})}
    assert not changes
    return LoadResult(figures, list(records), 0.0)


GOOD = (answered(0.0, 0.2, 0.3, 0.4), answered(1.0, 1.5, 1.6, 1.9))


async def test_the_progress_line_counts_every_request_once() -> None:
    now = 0.0
    run = LoadRun(None, lambda: now)  # type: ignore[arg-type]
    run.start_s = 0.0
    progress = Progress(run, lambda: now, io.StringIO())
    slow = StreamRecord(0.0, 3)
    run.records = [answered(0.0, 0.5, 1.0), failed(0.0), slow, answered(0.0, 1.0)]
    run.num_running, now = 1, 2.0
    assert " ".join(progress.line().split()) == "2.0 s sent 4 running 1 ok 2 errors 1 2 tok/s"
    slow.times_s.append(2.5)
    slow.take(b"[DONE]", 3.0)
    run.num_running, now = 0, 4.0
    assert " ".join(progress.line().split()) == "4.0 s sent 4 running 0 ok 3 errors 1 1 tok/s"


def test_a_clean_run_has_no_warnings() -> None:
    assert warnings(result(*GOOD).figures) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (result(*GOOD, client={"behind": True}), "the generator itself was late: p99 2.00 ms to send"),
        (result(*GOOD, setup={"prompt_tokens": 12}), "12 prompt tokens were asked for, 10 were counted"),
        (result(*GOOD, setup={"notes": ["no temperature"]}), "no temperature"),
        (result(answered(0.0, 0.1, 0.2)), "3 output tokens were asked for, 2 came"),
        (result(answered(0.0, 0.1, 0.2, 0.3, usage=False)), "tokens counted from events"),
    ],
)
def test_what_a_reader_should_know_is_said(given: LoadResult, words: str) -> None:
    (warning,) = warnings(given.figures)
    assert words in warning


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ({}, "closed loop, 2 users"),
        ({"concurrency": 1}, "closed loop, 1 user"),
        ({"loop": "open", "rate": 2.5}, "open loop, 2.5 req/s"),
        ({"loop": "open", "trace": "t.csv"}, "open loop, t.csv"),
    ],
)
def test_the_load_in_words(setup: dict[str, Any], words: str) -> None:
    assert load_of(SETUP | setup) == words


@pytest.mark.filterwarnings("error")  # matplotlib warns of what it cannot draw
@pytest.mark.parametrize(
    "given",
    [
        result(*GOOD, failed(0.5)),
        result(answered(0.0, 0.1)),  # one token: no gap at all
        result(answered(0.0, 0.1, 0.1)),  # gaps of nothing
        result(answered(0.0, 0.1, 0.11, 900.0)),  # a stall longer than all else
    ],
)
def test_every_run_with_an_answer_can_be_drawn_and_shown(given: LoadResult, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    draw(given, path)
    assert path.stat().st_size > 10_000
    assert summary(given.figures).renderables


def test_the_table_shows_the_largest_of_all_times() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(summary(result(answered(0.0, 0.1, 0.11, 0.9)).figures))
    rows = {row.split()[1]: row.split()[-2] for row in console.export_text().splitlines() if row.startswith("│")}
    assert rows == {"TTFT": "100.00", "ITL": "790.00", "TPOT": "400.00", "end": "900.00"}
