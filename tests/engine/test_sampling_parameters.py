"""Every sampling parameter, alone and in random company, against a plain reference.

The reference is written from the definitions, token by token over Python floats, with none of the
engine's code; transformers' own processors stand beside it where they are the same.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common.messages import LogitBias, SamplingParams
from engine.philox import uniforms
from engine.sampler import RowSampling, Sampler, _distribution
from engine.sampling_state import SamplingState

VOCABULARY = 60
END = 3


def plain_logits(logits: list[float], params: SamplingParams, prompt: list[int], answer: list[int]) -> list[float]:
    """Logits after bias, penalties and the mask of end tokens, by definition."""
    scores = list(logits)
    for bias in params.logit_bias:
        scores[bias.token] += bias.bias
    for token in set(prompt) | set(answer):
        if scores[token] > 0:
            scores[token] /= params.repetition_penalty
        else:
            scores[token] *= params.repetition_penalty
    for token in set(answer):
        scores[token] -= params.frequency_penalty * answer.count(token) + params.presence_penalty
    if len(answer) < params.min_tokens:
        for token in (END, *params.stop_token_ids):
            scores[token] = -math.inf
    return scores


def plain_distribution(scores: list[float], params: SamplingParams) -> list[float]:
    """Probabilities after temperature, top-k, top-p and min-p, each on what the one before left."""

    def softmax(values: dict[int, float]) -> dict[int, float]:
        highest = max(values.values())
        powers = {token: math.exp(value - highest) for token, value in values.items()}
        return {token: power / math.fsum(powers.values()) for token, power in powers.items()}

    left = {token: score / params.temperature for token, score in enumerate(scores) if score > -math.inf}
    if params.top_k:
        left = dict(sorted(left.items(), key=lambda item: -item[1])[: params.top_k])
    if params.top_p < 1:
        total, kept = 0.0, {}
        for token, share in sorted(softmax(left).items(), key=lambda item: -item[1]):
            kept[token] = left[token]
            total += share
            if total >= params.top_p:
                break
        left = kept
    if params.min_p:
        shares = softmax(left)
        left = {token: left[token] for token in left if shares[token] >= params.min_p * max(shares.values())}
    shares = softmax(left)
    return [shares.get(token, 0.0) for token in range(len(scores))]


@dataclass
class Row:
    """One sequence in the batch: what it wants and what it has."""

    params: SamplingParams
    prompt: list[int]
    answer: list[int] = field(default_factory=list)

    def sampling(self) -> RowSampling:
        state = SamplingState.of(self.params, self.prompt, ())
        for token in self.answer:
            if state is not None:
                state.add(token)
        position = len(self.prompt) + len(self.answer)
        return RowSampling(self.params, position, len(self.answer) < self.params.min_tokens, state)


biases = st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -2.5, 0.5, 3.0, 100.0]), max_size=4)
ALTERNATIVES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    "top_k": st.sampled_from([0, 1, 5, 40, VOCABULARY, 1000]),
    "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    "repetition_penalty": st.sampled_from([1.0, 0.7, 1.3, 5.0]),
    "presence_penalty": st.sampled_from([0.0, -2.0, 0.7, 2.0]),
    "frequency_penalty": st.sampled_from([0.0, -1.0, 0.4, 2.0]),
    "logit_bias": biases.map(lambda entries: tuple(LogitBias(*entry) for entry in entries.items())),
    "min_tokens": st.sampled_from([0, 2, 50]),
    "stop_token_ids": st.sampled_from([(), (7,), (7, 8)]),
    "seed": st.integers(0, 2**63 - 1),
    "child": st.integers(0, 5),
    "num_logprobs": st.sampled_from([None, 0, 1, 5]),
}
NEUTRAL = SamplingParams(max_tokens=100, temperature=1.0)


def rows_of(strategy: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[Row]:
    tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)
    parameters = strategy.map(lambda chosen: SamplingParams(**{"max_tokens": 100, "temperature": 1.0} | chosen))
    return st.builds(Row, parameters, tokens.filter(len), tokens)


alone = st.one_of([st.fixed_dictionaries({name: values}) for name, values in ALTERNATIVES.items()])
together = st.fixed_dictionaries({}, optional=ALTERNATIVES)


def distinct_logits(seed: int, num_rows: int) -> torch.Tensor:
    """No two logits of a row are near each other, so that float32 and float64 agree on every cut, nor are their
    distances equal, so that a penalty hardly makes two of them so."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.stack([torch.randperm(VOCABULARY, generator=generator) for _ in range(num_rows)])
    return (steps.float() - VOCABULARY * 0.6) * 0.173 * (1 + 0.00137 * steps)


@settings(deadline=None, max_examples=150)
@given(rows=st.lists(rows_of(st.one_of(alone, together)), min_size=1, max_size=6), seed=st.integers(0, 10_000))
def test_tokens_are_those_of_a_plain_reference(rows: list[Row], seed: int) -> None:
    logits = distinct_logits(seed, len(rows))
    results = Sampler((END,)).sample(logits.clone(), [row.sampling() for row in rows])
    for row, raw, result in zip(rows, logits.tolist(), results, strict=True):
        params = row.params
        scores = plain_logits(raw, params, row.prompt, row.answer)
        position = len(row.prompt) + len(row.answer)
        assert result.token is not None
        if params.temperature == 0:
            near = [token for token, score in enumerate(scores) if score > max(scores) - 1e-4]
            assert result.token in near
        else:
            shares = plain_distribution(scores, params)
            number = uniforms([params.seed], [params.child], [position])[0]
            sums = np.cumsum(shares)
            if np.abs(sums / sums[-1] - number).min() > 1e-5 and not _near_a_cut(scores):  # else rounding decides
                assert result.token == int(np.searchsorted(sums, number * sums[-1], side="right"))
            assert shares[result.token] > 0 or _near_a_cut(scores)
        check_logprobs(raw, params, result.token, result.logprobs)


