"""One layer's side of the KV cache during one step, as the layer's own attention sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.attention import Attention
from engine.batch import StepBatch
from engine.kv_cache import KVCache

LayerWritten = Callable[[int], None]
"""Called with a layer's number once its keys and values are in the cache."""

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a step's positions (`rope.py`)."""


class LayerCache:
    """Legend: N rows, Hq and H query and key/value heads, D head_dim."""

    def __init__(
        self, batch: StepBatch, cache: KVCache, attention: Attention, layer: int, written: LayerWritten | None
    ) -> None:
        self._batch = batch
        self._cache = cache
        self._attention = attention
        self._layer = layer
        self._written = written

    def attend(self, q: torch.Tensor, *halves: torch.Tensor) -> torch.Tensor:
        """Stores ``halves`` (keys and values, or latents) [N, H, D], then lets ``q`` [N, Hq, D] attend; returns
        [N, Hq * D].
        """
        self._cache.write(self._layer, self._batch, *halves)
        if self._written is not None:
            self._written(self._layer)
        return self._attention.attend(q, self._cache, self._layer)
