"""The tensors of a GGUF file under Hugging Face's names and in Hugging Face's row order.

Quantised tensors are dequantised to float32 when they are read. Knows nothing of layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from common.errors import EngineError
from engine.families import family_of
from engine.model_config import ModelArchitecture

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_READ_ELSEWHERE = ("rope_freqs.weight",)


class GGUFTensors:
    """A GGUF file as a source of tensors; a tensor is dequantised when it is asked for."""

    def __init__(self, reader: gguf.GGUFReader, architecture: ModelArchitecture) -> None:
        self._tensors = {
            _hf_name(tensor.name): tensor for tensor in reader.tensors if tensor.name not in _READ_ELSEWHERE
        }
        self.names: Sequence[str] = list(self._tensors)
        self._permuted: dict[str, int] = {}
        if family_of(architecture.family).permuted:
            self._permuted = {"q_proj": architecture.num_heads, "k_proj": architecture.num_kv_heads}

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, KeyError) as error:
            kind = tensor.tensor_type.name
            raise EngineError(f"weights: {name} is quantised as {kind}, which cannot be read") from error
        for projection, heads in self._permuted.items():
            if f".{projection}." in name:
                values = _uninterleave(values, heads)
        # A copy: what the file's mapping backs is read-only.
        return torch.from_numpy(np.array(values, dtype=np.float32))


def _hf_name(name: str) -> str:
    """Hugging Face's name for a GGUF tensor; an unknown name stays as it is (and is refused later)."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _PER_LAYER:
        return f"model.layers.{match[1]}.{_PER_LAYER[match[2]]}.{match[3]}"
    return name


def _uninterleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the row order of llama.cpp's converter: there the two halves of each head, which rotary
    embedding turns together, lie row by row next to each other; here one half follows the other.
    """
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