def _near_a_cut(scores: list[float]) -> bool:
    """Some filter's border runs through scores that differ by rounding only (penalties can make such)."""
    ordered = sorted(score for score in scores if score > -math.inf)
    return any(right - left < 1e-4 for left, right in itertools.pairwise(ordered))


def check_logprobs(raw: list[float], params: SamplingParams, token: int, told: Any) -> None:
    if params.num_logprobs is None:
        assert told is None
        return
    norm = math.log(math.fsum(math.exp(value) for value in raw))
    assert told.logprob == pytest.approx(raw[token] - norm, abs=1e-6)
    expected = sorted(((raw[i] - norm, -i) for i in range(VOCABULARY)), reverse=True)[: params.num_logprobs]
    assert [entry.token for entry in told.top] == [-negative for _, negative in expected]
    assert [entry.logprob for entry in told.top] == pytest.approx([value for value, _ in expected], abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(row=rows_of(together), seed=st.integers(0, 10_000))
def test_distributions_are_those_of_a_plain_reference(row: Row, seed: int) -> None:
    params = row.params
    if params.temperature == 0:
        return
    raw = distinct_logits(seed, 1)
    scores = plain_logits(raw[0].tolist(), params, row.prompt, row.answer)
    if _near_a_cut(scores):
        return
    mine = _distribution(torch.tensor([scores]), [row.sampling()])[0].tolist()
    assert mine == pytest.approx(plain_distribution([float(np.float32(s)) for s in scores], params), abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    penalty=st.sampled_from([0.5, 1.0, 1.2, 3.0]),
    temperature=st.sampled_from([0.5, 1.0, 1.5]),
    top_k=st.sampled_from([0, 3, 20]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    tokens=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20),
    num_prompt=st.integers(1, 20),
)
def test_where_transformers_has_the_same_processor(
    seed: int,
    penalty: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    tokens: list[int],
    num_prompt: int,
) -> None:
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = distinct_logits(seed, 1)
    ids = torch.tensor([tokens])
    scores = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    penalized = scores.clone()
    assume(not _near_a_cut(penalized[0].tolist()))
    scores = TemperatureLogitsWarper(temperature)(ids, scores.double())
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    params = SamplingParams(
        max_tokens=9, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    mine = _distribution(penalized, [RowSampling(params, 0)])[0]
    torch.testing.assert_close(mine, scores.softmax(-1)[0], atol=1e-12, rtol=1e-9)
    greedy = SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=penalty)
    row = Row(greedy, tokens[:num_prompt], tokens[num_prompt:])
    (result,) = Sampler(()).sample(logits.clone(), [row.sampling()])
    assert penalized[0, result.token] == penalized.max()


@settings(deadline=None, max_examples=30)
@given(rows=st.lists(rows_of(together), min_size=2, max_size=6), seed=st.integers(0, 10_000))
def test_no_parameter_of_a_row_touches_another_row(rows: list[Row], seed: int) -> None:
    logits = distinct_logits(seed, len(rows))
    sampler = Sampler((END,))
    batch = sampler.sample(logits.clone(), [row.sampling() for row in rows])
    single = [sampler.sample(logits[i : i + 1].clone(), [row.sampling()])[0] for i, row in enumerate(rows)]
    assert batch == single


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parameters_that_break_their_row_break_no_other(temperature: float) -> None:
    """Whatever numbers get here: the row that overflows has an error, its neighbours their tokens."""
    logits = distinct_logits(1, 3)
    mad = SamplingParams(max_tokens=9, temperature=temperature, repetition_penalty=1e-300, num_logprobs=1)
    calm = SamplingParams(max_tokens=9, temperature=temperature, seed=4)
    rows = [Row(calm, [5]), Row(mad, list(range(VOCABULARY))), Row(calm, [6])]
    results = Sampler(()).sample(logits.clone(), [row.sampling() for row in rows])
    assert [result.error_code for result in results] == ["", "nonfinite_logits", ""]
    for i in (0, 2):
        assert results[i] == Sampler(()).sample(logits[i : i + 1].clone(), [rows[i].sampling()])[0]


def test_of_equally_likely_tokens_the_smaller_ids_are_told() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 2.0, 0.0]])
    params = SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=3)
    (result,) = Sampler(()).sample(logits, [RowSampling(params, 1)])
    assert result.logprobs is not None
    assert [entry.token for entry in result.logprobs.top] == [1, 2, 3]


def test_more_logprobs_than_tokens() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=20)
    (result,) = Sampler(()).sample(torch.tensor([[0.0, 1.0]]), [RowSampling(params, 1)])
    assert result.logprobs is not None
    assert [entry.token for entry in result.logprobs.top] == [1, 0]


@settings(deadline=None, max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 500), min_size=1, max_size=200),
    answer=st.lists(st.integers(0, 500), max_size=300),
    split=st.integers(0, 300),
)
def test_occurrences_are_counted_however_they_came(prompt: list[int], answer: list[int], split: int) -> None:
    """At once, as for a request that is resumed, or one by one."""
    params = SamplingParams(max_tokens=1, presence_penalty=1.0)
    state = SamplingState(params, prompt, answer[:split])
    for token in answer[split:]:
        state.add(token)
    counts = dict(zip(state.ids.tolist(), state.counts.tolist(), strict=True))
    assert counts == {token: answer.count(token) for token in {*prompt, *answer}}
