"""The KV cache during one step, as the layers' own attention sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.attention import AttentionShape
from engine.batch import StepBatch
from engine.kernels import Kernels
from engine.kv_cache import KVCache

LayerWritten = Callable[[int], None]
"""Called with a layer's number once its keys and values are in the cache."""

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of a step's positions (`rope.py`)."""


class StepCache:
    """Legend: N rows, Hq and H query and key/value heads, D head_dim."""

    def __init__(
        self, batch: StepBatch, cache: KVCache, kernels: Kernels, shape: AttentionShape, written: LayerWritten | None
    ) -> None:
        self._batch = batch
        self._cache = cache
        self._attention = kernels.attention(batch, shape)
        self._places = cache.places(batch)
        self._store = kernels.store
        self._written = written

    def attend(self, layer: int, q: torch.Tensor, *halves: torch.Tensor) -> torch.Tensor:
        """Stores ``halves`` (keys and values, or latents) [N, H, D] of ``layer``, then lets ``q`` [N, Hq, D] attend;
        returns [N, Hq * D].
        """
        tokens = self._cache.begin(layer, self._batch)
        for half, places in zip(halves, self._places, strict=True):
            self._store(half, tokens, places)
        if self._written is not None:
            self._written(layer)
        return self._attention.attend(q, self._cache, layer)
