"""Attention of one step over the paged KV cache: the seam, and the reference.

An `Attention` is made once a step from its batch (masks, tables) and called once a layer; it covers
decodes and chunks in one batch. The reference gathers blocks and calls torch's SDPA; others are held
to its results. It knows rows and blocks, not the model.

Legend: N rows, S sequences, L keys, Hq query heads, H key/value heads, G = Hq / H, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.batch import Span, StepBatch, block_table
from engine.kv_cache import KVCache

_MOST_GATHERED_TOKENS = 1 << 16
"""Keys that one call for decodes gathers at most: bounds memory, and what padding wastes."""


class Attention(Protocol):
    def attend(self, q: torch.Tensor, cache: KVCache, layer: int) -> torch.Tensor:
        """``q`` [N, Hq, D] attends to the cache, each row to positions up to its own; the step's own
        keys and values have been written. Returns [N, Hq * D].
        """
        ...


AttentionFactory = Callable[[StepBatch, int], Attention]
"""(batch, num_kv_heads) → the attention of one step."""


class GatheredAttention:
    """The reference. Query heads that share a key/value head are its rows, so that keys and values
    are never copied per query head. Decodes go in groups, padded to the longest of the group.
    """

    def __init__(self, batch: StepBatch, num_kv_heads: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._groups = [_DecodeGroup(spans, batch) for spans in _grouped(batch.decodes, batch.block_size)]
        self._chunks = [_Chunk(span, batch) for span in batch.chunks]

    def attend(self, q: torch.Tensor, cache: KVCache, layer: int) -> torch.Tensor:
        num_rows, num_heads, head_dim = q.shape
        q = q.view(num_rows, self._num_kv_heads, -1, head_dim)
        out = torch.empty_like(q)
        for group in self._groups:
            k, v = cache.gather(layer, group.table)
            out[group.rows] = scaled_dot_product_attention(
                q[group.rows], k.transpose(1, 2), v.transpose(1, 2), attn_mask=group.mask.to(q.dtype)
            )
        for chunk in self._chunks:
            k, v = cache.gather(layer, chunk.table)
            # [n, H, G, D] → [1, H, G * n, D]
            rows = q[chunk.rows].permute(1, 2, 0, 3)
            mask = chunk.mask.to(q.dtype).repeat(rows.shape[1], 1)
            result = scaled_dot_product_attention(
                rows.flatten(1, 2)[None],
                k[:, : chunk.context].transpose(1, 2),
                v[:, : chunk.context].transpose(1, 2),
                attn_mask=mask,
            )
            out[chunk.rows] = result[0].view(rows.shape).permute(2, 0, 1, 3)
        return out.view(num_rows, num_heads * head_dim)


class _DecodeGroup:
    """``mask`` [S, 1, 1, L]: 0 where a sequence has a key, -inf where its row is padded."""

    def __init__(self, spans: Sequence[Span], batch: StepBatch) -> None:
        width = len(spans[0].block_ids)
        self.rows = slice(spans[0].first, spans[-1].first + 1)
        self.table = torch.from_numpy(block_table(spans, width)).to(batch.device)
        keys = torch.arange(width * batch.block_size, device=batch.device)
        contexts = torch.tensor([span.context for span in spans], device=batch.device)
        self.mask = _additive(keys < contexts[:, None])[:, None, None]


class _Chunk:
    """``mask`` [n, L]: 0 at keys up to the row's own position, -inf after it."""

    def __init__(self, span: Span, batch: StepBatch) -> None:
        self.rows = span.rows
        self.context = span.context
        self.table = torch.from_numpy(span.block_ids[None]).to(batch.device)
        keys = torch.arange(span.context, device=batch.device)
        self.mask = _additive(keys <= batch.positions[span.rows][:, None])


def _additive(visible: torch.Tensor) -> torch.Tensor:
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, float("-inf"))


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
