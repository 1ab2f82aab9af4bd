"""Batch-invariant attention: a row's result has the same bits whatever else is in the step.

Keys are taken in tiles of fixed length, counted from position 0, and merged in order with an online
softmax (Milakov and Gimelshein, arXiv 1805.02867). For every row each tile is the same matrix product
of the same shape, whether the row is a decode or part of a chunk, and a tile that a row does not see
changes nothing: its weights are exactly 0 and its rescaling exactly 1.

Relies on what `engine/numerics.py` checks at start-up: a batched product of at least `MIN_ATTENTION_ROWS` rows
gives each row the same bits whatever the number of rows and of products.

Legend: N rows, S sequences, H key/value heads, G query heads per key/value head, D head_dim,
R = rows of one product, T = keys of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from engine.attention import AttentionShape, first_key, hidden_keys, soft_capped
from engine.batch import Span, StepBatch, block_table
from engine.kv_cache import KVCache
from engine.numerics import MIN_ATTENTION_ROWS

TILE_TOKENS = 256
"""Keys of a tile. A tile is made of whole blocks: sizes that do not divide this make it shorter (or one
block long), and then results depend on the block size too.
"""


class TiledAttention:
    """See the module. All decodes of a step are computed together, each chunk on its own."""

    def __init__(self, batch: StepBatch, shape: AttentionShape) -> None:
        self._shape = shape
        self._num_decodes = batch.num_decodes
        self._views = {window: _View(batch, window) for window in set(shape.windows)}

    def attend(self, q: torch.Tensor, cache: KVCache, layer: int) -> torch.Tensor:
        view, softcap = self._views[self._shape.windows[layer]], self._shape.softcap
        num_rows, num_heads, head_dim = q.shape
        q = (q * self._shape.scale).view(num_rows, self._shape.num_kv_heads, -1, head_dim)
        out = torch.empty_like(q)
        if view.decodes is not None:
            rows = slice(0, self._num_decodes)
            out[rows] = _attend_tiles(q[rows], view.decodes, cache, layer, softcap)
        for rows, tiles in view.chunks:
            # [n, H, G, D] → [1, H, n * G, D]: neighbours of a token's group are rows like any other
            grouped = q[rows].transpose(0, 1).flatten(1, 2)[None]
            result = _attend_tiles(grouped, tiles, cache, layer, softcap)[0]
            out[rows] = result.unflatten(1, (-1, q.shape[2])).transpose(0, 1)
        return out.view(num_rows, num_heads * head_dim)


class _View:
    """The tiles of a step's sequences where rows see a window of so many positions (0: all before them)."""

    def __init__(self, batch: StepBatch, window: int) -> None:
        self.decodes = _Tiles(batch.decodes, batch, window) if batch.decodes else None
        self.chunks = [(span.rows, _Tiles([span], batch, window)) for span in batch.chunks]


class _Tiles:
    """What each tile of some sequences (longest context first) needs, for all layers of a step; those that nobody sees
    are left out.

    ``tables[t]`` [active, blocks of a tile]; only sequences that reach tile t are active in it.
    ``hidden[t]`` [active, 1, n, T]: keys that a row may not see, or None when every row sees all.
    """

    def __init__(self, spans: Sequence[Span], batch: StepBatch, window: int) -> None:
        blocks = max(1, TILE_TOKENS // batch.block_size)
        self.length = blocks * batch.block_size
        num_tiles = -(-spans[0].context // self.length)
        table = torch.from_numpy(block_table(spans, num_tiles * blocks)).to(batch.device)
        rows = slice(spans[0].first, spans[-1].first + spans[-1].count)
        positions = batch.positions[rows].view(len(spans), -1)
        self.tables: list[torch.Tensor] = []
        self.hidden: list[torch.Tensor | None] = []
        for tile in range(min(first_key(span, window) for span in spans) // self.length, num_tiles):
            first, last = tile * self.length, (tile + 1) * self.length - 1
            active = sum(span.context > first for span in spans)
            self.tables.append(table[:active, tile * blocks : (tile + 1) * blocks])
            if min(span.start for span in spans[:active]) >= last and (
                not window or max(span.context - window for span in spans[:active]) <= first
            ):
                self.hidden.append(None)
            else:
                keys = torch.arange(first, last + 1, device=batch.device)
                self.hidden.append(hidden_keys(keys, positions[:active, :, None], window)[:, None])


_LOWEST = -1e30
"""Less than any score, and finite: of a row that sees nothing of its first tiles the difference to it is defined."""


def _attend_tiles(q: torch.Tensor, tiles: _Tiles, cache: KVCache, layer: int, softcap: float) -> torch.Tensor:
    """``q`` [S, H, R, D], scaled, in; the same shape out."""
    num_sequences, num_heads, num_rows, head_dim = q.shape
    q = pad(q, (0, 0, 0, max(0, MIN_ATTENTION_ROWS - num_rows)))
    padded_rows = q.shape[2]
    q = q.reshape(-1, padded_rows, head_dim)
    highest = q.new_full((len(q), padded_rows, 1), _LOWEST)
    total = torch.zeros_like(highest)
    mixed = torch.zeros_like(q)
    for table, hidden in zip(tiles.tables, tiles.hidden, strict=True):
        active = len(table) * num_heads
        k, v = (half.transpose(1, 2).reshape(active, tiles.length, head_dim) for half in cache.gather(layer, table))
        scores = torch.bmm(q[:active], k.transpose(1, 2))
        if softcap:
            scores = soft_capped(scores, softcap)
        if hidden is not None:
            _hide(scores, hidden, num_heads, num_rows)
        before = highest[:active]
        now = torch.maximum(before, scores.amax(-1, keepdim=True))
        rescale = torch.exp(before - now)
        weights = scores.sub_(now).exp_()
        highest[:active] = now
        total[:active] = total[:active] * rescale + weights.sum(-1, keepdim=True)
        mixed[:active] = mixed[:active] * rescale + torch.bmm(weights, v)
    result = mixed / total
    return result.view(num_sequences, num_heads, padded_rows, head_dim)[:, :, :num_rows]


def _hide(scores: torch.Tensor, hidden: torch.Tensor, num_heads: int, num_rows: int) -> None:
    """Sets hidden keys of the real rows to -inf, in place. Padding rows, all zero, see everything.

    ``hidden`` has a row for each token; a chunk has G rows for each (``num_rows`` = n * G), and a decode
    G rows for its only one, which broadcasting covers.
    """
    if hidden.shape[2] > 1:
        hidden = hidden.repeat_interleave(num_rows // hidden.shape[2], dim=2)
    view = scores.view(len(hidden), num_heads, -1, scores.shape[-1])[:, :, :num_rows]
    view.masked_fill_(hidden, float("-inf"))
