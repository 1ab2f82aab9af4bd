"""Reads a GGUF file's metadata into a `ModelArchitecture`. Knows nothing of torch.

GGUF keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from common.errors import ConfigError
from engine.families import FAMILIES, Family
from engine.model_config import ModelArchitecture, RopeScaling, Rotary, checked


def open_gguf(path: Path) -> gguf.GGUFReader:
    """The file, mapped into memory. Raises ConfigError when it is not a GGUF file."""
    try:
        return gguf.GGUFReader(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"{path} is not a GGUF file that can be read: {error}") from error


def read_gguf_architecture(reader: gguf.GGUFReader) -> ModelArchitecture:
    """The architecture that the metadata describes. Raises ConfigError that names the key."""
    metadata = _Metadata(reader)
    name = metadata.required("general.architecture")
    family = _gguf_family(name)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads = metadata.required(f"{name}.attention.head_count")
    hidden = metadata.required(f"{name}.embedding_length")
    head_dim = metadata.get(f"{name}.attention.key_length", hidden // heads)
    num_layers = metadata.required(f"{name}.block_count")
    theta = float(metadata.get(f"{name}.rope.freq_base", 10_000.0))
    return checked(
        ModelArchitecture(
            family=family.name,
            hidden_size=hidden,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=metadata.get(f"{name}.attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=metadata.required(f"{name}.feed_forward_length"),
            vocab_size=_vocab_size(tensors),
            rms_eps=float(metadata.required(f"{name}.attention.layer_norm_rms_epsilon")),
            rope=Rotary(theta, head_dim, _rope_scaling(metadata, name, tensors)),
            local_rope=None,
            context_limit=_context_limit(metadata, name),
            tied_head="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_up.bias" in tensors,
            end_token_ids=_end_token_ids(metadata),
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            dtype=_stored_dtype(tensors),
            windows=(0,) * num_layers,
            attention_scale=head_dim**-0.5,
        )
    )


class _Metadata:
    """The key/value part of the file, as plain Python values."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"GGUF metadata: {key} is missing")
        return value


def _gguf_family(name: str) -> Family:
    for family in FAMILIES:
        if name in family.gguf_names:
            return family
    known = ", ".join(known for family in FAMILIES for known in family.gguf_names)
    raise ConfigError(f"GGUF architecture {name!r} is not supported, only {known}")


def _rope_scaling(metadata: _Metadata, name: str, tensors: dict[str, Any]) -> RopeScaling:
    factors = tensors.get("rope_freqs.weight")
    if factors is not None:
        return RopeScaling(kind="factors", factors=tuple(float(factor) for factor in factors.data.reshape(-1)))
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return RopeScaling()
    context = metadata.required(f"{name}.context_length")
    return RopeScaling(
        kind=kind,
        factor=float(metadata.required(f"{name}.rope.scaling.factor")),
        original_context=metadata.get(f"{name}.rope.scaling.original_context_length", context),
        beta_fast=float(metadata.get(f"{name}.rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(metadata.get(f"{name}.rope.scaling.yarn_beta_slow", 1.0)),
    )


def _context_limit(metadata: _Metadata, name: str) -> int:
    limit = int(metadata.required(f"{name}.context_length"))
    window = metadata.get(f"{name}.attention.sliding_window")
    # Which layers have it the file does not say; within it they are all alike.
    return min(limit, int(window)) if window else limit


def _vocab_size(tensors: dict[str, Any]) -> int:
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError("GGUF file: tensor token_embd.weight is missing")
    return int(embedding.shape[1])


def _end_token_ids(metadata: _Metadata) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(sorted({int(token) for token in ids if token is not None}))


def _stored_dtype(tensors: dict[str, Any]) -> str:
    """The dtype of the projections; quantised ones are dequantised to float16, as they were made from."""
    stored = tensors["token_embd.weight"].tensor_type.name
    return {"F32": "float32", "BF16": "bfloat16"}.get(stored, "float16")
