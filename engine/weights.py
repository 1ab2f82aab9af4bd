"""Hands a model its tensors, one at a time, under Hugging Face's names. Knows nothing of layers.

A model *takes* each tensor it is made of, by name and shape; what is missing, misshapen or left over
is an error, so that a checkpoint of another model can never be half loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from common.errors import EngineError
from engine.checkpoint import Checkpoint
from engine.gguf_weights import GGUFTensors
from engine.model_config import ModelArchitecture
from engine.quantised import QuantisedWeight

_DERIVED = re.compile(r"(rotary_emb\.inv_freq|attn\.(masked_)?bias)$")
"""Tensors that some checkpoints store although they follow from the config."""


class TensorSource(Protocol):
    """Where tensors come from. ``names`` are Hugging Face's; `read` gives one, on the CPU."""

    names: Sequence[str]

    def read(self, name: str) -> torch.Tensor: ...

    def read_quantised(self, name: str) -> QuantisedWeight | None:
        """The matrix as it is stored; None where that is not in a form of `quantised.py`."""
        ...


class SafetensorsFiles:
    """One or several safetensors files as one source; a tensor is read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._home: dict[str, safe_open] = {}
        for path in checkpoint.weight_files:
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise EngineError(f"{path} is not a safetensors file that can be read: {error}") from error
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                self._home[name] = file
        self.names: Sequence[str] = list(self._home)

    def read(self, name: str) -> torch.Tensor:
        return self._home[name].get_tensor(name)

    def read_quantised(self, name: str) -> QuantisedWeight | None:
        return None


class ModelWeights:
    """The tensors of one checkpoint, to be taken once each, as ``dtype`` on ``device``. ``as_stored``: quantised
    matrices that rows are multiplied with stay so.
    """

    def __init__(
        self, source: TensorSource, dtype: torch.dtype, device: torch.device, *, as_stored: bool = False
    ) -> None:
        self._source = source
        self._left = dict.fromkeys(name for name in source.names if not _DERIVED.search(name))
        self._as_stored = as_stored
        self.dtype = dtype
        self.device = device

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor ``name``, which must have ``shape``; as ``dtype`` if given. Raises EngineError."""
        if name not in self._left:
            raise EngineError(f"weights: tensor {name} is missing")
        del self._left[name]
        tensor = self._source.read(name)
        if tuple(tensor.shape) != shape:
            found = list(tensor.shape)
            raise EngineError(f"weights: tensor {name} has shape {found}, the config asks for {list(shape)}")
        return tensor.to(device=self.device, dtype=dtype or self.dtype, copy=True).contiguous()

    def take_product(self, name: str, outputs: int, inputs: int) -> torch.Tensor | QuantisedWeight:
        """As `take`, for a matrix [outputs, inputs] that rows are multiplied with."""
        quantised = self.quantised(name, outputs, inputs) if name in self._left else None
        if quantised is None:
            return self.take(name, outputs, inputs)
        del self._left[name]
        return quantised

    def quantised(self, name: str, outputs: int, inputs: int) -> QuantisedWeight | None:
        """The matrix as it is stored, if that is wanted and it is quantised; it is not taken by that."""
        found = self._source.read_quantised(name) if self._as_stored else None
        return found if found is not None and (len(found.codes), found.inputs) == (outputs, inputs) else None

    def discard(self, name: str) -> None:
        """Ignores ``name`` if it is there: a tied head that a checkpoint stores all the same."""
        self._left.pop(name, None)

    def discard_layers(self, first: int, count: int) -> None:
        """Ignores ``count`` layers from number ``first`` on, where they are there."""
        extra = tuple(f"model.layers.{layer}." for layer in range(first, first + count))
        self._left = {name: None for name in self._left if not name.startswith(extra)}

    def finish(self) -> None:
        """Raises EngineError when tensors are left that nobody took."""
        if self._left:
            names = list(self._left)
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise EngineError(f"weights: {len(names)} tensors belong to no layer of this model: {shown}")


def open_weights(
    checkpoint: Checkpoint,
    architecture: ModelArchitecture,
    dtype: torch.dtype,
    device: torch.device,
    *,
    as_stored: bool = False,
) -> ModelWeights:
    """The weights at ``checkpoint``. Raises ConfigError or EngineError when they cannot be read."""
    source: TensorSource
    is_gguf = checkpoint.kind == "gguf"
    source = GGUFTensors(checkpoint.gguf, architecture) if is_gguf else SafetensorsFiles(checkpoint)
    return ModelWeights(source, dtype, device, as_stored=as_stored)
