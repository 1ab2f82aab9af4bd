"""The native kernels alone: results against float64 and torch, bits against themselves, and where they are not to be
had.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from common.config import EngineConfig
from common.errors import ConfigError
from engine import native
from engine.attention import AttentionShape, GatheredAttention
from engine.batch import build_batch
from engine.kernels import ORDINARY, Kernels
from engine.kv_cache import KVCache
from engine.loading import load_model
from engine.native import NativeError, native_kernels
from engine.plan import SequenceStep
from tests.tiny_model import build_tiny_llama

CPU = torch.device("cpu")


def available() -> bool:
    try:
        native_kernels(1)
    except NativeError:
        return False
    return True


needs_them = pytest.mark.skipif(not available(), reason="no AVX-512 or no C++ compiler here")


@pytest.fixture(scope="module")
def one() -> Kernels:
    return native_kernels(1)


@pytest.fixture(scope="module")
def several() -> Kernels:
    return native_kernels(3)


@needs_them
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (31, 7), (32, 64), (33, 1536), (100, 1537), (70, 3100)])
def test_products(one: Kernels, several: Kernels, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs)
    packed = one.pack(weight)
    for rows in (1, 2, 11, 12, 13, 95, 96, 97, 205):
        x = torch.randn(rows, inputs)
        out = one.product(x, packed, bias)
        exact = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(out.double(), exact, atol=3e-4, rtol=1e-4)
        assert several.product(x, several.pack(weight), bias).equal(out)
        for row in {0, rows // 2, rows - 1}:
            assert one.product(x[row : row + 1].clone(), packed, bias)[0].equal(out[row])


@needs_them
def test_products_of_rows_that_lie_apart(one: Kernels) -> None:
    x, weight = torch.randn(9, 3, 40), torch.randn(24, 40)
    packed = one.pack(weight)
    for head in range(3):
        assert one.product(x[:, head], packed, None).equal(one.product(x[:, head].clone(), packed, None))
    assert one.product(x[..., ::2][:, 0], one.pack(weight[:, :20]), None).shape == (9, 24)
    assert one.product(x[:0, 0], packed, None).shape == (0, 24)


@needs_them
@pytest.mark.parametrize("width", [1, 15, 16, 17, 100, 576])
def test_row_functions(several: Kernels, width: int) -> None:
    x, weight = torch.randn(37, width) * 3, torch.randn(width)
    for centred in (False, True):
        want = ORDINARY.rms_norm(x, weight, 1e-5, centred)
        torch.testing.assert_close(several.rms_norm(x, weight, 1e-5, centred), want, atol=1e-6, rtol=1e-5)
    both = torch.randn(37, 2 * width) * 4
    for name in ("silu", "gelu_tanh"):
        exact = ORDINARY.gated(both.double(), name).float()
        torch.testing.assert_close(several.gated(both, name), exact, atol=1e-6, rtol=1e-5)
    heads = torch.randn(37, 4, 2 * width + 3)
    cos, sin = torch.randn(37, width), torch.randn(37, width)
    turned = several.rotate(heads, cos, sin)
    torch.testing.assert_close(turned, ORDINARY.rotate(heads, cos, sin), atol=1e-5, rtol=1e-5)
    part = torch.randn(37, 6, 2 * width)[:, 1:3]  # rows that lie apart
    torch.testing.assert_close(several.rotate(part, cos, sin), ORDINARY.rotate(part, cos, sin), atol=1e-5, rtol=1e-5)


@needs_them
def test_extreme_numbers(one: Kernels) -> None:
    """Nothing overflows to NaN, and what is too small becomes 0."""
    gate = torch.tensor([[-1e30, -1000.0, -88.0, -87.0, 0.0, 88.0, 1000.0, 1e30]])
    both = torch.cat([gate, torch.ones_like(gate)], dim=-1)
    torch.testing.assert_close(one.gated(both, "silu"), ORDINARY.gated(both, "silu"), atol=1e-30, rtol=1e-5)


@needs_them
def test_what_is_no_number_stays_none(one: Kernels) -> None:
    """Whoever samples sees it (and its neighbours see nothing of it)."""
    from common.handoff import KVLayout

    both = torch.ones(1, 64)
    both[0, 3] = both[0, 40] = float("nan")
    assert one.gated(both, "silu").isnan().nonzero()[:, 1].tolist() == [3, 8]
    x, weight = torch.randn(5, 70), torch.randn(40, 70)
    x[2, 65], x[4, 1] = float("nan"), float("inf")
    for packed in (one.pack(weight), native_kernels(1, "int8").pack(weight), native_kernels(1, "int4").pack(weight)):
        finite = one.product(x, packed, None).isfinite()
        assert finite[[0, 1, 3]].all()
        assert not finite[[2, 4]].any()
    for softcap in (0.0, 5.0):
        cache = KVCache(KVLayout("m", 1, 1, 16, 8, "float32"), 4, CPU)
        cache.layers[0].copy_(torch.randn(cache.layers[0].shape))
        cache.layers[0][1, 0, 4] = float("nan")  # keys at position 12
        batch = build_batch([(0, SequenceStep("s", [0] * 20, 0, [0, 1, 2]))], 8, CPU)
        out = one.attention(batch, AttentionShape(1, 0.25, (0,), softcap)).attend(torch.randn(20, 2, 16), cache, 0)
        assert out.isfinite().all(-1).tolist() == [True] * 12 + [False] * 8


@needs_them
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_stored_is_rounded_to_the_nearest(several: Kernels, dtype: torch.dtype) -> None:
    rows, places = torch.randn(20, 3, 19), torch.randperm(50)[:20]
    pool = torch.zeros(50, 3, 19, dtype=dtype)
    several.store(rows, pool, places)
    assert pool[places].equal(rows.to(dtype))
    assert (pool != 0).flatten(1).any(-1).sum() == 20


@needs_them
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "softcap"),
    [(4, 2, 16, 0, 0.0), (6, 1, 80, 0, 0.0), (3, 3, 64, 21, 0.0), (8, 2, 32, 5, 3.0), (64, 1, 48, 0, 0.0)],
)
def test_attention(
    one: Kernels, several: Kernels, heads: int, kv_heads: int, dim: int, window: int, softcap: float, dtype: torch.dtype
) -> None:
    """Against the reference, for chunks and decodes that start anywhere; and a row's bits alone."""
    from common.handoff import KVLayout

    torch.manual_seed(heads)
    block_size = 7
    layout = KVLayout("m", 1, kv_heads, dim, block_size, str(dtype).removeprefix("torch."))
    cache, wide = KVCache(layout, 90, CPU), KVCache(layout, 90, CPU)
    cache.layers[0].copy_(torch.randn(cache.layers[0].shape))
    wide.layers[0] = cache.layers[0].float()
    shape = AttentionShape(kv_heads, dim**-0.5, (window,), softcap)
    blocks = torch.randperm(90).tolist()
    steps, used = [], 0
    for start, count in ((0, 1), (70, 1), (31, 1), (0, 60), (33, 40), (95, 17)):
        needed = -(-(start + count) // block_size)
        steps.append(SequenceStep(str(used), [0] * count, start, blocks[used : used + needed]))
        used += needed
    batch = build_batch(list(enumerate(steps)), block_size, CPU)
    q = torch.randn(sum(len(step.token_ids) for step in steps), heads, dim)
    out = one.attention(batch, shape).attend(q, cache, 0)
    torch.testing.assert_close(out, GatheredAttention(batch, shape).attend(q, wide, 0), atol=2e-5, rtol=1e-4)
    assert several.attention(batch, shape).attend(q, cache, 0).equal(out)
    for span, place in zip(batch.spans, batch.order, strict=True):
        step = steps[place]
        for row in {0, span.count // 2, span.count - 1}:
            single = build_batch([(0, SequenceStep("s", [0], step.start + row, step.block_ids))], block_size, CPU)
            place_in_batch = span.first + row
            alone = one.attention(single, shape).attend(q[place_in_batch : place_in_batch + 1], cache, 0)
            assert alone[0].equal(out[place_in_batch])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"CXX": "/nowhere/c++"}, r"/nowhere/c\+\+ cannot be run"),
        ({"CXX": "false"}, "false ended with 1"),
        ({"CXX": "", "PATH": ""}, "no C\\+\\+ compiler was found"),
    ],
)
def test_without_a_compiler(change: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "_cpu_flags", lambda: "flags: avx512f")
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NativeError, match=text):
        native_kernels(1)
    assert not list(tmp_path.rglob("*.so"))


