"""Logits equal transformers' for every variant of the family, in odd chunks and mixed batches."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.model_driver import Driver, hf_logits, load, random_tokens
from tests.tiny_model import build_tiny_llama

ROPE = {"rope_theta": 10_000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied, sharded": {"tie_word_embeddings": False, "max_shard_size": "100KB"},
    "one kv head": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4},
    "wide groups": {"hidden_size": 192, "num_attention_heads": 12, "num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear": {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}},
    "llama3": {"rope_parameters": ROPE | LLAMA3},
    "yarn": {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "yarn with mscale": {
        "rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
                                   "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 16.0, "truncate": False},
    },
}  # fmt: skip


def check_against_oracle(folder: Path, kind: str) -> None:
    rng = random.Random(1)
    sequences = {name: random_tokens(rng, length) for name, length in (("a", 300), ("b", 41), ("c", 5))}
    seen = Driver(load(folder, kind)).run_all(sequences, rng, longest=61)
    for name, tokens in sequences.items():
        want = hf_logits(folder, tokens)
        assert len(seen[name]) > 1
        for position, logits in seen[name].items():
            torch.testing.assert_close(logits, want[position], atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["ordinary", "native"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, kind: str, tmp_path: Path) -> None:
    check_against_oracle(build_tiny_llama(tmp_path, **VARIANTS[variant]), kind)


def test_batch_invariant_arithmetic_equals_transformers(tmp_path: Path) -> None:
    check_against_oracle(build_tiny_llama(tmp_path), "invariant")


def test_older_config_keys_mean_the_same(tmp_path: Path) -> None:
    folder = build_tiny_llama(tmp_path, rope_parameters=ROPE | LLAMA3)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype", "float32")
    (folder / "config.json").write_text(json.dumps(config))
    check_against_oracle(folder, "ordinary")


@pytest.mark.parametrize("block_size", [1, 7, 48, 300])
@pytest.mark.parametrize("kind", ["ordinary", "invariant", "native"])
def test_any_block_size(block_size: int, kind: str, tmp_path: Path) -> None:
    folder = build_tiny_llama(tmp_path)
    rng = random.Random(2)
    sequences = {"a": random_tokens(rng, 301), "b": random_tokens(rng, 20)}
    loaded = load(folder, kind, block_size=block_size, blocks=330)
    for name, logits in Driver(loaded).run_all(sequences, rng, longest=90).items():
        position = len(sequences[name]) - 1
        torch.testing.assert_close(logits[position], hf_logits(folder, sequences[name])[-1], atol=3e-4, rtol=1e-4)
