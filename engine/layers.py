"""The layers that decoder models are made of, and the kernels they compute with.

`Kernels` is what differs between ordinary and batch-invariant arithmetic; a layer is given one and does
not know which. Legend: N rows, E hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.attention import AttentionFactory, GatheredAttention
from engine.numerics import MAX_ROWS, MIN_ROWS
from engine.tiled_attention import TiledAttention
from engine.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class Kernels:
    """``product``: [N, in] and a weight [out, in] → [N, out]. ``silu``: elementwise x * sigmoid(x)."""

    name: str
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    silu: Callable[[torch.Tensor], torch.Tensor]
    attention: AttentionFactory


def _invariant_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product whose rows do not depend on their number: always within the checked range of rows."""
    num_rows = len(x)
    if num_rows > MAX_ROWS:
        return torch.cat([_invariant_product(part, weight) for part in x.split(MAX_ROWS)])
    padded = functional.pad(x, (0, 0, 0, max(0, MIN_ROWS - num_rows)))
    return functional.linear(padded, weight)[:num_rows]


def _invariant_silu(x: torch.Tensor) -> torch.Tensor:
    """torch's own gives other bits to the last elements of a vector; its exp does not."""
    return x / (torch.exp(-x) + 1)


ORDINARY = Kernels("ordinary", functional.linear, functional.silu, GatheredAttention)
BATCH_INVARIANT = Kernels("batch-invariant", _invariant_product, _invariant_silu, TiledAttention)


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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._product(x, self.weight)
        return out if self._bias is None else out + self._bias


class RMSNorm:
    """Divides each row by its root mean square (computed in float32), then scales by a weight [E]."""

    def __init__(self, weights: ModelWeights, name: str, size: int, eps: float) -> None:
        self._weight = weights.take(f"{name}.weight", size)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self._weight * wide.to(x.dtype)


class GatedMLP:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: ModelWeights, name: str, hidden: int, inner: int, bias: bool, kernels: Kernels) -> None:
        self.gate_up = Linear(weights, (f"{name}.gate_proj", f"{name}.up_proj"), hidden, (inner, inner), bias, kernels)
        self.down = Linear(weights, (f"{name}.down_proj",), inner, (hidden,), bias, kernels)
        self._silu = kernels.silu

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self._silu(gate) * up)


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
