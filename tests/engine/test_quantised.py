"""Quantised weights: what they stand for, products with them, and what they do to a real model."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from common.config import EngineConfig
from common.errors import ConfigError
from common.model_store import resolve
from engine.batch import build_batch
from engine.gguf_weights import _STORED
from engine.kernels import Kernels
from engine.loading import load_model
from engine.native import NativeError, native_kernels
from engine.plan import SequenceStep
from engine.quantised import GROUP, QuantisedWeight, rounded, stacked
from router.tokenizer import Tokenizer
from tests.tiny_model import build_tiny_llama


def kernels(threads: int, quantization: str) -> Kernels:
    try:
        return native_kernels(threads, quantization)
    except NativeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("inputs", [32, 64, 40, 7])
@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_is_within_half_a_step(bits: int, inputs: int) -> None:
    weight = torch.randn(19, inputs) * torch.tensor([1e-3, 1.0, 30.0] * 6 + [0.0])[:, None]
    made = rounded(weight, bits)
    assert made.codes.max() <= (1 << bits) - 1
    steps = made.scales.float().repeat_interleave(GROUP, dim=1)[:, :inputs]
    # Scales and minima are rounded to half precision, which moves codes by a little.
    assert ((made.expanded() - weight).abs() <= 0.51 * steps + 2e-3 * weight.abs()).all()
    assert (made.expanded()[-1] == 0).all()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_gguf_blocks_stand_for_what_gguf_says(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(1).standard_normal((24, 96)).astype(np.float32)
    stored = quantize(values, kind)
    weight = _STORED[name](stored.reshape(24, 3, -1), 96)
    assert np.allclose(weight.expanded().numpy(), dequantize(stored, kind), rtol=1e-6, atol=1e-7)


def test_stacked_stays_quantised_only_where_all_are_alike() -> None:
    a, b, c = rounded(torch.randn(3, 40), 8), rounded(torch.randn(2, 40), 8), rounded(torch.randn(2, 40), 4)
    both = stacked([a, b])
    assert isinstance(both, QuantisedWeight)
    assert both.expanded().equal(torch.cat([a.expanded(), b.expanded()]))
    assert stacked([a, c]).equal(torch.cat([a.expanded(), c.expanded()]))  # type: ignore[union-attr]
    plain = torch.randn(1, 40)
    assert stacked([plain, a]).equal(torch.cat([plain, a.expanded()]))  # type: ignore[union-attr]


def naive_product(x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    """In float64, with activations rounded to 8 bits, a scale for each group of a row."""
    groups = weight.scales.shape[1]
    grouped = torch.nn.functional.pad(x, (0, groups * GROUP - x.shape[1])).unflatten(-1, (groups, GROUP))
    largest = grouped.abs().amax(-1, keepdim=True)
    scales = largest / 127
    factors = torch.full_like(largest, 127) / largest  # 127 / largest would be rounded twice
    codes = torch.where(scales > 0, grouped * factors, 0.0).round()
    kept = (codes.double() * scales.double()).flatten(1)[:, : x.shape[1]]
    return kept @ weight.expanded().double().T


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (31, 33), (32, 576), (70, 1536), (100, 45)])
def test_products(outputs: int, inputs: int, bits: int) -> None:
    one, several = kernels(1, "int8"), kernels(3, "int8")
    torch.manual_seed(outputs)
    weight, bias = rounded(torch.randn(outputs, inputs), bits), torch.randn(outputs)
    packed = one.pack(weight)
    for rows in (1, 5, 6, 7, 96, 101):
        x = torch.randn(rows, inputs) * torch.rand(rows, 1) * 10
        x[0] = 0
        out = one.product(x, packed, bias)
        torch.testing.assert_close(out.double(), naive_product(x, weight) + bias, atol=2e-4, rtol=1e-4)
        assert several.product(x, several.pack(weight), bias).equal(out)
        assert one.product(x[-1:].clone(), packed, bias)[0].equal(out[-1])


def perplexity(quantization: str) -> float:
    """Of the small model on the licence of this repository, 2,048 tokens of it."""
    path = Path(resolve("smollm2-135m"))
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    tokens = list(Tokenizer.load(path).encode(text, False))[:2048]
    config = EngineConfig(device="cpu", quantization=quantization, pool_bytes=200 << 20)  # type: ignore[arg-type]
    loaded = load_model(path, config, "float32", 2, None, None, lambda text: None)
    lost = 0.0
    for start in range(0, len(tokens), 512):
        part, targets = tokens[start : start + 512], tokens[start + 1 : start + 513]
        step = SequenceStep("it", part[: len(targets)], start, list(range(128)), targets=targets)
        with torch.inference_mode():
            logits = loaded.model.forward(build_batch([(0, step)], 16, loaded.cache.device), loaded.cache)
        lost -= logits.log_softmax(-1).gather(1, torch.tensor(targets)[:, None]).sum().item()
    return math.exp(lost / (len(tokens) - 1))


def test_perplexity_of_the_real_model() -> None:
    kernels(1, "int8")
    exact = perplexity("none")
    for quantization, most in (("int8", 0.01), ("int4", 0.03), ("stored", 0.005)):
        found = perplexity(quantization)
        assert abs(found / exact - 1) < most, (quantization, found, exact)


def test_torch_kernels_do_not_quantise(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", kernels="torch", quantization="int8", pool_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"engine.quantization int8 needs native kernels"):
        load_model(build_tiny_llama(tmp_path), config, "auto", 1, None, None, lambda text: None)
