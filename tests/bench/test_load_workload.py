"""What is sent: arrivals, lengths and shared prefixes, from a seed or from a trace; and the prompts' words."""

from __future__ import annotations

import gzip
import json
import statistics
from itertools import islice, pairwise
from pathlib import Path

import pytest

from bench.load.prompts import HEAD, VOCABULARY, Calibration, PromptWriter
from bench.load.trace import TraceRow, read_trace
from bench.load.workload import Planned, from_trace, synthetic
from common.errors import ConfigError


def test_arrivals_are_a_poisson_process_of_the_asked_rate() -> None:
    at = [planned.at_s for planned in islice(synthetic(8, 4, 1, rate=20.0), 4000)]
    gaps = [late - early for early, late in pairwise(at)]
    # An exponential distribution's mean and deviation are both 1 / rate, its median ln 2 of that.
    assert statistics.fmean(gaps) == pytest.approx(0.05, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.05, rel=0.08)
    assert statistics.median(gaps) == pytest.approx(0.05 * 0.6931, rel=0.08)


def test_a_seed_gives_its_own_workload_again_and_again() -> None:
    first, again, other = (list(islice(synthetic(8, 4, seed, rate=5.0), 50)) for seed in (3, 3, 4))
    assert first == again
    assert not {planned.pieces for planned in first} & {planned.pieces for planned in other}
    # The rate does not change the prompts.
    assert [p.pieces for p in islice(synthetic(8, 4, 3), 50)] == [p.pieces for p in first]


# ── traces ────────────────────────────────────────────────────────────────────────────────────────


def mooncake(rows: list[tuple[int, int, int, list[int]]]) -> str:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows)


def test_a_mooncake_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    rows = [(0, 1000, 5, [0, 1]), (40, 512, 6, [0]), (100, 513, 7, [0, 2])]
    path.write_bytes(gzip.compress(mooncake(rows).encode()))
    assert read_trace(path) == [
        TraceRow(0.0, 1000, 5, (0, 1), 512),
        TraceRow(0.04, 512, 6, (0,), 512),
        TraceRow(0.1, 513, 7, (0, 2), 512),
    ]
    assert read_trace(path, 1) == [TraceRow(0.0, 1000, 5, (0, 1), 512)]


def test_blocks_of_sixteen_are_recognised(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake([(0, 40, 5, [0, 1, 2]), (1, 600, 5, list(range(38)))]))
    assert [row.block_tokens for row in read_trace(path)] == [16, 16]


def test_coarse_ticks_are_spread_evenly(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    stamps = [0, 0, 0, 2999, 3001, 9000]  # the real ones miss their tick by a millisecond or three
    path.write_text(mooncake([(stamp, 10, 5, [0]) for stamp in stamps]))
    assert [row.at_s for row in read_trace(path)] == [0.0, 1.0, 2.0, 3.0, 4.5, 9.0]


def test_an_azure_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799605,3180,8\n"
    )
    assert read_trace(path) == [TraceRow(0.0, 4808, 10), TraceRow(0.5, 3180, 8)]
    one, two = from_trace(read_trace(path), seed=1)
    assert one.pieces != two.pieces  # nothing is known to be shared


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no requests"),
        ("a,b\n1,2\n", "neither"),
        ('{"x": 1}\n', "neither"),
        ("{broken", "neither"),
        (mooncake([(0, 5000, 5, [0])]), "neither"),
        (mooncake([(0, 10, 5, [0])]).replace("10", '"ten"'), "neither"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_trace(path)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 100)[:20])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "cut.gz")


ROWS = [
    TraceRow(2.0, 1024, 100, (7, 8), 512),
    TraceRow(4.0, 1000, 51, (7, 9), 512),
    TraceRow(6.0, 600, 1, (7, 8), 512),
]


def test_what_a_trace_shares_stays_shared_when_it_is_scaled() -> None:
    plans = list(from_trace(ROWS, seed=0, length_scale=1 / 16))
    assert [(p.prompt_tokens, p.output_tokens, p.piece_tokens) for p in plans] == [
        (64, 6, 32),
        (62, 3, 32),
        (38, 1, 32),
    ]
    words = [PromptWriter().text(planned).split() for planned in plans]
    assert [len(text) for text in words] == [65, 63, 39]
    assert words[0][:33] == words[1][:33] == words[2][:33]
    assert words[0][33] != words[1][33]
    assert words[0][:39] == words[2]


def test_a_trace_keeps_its_rhythm_at_another_rate() -> None:
    assert [planned.at_s for planned in from_trace(ROWS, seed=0)] == [0.0, 2.0, 4.0]
    assert [planned.at_s for planned in from_trace(ROWS, seed=0, rate=2.0)] == [0.0, 0.5, 1.0]
    assert [planned.at_s for planned in from_trace(ROWS[:1], seed=0, rate=2.0)] == [0.0]


# ── words ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("length", [1, 2, 9, 10, 500, 100_000])
def test_a_prompt_has_the_wanted_number_of_words(length: int) -> None:
    for planned in islice(synthetic(length, 4, 2), 20):
        head, *words = PromptWriter().text(planned).split(" ")
        assert head == HEAD
        assert len(words) == length
        assert set(words) <= set(VOCABULARY)


def test_prompts_differ_from_their_first_words_on() -> None:
    """So that none is answered from what another left in a prefix cache."""
    writer = PromptWriter()
    texts = {tuple(writer.text(planned).split()[1:10]) for planned in islice(synthetic(64, 4, 2), 5000)}
    assert len(texts) == 5000
    assert len({text[0] for text in texts}) > 0.9 * len(VOCABULARY)


def test_calibration_sets_the_number_of_words() -> None:
    planned = Planned(0.0, 100, 4, (5,), 100)
    exact = PromptWriter(calibration=Calibration(overhead=30.0))
    assert len(exact.text(planned).split()) - 1 == 70
    costly = PromptWriter(calibration=Calibration(overhead=30.0, per_word=1.4))
    assert len(costly.text(planned).split()) - 1 == 50
    never_none = PromptWriter(calibration=Calibration(overhead=300.0))
    assert len(never_none.text(planned).split()) - 1 == 1


def test_the_vocabulary_has_no_word_twice() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY) > 100
