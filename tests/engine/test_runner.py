"""The runner as an executor: hooks, refusals, failures, cancellation, sampling end to end."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from common.config import EngineConfig
from common.errors import ConfigError, EngineError
from common.messages import SamplingParams
from engine.plan import Executor, SequenceStep, StepPlan
from engine.runner import ModelRunner
from tests.engine.model_driver import hf_logits, random_tokens
from tests.tiny_model import EOS_ID, build_tiny_llama

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
CONFIG = EngineConfig(device="cpu", pool_bytes=1 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture
async def runner(folder: Path) -> AsyncGenerator[ModelRunner, None]:
    loaded = await ModelRunner.load(folder, CONFIG, num_threads=1)
    yield loaded
    await loaded.close()


def plan(*steps: SequenceStep) -> StepPlan:
    return StepPlan(7, steps)


async def test_describes_itself(folder: Path) -> None:
    heard: list[str] = []
    runner: Executor = await ModelRunner.load(folder, CONFIG, "auto", 1, heard.append, name="tiny", max_model_len=200)
    assert isinstance(runner, ModelRunner)
    assert (runner.model_info.name, runner.model_info.max_model_len) == ("tiny", 200)
    assert runner.model_info.vocab_size == 512
    assert runner.model_info.eos_token_ids == (EOS_ID,)
    assert runner.layout.model == runner.model_info.fingerprint
    assert runner.num_blocks == (1 << 20) // runner.layout.block_bytes == runner.cache.num_blocks
    assert not any(tensor.any() for tensor in runner.cache.layers)
    assert any("KV pool" in line for line in heard)
    await runner.close()


async def test_greedy_tokens_and_layer_hooks(runner: ModelRunner, folder: Path) -> None:
    tokens = random_tokens(random.Random(1), 45)
    calls: list[tuple[int, bool]] = []
    done = False

    def on_layer(stepped: StepPlan, layer: int) -> None:
        assert stepped.step_id == 7
        calls.append((layer, done))

    chunk = SequenceStep("a", tokens[:40], 0, (3, 1, 2))
    assert (await runner.execute(plan(chunk), on_layer)).results[0].token is None
    done = True
    assert calls == [(0, False), (1, False)]
    output = await runner.execute(plan(SequenceStep("a", tokens[40:], 40, (3, 1, 2), GREEDY)))
    assert output.step_id == 7
    assert output.results[0].token == hf_logits(folder, tokens)[-1].argmax()


async def test_tokens_are_scored_in_chunks_and_beside_others(runner: ModelRunner, folder: Path) -> None:
    """Chunks that are only scored, one that is scored and samples, and neighbours that are not scored."""
    tokens = [(7 * i + 3) % 500 for i in range(90)]
    expected = torch.log_softmax(hf_logits(folder, tokens).double(), -1)
    blocks = (9, 4, 8, 5, 7, 6)
    first = SequenceStep("a", tokens[:70], 0, blocks, targets=tokens[1:71], num_logprobs=2)
    other = SequenceStep("b", [1, 2, 3], 0, [0], GREEDY)
    plain = SequenceStep("c", [1, 2, 3], 0, [1])
    output = await runner.execute(plan(plain, first, other))
    assert output.results[0].target_logprobs == output.results[2].target_logprobs == ()
    assert output.results[1].token is None
    last = SequenceStep("a", tokens[70:], 70, blocks, GREEDY, targets=tokens[71:], num_logprobs=2)
    rest = await runner.execute(plan(other, last))
    assert rest.results[0] == output.results[2]
    assert rest.results[1].token == expected[-1].argmax()
    told = [*output.results[1].target_logprobs, *rest.results[1].target_logprobs]
    mine = torch.tensor([entry.logprob for entry in told], dtype=torch.float64)
    torch.testing.assert_close(mine, expected[range(89), tokens[1:]], atol=1e-4, rtol=0)
    assert [[top.token for top in entry.top] for entry in told] == expected[:89].topk(2).indices.tolist()


async def test_bad_steps_fail_alone(runner: ModelRunner) -> None:
    good = SequenceStep("good", [1, 2, 3], 0, [0], GREEDY)
    wrong = {
        "needs new tokens, it has 0": dataclasses.replace(good, token_ids=[]),
        "context limit is 512 tokens, the sequence has 513": dataclasses.replace(good, start=510),
        "17 tokens need 2 blocks, the sequence has 1": dataclasses.replace(good, start=14),
        "outside the pool": dataclasses.replace(good, block_ids=[99999]),
        "must lie in 0..511": dataclasses.replace(good, token_ids=[1, 512]),
    }
    output = await runner.execute(plan(*wrong.values(), good))
    for text, result in zip(wrong, output.results, strict=False):
        assert result.error_code in ("engine", "invalid_request")
        assert text in result.error_message
    assert output.results[-1].token is not None
    assert (await runner.execute(plan())).results == ()


async def test_nonfinite_logits_end_one_sequence(runner: ModelRunner) -> None:
    steps = [SequenceStep(str(i), [5 + i, 9], 0, [i], GREEDY) for i in range(3)]
    before = await runner.execute(plan(*steps))
    runner.cache.layers[0][1] = float("nan")
    decodes = [SequenceStep(str(i), [8], 2, [i], GREEDY) for i in range(3)]
    after = await runner.execute(plan(*decodes))
    assert [result.error_code for result in after.results] == ["", "nonfinite_logits", ""]
    assert (await runner.execute(plan(*steps))) == before


async def test_a_failed_step_is_an_engine_error(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of\nmemory")

    step = SequenceStep("a", [1], 0, [0], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(runner._model, "forward", fail)
        with pytest.raises(EngineError, match="step 7 of 1 tokens failed: out of memory"):
            await runner.execute(plan(step))
    assert (await runner.execute(plan(step))).results[0].token is not None


async def test_a_cancelled_step_is_over_when_cancel_returns(runner: ModelRunner) -> None:
    layers: list[int] = []
    step = SequenceStep("a", [1] * 200, 0, list(range(13)), GREEDY)
    task = asyncio.create_task(runner.execute(plan(step), lambda _, layer: layers.append(layer)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert layers == [0, 1]
    assert runner.cache.layers[-1][12].any()


async def test_seeded_sampling_is_a_function_of_seed_child_and_position(runner: ModelRunner) -> None:
    def step(seed: int, child: int, block: int) -> SequenceStep:
        hot = SamplingParams(max_tokens=1, temperature=5.0, seed=seed, child=child)
        return SequenceStep(f"{seed}/{child}", [4, 4], 0, [block], hot)

    pairs = [(seed, child) for seed in range(8) for child in range(2)]
    together = await runner.execute(plan(*(step(*pair, i) for i, pair in enumerate(pairs))))
    alone = [(await runner.execute(plan(step(*pair, 0)))).results[0] for pair in pairs]
    assert list(together.results) == alone
    assert len({result.token for result in alone}) > 8


@pytest.mark.parametrize(
    ("config", "options", "text"),
    [
        ({"device": "tpu9"}, {}, "'tpu9' is not a"),
        ({"pool_bytes": 100}, {}, "pool_bytes 100 holds no block"),
        ({}, {"max_model_len": 513}, "max_model_len 513 exceeds the model's limit of 512"),
    ],
)
async def test_bad_settings_stop_the_load(
    folder: Path, config: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        await ModelRunner.load(folder, CONFIG.model_copy(update=config), num_threads=1, **options)
