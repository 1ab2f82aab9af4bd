"""Checkpoints on disk: Hugging Face folders and GGUF files, what is missing or foreign, fingerprints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from common.errors import BatonError, ConfigError, EngineError
from engine.checkpoint import find_checkpoint, read_architecture, weights_fingerprint
from engine.gguf_weights import _PER_LAYER, _WHOLE, GGUFTensors
from engine.hf_config import parse_hf_config
from engine.rope import rotary_frequencies
from tests.engine.model_driver import Driver, load
from tests.tiny_model import build_tiny_llama

TOKENS = list(range(3, 90, 2))
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama.cpp's converter, row by row."""
    size = len(values) // heads
    rows = [h * size + half * size // 2 + i for h in range(heads) for i in range(size // 2) for half in (0, 1)]
    return values[rows]


def write_gguf(folder: Path, path: Path, **changes: Any) -> Path:
    """The checkpoint in ``folder`` as a GGUF file: float32, the MLP quantised when asked for."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, changes.get("arch", "llama"))
    writer.add_context_length(512)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_eos_token_id(257)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.numpy()
        if ".q_proj." in name:
            values = interleave(values, config["num_attention_heads"])
        if ".k_proj." in name:
            values = interleave(values, config["num_key_value_heads"])
        if changes.get("quantized") and "mlp" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
    if (factors := changes.get("factors")) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    for theirs, ours in _WHOLE.items():
        if name == ours:
            return theirs
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{ {ours: theirs for theirs, ours in _PER_LAYER.items()}[part] }.{kind}"


def logits(path: Path) -> torch.Tensor:
    driver = Driver(load(path))
    return driver.run([driver.step("it", TOKENS, 0)])[0]


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": False, "attention_bias": True}])
def test_gguf_is_the_same_model(overrides: dict[str, Any], tmp_path: Path) -> None:
    folder = build_tiny_llama(tmp_path / "hf", **overrides)
    path = write_gguf(folder, tmp_path / "tiny.gguf")
    assert logits(path).equal(logits(folder))
    assert logits(tmp_path).equal(logits(folder))  # a folder with one GGUF file


def test_gguf_rope_factors(tmp_path: Path) -> None:
    folder = build_tiny_llama(tmp_path / "hf", rope_parameters=LLAMA3)
    architecture = read_architecture(find_checkpoint(folder))
    plain = 1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / rotary_frequencies(architecture.rope, 512)[0]).numpy()
    path = write_gguf(folder, tmp_path / "tiny.gguf", factors=factors)
    torch.testing.assert_close(logits(path), logits(folder), atol=1e-4, rtol=1e-4)


def test_gguf_quantised_tensors(tmp_path: Path) -> None:
    folder = build_tiny_llama(tmp_path / "hf")
    checkpoint = find_checkpoint(write_gguf(folder, tmp_path / "tiny.gguf", quantized=True))
    source = GGUFTensors(checkpoint.gguf, read_architecture(checkpoint))
    name = "model.layers.1.mlp.down_proj.weight"
    original = load_file(folder / "model.safetensors")[name].numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    assert np.array_equal(source.read(name).numpy(), dequantize(quantize(original, kind), kind))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("model.norm.weight"), "tensor model.norm.weight is missing"),
        (lambda t: t.update({"extra.weight": torch.ones(1)}), "1 tensors belong to no layer .*: extra.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"shape \[3\], the config asks for \[64\]"),
    ],
)
def test_foreign_weights_are_refused(change: Any, text: str, tmp_path: Path) -> None:
    folder = build_tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(EngineError, match=text):
        load(folder)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, "needs config.json or one .gguf file, has 0"),
        ({"config.json": "{}"}, "model.safetensors missing"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, "only safetensors are read"),
        ({"a.gguf": "nonsense"}, "is not a GGUF file|cannot read"),
        ({"config.json": "[", "model.safetensors": ""}, "is not JSON"),
        ({"config.json": '{"architectures": ["T5ForConditionalGeneration"]}', "model.safetensors": ""},
         "'T5ForConditionalGeneration' is not supported, only LlamaForCausalLM, MistralForCausalLM, "),
    ],
)  # fmt: skip
def test_what_is_no_model_says_why(files: dict[str, str], text: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(BatonError, match=text):
        read_architecture(find_checkpoint(tmp_path))


def test_unknown_gguf_architecture(tmp_path: Path) -> None:
    path = write_gguf(build_tiny_llama(tmp_path / "hf"), tmp_path / "x.gguf", arch="mamba")
    with pytest.raises(ConfigError, match="'mamba' is not supported, only llama, qwen2, qwen3"):
        read_architecture(find_checkpoint(path))


def test_config_details(tmp_path: Path) -> None:
    config = json.loads((build_tiny_llama(tmp_path) / "config.json").read_text())
    both = parse_hf_config(config | {"eos_token_id": 9}, {"eos_token_id": [300, 2]})
    assert both.end_token_ids == (2, 9, 300)
    for changes, text in (
        ({"rope_parameters": {"rope_type": "stretched"}}, "rope scaling 'stretched' is not supported, only none, "),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0]}},
            "rope scaling has 1 factors, 16 turned components need 8",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only silu, swish, gelu_pytorch_tanh"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types 'linear_attention' is not supported"),
        ({"layer_types": ["full_attention"]}, "1 layers have a kind of attention, there are 2"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window must be a positive number, it is None"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config 'gptq' is not supported"),
        ({"partial_rotary_factor": 0.2}, "turns an even number of a head's 16 components, not 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive number, it is 0"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
    ):
        with pytest.raises(ConfigError, match=text):
            parse_hf_config(config | changes, {})


def windows(family: str, **settings: Any) -> tuple[int, ...]:
    config = {
        "architectures": [f"{family}ForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6,
        "intermediate_size": 96, "vocab_size": 512, "max_position_embeddings": 512, "sliding_window": 128,
    }  # fmt: skip
    return parse_hf_config(config | settings, {}).windows


def test_which_layers_have_a_window() -> None:
    """Of configs as the hub has them; newer ones list their layers."""
    assert windows("Llama") == (0,) * 6
    assert windows("Mistral") == (128,) * 6
    assert windows("Mistral", sliding_window=None) == (0,) * 6
    assert windows("Qwen2", max_window_layers=4) == (0,) * 6
    assert windows("Qwen2", max_window_layers=4, use_sliding_window=True) == (0, 0, 0, 0, 128, 128)
    assert windows("Gemma2") == (128, 0, 128, 0, 128, 0)
    assert windows("Gemma3", sliding_window_pattern=3) == (128, 128, 0, 128, 128, 0)
    assert windows("Gemma3") == (128, 128, 128, 128, 128, 0)
    kinds = ["full_attention"] * 5 + ["sliding_attention"]
    assert windows("Gemma3", layer_types=kinds) == (0, 0, 0, 0, 0, 128)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "a token cannot go to 5 of 4 experts"),
        ({"num_local_experts": 4}, "num_experts_per_tok must be a positive number, it is None"),
    ],
)
def test_experts_that_do_not_fit(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        windows("Mixtral", **settings)


def test_layers_for_guessing_ahead_are_left_out(tmp_path: Path) -> None:
    folder = build_tiny_llama(tmp_path)
    before = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(EngineError, match="1 tensors belong to no layer"):
        load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert logits(folder).equal(before)


def test_fingerprint_names_the_weights(tmp_path: Path) -> None:
    one = build_tiny_llama(tmp_path / "one")
    copy = Path(shutil.copytree(one, tmp_path / "copy"))
    other = build_tiny_llama(tmp_path / "other", seed=1)
    prints = [weights_fingerprint(folder, "float32") for folder in (one, copy, other)]
    assert prints[0] == prints[1]
    assert prints[0] != prints[2]
    assert weights_fingerprint(one, "bfloat16") != prints[0]
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert weights_fingerprint(copy, "float32") != prints[0]
