"""The layers that decoder models are made of, and the kernels they compute with.

`Kernels` is what differs between ordinary and batch-invariant arithmetic; a layer is given one and does
not know which. Legend: N rows, E hidden size, I intermediate size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.attention import AttentionFactory, GatheredAttention
from engine.model_config import ModelArchitecture
from engine.numerics import MAX_ROWS, min_rows
from engine.tiled_attention import TiledAttention
from engine.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class Kernels:
    """``product``: [N, in] and a weight [out, in] → [N, out]. ``head_product``: [N, heads, in] and a
    weight of each head [heads, out, in] → [N, heads, out]. ``activations``: elementwise functions by the names of
    `model_config.ACTIVATIONS`.
    """

    name: str
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    head_product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    activations: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
    attention: AttentionFactory


def _invariant_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product whose rows do not depend on their number: always within the checked range of rows."""
    num_rows = len(x)
    if num_rows > MAX_ROWS:
        return torch.cat([_invariant_product(part, weight) for part in x.split(MAX_ROWS)])
    padded = functional.pad(x, (0, 0, 0, max(0, min_rows(len(weight)) - num_rows)))
    return functional.linear(padded, weight)[:num_rows]


def _head_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def _invariant_head_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.stack([_invariant_product(x[:, head], weight[head]) for head in range(len(weight))], dim=1)


def _invariant_silu(x: torch.Tensor) -> torch.Tensor:
    """torch's own gives other bits to the last elements of a vector; its exp does not."""
    return x / (torch.exp(-x) + 1)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _invariant_gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x * (1 + tanh(y)) / 2 = x * sigmoid(2 y), with y = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    y = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return x / (torch.exp(-2 * y) + 1)


ORDINARY = Kernels(
    "ordinary",
    functional.linear,
    _head_product,
    {"silu": functional.silu, "gelu_tanh": _gelu_tanh},
    GatheredAttention,
)
BATCH_INVARIANT = Kernels(
    "batch-invariant",
    _invariant_product,
    _invariant_head_product,
    {"silu": _invariant_silu, "gelu_tanh": _invariant_gelu_tanh},
    TiledAttention,
)


class Linear:
    """One or several projections of the same input, computed as one product.

    ``names`` of several are stacked in order; each has ``sizes[i]`` outputs.
    """

    def __init__(
        self,
        weights: ModelWeights,
        names: tuple[str, ...],
        inputs: int,
        sizes: tuple[int, ...],
        bias: bool,
        kernels: Kernels,
    ) -> None:
        named = list(zip(names, sizes, strict=True))
        self.weight = _stacked([weights.take(f"{name}.weight", size, inputs) for name, size in named])
        self._bias = _stacked([weights.take(f"{name}.bias", size) for name, size in named]) if bias else None
        self._product = kernels.product

    def reorder(self, order: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Puts the outputs in another order: ``order`` gives rows in it."""
        self.weight = order(self.weight)
        if self._bias is not None:
            self._bias = order(self._bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._product(x, self.weight)
        return out if self._bias is None else out + self._bias


class RMSNorm:
    """Divides each row by its root mean square (computed in float32), then scales by a weight [E]. ``centred``: the
    weight is stored minus 1, and the scaling is in float32, too.
    """

    def __init__(self, weights: ModelWeights, name: str, size: int, eps: float, *, centred: bool = False) -> None:
        self._weight = weights.take(f"{name}.weight", size)
        self._eps = eps
        self._centred = centred
        if centred:
            self._weight = 1.0 + self._weight.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return (wide * self._weight).to(x.dtype) if self._centred else self._weight * wide.to(x.dtype)


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
        self._activation = kernels.activations[a.activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._activation(gate) * up)

    @property
    def product_weights(self) -> list[torch.Tensor]:
        return [self._gate_up.weight, self._down.weight]


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
