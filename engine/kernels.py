"""The arithmetic that layers compute with. `Kernels` is what differs between its kinds; a layer is given one and does
not know which.

`ORDINARY` is torch's own. `BATCH_INVARIANT` gives a row the same bits in any company, by way of torch operations that
`numerics.py` checks. `engine/native/` has a third kind, for CPUs, which does so too and is the fastest.

Legend: N rows, E width of a row, Hq and H query and key/value heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.nn import functional

from engine.attention import AttentionFactory, GatheredAttention
from engine.numerics import MAX_ROWS, min_rows
from engine.quantised import QuantisedWeight
from engine.tiled_attention import TiledAttention

T = TypeVar("T")

Packed = Any
"""A weight as `Kernels.pack` made it."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """``pack``: a weight [out, in], in the model's dtype or (native kernels) quantised, made ready for `product`:
    [N, in] and it → [N, out], plus a bias [out] or None; ``pack_head``: the same for the one that gives logits,
    ``pack_exactly`` for one that is never quantised. ``widen``: rows of the model's dtype in that of activations.

    ``rms_norm``: rows [..., E], a weight [E], eps → rows; with ``centred`` weights (which are float32, and 1 larger
    than stored) all of it is computed in float32. ``gated``: rows [N, 2 * E], activation → act(first half) * second.
    ``rotate``: [N, H, D] by cosines and sines [N, T/2] of its first T components. ``store``: rows [N, H, D] become
    those of a pool [n, H, D] at places [N].
    """

    name: str
    pack: Callable[[torch.Tensor | QuantisedWeight], Packed]
    pack_head: Callable[[torch.Tensor | QuantisedWeight], Packed]
    pack_exactly: Callable[[torch.Tensor], Packed]
    product: Callable[[torch.Tensor, Packed, torch.Tensor | None], torch.Tensor]
    widen: Callable[[torch.Tensor], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, bool], torch.Tensor]
    gated: Callable[[torch.Tensor, str], torch.Tensor]
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    store: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    attention: AttentionFactory

    def head_product(self, x: torch.Tensor, weights: list[Packed]) -> torch.Tensor:
        """[N, heads, in] and a weight [out, in] of each head → [N, heads, out]."""
        return torch.stack([self.product(x[:, head], weight, None) for head, weight in enumerate(weights)], dim=1)


def _same(x: T) -> T:
    return x


def _invariant_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product whose rows do not depend on their number: always within the checked range of rows."""
    num_rows = len(x)
    if num_rows > MAX_ROWS:
        return torch.cat([_invariant_product(part, weight, bias) for part in x.split(MAX_ROWS)])
    padded = functional.pad(x, (0, 0, 0, max(0, min_rows(len(weight)) - num_rows)))
    out = functional.linear(padded, weight)[:num_rows]
    return out if bias is None else out + bias


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, centred: bool) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype) if centred else weight * wide.to(x.dtype)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _invariant_silu(x: torch.Tensor) -> torch.Tensor:
    """torch's own gives other bits to the last elements of a vector; its exp does not."""
    return x / (torch.exp(-x) + 1)


def _invariant_gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x * (1 + tanh(y)) / 2 = x * sigmoid(2 y), with y = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    y = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return x / (torch.exp(-2 * y) + 1)


_Activations = Mapping[str, Callable[[torch.Tensor], torch.Tensor]]

_ACTIVATIONS: _Activations = {"silu": functional.silu, "gelu_tanh": _gelu_tanh}
_INVARIANT_ACTIVATIONS: _Activations = {"silu": _invariant_silu, "gelu_tanh": _invariant_gelu_tanh}


def _gated(both: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up


def _invariant_gated(both: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return _INVARIANT_ACTIVATIONS[activation](gate) * up


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos[:, None], sin[:, None]
    turned = 2 * cos.shape[-1]
    first, second = x[..., :turned].float().chunk(2, dim=-1)
    parts = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    return torch.cat(parts if turned == x.shape[-1] else [*parts, x[..., turned:]], dim=-1)


def _store(rows: torch.Tensor, pool: torch.Tensor, places: torch.Tensor) -> None:
    pool.index_copy_(0, places, rows)


ORDINARY = Kernels(
    "ordinary", _same, _same, _same, functional.linear, _same, _rms_norm, _gated, _rotate, _store, GatheredAttention
)
BATCH_INVARIANT = Kernels(
    "batch-invariant",
    _same,
    _same,
    _same,
    _invariant_product,
    _same,
    _rms_norm,
    _invariant_gated,
    _rotate,
    _store,
    TiledAttention,
)
