"""Law 1, bitwise: a row's logits and its sampled token depend on its own sequence alone."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu, silu

from common.errors import ConfigError, EngineError
from common.messages import SamplingParams
from engine import numerics
from engine.kernels import BATCH_INVARIANT
from engine.sampler import RowSampling, Sampler
from tests.engine.model_driver import Driver, load, random_tokens
from tests.tiny_model import build_tiny_llama

pytestmark = pytest.mark.skipif(not numerics.is_prepared(), reason="torch was loaded without MKL's strict mode")


# The second one's sizes fill no vector and split unevenly over threads.
SHAPES = [{}, {"num_key_value_heads": 1, "hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 173}]
# A failure is told as it is found: shrinking one takes minutes, and the seed says it all.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


@pytest.fixture(scope="module", params=[(shape, kind) for kind in ("native", "invariant") for shape in SHAPES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    shape, kind = request.param
    folder = build_tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=1024, **shape)
    return Driver(load(folder, kind, blocks=400))


@settings(deadline=None, max_examples=12, phases=PHASES)
@given(seed=st.integers(0, 2**32), length=st.integers(2, 700), longest=st.integers(1, 600))
def test_any_chunking_in_any_company(model: Driver, seed: int, length: int, longest: int) -> None:
    rng = random.Random(seed)
    tokens = random_tokens(rng, length)
    alone = Driver(model.loaded, seed)
    # One row at a time would be slow for long sequences: the last rows are decoded singly, alone.
    start = max(0, length - 5)
    if start:
        alone.run([alone.step("alone", tokens[:start], 0)])
    singly = {i: alone.run([alone.step("alone", tokens[i : i + 1], i)])[0] for i in range(start, length)}

    others = {f"other {i}": random_tokens(rng, rng.randint(1, 300)) for i in range(rng.randint(0, 5))}
    together = Driver(model.loaded, seed + 1).run_all({"it": tokens} | others, rng, longest)["it"]
    whole = Driver(model.loaded, seed + 2)
    assert whole.run([whole.step("it", tokens, 0)])[0].equal(singly[length - 1])
    for position, logits in together.items():
        if position in singly:
            assert logits.equal(singly[position]), f"position {position} of {length} differs"

    row = RowSampling(SamplingParams(max_tokens=1, temperature=0.8, top_k=100, top_p=0.9, seed=seed), length)
    sampler = Sampler(())
    crowd = torch.stack([together[length - 1], *torch.randn(7, 512)])
    among = sampler.sample(crowd, [row] + [RowSampling(SamplingParams(max_tokens=1, seed=i), 3) for i in range(7)])
    assert among[0] == sampler.sample(singly[length - 1][None].clone(), [row])[0]


def test_more_rows_than_one_product_takes(model: Driver) -> None:
    rng = random.Random(5)
    sequences = [random_tokens(rng, 260) for _ in range(5)]
    together = Driver(model.loaded)
    rows = together.run([together.step(str(i), tokens, 0) for i, tokens in enumerate(sequences)])
    for tokens, logits in zip(sequences, rows, strict=True):
        alone = Driver(model.loaded)
        assert alone.run([alone.step("it", tokens, 0)])[0].equal(logits)


def test_activation_does_not_depend_on_its_place() -> None:
    gate, ones = torch.randn(4000) * 4, torch.ones(4000)
    for name, function in (("silu", silu), ("gelu_tanh", partial(gelu, approximate="tanh"))):
        whole = BATCH_INVARIANT.gated(torch.cat([gate, ones])[None], name)[0]
        torch.testing.assert_close(whole, function(gate), atol=1e-6, rtol=1e-5)
        for first in range(0, 3900, 13):
            part = slice(first, first + 1 + first % 67)
            both = torch.cat([gate[part], ones[part]])[None]
            assert BATCH_INVARIANT.gated(both, name)[0].equal(whole[part])


@pytest.mark.parametrize("kind", ["invariant", "native"])
def test_block_size_does_not_show(kind: str, tmp_path: Path) -> None:
    folder = build_tiny_llama(tmp_path)
    tokens = random_tokens(random.Random(1), 400)
    seen = []
    for block_size in (8, 16, 64):
        driver = Driver(load(folder, kind, block_size=block_size))
        seen.append(driver.run([driver.step("it", tokens, 0)])[0])
    assert seen[0].equal(seen[1])
    assert seen[0].equal(seen[2])


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    from common.config import EngineConfig
    from engine.loading import load_model

    folder = build_tiny_llama(tmp_path)
    config = EngineConfig(device="cpu", kernels="torch", batch_invariant=True)
    with pytest.raises(ConfigError, match=r"needs model.dtype float32 with torch's kernels, it is bfloat16"):
        load_model(folder, config, "bfloat16", 1, None, None, print)


def test_platform_that_breaks_the_promise_is_found() -> None:
    code = (
        "import torch; from engine.numerics import check_batch_invariance\n"
        "real = torch.nn.functional.linear\n"
        "torch.nn.functional.linear = lambda x, w: real(x, w) + len(x) * 1e-6\n"
        "check_batch_invariance([torch.randn(64, 32)], 16)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert EngineError.__name__ in run.stderr
    assert "a product of 8 rows with a weight of [64, 32] differs" in run.stderr


def test_environment_is_set_only_before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKL_CBWR")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "torch was loaded before MKL_CBWR could be set" in (numerics.prepare_environment() or "")
    monkeypatch.delitem(sys.modules, "torch")
    assert numerics.prepare_environment() is None
    assert os.environ["MKL_CBWR"].endswith(",STRICT")
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_importing_numerics_imports_no_torch() -> None:
    code = "import sys, engine.numerics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
