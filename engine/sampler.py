"""Chooses the next token of each row from its logits. Knows rows and parameters, not sequences.

Every row is decided by its own logits, parameters and position alone, bit for bit. The stages are:
adjust (biases, penalties, tokens that may not come), then for greedy rows the highest logit; for others a
distribution (temperature, then filters, each a lowest logit to keep), then one draw from it by inverse CDF
in vocabulary order, with a random number keyed by (seed, child, position). Log probabilities are those of
the logits as they came.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import NonFiniteLogitsError
from common.messages import Logprobs, SamplingParams, TokenLogprob
from engine.philox import uniforms
from engine.plan import StepResult
from engine.sampling_state import SamplingState

_NUCLEUS_TOKENS = 1024
"""How many of the likeliest tokens are sorted first when looking for a nucleus; most fit."""

_SCORED_ROWS = 64


@dataclass(frozen=True, slots=True)
class RowSampling:
    """One row's wishes. ``position``: the place in its sequence of the token to be chosen."""

    params: SamplingParams
    position: int
    mask_end_tokens: bool = False
    state: SamplingState | None = None

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0


class Sampler:
    """``end_token_ids``: the model's own, masked where a row asks for it (with its stop tokens)."""

    def __init__(self, end_token_ids: Sequence[int]) -> None:
        self._end_token_ids = tuple(end_token_ids)

    def sample(self, logits: torch.Tensor, rows: Sequence[RowSampling]) -> list[StepResult]:
        """A token for each row of ``logits`` [R, V] (float32, may be overwritten), or an error of code
        ``nonfinite_logits`` for rows that hold a NaN or an infinity; other rows are not affected.
        """
        if not rows:
            return []
        logits, broken = _without_broken(logits)
        told = _Told.of(logits, rows)
        if any(row.state is not None for row in rows):
            _bias(logits, rows)
            _penalize(logits, rows)
            # Whatever a client asked for may break its own row only.
            logits, broken_now = _without_broken(logits)
            broken |= broken_now
        self._mask(logits, rows)
        tokens = np.empty(len(rows), dtype=np.int64)
        greedy = [i for i, row in enumerate(rows) if row.greedy]
        drawn = [i for i, row in enumerate(rows) if not row.greedy]
        if greedy:
            tokens[greedy] = select_rows(logits, greedy).argmax(-1).cpu().numpy()
        if drawn:
            wishes = [rows[i] for i in drawn]
            tokens[drawn] = _draw(_distribution(select_rows(logits, drawn), wishes), wishes)
        logprobs = told.logprobs(tokens) if told is not None else {}
        return [
            _nonfinite(rows[i]) if bad else StepResult(token, logprobs=logprobs.get(i))
            for i, (token, bad) in enumerate(zip(tokens.tolist(), broken.tolist(), strict=True))
        ]

    def _mask(self, logits: torch.Tensor, rows: Sequence[RowSampling]) -> None:
        """Sets tokens that may not come to -inf, in place."""
        where: list[int] = []
        which: list[int] = []
        for i, row in enumerate(rows):
            if row.mask_end_tokens:
                ids = [t for t in (*self._end_token_ids, *row.params.stop_token_ids) if 0 <= t < logits.shape[1]]
                where.extend([i] * len(ids))
                which.extend(ids)
        if where:
            logits[where, which] = float("-inf")


