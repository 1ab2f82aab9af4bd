"""The model families that Baton runs, by name.

A family is added with an entry in `engine.model_config.FAMILIES` (the names it goes by) and one here
(the code that computes it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from engine.batch import StepBatch
from engine.kv_cache import KVCache
from engine.layers import Kernels
from engine.model_config import ModelArchitecture
from engine.models.llama import LayerWritten, LlamaModel
from engine.weights import ModelWeights


class DecoderModel(Protocol):
    """What the runner asks of a model; see `LlamaModel` for what the words mean."""

    def forward(self, batch: StepBatch, cache: KVCache, written: LayerWritten | None = None) -> torch.Tensor: ...

    @property
    def product_weights(self) -> list[torch.Tensor]: ...


ModelFactory = Callable[[ModelArchitecture, ModelWeights, Kernels, int], DecoderModel]

MODELS: dict[str, ModelFactory] = {"llama": LlamaModel, "qwen2": LlamaModel}
"""Family → its model, made from (architecture, weights, kernels, longest context in tokens)."""
