"""Everything that a request may ask of its answer, on the real model: what the split cluster says is what
one process says, bit for bit, and what transformers says as near as arithmetic allows.

Both clusters are batch-invariant, so that tokens and log probabilities can be compared for equality.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch

from common.model_store import resolve
from router.tokenizer import Tokenizer
from tests.both_ways import both_ways
from tests.e2e.asking import random_text_ids
from tests.e2e.fleet import Fleet, fleet

BLOCK = 16
BLOCK_BYTES = 30 * 2 * BLOCK * 3 * 64 * 4  # layers × (K, V) × tokens × heads × dim × float32

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def split(shared_fleet: Fleet) -> Fleet:
    return shared_fleet


@dataclass(frozen=True)
class Case:
    """One request, by its body; on which cluster does not matter."""

    path: str
    body: dict[str, Any]


def ask(running: Fleet, cases: Sequence[Case], concurrency: int = 8) -> list[list[dict[str, Any]]]:
    """The choices of each case's answer; those of the stream and of the whole response must be the same."""

    async def run() -> list[list[dict[str, Any]]]:
        limits = httpx.Limits(max_connections=2 * concurrency)
        async with httpx.AsyncClient(base_url=running.url, timeout=120, trust_env=False, limits=limits) as client:
            gate = asyncio.Semaphore(concurrency)

            async def one(case: Case) -> list[dict[str, Any]]:
                async with gate:
                    return await both_ways(client, case.path, {"model": running.model} | case.body)

            return list(await asyncio.gather(*(one(case) for case in cases)))

    return asyncio.run(run())


def completion(number: int, /, num_prompt: int = 24, max_tokens: int = 10, **fields: Any) -> Case:
    prompt = list(random_text_ids(number, num_prompt))
    common = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
    return Case("/v1/completions", common | fields)


ALONE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.3, "seed": 2, "top_k": 20},
    {"temperature": 1.3, "seed": 3, "top_p": 0.7},
    {"temperature": 1.3, "seed": 4, "min_p": 0.1},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 0.0, "presence_penalty": 1.5},
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"temperature": 0.0, "frequency_penalty": -1.0},
    {"temperature": 0.0, "logit_bias": {"28": 100, "30": -100}},
    {"temperature": 0.0, "ignore_eos": False, "logit_bias": {"2": 100}},
    {"temperature": 0.0, "ignore_eos": False, "logit_bias": {"2": 100}, "min_tokens": 3},
    {"temperature": 0.0, "ignore_eos": False, "logit_bias": {"28": 100}, "stop_token_ids": [28]},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 1.0, "seed": 5, "n": 3, "logprobs": 2},
    {"temperature": 0.0, "n": 2},
    {"temperature": 0.0, "skip_special_tokens": False},
    {"temperature": 0.0, "echo": True},
    {"temperature": 0.0, "echo": True, "logprobs": 2},
    {"temperature": 1.0, "seed": 7, "echo": True, "logprobs": 0, "n": 2},
    {"temperature": 0.0, "truncate_prompt_tokens": 17},
]


def together(seed: int) -> dict[str, Any]:
    """A random combination."""
    rng = random.Random(seed)
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 0.7, 1.2],
        "top_k": [0, 10, 100],
        "top_p": [1.0, 0.9],
        "min_p": [0.0, 0.05],
        "repetition_penalty": [1.0, 1.2],
        "presence_penalty": [0.0, 0.8],
        "frequency_penalty": [0.0, 0.8],
        "logit_bias": [{}, {"28": -5, "284": 3}],
        "min_tokens": [0, 4],
        "ignore_eos": [True, False],
        "logprobs": [None, 3],
        "n": [1, 1, 2],
        "stop": [None, ["e", "zz"], " the"],
        "include_stop_str_in_output": [True, False],
    }
    return {name: rng.choice(values) for name, values in choices.items()} | {"seed": seed}


