"""The decoder that families share: RMSNorm, rotary embedding, grouped-query or latent attention, a gated MLP or
experts.

What differs between them is in `engine/families.py` and in the numbers of their configs. It knows the batch as
rows, and where keys and values are kept, but no sequence.

Legend: N rows, R rows whose logits are wanted, E hidden size, V vocabulary, Hq and H query and
key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.attention import AttentionShape, soft_capped
from engine.batch import StepBatch
from engine.families import Family, family_of
from engine.kernels import Kernels
from engine.kv_cache import KVCache
from engine.layers import GatedMLP, Linear, RMSNorm
from engine.model_config import ModelArchitecture
from engine.models.attending import Angles, LayerWritten, StepCache
from engine.models.experts import SparseMLP
from engine.models.latent import LatentAttention
from engine.rope import RotaryTable
from engine.weights import ModelWeights


class Decoder:
    """Tokens in, logits out; keys and values go into the cache on the way."""

    def __init__(self, architecture: ModelArchitecture, weights: ModelWeights, kernels: Kernels, max_len: int) -> None:
        a, family = architecture, family_of(architecture.family)
        self._kernels = kernels
        self._shape = AttentionShape(a.num_kv_heads, a.attention_scale, a.windows, a.attention_softcap)
        self._logit_softcap = a.logit_softcap
        embedding = ("model.embed_tokens.weight", a.vocab_size, a.hidden_size)
        quantised = weights.quantised(*embedding) if a.tied_head else None
        self._embedding = weights.take(*embedding)
        self._embedding_scale: torch.Tensor | None = None
        if family.scaled_embedding:
            self._embedding_scale = torch.tensor(a.hidden_size**0.5).to(self._embedding)
        ropes = [a.rope] if a.local_rope is None else [a.rope, a.local_rope]
        self._ropes = [RotaryTable(rope, max_len, weights.device) for rope in ropes]
        self._rope_of = [bool(window and a.local_rope is not None) for window in a.windows]
        self._layers = [_DecoderLayer(a, family, weights, layer, kernels) for layer in range(a.num_layers)]
        self._norm = RMSNorm(weights, "model.norm", a.hidden_size, a.rms_eps, kernels, centred=family.centred)
        weights.discard_layers(a.num_layers, a.extra_layers)
        if a.tied_head:
            weights.discard("lm_head.weight")
            self._head = kernels.pack_head(self._embedding if quantised is None else quantised)
        else:
            self._head = kernels.pack_head(weights.take_product("lm_head.weight", a.vocab_size, a.hidden_size))

    def forward(self, batch: StepBatch, cache: KVCache, written: LayerWritten | None = None) -> torch.Tensor:
        """Logits [R, V] in float32 of the batch's ``logit_rows``.

        ``written`` is called with each layer's number once its keys and values are in the cache.
        """
        kept = StepCache(batch, cache, self._kernels, self._shape, written)
        angles = [rope.rows(batch.positions) for rope in self._ropes]
        x = self._kernels.widen(self._embedding.index_select(0, batch.token_ids))
        if self._embedding_scale is not None:
            x = x * self._embedding_scale
        for layer, rope in zip(self._layers, self._rope_of, strict=True):
            x = layer(x, angles[rope], kept)
        wanted = self._norm(x.index_select(0, batch.logit_rows))
        logits = self._kernels.product(wanted, self._head, None).float()
        return soft_capped(logits, self._logit_softcap) if self._logit_softcap else logits


class _DecoderLayer:
    def __init__(
        self, architecture: ModelArchitecture, family: Family, weights: ModelWeights, layer: int, kernels: Kernels
    ) -> None:
        a, name = architecture, f"model.layers.{layer}"
        norm = partial(RMSNorm, weights, size=a.hidden_size, eps=a.rms_eps, kernels=kernels, centred=family.centred)
        norms = _NORMS[family.norms]
        self._before_attention, self._after_attention, self._before_mlp, self._after_mlp = (
            norm(f"{name}.{part}") if part else _unchanged for part in norms
        )
        self._attention: _SelfAttention | LatentAttention
        if a.latent is not None:
            self._attention = LatentAttention(a, a.latent, weights, layer, f"{name}.self_attn", kernels)
        else:
            self._attention = _SelfAttention(a, family, weights, layer, f"{name}.self_attn", kernels)
        self._mlp: GatedMLP | SparseMLP
        if family.experts is not None and a.experts is not None and a.experts.sparse[layer]:
            self._mlp = SparseMLP(weights, name, a, a.experts, family.experts, kernels)
        else:
            parts = ("gate_up_proj",) if family.fused else ("gate_proj", "up_proj")
            names = tuple(f"{name}.mlp.{part}" for part in parts)
            self._mlp = GatedMLP(weights, names, f"{name}.mlp.down_proj", a, kernels)

    def __call__(self, x: torch.Tensor, angles: Angles, cache: StepCache) -> torch.Tensor:
        x = x + self._after_attention(self._attention(self._before_attention(x), angles, cache))
        return x + self._after_mlp(self._mlp(self._before_mlp(x)))


_NORMS = {
    "before": ("input_layernorm", "", "post_attention_layernorm", ""),
    "after": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""Of `families.Norms`: the norms before and after attention, before and after the MLP."""


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


class _SelfAttention:
    def __init__(
        self,
        architecture: ModelArchitecture,
        family: Family,
        weights: ModelWeights,
        layer: int,
        name: str,
        kernels: Kernels,
    ) -> None:
        a = architecture
        self._layer = layer
        self._rotate = kernels.rotate
        self._head_dim = a.head_dim
        self._sizes = (a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.head_dim)
        parts = ("qkv_proj",) if family.fused else ("q_proj", "k_proj", "v_proj")
        sizes = (sum(self._sizes),) if family.fused else self._sizes
        names = tuple(f"{name}.{part}" for part in parts)
        self._qkv = Linear(weights, names, a.hidden_size, sizes, a.qkv_bias, kernels)
        self._output = Linear(weights, (f"{name}.o_proj",), self._sizes[0], (a.hidden_size,), a.output_bias, kernels)
        self._whole = family.qk_norm == "whole"
        self._q_norm: Callable[[torch.Tensor], torch.Tensor] = _unchanged
        self._k_norm: Callable[[torch.Tensor], torch.Tensor] = _unchanged
        if family.qk_norm != "none":
            widths = self._sizes[:2] if self._whole else (a.head_dim, a.head_dim)
            self._q_norm, self._k_norm = (
                RMSNorm(weights, f"{name}.{part}_norm", width, a.rms_eps, kernels, centred=family.centred)
                for part, width in zip("qk", widths, strict=True)
            )

    def __call__(self, x: torch.Tensor, angles: Angles, cache: StepCache) -> torch.Tensor:
        q, k, v = self._qkv(x).split(self._sizes, dim=-1)
        if self._whole:
            q, k = self._q_norm(q), self._k_norm(k)
        q, k, v = (part.unflatten(-1, (-1, self._head_dim)) for part in (q, k, v))
        if not self._whole:
            q, k = self._q_norm(q), self._k_norm(k)
        return self._output(cache.attend(self._layer, self._rotate(q, *angles), self._rotate(k, *angles), v))
