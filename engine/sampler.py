"""Chooses the next token of each row from its logits. Knows rows and parameters, not sequences.

Every row is decided by its own logits, parameters and position alone, bit for bit. The stages are:
mask (tokens that may not come), then for greedy rows the highest logit; for others a distribution
(temperature, then filters, each a lowest logit to keep), then one draw from it by inverse CDF in
vocabulary order, with a random number keyed by (seed, child, position).

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import NonFiniteLogitsError
from common.messages import SamplingParams
from engine.philox import uniforms
from engine.plan import StepResult

_NUCLEUS_TOKENS = 1024
"""How many of the likeliest tokens are sorted first when looking for a nucleus; most fit."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """One row's wishes. ``position``: the place in its sequence of the token to be chosen."""

    params: SamplingParams
    position: int
    mask_end_tokens: bool = False

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
        low, high = torch.aminmax(logits, dim=-1)
        broken = ~(torch.isfinite(low) & torch.isfinite(high))
        if broken.any():
            logits = logits.masked_fill(broken[:, None], 0.0)
        self._mask(logits, rows)
        tokens = np.empty(len(rows), dtype=np.int64)
        greedy = [i for i, row in enumerate(rows) if row.greedy]
        drawn = [i for i, row in enumerate(rows) if not row.greedy]
        if greedy:
            tokens[greedy] = _select(logits, greedy).argmax(-1).cpu().numpy()
        if drawn:
            wishes = [rows[i] for i in drawn]
            tokens[drawn] = _draw(_distribution(_select(logits, drawn), wishes), wishes)
        return [
            _nonfinite(rows[i]) if bad else StepResult(token=token)
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


def _select(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The given rows; the logits themselves, not a copy, when that is all of them."""
    if len(rows) == len(logits):
        return logits
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def _distribution(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Probabilities [R, V] in float64 after temperature, top-k and top-p, in that order.

    Filters keep every token that ties with the last one kept: no choice hangs on the order of a sort.
    """
    scores = logits.double()
    scores = scores - scores.amax(-1, keepdim=True)
    scores /= _column([row.params.temperature for row in rows], scores)
    _keep_top_k(scores, [row.params.top_k for row in rows])
    _keep_top_p(scores, [row.params.top_p for row in rows])
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


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _nonfinite(row: RowSampling) -> StepResult:
    return StepResult(
        error_code=NonFiniteLogitsError.code,
        error_message=f"the model's logits at position {row.position} are not finite",
    )