def test_without_avx512_torch_serves_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "_cpu_flags", lambda: "flags: sse2 avx2")
    folder, said = build_tiny_llama(tmp_path), list[str]()
    config = EngineConfig(device="cpu", pool_bytes=1 << 20)
    load_model(folder, config, "auto", 1, None, None, said.append)
    assert "no native kernels: this CPU has no AVX-512; torch's are used, which are slower" in said
    with pytest.raises(ConfigError, match=r"engine.kernels is native, and no native kernels: this CPU"):
        load_model(folder, config.model_copy(update={"kernels": "native"}), "auto", 1, None, None, said.append)


@needs_them
def test_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    native_kernels(1)
    (made,) = tmp_path.rglob("*.so")
    before = made.stat().st_mtime_ns, os.listdir(made.parent)
    native_kernels(1)
    assert (made.stat().st_mtime_ns, os.listdir(made.parent)) == before


@needs_them
def test_a_damaged_library_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    library = tmp_path / "native" / "kernels.so"
    native._compile("c++", library)
    assert native._is_whole(library)
    library.write_bytes(library.read_bytes()[:1000])
    assert not native._is_whole(library)
    native_kernels(1)
    version = native.VERSION
    monkeypatch.setattr(native, "VERSION", 99)
    with pytest.raises(NativeError, match=f"is version {version}, this is for version 99"):
        native_kernels(1)
