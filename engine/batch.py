"""Turns a step plan into the arrays that one forward pass needs. Knows no model.

Rows of a forward pass are the new tokens of all sequences. Decodes (one new token) come first, longest
context first, so that attention can drop finished ones by cutting a prefix; chunks follow in the
plan's order. Legend: N rows, B decodes, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.plan import SequenceStep

_Ints = np.ndarray


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence: ``count`` of them from row ``first``, at positions ``start ..``; they
    attend to ``context`` tokens in ``block_ids`` (only the blocks that hold those tokens).
    """

    first: int
    count: int
    start: int
    block_ids: _Ints

    @property
    def context(self) -> int:
        return self.start + self.count

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.count)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass. ``order[i]`` is the place in the plan of the sequence of ``spans[i]``.

    ``slots`` [N]: where each row's KV goes (block id * block size + offset). ``unfilled``: blocks that
    this step begins and does not fill.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    unfilled: torch.Tensor
    logit_rows: torch.Tensor
    spans: tuple[Span, ...]
    order: tuple[int, ...]
    num_decodes: int
    block_size: int
    device: torch.device

    @property
    def decodes(self) -> tuple[Span, ...]:
        return self.spans[: self.num_decodes]

    @property
    def chunks(self) -> tuple[Span, ...]:
        return self.spans[self.num_decodes :]


def build_batch(steps: Sequence[tuple[int, SequenceStep]], block_size: int, device: torch.device) -> StepBatch:
    """The batch of ``steps``, (place in the plan, step) each. Every step must have been checked."""
    decodes = [item for item in steps if len(item[1].token_ids) == 1]
    decodes.sort(key=lambda item: -item[1].start)
    ordered = decodes + [item for item in steps if len(item[1].token_ids) > 1]
    spans: list[Span] = []
    positions: list[_Ints] = []
    slots: list[_Ints] = []
    unfilled: list[int] = []
    first = 0
    for _, step in ordered:
        count = len(step.token_ids)
        context = step.start + count
        blocks = np.asarray(step.block_ids[: -(-context // block_size)], dtype=np.int64)
        places = np.arange(step.start, context)
        positions.append(places)
        slots.append(blocks[places // block_size] * block_size + places % block_size)
        if context % block_size and context - context % block_size >= step.start:
            unfilled.append(int(blocks[-1]))
        spans.append(Span(first, count, step.start, blocks))
        first += count

    def tensor(values: Sequence[int] | _Ints) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)

    return StepBatch(
        token_ids=tensor(np.concatenate([np.asarray(step.token_ids, dtype=np.int64) for _, step in ordered])),
        positions=tensor(np.concatenate(positions)),
        slots=tensor(np.concatenate(slots)),
        unfilled=tensor(unfilled),
        logit_rows=tensor(
            [
                row
                for span, (_, step) in zip(spans, ordered, strict=True)
                for row in range(span.first + span.count - step.num_logit_rows, span.first + span.count)
            ]
        ),
        spans=tuple(spans),
        order=tuple(place for place, _ in ordered),
        num_decodes=len(decodes),
        block_size=block_size,
        device=device,
    )


def block_table(spans: Sequence[Span], width: int, firsts: Sequence[int] | None = None) -> _Ints:
    """Block ids [len(spans), width], of each span from its ``firsts``-th block on. A row is filled up with its own
    last block: whatever lies in other blocks belongs to other sequences and may not even be finite.
    """
    table = np.empty((len(spans), width), dtype=np.int64)
    for row, span, first in zip(table, spans, firsts or (0,) * len(spans), strict=True):
        held = span.block_ids[first : first + width]
        row[: len(held)] = held
        row[len(held) :] = span.block_ids[-1]
    return table
