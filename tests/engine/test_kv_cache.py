"""The KV pool: bytes in and out, what stays behind in reused blocks, sizes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import ConfigError, EngineError
from common.handoff import KVLayout
from engine.kv_cache import KVCache, pool_blocks
from tests.engine.model_driver import Driver, load, random_tokens
from tests.tiny_model import build_tiny_llama

CPU = torch.device("cpu")


def layout(dtype: str = "float32") -> KVLayout:
    return KVLayout(model="m", num_layers=3, num_kv_heads=2, head_dim=4, block_size=8, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_round_trip(dtype: str) -> None:
    cache = KVCache(layout(dtype), 12, CPU)
    for tensor in cache.layers:
        assert tensor.shape == (12, 2, 8, 2, 4)
        assert not tensor.any()
        tensor.normal_()
    before = [tensor.clone() for tensor in cache.layers]
    out = np.empty((4, cache.layout.block_layer_bytes), dtype=np.uint8)
    cache.read_blocks(1, [7, 0, 11, 3], out)
    assert out.tobytes() == before[1][[7, 0, 11, 3]].view(torch.uint8).numpy().tobytes()
    frozen = np.frombuffer(out.tobytes(), dtype=np.uint8).reshape(out.shape)
    cache.write_blocks(1, (2, 5, 6, 1), frozen)
    assert cache.layers[1][[2, 5, 6, 1]].equal(before[1][[7, 0, 11, 3]])
    untouched = [0, 3, 4, 7, 8, 9, 10, 11]
    assert cache.layers[1][untouched].equal(before[1][untouched])
    assert cache.layers[0].equal(before[0])
    assert cache.layers[2].equal(before[2])


@pytest.mark.parametrize(
    ("layer", "ids", "shape", "text"),
    [
        (3, [0], (1, 512), "KV layer 3 is not one of the 3"),
        (0, [12], (1, 512), "outside the pool of 12"),
        (0, [-1], (1, 512), "outside the pool of 12"),
        (0, [0, 1], (1, 512), "must be uint8"),
        (0, [0], (1, 511), "must be uint8"),
    ],
)
def test_wrong_places_and_sizes_are_refused(layer: int, ids: list[int], shape: tuple[int, int], text: str) -> None:
    cache = KVCache(layout(), 12, CPU)
    for call in (cache.read_blocks, cache.write_blocks):
        with pytest.raises(EngineError, match=text):
            call(layer, ids, np.zeros(shape, dtype=np.uint8))


@pytest.mark.parametrize("kind", ["ordinary", "invariant", "native"])
def test_what_a_failed_sequence_left_behind_harms_nobody(kind: str, tmp_path: Path) -> None:
    loaded = load(build_tiny_llama(tmp_path), kind)
    rng = random.Random(3)
    sequences = {"a": random_tokens(rng, 75), "b": random_tokens(rng, 18), "c": random_tokens(rng, 3)}
    clean = Driver(loaded).run_all(sequences, random.Random(4), longest=20)
    for tensor in loaded.cache.layers:
        tensor.fill_(float("nan"))
    after = Driver(loaded).run_all(sequences, random.Random(4), longest=20)
    for name, rows in clean.items():
        for position, logits in rows.items():
            assert after[name][position].equal(logits), f"{name} at {position}"


def test_handed_over_blocks_continue_elsewhere(tmp_path: Path) -> None:
    folder = build_tiny_llama(tmp_path)
    tokens = random_tokens(random.Random(1), 60)
    one, other = Driver(load(folder), seed=1), Driver(load(folder, blocks=64), seed=2)
    one.run([one.step("it", tokens[:50], 0)])
    other.step("it", tokens, 0)
    source, target = one.blocks["it"], other.blocks["it"][:4]
    cache = one.loaded.cache
    moved = np.empty((4, cache.layout.block_layer_bytes), dtype=np.uint8)
    for layer in range(cache.layout.num_layers):
        cache.read_blocks(layer, source, moved)
        other.loaded.cache.write_blocks(layer, target, moved)
    rest = [driver.run([driver.step("it", tokens[50:], 50)])[0] for driver in (one, other)]
    assert rest[0].equal(rest[1])


def test_pool_sizes() -> None:
    block = layout().block_bytes
    assert pool_blocks(10 * block + 5, layout(), CPU) == 10
    assert pool_blocks(None, layout(), CPU) > 100
    with pytest.raises(ConfigError, match=f"pool_bytes 5 holds no block; one takes {block} bytes"):
        pool_blocks(5, layout(), CPU)
