"""Reads a Hugging Face ``config.json`` into a `ModelArchitecture`. Knows nothing of torch, nor of transformers."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from engine.families import FAMILIES, FOREIGN, FOREIGN_ENDINGS, Family
from engine.model_config import ROPE_KINDS, Experts, Latent, ModelArchitecture, RopeScaling, Rotary, checked, listed

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_OTHER_NAMES = {
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length"),
}
"""What older configs call the same."""

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_KINDS_OF_ATTENTION = ("full_attention", "sliding_attention")


def read_hf_architecture(folder: Path) -> ModelArchitecture:
    """The architecture of a Hugging Face checkpoint folder. Raises ConfigError."""
    config = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    return parse_hf_config(config, _read_json(generation) if generation.is_file() else {})


def parse_hf_config(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelArchitecture:
    """The architecture that ``config.json`` and ``generation_config.json`` (as read) describe.

    Raises ConfigError that names the key and its value.
    """
    family = _family(config)
    _check_unquantised(config)
    if family is FOREIGN:
        return _foreign(config, generation)
    heads = _positive(config, "num_attention_heads")
    hidden = _positive(config, "hidden_size")
    num_layers = _positive(config, "num_hidden_layers")
    latent = _latent(config) if family.latent else None
    if latent is not None:
        head_dim = latent.rank + latent.rope_dim
        rope, local_rope = _ropes(config, latent.rope_dim)
        scale = (latent.plain_dim + latent.rope_dim) ** -0.5 * _latent_scale(rope.scaling)
    else:
        head_dim = int(config.get("head_dim") or hidden // heads)
        rope, local_rope = _ropes(config, head_dim)
        scale = float(config.get("query_pre_attn_scalar") or head_dim) ** -0.5
    attention_bias = bool(config.get("attention_bias", False))
    return checked(
        ModelArchitecture(
            family=family.name,
            hidden_size=hidden,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=1 if latent is not None else int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            intermediate_size=_positive(config, "intermediate_size"),
            vocab_size=_positive(config, "vocab_size"),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=rope,
            local_rope=local_rope,
            context_limit=_positive(config, "max_position_embeddings"),
            tied_head=bool(config.get("tie_word_embeddings", family.scaled_embedding)),
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            end_token_ids=_token_ids(generation.get("eos_token_id"), config.get("eos_token_id")),
            bos_token_id=config.get("bos_token_id"),
            dtype=_dtype(config),
            windows=_windows(config, family, num_layers),
            activation=_activation(config),
            attention_scale=scale,
            attention_softcap=float(config.get("attn_logit_softcapping") or 0.0),
            logit_softcap=float(config.get("final_logit_softcapping") or 0.0),
            experts=_experts(config, family, num_layers),
            latent=latent,
            extra_layers=int(config.get("num_nextn_predict_layers") or 0),
        )
    )


def _family(config: Mapping[str, Any]) -> Family:
    name = (config.get("architectures") or [config.get("model_type")])[0]
    for family in FAMILIES:
        if name in family.architectures or name == family.name:
            return family
    known = listed(name for family in FAMILIES for name in family.architectures)
    if not str(name).endswith(FOREIGN_ENDINGS):
        raise ConfigError(f"model architecture {name!r} is not supported, only {known}")
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"model architecture {name!r} is not supported without the package transformers (pip install "
            f"'baton[transformers]'), only {known}"
        )
    return FOREIGN


def _foreign(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelArchitecture:
    """Of a model that transformers computes: what serving has to know. What its attention is like is found out when
    it is loaded.
    """
    known = dict(config)
    for key, others in _OTHER_NAMES.items():
        if known.get(key) is None:
            known[key] = next((config[other] for other in others if config.get(other) is not None), None)
    heads, hidden = _positive(known, "num_attention_heads"), _positive(known, "hidden_size")
    num_layers = _positive(known, "num_hidden_layers")
    head_dim = int(known.get("head_dim") or hidden // heads)
    return ModelArchitecture(
        family=FOREIGN.name,
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=int(known.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate_size=0,
        vocab_size=_positive(known, "vocab_size"),
        rms_eps=0.0,
        rope=Rotary(0.0, head_dim),
        local_rope=None,
        context_limit=_positive(known, "max_position_embeddings"),
        tied_head=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        end_token_ids=_token_ids(generation.get("eos_token_id"), config.get("eos_token_id")),
        bos_token_id=config.get("bos_token_id"),
        dtype=_dtype(config),
        windows=(0,) * num_layers,
    )


def _dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def _check_unquantised(config: Mapping[str, Any]) -> None:
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise ConfigError(f"model config: quantization_config {method!r} is not supported, only unquantised weights")


def _latent(config: Mapping[str, Any]) -> Latent:
    return Latent(
        rank=_positive(config, "kv_lora_rank"),
        query_rank=int(config.get("q_lora_rank") or 0),
        plain_dim=_positive(config, "qk_nope_head_dim"),
        rope_dim=_positive(config, "qk_rope_head_dim"),
        value_dim=_positive(config, "v_head_dim"),
        interleaved=bool(config.get("rope_interleave", True)),
    )


def _latent_scale(scaling: RopeScaling) -> float:
    """What YaRN does to the scale of attention in DeepSeek's models."""
    if scaling.kind == "none" or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2


