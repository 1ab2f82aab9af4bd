"""What a model looks like: the numbers that shape its layers, read from a Hugging Face ``config.json``.

Knows families only by name (`FAMILIES`); the code that computes them is in `engine/models/`. GGUF
metadata is read into the same dataclass by `engine/gguf_config.py`. This module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of decoder and the names it goes by.

    ``qkv_bias``: its query, key and value projections have a bias though its config does not say so.
    ``permuted``: its GGUF files hold query and key rows in llama.cpp's interleaved order.
    """

    name: str
    architectures: tuple[str, ...]
    gguf_names: tuple[str, ...]
    qkv_bias: bool = False
    permuted: bool = False


FAMILIES: tuple[Family, ...] = (
    Family("llama", ("LlamaForCausalLM", "MistralForCausalLM"), ("llama",), permuted=True),
    Family("qwen2", ("Qwen2ForCausalLM",), ("qwen2",), qkv_bias=True),
)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched; which fields count depends on ``kind``.

    ``kind``: none, linear, dynamic (nothing changes within the original context, which is all that is
    served), llama3, yarn, or factors (GGUF: each frequency divided by its own factor).
    """

    kind: str = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """A decoder-only transformer in numbers. ``context_limit`` is in tokens; ``dtype`` is how the
    checkpoint stores its weights. ``end_token_ids`` end an answer, in ascending order.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    context_limit: int
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    end_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


_ROPE_KINDS = ("none", "linear", "dynamic", "llama3", "yarn", "factors")
_DTYPES = ("float32", "bfloat16", "float16")


def read_hf_architecture(folder: Path) -> ModelArchitecture:
    """The architecture of a Hugging Face checkpoint folder. Raises ConfigError."""
    config = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    return parse_hf_config(config, _read_json(generation) if generation.is_file() else {})


def parse_hf_config(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelArchitecture:
    """The architecture that ``config.json`` and ``generation_config.json`` (as read) describe.

    Raises ConfigError that names the key and its value.
    """
    family = _hf_family(config)
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ConfigError(f"model config: hidden_act {act!r} is not supported, only 'silu'")
    heads = _positive(config, "num_attention_heads")
    hidden = _positive(config, "hidden_size")
    rope = _hf_rope_parameters(config)
    attention_bias = bool(config.get("attention_bias", False))
    return checked(
        ModelArchitecture(
            family=family.name,
            hidden_size=hidden,
            num_layers=_positive(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate_size=_positive(config, "intermediate_size"),
            vocab_size=_positive(config, "vocab_size"),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or 10_000.0),
            rope_scaling=_hf_rope_scaling(rope, config),
            context_limit=_hf_context_limit(config),
            tied_head=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            end_token_ids=_token_ids(generation.get("eos_token_id"), config.get("eos_token_id")),
            bos_token_id=config.get("bos_token_id"),
            dtype=_hf_dtype(config),
        )
    )


def checked(architecture: ModelArchitecture) -> ModelArchitecture:
    """``architecture`` itself, or a ConfigError that names what does not fit together."""
    a = architecture
    if a.num_heads % a.num_kv_heads:
        raise ConfigError(f"model config: {a.num_heads} heads cannot share {a.num_kv_heads} key/value heads evenly")
    if a.head_dim % 2:
        raise ConfigError(f"model config: head_dim must be even for rotary embedding, it is {a.head_dim}")
    scaling = a.rope_scaling
    if scaling.kind not in _ROPE_KINDS:
        raise ConfigError(f"model config: rope scaling {scaling.kind!r} is not supported, only {_listed(_ROPE_KINDS)}")
    if scaling.kind in ("llama3", "yarn") and scaling.original_context < 1:
        raise ConfigError(f"model config: rope scaling {scaling.kind} needs original_max_position_embeddings")
    if scaling.kind == "factors" and len(scaling.factors) != a.head_dim // 2:
        found, needed = len(scaling.factors), a.head_dim // 2
        raise ConfigError(f"model config: rope scaling has {found} factors, head_dim {a.head_dim} needs {needed}")
    if a.dtype not in _DTYPES:
        raise ConfigError(f"model config: dtype {a.dtype!r} is not supported, only {_listed(_DTYPES)}")
    return a


def family_of(name: str) -> Family:
    """The family called ``name``. Raises ConfigError."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ConfigError(f"model family {name!r} is not supported, only {_listed(f.name for f in FAMILIES)}")


def _hf_family(config: Mapping[str, Any]) -> Family:
    name = (config.get("architectures") or [config.get("model_type")])[0]
    for family in FAMILIES:
        if name in family.architectures or name == family.name:
            return family
    known = _listed(name for family in FAMILIES for name in family.architectures)
    raise ConfigError(f"model architecture {name!r} is not supported, only {known}")


def _hf_rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters from their newer place (``rope_parameters``) or the older two, as one dict."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta"))
    if float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError("model config: partial_rotary_factor other than 1.0 is not supported")
    return rope


def _hf_rope_scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "default":
        return RopeScaling()
    context = _positive(config, "max_position_embeddings")
    original = int(
        config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or context
    )
    return RopeScaling(
        kind=kind,
        factor=float(rope.get("factor") or context / original),
        original_context=original,
        low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=_optional_float(rope.get("attention_factor")),
        mscale=_optional_float(rope.get("mscale")),
        mscale_all_dim=_optional_float(rope.get("mscale_all_dim")),
        truncate=bool(rope.get("truncate", True)),
    )


def _hf_context_limit(config: Mapping[str, Any]) -> int:
    limit = _positive(config, "max_position_embeddings")
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        # Within the window, attention over a window and over everything are the same.
        return min(limit, int(window))
    return limit


def _hf_dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def _token_ids(*values: Any) -> tuple[int, ...]:
    """All ids in ``values``, each None, a number or a list of numbers, in ascending order."""
    ids: list[int] = []
    for value in values:
        if value is not None:
            ids.extend(value if isinstance(value, list) else [value])
    return tuple(sorted(dict.fromkeys(int(token) for token in ids)))


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"model config: {key} must be a positive number, it is {value!r}")
    return value


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _listed(names: Any) -> str:
    return ", ".join(names)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a mapping, it holds a {type(loaded).__name__}")
    return loaded
