"""Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

A head's keys are a product of the cached latent c with a matrix U, so its scores q·(U c) are (Uᵀ q)·c: the query is
taken to the latent's space instead of every key out of it. What the head mixes are latents, too, and its values follow
from the mix. So attention is that of one key/value head, whose keys and values are the cache as it is.

Legend: N rows, E hidden size, Hq query heads, C latent rank, P components of a head's key that are not rotated,
T rotated ones, V components of a head's value.
"""

from __future__ import annotations

from functools import partial

import torch

from engine.kernels import Kernels
from engine.layers import Linear, RMSNorm
from engine.model_config import Latent, ModelArchitecture
from engine.models.attending import Angles, StepCache
from engine.weights import ModelWeights

_NORM_EPS = 1e-6
"""Of the norms of latents, which the config does not have."""


class LatentAttention:
    """The attention of one layer."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        latent: Latent,
        weights: ModelWeights,
        layer: int,
        name: str,
        kernels: Kernels,
    ) -> None:
        a, self._latent, self._num_heads, self._layer = architecture, latent, architecture.num_heads, layer
        self._rotate, self._head_product = kernels.rotate, kernels.head_product
        query_size = a.num_heads * (latent.plain_dim + latent.rope_dim)
        query_name, query_inputs = f"{name}.q_proj", a.hidden_size
        self._query_in: Linear | None = None
        if latent.query_rank:
            query_name, query_inputs = f"{name}.q_b_proj", latent.query_rank
            self._query_in = Linear(
                weights, (f"{name}.q_a_proj",), a.hidden_size, (latent.query_rank,), a.output_bias, kernels
            )
            self._query_norm = RMSNorm(weights, f"{name}.q_a_layernorm", latent.query_rank, _NORM_EPS, kernels)
        by_head = partial(self._paired, heads=a.num_heads)
        self._query = Linear(weights, (query_name,), query_inputs, (query_size,), False, kernels, by_head)
        self._down = Linear(
            weights,
            (f"{name}.kv_a_proj_with_mqa",),
            a.hidden_size,
            (latent.rank + latent.rope_dim,),
            a.output_bias,
            kernels,
            partial(self._paired, heads=1),
        )
        self._norm = RMSNorm(weights, f"{name}.kv_a_layernorm", latent.rank, _NORM_EPS, kernels)
        rows = a.num_heads * (latent.plain_dim + latent.value_dim)
        up = weights.take(f"{name}.kv_b_proj.weight", rows, latent.rank).unflatten(0, (a.num_heads, -1))
        keys, values = up.split((latent.plain_dim, latent.value_dim), dim=1)
        self._absorb = [kernels.pack(head.T.contiguous()) for head in keys]
        """[C, P] of each head."""
        self._values = [kernels.pack(head.contiguous()) for head in values]
        """[V, C] of each head."""
        self._output = Linear(
            weights, (f"{name}.o_proj",), a.num_heads * latent.value_dim, (a.hidden_size,), a.output_bias, kernels
        )

    def __call__(self, x: torch.Tensor, angles: Angles, cache: StepCache) -> torch.Tensor:
        latent = self._latent
        q = self._query(x if self._query_in is None else self._query_norm(self._query_in(x)))
        plain, turned = q.unflatten(-1, (self._num_heads, -1)).split((latent.plain_dim, latent.rope_dim), dim=-1)
        q = torch.cat((self._head_product(plain, self._absorb), self._rotate(turned, *angles)), dim=-1)
        kept, key = self._down(x).split((latent.rank, latent.rope_dim), dim=-1)
        key = self._rotate(key[:, None], *angles)
        mixed = cache.attend(self._layer, q, torch.cat((self._norm(kept)[:, None], key), dim=-1))
        mixed = mixed.unflatten(-1, (self._num_heads, -1))[..., : latent.rank]
        return self._output(self._head_product(mixed, self._values).flatten(1))

    def _paired(self, rows: torch.Tensor, heads: int) -> torch.Tensor:
        """``rows`` [heads * ..., ...]; of those where the last T of each head lie in pairs, the first halves of the
        pairs, then the second ones.
        """
        if not self._latent.interleaved:
            return rows
        by_head = rows.unflatten(0, (heads, -1))
        plain, turned = by_head[:, : -self._latent.rope_dim], by_head[:, -self._latent.rope_dim :]
        return torch.cat((plain, turned[:, 0::2], turned[:, 1::2]), dim=1).flatten(0, 1).contiguous()
