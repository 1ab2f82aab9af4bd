"""The Llama family: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

Llama, Mistral (within its window) and Qwen2 (biases on queries, keys and values) are this module with
other numbers. It knows the batch as rows, and where keys and values are kept, but no sequence.

Legend: N rows, R rows whose logits are wanted, E hidden size, V vocabulary, Hq and H query and
key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.attention import Attention
from engine.batch import StepBatch
from engine.kv_cache import KVCache
from engine.layers import GatedMLP, Kernels, Linear, RMSNorm
from engine.model_config import ModelArchitecture
from engine.rope import RotaryTable, rotate
from engine.weights import ModelWeights

LayerWritten = Callable[[int], None]


class LlamaModel:
    """Tokens in, logits out; keys and values go into the cache on the way."""

    def __init__(self, architecture: ModelArchitecture, weights: ModelWeights, kernels: Kernels, max_len: int) -> None:
        a = architecture
        self._kernels = kernels
        self._num_kv_heads = a.num_kv_heads
        self._embedding = weights.take("model.embed_tokens.weight", a.vocab_size, a.hidden_size)
        self._rope = RotaryTable(a, max_len, weights.device)
        self._layers = [_DecoderLayer(a, weights, f"model.layers.{i}", kernels) for i in range(a.num_layers)]
        self._norm = RMSNorm(weights, "model.norm", a.hidden_size, a.rms_eps)
        if a.tied_head:
            weights.discard("lm_head.weight")
            self._head = self._embedding
        else:
            self._head = weights.take("lm_head.weight", a.vocab_size, a.hidden_size)

    def forward(self, batch: StepBatch, cache: KVCache, written: LayerWritten | None = None) -> torch.Tensor:
        """Logits [R, V] in float32 of the batch's ``logit_rows``.

        ``written`` is called with each layer's number once its keys and values are in the cache.
        """
        attention = self._kernels.attention(batch, self._num_kv_heads)
        cos, sin = self._rope.rows(batch.positions)
        x = self._embedding.index_select(0, batch.token_ids)
        for index, layer in enumerate(self._layers):
            x = layer(x, cos, sin, _LayerCache(batch, cache, attention, index, written))
        wanted = self._norm(x.index_select(0, batch.logit_rows))
        return self._kernels.product(wanted, self._head).float()

    @property
    def product_weights(self) -> list[torch.Tensor]:
        """Every matrix that rows are multiplied with, [out, in] each."""
        return [weight for layer in self._layers for weight in layer.product_weights] + [self._head]


class _LayerCache:
    """One layer's side of the cache during one step."""

    def __init__(
        self, batch: StepBatch, cache: KVCache, attention: Attention, layer: int, written: LayerWritten | None
    ) -> None:
        self._batch = batch
        self._cache = cache
        self._attention = attention
        self._layer = layer
        self._written = written

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores ``k`` and ``v`` [N, H, D], then lets ``q`` [N, Hq, D] attend; returns [N, Hq * D]."""
        self._cache.write(self._layer, self._batch, k, v)
        if self._written is not None:
            self._written(self._layer)
        return self._attention.attend(q, self._cache, self._layer)


class _DecoderLayer:
    def __init__(self, architecture: ModelArchitecture, weights: ModelWeights, name: str, kernels: Kernels) -> None:
        a = architecture
        self._head_dim = a.head_dim
        self._sizes = (a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.head_dim)
        self._input_norm = RMSNorm(weights, f"{name}.input_layernorm", a.hidden_size, a.rms_eps)
        projections = tuple(f"{name}.self_attn.{part}_proj" for part in "qkv")
        self._qkv = Linear(weights, projections, a.hidden_size, self._sizes, a.qkv_bias, kernels)
        self._output = Linear(
            weights, (f"{name}.self_attn.o_proj",), self._sizes[0], (a.hidden_size,), a.output_bias, kernels
        )
        self._mlp_norm = RMSNorm(weights, f"{name}.post_attention_layernorm", a.hidden_size, a.rms_eps)
        self._mlp = GatedMLP(weights, f"{name}.mlp", a.hidden_size, a.intermediate_size, a.mlp_bias, kernels)

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: _LayerCache) -> torch.Tensor:
        parts = self._qkv(self._input_norm(x)).split(self._sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self._head_dim)) for part in parts)
        x = x + self._output(cache.attend(rotate(q, cos, sin), rotate(k, cos, sin), v))
        return x + self._mlp(self._mlp_norm(x))

    @property
    def product_weights(self) -> list[torch.Tensor]:
        return [self._qkv.weight, self._output.weight, self._mlp.gate_up.weight, self._mlp.down.weight]