def _activation(config: Mapping[str, Any]) -> str:
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    name = config.get(key) or "silu"
    if name not in _ACTIVATIONS:
        raise ConfigError(f"model config: {key} {name!r} is not supported, only {listed(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    """How many positions a row sees in each layer, 0 for all before it."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None:
        unknown = [kind for kind in kinds if kind not in _KINDS_OF_ATTENTION]
        if unknown:
            raise ConfigError(
                f"model config: layer_types {unknown[0]!r} is not supported, only {listed(_KINDS_OF_ATTENTION)}"
            )
        sliding = [kind == "sliding_attention" for kind in kinds]
        if any(sliding):
            window = _positive(config, "sliding_window")
    else:
        # Where a family's models may have windows or not, their config says so.
        if not config.get("use_sliding_window", family.windowed != "upper"):
            window = None
        upper, pattern = int(config.get("max_window_layers") or 0), int(config.get("sliding_window_pattern") or 6)
        rule = {
            "none": lambda layer: False,
            "all": lambda layer: True,
            "upper": lambda layer: layer >= upper,
            "alternate": lambda layer: layer % 2 == 0,
            "pattern": lambda layer: (layer + 1) % pattern != 0,
        }[family.windowed]
        sliding = [rule(layer) for layer in range(num_layers)]
    return tuple(int(window) if window and slides else 0 for slides in sliding)


def _ropes(config: Mapping[str, Any], head_dim: int) -> tuple[Rotary, Rotary | None]:
    """The rotary embedding, and that of layers with a window where it is another one."""
    # Their newer place, or the older one.
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(kind in given for kind in _KINDS_OF_ATTENTION):
        rope, local = (_rope(given.get(kind) or {}, config, head_dim) for kind in _KINDS_OF_ATTENTION)
        return rope, local if local != rope else None
    local_theta = config.get("rope_local_base_freq")
    return (
        _rope(given, config, head_dim),
        _rope({"rope_theta": local_theta}, config, head_dim) if local_theta else None,
    )


def _rope(rope: Mapping[str, Any], config: Mapping[str, Any], head_dim: int) -> Rotary:
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    share = float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    return Rotary(theta, int(head_dim * share), _scaling(rope, config))


def _scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "default":
        return RopeScaling()
    kind = {"su": "longrope"}.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise ConfigError(f"model config: rope scaling {kind!r} is not supported, only {listed(ROPE_KINDS)}")
    context = _positive(config, "max_position_embeddings")
    original = int(
        config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or context
    )
    factor = float(rope.get("factor") or context / original)
    attention_factor = _optional_float(rope.get("attention_factor"))
    if kind == "longrope" and attention_factor is None:
        # LongRoPE, arXiv 2402.13753, section 4.
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_context=original,
        low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=attention_factor,
        mscale=_optional_float(rope.get("mscale")),
        mscale_all_dim=_optional_float(rope.get("mscale_all_dim")),
        truncate=bool(rope.get("truncate", True)),
        factors=tuple(map(float, rope.get("short_factor") or ())),
        long_factors=tuple(map(float, rope.get("long_factor") or ())),
    )


def _experts(config: Mapping[str, Any], family: Family, num_layers: int) -> Experts | None:
    if family.experts is None:
        return None
    count = next((key for key in _EXPERT_COUNTS if key in config), _EXPERT_COUNTS[0])
    inner_key = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    inner = _positive(config, inner_key)
    dense = {*(config.get("mlp_only_layers") or ()), *range(int(config.get("first_k_dense_replace") or 0))}
    step = int(config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1)
    phase = 0 if "moe_layer_freq" in config else 1
    is_v3 = family.name == "deepseek_v3"
    grouped = is_v3 or config.get("topk_method") == "group_limited_greedy"
    return Experts(
        count=_positive(config, count),
        top_k=_positive(config, "num_experts_per_tok"),
        inner_size=inner,
        normalised=bool(config.get("norm_topk_prob", family.name in ("mixtral", "deepseek_v3"))),
        sparse=tuple(layer not in dense and (layer + phase) % step == 0 for layer in range(num_layers)),
        scoring="sigmoid" if is_v3 else "softmax",
        scale=float(config.get("routed_scaling_factor") or 1.0),
        groups=int(config.get("n_group") or 1) if grouped else 1,
        top_groups=int(config.get("topk_group") or 1) if grouped else 1,
        corrected=is_v3,
        shared_size=inner * int(config.get("n_shared_experts") or 0),
    )


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
