"""Attention of one step over the paged KV cache: the seam, and the reference.

An `Attention` is made once a step from its batch (masks, tables) and called once a layer; it covers
decodes and chunks in one batch. The reference gathers blocks and calls torch's SDPA; others are held
to its results. It knows rows and blocks, not the model.

Legend: N rows, S sequences, L keys, Hq query heads, H key/value heads, G = Hq / H, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.batch import Span, StepBatch, block_table
from engine.kv_cache import KVCache

_MOST_GATHERED_TOKENS = 1 << 16
"""Keys that one call for decodes gathers at most: bounds memory, and what padding wastes."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a model's attention is like. ``windows[layer]``: how many positions a row sees, its own included, 0 for all
    before it. ``scale`` multiplies the products of queries and keys; ``softcap`` c then turns x into
    c * tanh(x / c), 0 for none.
    """

    num_kv_heads: int
    scale: float
    windows: tuple[int, ...]
    softcap: float = 0.0


class Attention(Protocol):
    def attend(self, q: torch.Tensor, cache: KVCache, layer: int) -> torch.Tensor:
        """``q`` [N, Hq, D] attends to the cache, each row to positions up to its own; the step's own
        keys and values have been written. Returns [N, Hq * D].
        """
        ...


AttentionFactory = Callable[[StepBatch, AttentionShape], Attention]
"""The attention of one step."""


class GatheredAttention:
    """The reference. Query heads that share a key/value head are its rows, so that keys and values
    are never copied per query head. Decodes go in groups, padded to the longest of the group.
    """

    def __init__(self, batch: StepBatch, shape: AttentionShape) -> None:
        self._shape = shape
        self._views = {window: _View(batch, window) for window in set(shape.windows)}

    def attend(self, q: torch.Tensor, cache: KVCache, layer: int) -> torch.Tensor:
        view = self._views[self._shape.windows[layer]]
        num_rows, num_heads, head_dim = q.shape
        q = q.view(num_rows, self._shape.num_kv_heads, -1, head_dim)
        out = torch.empty_like(q)
        for group in view.groups:
            k, v = cache.gather(layer, group.table)
            out[group.rows] = self._mix(q[group.rows], k.transpose(1, 2), v.transpose(1, 2), group.mask)
        for chunk in view.chunks:
            k, v = cache.gather(layer, chunk.table)
            # [n, H, G, D] → [1, H, G * n, D]
            rows = q[chunk.rows].permute(1, 2, 0, 3)
            result = self._mix(
                rows.flatten(1, 2)[None],
                k[:, : chunk.num_keys].transpose(1, 2),
                v[:, : chunk.num_keys].transpose(1, 2),
                chunk.mask.repeat(rows.shape[1], 1),
            )
            out[chunk.rows] = result[0].view(rows.shape).permute(2, 0, 1, 3)
        return out.view(num_rows, num_heads * head_dim)

    def _mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        if not shape.softcap:
            return scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype), scale=shape.scale)
        scores = soft_capped(torch.matmul(q, k.transpose(-2, -1)).float() * shape.scale, shape.softcap)
        return torch.matmul((scores + mask).softmax(-1).to(v.dtype), v)


class _View:
    """What the rows of a step see through a window of so many positions (0: all before them)."""

    def __init__(self, batch: StepBatch, window: int) -> None:
        self.groups = [_DecodeGroup(spans, batch, window) for spans in _grouped(batch.decodes, batch.block_size)]
        self.chunks = [_Chunk(span, batch, window) for span in batch.chunks]


class _DecodeGroup:
    """``mask`` [S, 1, 1, L]: 0 where a sequence has a key that it sees, -inf elsewhere."""

    def __init__(self, spans: Sequence[Span], batch: StepBatch, window: int) -> None:
        self.rows = slice(spans[0].first, spans[-1].first + 1)
        firsts = [_first_block(span, batch.block_size, window) for span in spans]
        width = max(len(span.block_ids) - first for span, first in zip(spans, firsts, strict=True))
        self.table = torch.from_numpy(block_table(spans, width, firsts)).to(batch.device)
        begins = torch.tensor(firsts, device=batch.device)[:, None] * batch.block_size
        keys = begins + torch.arange(width * batch.block_size, device=batch.device)
        positions = torch.tensor([[span.start] for span in spans], device=batch.device)
        self.mask = _mask(keys, positions, window)[:, None, None]


class _Chunk:
    """``mask`` [n, L]: 0 at keys that a row sees, -inf elsewhere."""

    def __init__(self, span: Span, batch: StepBatch, window: int) -> None:
        self.rows = span.rows
        first = _first_block(span, batch.block_size, window)
        self.num_keys = span.context - first * batch.block_size
        self.table = torch.from_numpy(np.ascontiguousarray(span.block_ids[None, first:])).to(batch.device)
        keys = torch.arange(first * batch.block_size, span.context, device=batch.device)
        self.mask = _mask(keys, batch.positions[span.rows][:, None], window)


def soft_capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap`` * tanh(``x`` / ``cap``) of float32 numbers, by way of exp: torch's tanh gives other bits to the last
    elements of a vector (`numerics.py`).
    """
    return cap - 2 * cap / (torch.exp(x * (2 / cap)) + 1)


def first_key(span: Span, window: int) -> int:
    """The first position that a row of ``span`` sees."""
    return max(0, span.start + 1 - window) if window else 0


def _first_block(span: Span, block_size: int, window: int) -> int:
    return first_key(span, window) // block_size


def hidden_keys(keys: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
    """Where a row at ``positions`` may not see ``keys`` (positions, too): after it, or outside its window."""
    hidden = keys > positions
    return hidden | (keys <= positions - window) if window else hidden


def _mask(keys: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
    hidden = hidden_keys(keys, positions, window)
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _grouped(decodes: Sequence[Span], block_size: int) -> list[Sequence[Span]]:
    """Cuts decodes (longest first) into groups of like length: at least half of what a group gathers
    is real, and it is never more than the limit (one sequence may exceed it alone).
    """
    groups: list[Sequence[Span]] = []
    first = 0
    while first < len(decodes):
        longest = len(decodes[first].block_ids)
        most = max(1, _MOST_GATHERED_TOKENS // (longest * block_size))
        last = first + 1
        while last < len(decodes) and last - first < most and 2 * len(decodes[last].block_ids) >= longest:
            last += 1
        groups.append(decodes[first:last])
        first = last
    return groups
