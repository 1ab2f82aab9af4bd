"""The layers that decoder models are made of. Legend: N rows, E hidden size, I inner size."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.kernels import Kernels
from engine.model_config import ModelArchitecture
from engine.quantised import QuantisedWeight, stacked
from engine.weights import ModelWeights


class Linear:
    """One or several projections of the same input, computed as one product.

    ``names`` of several are stacked in order; each has ``sizes[i]`` outputs. ``reorder`` puts rows (of the weight, and
    of the bias) in the order that is wanted.
    """

    def __init__(
        self,
        weights: ModelWeights,
        names: tuple[str, ...],
        inputs: int,
        sizes: tuple[int, ...],
        bias: bool,
        kernels: Kernels,
        reorder: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        named = list(zip(names, sizes, strict=True))
        weight = stacked([weights.take_product(f"{name}.weight", size, inputs) for name, size in named])
        self._bias: torch.Tensor | None = None
        if bias:
            self._bias = kernels.widen(torch.cat([weights.take(f"{name}.bias", size) for name, size in named]))
        if reorder is not None:
            weight = weight.with_rows(reorder) if isinstance(weight, QuantisedWeight) else reorder(weight)
            self._bias = None if self._bias is None else reorder(self._bias)
        self._weight = kernels.pack(weight)
        self._product = kernels.product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self._weight, self._bias)


class RMSNorm:
    """Divides each row by its root mean square (computed in float32), then scales by a weight [E]. ``centred``: the
    weight is stored minus 1.
    """

    def __init__(
        self, weights: ModelWeights, name: str, size: int, eps: float, kernels: Kernels, *, centred: bool = False
    ) -> None:
        weight = weights.take(f"{name}.weight", size)
        self._weight = 1.0 + weight.float() if centred else kernels.widen(weight)
        self._eps = eps
        self._centred = centred
        self._norm = kernels.rms_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self._weight, self._eps, self._centred)


class GatedMLP:
    """down(activation(gate(x)) * up(x)); SwiGLU with silu. ``names``: of gate and up, or of the one tensor that is
    both. ``inner_size``: where it is not the architecture's.
    """

    def __init__(
        self,
        weights: ModelWeights,
        names: tuple[str, ...],
        down: str,
        architecture: ModelArchitecture,
        kernels: Kernels,
        *,
        inner_size: int | None = None,
    ) -> None:
        a = architecture
        inner, bias = inner_size or a.intermediate_size, a.mlp_bias
        self._gate_up = Linear(weights, names, a.hidden_size, (2 * inner // len(names),) * len(names), bias, kernels)
        self._down = Linear(weights, (down,), inner, (a.hidden_size,), bias, kernels)
        self._gated = kernels.gated
        self._activation = a.activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._gated(self._gate_up(x), self._activation))
