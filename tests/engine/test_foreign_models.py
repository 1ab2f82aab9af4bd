"""Models that transformers computes on Baton's paged KV: the logits of transformers alone, and what is refused."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from engine.hf_config import parse_hf_config
from engine.models import foreign
from tests.engine.model_driver import Driver, hf_logits, load, random_tokens

COMMON = {"vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3}
USUAL = COMMON | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
OLD = COMMON | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2:LMHeadModel", OLD),
    "gpt-neox": ("GPTNeoX", USUAL),
    "starcoder2": ("Starcoder2", USUAL | {"num_key_value_heads": 2, "sliding_window": 40}),
    "stablelm": ("StableLm", USUAL | {"num_key_value_heads": 4}),
    "cohere": ("Cohere", USUAL | {"num_key_value_heads": 2, "logit_scale": 0.25}),
    "granite": ("Granite", USUAL | {"num_key_value_heads": 2, "attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "glm4": ("Glm4", USUAL | {"num_key_value_heads": 2, "head_dim": 16}),
    "smollm3": ("SmolLM3", USUAL | {"num_key_value_heads": 2}),
    "olmo3": (
        "Olmo3",
        USUAL
        | {
            "num_key_value_heads": 2,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def build(folder: Path, kind: str, settings: dict[str, Any]) -> Path:
    import transformers

    torch.manual_seed(4)
    name, _, ending = kind.partition(":")
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, name + (ending or "ForCausalLM"))(config).float()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = build(tmp_path, *MODELS[name])
    rng = random.Random(1)
    sequences = {each: random_tokens(rng, length) for each, length in (("a", 250), ("b", 90), ("c", 5))}
    seen = Driver(load(folder)).run_all(sequences, rng, longest=61)
    assert sum(map(len, seen.values())) > 8
    for each, tokens in sequences.items():
        want = hf_logits(folder, tokens)
        for position, logits in seen[each].items():
            torch.testing.assert_close(logits, want[position], atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        (
            "GptOss",
            USUAL | {"num_local_experts": 2, "num_key_value_heads": 2, "head_dim": 16},
            "its attention has s_aux",
        ),
        (
            "Bloom",
            COMMON | {"hidden_size": 64, "n_layer": 2, "n_head": 4, "seq_length": 512},
            "cannot be run by way of",
        ),
    ],
)
def test_attention_that_is_not_ours_is_refused(kind: str, settings: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        load(build(tmp_path, kind, settings))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"attention_chunk_size": 8192}, "its config has attention_chunk_size"),
        ({"layer_types": ["chunked_attention"]}, "layer 0 has chunked_attention, and asks for a window of everything"),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 8},
            "layer 0 has sliding_attention, and asks for a window of everything",
        ),
        ({"layer_types": ["full_attention"], "sliding_window": 8}, ""),
        ({"sliding_window": None}, ""),
    ],
)
def test_what_only_masks_would_hide_is_found(config: dict[str, Any], text: str) -> None:
    sees_all = foreign._LayerAttention(2, 16, 0.25, window=0, softcap=0.0)
    assert foreign._hidden_by_masks(SimpleNamespace(**config), [sees_all]) == text


def test_batch_invariance_is_not_promised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch_invariant is not possible"):
        load(build(tmp_path, *MODELS["gpt2"]), "invariant")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="'GPT2LMHeadModel' is not supported without the package transformers"):
        parse_hf_config(OLD | {"architectures": ["GPT2LMHeadModel"]}, {})
