"""Sampling against transformers' warpers, known answers for Philox, and independence of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import SamplingParams
from engine.philox import philox4x32, uniforms
from engine.sampler import RowSampling, Sampler, _distribution

KNOWN_ANSWERS = [  # Random123, kat_vectors, "philox4x32 10"
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def test_philox_known_answers() -> None:
    counters, keys, answers = (np.array([words(row[i]) for row in KNOWN_ANSWERS], np.uint64) for i in range(3))
    assert philox4x32(counters, keys).tolist() == answers.tolist()


def test_uniforms_depend_on_all_of_seed_child_and_position() -> None:
    base = uniforms([7], [1], [5])[0]
    others = [(8, 1, 5), (7 + 2**40, 1, 5), (7, 2, 5), (7, 1, 6), (7, 1, 5 + 2**33), (1, 7, 5)]
    values = uniforms(*map(list, zip(*others, strict=True)))
    assert len({base, *values}) == len(others) + 1
    assert uniforms([-1], [0], [0]) == uniforms([2**64 - 1], [0], [0])
    spread = uniforms(range(20_000), [0] * 20_000, [3] * 20_000)
    assert spread.min() >= 0
    assert spread.max() < 1
    assert abs(spread.mean() - 0.5) < 0.01
    assert abs(spread.std() - 12**-0.5) < 0.01


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 1} | changes))


warpers = st.fixed_dictionaries({
    "temperature": st.sampled_from([0.01, 0.3, 1.0, 1.7, 10.0]),
    "top_k": st.sampled_from([0, 1, 2, 40, 1500, 3000, 5000]),
    "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
})  # fmt: skip


@settings(deadline=None, max_examples=30)
@given(rows=st.lists(warpers, min_size=1, max_size=5), seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 3.0]))
def test_distribution_equals_transformers(rows: list[dict[str, float]], seed: int, scale: float) -> None:
    from transformers.generation.logits_process import (
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(len(rows), 3000, generator=torch.Generator().manual_seed(seed)) * scale
    ours = _distribution(logits.clone(), [RowSampling(params(**row), 0) for row in rows])
    for row, one, mine in zip(rows, logits, ours, strict=True):
        scores = TemperatureLogitsWarper(row["temperature"])(None, one[None].double())
        if row["top_k"]:
            scores = TopKLogitsWarper(int(row["top_k"]))(None, scores)
        if row["top_p"] < 1:
            scores = TopPLogitsWarper(row["top_p"])(None, scores)
        torch.testing.assert_close(mine, scores.softmax(-1)[0], atol=1e-12, rtol=1e-9)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000), rows=st.lists(st.one_of(st.none(), warpers), min_size=2, max_size=8))
def test_a_row_does_not_see_its_neighbours(seed: int, rows: list[dict[str, float] | None]) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 3000, generator=generator) * 3
    sampler = Sampler((5,))
    wishes = [
        RowSampling(params(seed=seed + i, **(row or {"temperature": 0.0})), 10 + i, mask_end_tokens=i % 2 == 0)
        for i, row in enumerate(rows)
    ]
    together = sampler.sample(logits.clone(), wishes)
    alone = [sampler.sample(logits[i : i + 1].clone(), [wish])[0] for i, wish in enumerate(wishes)]
    assert together == alone
    for wish, one, result in zip(wishes, logits, together, strict=True):
        if wish.greedy:
            assert result.token == max(range(3000), key=lambda t: one[t] if t != 5 or not wish.mask_end_tokens else -99)


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    count = 4000
    wishes = [RowSampling(params(seed=11), position) for position in range(count)]
    tokens = [result.token for result in Sampler(()).sample(logits.repeat(count, 1), wishes)]
    seen = np.bincount(np.array(tokens), minlength=5) / count
    expected = logits.softmax(-1)[0].numpy()
    assert np.abs(seen - expected).max() < 4 * np.sqrt(0.25 / count)


def test_end_tokens_are_masked_only_where_asked() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 8.0]]).repeat(3, 1)
    greedy = SamplingParams(max_tokens=1, temperature=0.0, stop_token_ids=(3, 99, -1))
    rows = [RowSampling(greedy, 4), RowSampling(greedy, 4, True), RowSampling(params(stop_token_ids=(3,)), 4, True)]
    first, second, third = Sampler((2,)).sample(logits, rows)
    assert first.token == 2
    assert second.token == 1
    assert third.token in (0, 1)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_bad_logits_fail_their_own_row_only(poison: float) -> None:
    logits = torch.randn(4, 50)
    clean = logits.clone()
    logits[1, 7] = logits[2, 0] = poison
    rows = [RowSampling(params(temperature=t, seed=3), 20) for t in (0.0, 0.0, 1.0, 1.0)]
    results = Sampler(()).sample(logits, rows)
    assert [result.error_code for result in results] == ["", "nonfinite_logits", "nonfinite_logits", ""]
    assert results[1].token is None
    assert "position 20" in results[1].error_message
    for i in (0, 3):
        assert results[i] == Sampler(()).sample(clean[i : i + 1], rows[i : i + 1])[0]


def test_extreme_temperatures_stay_numbers() -> None:
    logits = torch.tensor([[100.0, -100.0, 99.0]])
    for temperature in (1e-300, 1e-9, 1e9):
        result = Sampler(()).sample(logits.clone(), [RowSampling(params(temperature=temperature), 1)])[0]
        assert result.token is not None
        if temperature < 1:
            assert result.token == 0


def test_ties_are_cut_by_value_never_by_order() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    for changes in ({"top_k": 2}, {"top_p": 0.5}):
        kept = (_distribution(logits.clone(), [RowSampling(params(**changes), 0)]) > 0)[0].tolist()
        assert kept == [False, True, True, True, False]
    greedy = RowSampling(params(temperature=0.0), 0)
    assert [r.token for r in Sampler(()).sample(logits.repeat(3, 1), [greedy] * 3)] == [1, 1, 1]