def compared(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ("index", "text", "token_ids", "finish_reason", "logprobs", "usage")
    return [{name: choice[name] for name in names} for choice in choices]


def test_every_parameter_on_the_split_as_in_one_process(split: Fleet) -> None:
    cases = [completion(number, **fields) for number, fields in enumerate(ALONE)]
    cases += [completion(100 + seed, num_prompt=10 + seed, max_tokens=8, **together(seed)) for seed in range(24)]
    with fleet(decode=1, mode="colocated", threads=2, sets=["engine.batch_invariant=true"]) as one_process:
        expected = [compared(choices) for choices in ask(one_process, cases)]
        one_process.quiet()
    got = [compared(choices) for choices in ask(split, cases)]
    for case, mine, theirs in zip(cases, got, expected, strict=True):
        assert mine == theirs, case.body
    assert got[10][0]["token_ids"] == [2]  # the end token that its bias makes certain
    assert [len(got[11][0]["token_ids"]), got[11][0]["token_ids"][-1]] == [4, 2]  # and later, with min_tokens
    assert got[12][0]["finish_reason"] == "stop"
    assert len(got[15]) == 3
    assert len({tuple(choice["token_ids"]) for choice in got[15]}) == 3  # a seed, three children, three answers
    split.quiet()


def test_logprobs_are_those_of_transformers(split: Fleet) -> None:
    """R34, with echo or without: its own and the likeliest, at every place, of greedy and sampled answers."""
    from transformers import AutoModelForCausalLM, GgufConfig

    path = resolve("smollm2-135m")
    oracle: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).eval()
    cases = [
        completion(
            200 + number,
            num_prompt,
            6,
            logprobs=5,
            temperature=temperature,
            seed=number,
            frequency_penalty=0.5,
            echo=echo,
        )
        for number, (num_prompt, temperature, echo) in enumerate(
            [(1, 0.0, False), (15, 1.0, True), (16, 0.0, False), (70, 1.2, True), (130, 0.0, True), (1, 0.0, True)]
        )
    ]
    for case, (choice,) in zip(cases, ask(split, cases), strict=True):
        prompt, answer = case.body["prompt"], choice["token_ids"]
        assert len(answer) == 6
        everything = torch.tensor([[*prompt, *answer]])
        with torch.inference_mode():
            logits = oracle(everything[:, :-1]).logits[0]
        expected = torch.log_softmax(logits.double(), -1)
        told = choice["logprobs"]
        if case.body["echo"]:
            assert told["token_logprobs"].pop(0) is None
            assert told["top_logprobs"].pop(0) is None
            assert len(told["tokens"]) == len(prompt) + 6
        else:
            expected = expected[len(prompt) - 1 :]
            assert len(told["tokens"]) == 6
        mine = torch.tensor(told["token_logprobs"], dtype=torch.float64)
        follow = everything[0, -len(expected) :]
        torch.testing.assert_close(mine, expected[range(len(expected)), follow], atol=2e-3, rtol=0)
        for entry, row in zip(told["top_logprobs"], expected, strict=True):
            likeliest = list(entry.values())
            assert likeliest == sorted(likeliest, reverse=True)
            if len(likeliest) == 5:  # of tokens that look the same the likeliest is told
                assert likeliest == pytest.approx(row.topk(5).values.tolist(), abs=2e-3)


def test_children_share_the_prompts_kv_through_the_handoff(split: Fleet) -> None:
    """R33: n = 4 moves the prompt's full blocks once, and only the last, partial one again for each."""
    num_prompt, n = 5 * BLOCK + 7, 4
    case = completion(300, num_prompt, 12, n=n, temperature=1.0, seed=9)
    body = {"model": split.model} | case.body
    before = split.loads()["decode-0"]["kv_bytes_received"]
    response = httpx.post(split.url + case.path, json=body, timeout=60, trust_env=False).json()
    moved = split.loads()["decode-0"]["kv_bytes_received"] - before
    assert moved == (6 + (n - 1) * 1) * BLOCK_BYTES
    assert response["usage"]["prompt_tokens"] == num_prompt
    assert response["usage"]["completion_tokens"] == n * 12
    for index in range(n):
        record = split.record(response["id"] + (f"-{index}" if index else ""))
        tokens = record["tokens"]
        assert tokens["cached_prefill"] == tokens["cached_decode"] == (5 * BLOCK if index else 0)
    split.quiet()


def test_text_of_random_tokens_streams_as_it_is(split: Fleet) -> None:
    """R29: at this temperature the model writes parts of characters in all scripts, and some prompts end in
    the middle of one; what streams is the whole text (`both_ways`), with its own U+FFFD and no other."""
    tokenizer = Tokenizer.load(resolve("smollm2-135m"))
    thai = tokenizer.encode("ก", False)
    assert len(thai) > 1
    cases = []
    for seed in range(9):
        case = completion(400 + seed, 8, 24, temperature=2.0, seed=seed, top_k=0)
        if seed % 3 == 0:
            case.body["prompt"] += thai[:1]
        cases.append(case)
    choices = [choice for (choice,) in ask(split, cases)]
    assert any("\ufffd" in choice["text"] for choice in choices)  # or nothing was tried
    for choice in choices:
        assert choice["text"] == tokenizer.decode(choice["token_ids"])


def test_stop_strings_on_real_text(split: Fleet) -> None:
    """R30: of a stop string nothing is shown, wherever it lies among the tokens; a false start is."""
    case = completion(500, 20, 24, temperature=0.0)
    ((plain,),) = ask(split, [case])
    text = plain["text"]
    stops = [text[start : start + 7] for start in range(2, len(text) - 8, 11)]
    stopped = ask(split, [Case(case.path, case.body | {"stop": [stop, stop[:4] + "\x00"]}) for stop in stops])
    for stop, (choice,) in zip(stops, stopped, strict=True):
        assert choice["text"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"
        assert plain["token_ids"][: len(choice["token_ids"])] == choice["token_ids"]
    split.quiet()
    record = split.get("/cluster")
    assert {worker["state"] for worker in record["workers"]} == {"ready"}
