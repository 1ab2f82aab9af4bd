"""The tensors of a GGUF file under Hugging Face's names and in Hugging Face's row order.

Quantised tensors are dequantised to float32 when they are read. Knows nothing of layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from common.errors import EngineError
from engine.families import family_of
from engine.model_config import ModelArchitecture
from engine.quantised import GROUP, QuantisedWeight

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

    def read_quantised(self, name: str) -> QuantisedWeight | None:
        tensor = self._tensors[name]
        reader = _STORED.get(tensor.tensor_type.name)
        if reader is None or len(tensor.shape) != 2:
            return None
        inputs, outputs = (int(size) for size in tensor.shape)
        weight = reader(np.array(tensor.data).reshape(outputs, inputs // GROUP, -1), inputs)
        for projection, heads in self._permuted.items():
            if f".{projection}." in name:
                weight = weight.with_rows(partial(_uninterleave_rows, heads=heads))
        return weight


def _read_q8_0(blocks: np.ndarray, inputs: int) -> QuantisedWeight:
    """``blocks`` [out, groups, 34]: scale, 32 signed codes."""
    codes = (blocks[..., 2:].view(np.int8).astype(np.int16) + 128).astype(np.uint8)
    return QuantisedWeight(_flat(codes), _halves(blocks, 0), None, inputs, 8)


def _read_q4_0(blocks: np.ndarray, inputs: int) -> QuantisedWeight:
    """``blocks`` [out, groups, 18]: scale, 32 codes around 8."""
    scales = _halves(blocks, 0)
    return QuantisedWeight(_nibbles(blocks[..., 2:]), scales, scales * -8, inputs, 4)


def _read_q4_1(blocks: np.ndarray, inputs: int) -> QuantisedWeight:
    """``blocks`` [out, groups, 20]: scale, minimum, 32 codes."""
    return QuantisedWeight(_nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2), inputs, 4)


def _halves(blocks: np.ndarray, at: int) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0])


def _nibbles(packed: np.ndarray) -> torch.Tensor:
    """uint8 [out, groups, 16] → [out, groups * 32]: first the low halves of all bytes, then the high ones."""
    return _flat(np.concatenate([packed & 15, packed >> 4], axis=-1))


def _flat(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes.reshape(len(codes), -1)))


_STORED = {"Q8_0": _read_q8_0, "Q4_0": _read_q4_0, "Q4_1": _read_q4_1}
"""Types of GGUF whose blocks are `quantised.GROUP` weights of one scale (ggml's block_q8_0, block_q4_0, block_q4_1)."""


def _hf_name(name: str) -> str:
    """Hugging Face's name for a GGUF tensor; an unknown name stays as it is (and is refused later)."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _PER_LAYER:
        return f"model.layers.{match[1]}.{_PER_LAYER[match[2]]}.{match[3]}"
    return name


def _uninterleave_rows(rows: torch.Tensor, heads: int) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(_uninterleave(rows.numpy(), heads)))


def _uninterleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the row order of llama.cpp's converter: there the two halves of each head, which rotary
    embedding turns together, lie row by row next to each other; here one half follows the other.
    """
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