def _without_broken(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits with zeros in rows that hold anything but numbers, and which rows [R] those are."""
    low, high = torch.aminmax(logits, dim=-1)
    broken = ~(torch.isfinite(low) & torch.isfinite(high))
    return (logits.masked_fill(broken[:, None], 0.0) if broken.any() else logits), broken


class _Told:
    """The log probabilities of the rows that want them: taken before anything changes the logits, read
    once the tokens are chosen."""

    def __init__(self, logits: torch.Tensor, rows: list[int], wanted: list[int]) -> None:
        self._rows = rows
        self._logprobs = torch.log_softmax(logits[rows].double(), dim=-1)
        self._top = _likeliest(self._logprobs, wanted)

    @classmethod
    def of(cls, logits: torch.Tensor, rows: Sequence[RowSampling]) -> _Told | None:
        wanted = {i: row.params.num_logprobs for i, row in enumerate(rows) if row.params.num_logprobs is not None}
        return cls(logits, list(wanted), list(wanted.values())) if wanted else None

    def logprobs(self, tokens: np.ndarray) -> dict[int, Logprobs]:
        """Row → what is told of its token."""
        chosen = torch.from_numpy(tokens[self._rows]).to(self._logprobs.device)
        values = self._logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        return {row: Logprobs(value, top) for row, value, top in zip(self._rows, values, self._top, strict=True)}


def score(logits: torch.Tensor, tokens: Sequence[int], num_logprobs: int) -> tuple[Logprobs, ...]:
    """What the model thought of ``tokens[i]`` where ``logits[i]`` [V] were its logits. In slices, so that a long
    prompt needs no second copy of its logits in double precision."""
    told: list[Logprobs] = []
    for start in range(0, len(tokens), _SCORED_ROWS):
        rows = slice(start, start + _SCORED_ROWS)
        logprobs = torch.log_softmax(logits[rows].double(), dim=-1)
        chosen = torch.tensor(tokens[rows], device=logits.device)
        values = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        told.extend(map(Logprobs, values, _likeliest(logprobs, [num_logprobs] * len(values))))
    return tuple(told)


def _likeliest(logprobs: torch.Tensor, wanted: list[int]) -> list[tuple[TokenLogprob, ...]]:
    """The ``wanted[i]`` likeliest tokens of each row of ``logprobs`` [R, V]; of equals the smaller ids."""
    most = min(max(wanted), logprobs.shape[1])
    if not most:
        return [() for _ in wanted]
    # `topk` may pick any of several that tie with the last one, so only its values are used.
    least = logprobs.topk(most, dim=-1).values[:, -1:]
    row_of, tokens = (index.cpu().numpy() for index in torch.nonzero(logprobs >= least, as_tuple=True))
    values = logprobs[torch.from_numpy(row_of), torch.from_numpy(tokens)].cpu().numpy()
    order = np.lexsort((tokens, -values, row_of))
    tokens, values = tokens[order], values[order]
    starts = np.searchsorted(row_of, np.arange(len(wanted)))
    told = []
    for start, count in zip(starts.tolist(), wanted, strict=True):
        best = slice(start, start + count)
        told.append(tuple(map(TokenLogprob, tokens[best].tolist(), values[best].tolist())))
    return told


def _bias(logits: torch.Tensor, rows: Sequence[RowSampling]) -> None:
    """Adds each row's biases, in place."""
    biased = [(i, row.state) for i, row in enumerate(rows) if row.state is not None and len(row.state.bias_ids)]
    if biased:
        where = _tensor(np.repeat([i for i, _ in biased], [len(state.bias_ids) for _, state in biased]), logits)
        which = _tensor(np.concatenate([state.bias_ids for _, state in biased]), logits)
        logits[where, which] += _tensor(np.concatenate([state.bias_values for _, state in biased]), logits)


def _penalize(logits: torch.Tensor, rows: Sequence[RowSampling]) -> None:
    """Penalties of tokens that were there before, in place: only those tokens' logits are touched."""
    penalized = [(i, row.params, row.state) for i, row in enumerate(rows) if row.state and row.params.penalizes]
    if not penalized:
        return
    sizes = [len(state.ids) for _, _, state in penalized]

    def of_each(values: list[float]) -> torch.Tensor:
        return _tensor(np.repeat(np.array(values, dtype=np.float32), sizes), logits)

    where = _tensor(np.repeat([i for i, _, _ in penalized], sizes), logits)
    which = _tensor(np.concatenate([state.ids for _, _, state in penalized]), logits)
    counts = _tensor(np.concatenate([state.counts for _, _, state in penalized]), logits)
    repetition = of_each([params.repetition_penalty for _, params, _ in penalized])
    values = logits[where, which]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= of_each([params.frequency_penalty for _, params, _ in penalized]) * counts
    values -= of_each([params.presence_penalty for _, params, _ in penalized]) * (counts > 0)
    logits[where, which] = values


def select_rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The given rows; the logits themselves, not a copy, when that is all of them."""
    if len(rows) == len(logits):
        return logits
    return logits.index_select(0, torch.tensor(rows, dtype=torch.long, device=logits.device))


def _distribution(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Probabilities [R, V] in float64 after temperature, top-k, top-p and min-p, in that order.

    Filters keep every token that ties with the last one kept: no choice hangs on the order of a sort.
    """
    scores = logits.double()
    scores = scores - scores.amax(-1, keepdim=True)
    scores /= _column([row.params.temperature for row in rows], scores)
    _keep_top_k(scores, [row.params.top_k for row in rows])
    _keep_top_p(scores, [row.params.top_p for row in rows])
    _keep_min_p(scores, [row.params.min_p for row in rows])
    return torch.softmax(scores, dim=-1)


def _keep_top_k(scores: torch.Tensor, top_k: list[int]) -> None:
    """Sets all but the k highest scores of each row to -inf, in place; k = 0 keeps all."""
    size = scores.shape[1]
    limited = [i for i, k in enumerate(top_k) if 0 < k < size]
    if not limited:
        return
    counts = torch.tensor([top_k[i] for i in limited], device=scores.device)
    chosen = scores[limited]
    best = chosen.topk(int(counts.max()), dim=-1).values
    chosen.masked_fill_(chosen < best.gather(1, counts[:, None] - 1), float("-inf"))
    scores[limited] = chosen


def _keep_top_p(scores: torch.Tensor, top_p: list[float]) -> None:
    """Sets all but each row's nucleus, the fewest likeliest tokens that reach p, to -inf, in place."""
    size = scores.shape[1]
    limited = [i for i, p in enumerate(top_p) if p < 1.0]
    width = min(_NUCLEUS_TOKENS, size)
    while limited:
        chosen = scores[limited]
        p = _column([top_p[i] for i in limited], scores)
        best, order = chosen.topk(width, dim=-1)
        # Sums run from the likeliest token on, so they are the same whatever `width` is.
        sums = torch.softmax(chosen, dim=-1).gather(1, order).cumsum(-1)
        num_kept = (sums[:, :-1] < p).sum(-1, keepdim=True) + 1
        chosen.masked_fill_(chosen < best.gather(1, num_kept - 1), float("-inf"))
        reached = ((sums[:, -1:] >= p).squeeze(1) | (width == size)).tolist()
        done = [i for i, enough in enumerate(reached) if enough]
        scores[[limited[i] for i in done]] = chosen[done]
        limited = [row for row, enough in zip(limited, reached, strict=True) if not enough]
        width = size


def _keep_min_p(scores: torch.Tensor, min_p: list[float]) -> None:
    """Sets scores of less than p times the likeliest token's probability to -inf, in place. The likeliest
    one has score 0, before and after all other filters."""
    if any(min_p):
        least = [math.log(p) if p > 0 else -math.inf for p in min_p]
        scores.masked_fill_(scores < _column(least, scores), float("-inf"))


def _draw(probabilities: torch.Tensor, rows: Sequence[RowSampling]) -> np.ndarray:
    """One token for each row of ``probabilities`` [R, V], by inverse CDF in vocabulary order."""
    numbers = uniforms(
        [row.params.seed for row in rows],
        [row.params.child for row in rows],
        [row.position for row in rows],
    )
    sums = probabilities.cumsum(-1)
    targets = torch.from_numpy(numbers)[:, None].to(sums.device) * sums[:, -1:]
    tokens = torch.searchsorted(sums, targets, right=True)
    # Rounding may lift a target to the very end; the last token that can come is where the sum ends.
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    return torch.minimum(tokens, last).squeeze(1).cpu().numpy()


def _tensor(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _nonfinite(row: RowSampling) -> StepResult:
    return StepResult(
        error_code=NonFiniteLogitsError.code,
        error_message=f"the model's logits at position {row.position} are not finite",
    )
