"""gRPC and HTTP on a real cluster with the real model: the same tokens, text, usage and errors; calls that
are cancelled leave nothing behind; the example runs.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton_client import AsyncClient, Client
from rpc.v1 import generation_pb2 as pb
from rpc.v1.generation_pb2_grpc import GenerationStub
from tests.e2e.asking import random_text_ids
from tests.e2e.fleet import Fleet, fleet
from tests.http_and_grpc import Outcome, four_ways, over_grpc, over_http

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpc_client.py"
SOON_S = 5.0
"""A step takes some 50 ms; the rest is for a busy machine."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

INPUTS: list[dict[str, Any]] = [
    {"prompt": "The capital of France is"},
    {"prompt": "서울은 대한민국의 수도이고, 파리는"},
    {"prompt": list(random_text_ids(7, 40))},
    {
        "messages": [
            {"role": "system", "content": "Answer in one word."},
            {"role": "user", "content": "What colour is the sky? 🌈"},
        ]
    },
]
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": True, "top_logprobs": 3},
    {"temperature": 1.0, "seed": 5, "n": 2, "top_p": 0.9},
    {"temperature": 0.8, "seed": 6, "top_k": 40, "min_p": 0.05, "logit_bias": {"28": -5.0, "30": 2.0}},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.25},
    {"temperature": 0.0, "stop": ["e", "\n"], "include_stop_str_in_output": True},
    {"temperature": 0.0, "ignore_eos": True, "min_tokens": 8, "skip_special_tokens": False},
]
WRONG: list[dict[str, Any]] = [
    {"prompt": list(random_text_ids(1, 9000))},
    {"prompt": "word " * 9000},
    {"prompt": "x", "max_tokens": 8192},
    {"prompt": "x", "max_tokens": 0},
    {"prompt": [49152]},
    {"prompt": "x", "model": "smollm3"},
    {"messages": [{"role": "user", "content": "x"}], "temperature": 2.5},
    {"messages": []},
]


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    with fleet(sets=["engine.batch_invariant=true"]) as running:
        yield running


def grpc_url(running: Fleet) -> str:
    assert running.router is not None
    return running.router.place.split(" ")[1]


@asynccontextmanager
async def both(running: Fleet) -> AsyncIterator[tuple[httpx.AsyncClient, GenerationStub]]:
    async with (
        httpx.AsyncClient(base_url=running.url, timeout=60.0, trust_env=False) as client,
        grpc.aio.insecure_channel(grpc_url(running).removeprefix("grpc://")) as channel,
    ):
        yield client, GenerationStub(channel)


@pytest.mark.parametrize("given", INPUTS, ids=["text", "unicode", "ids", "chat"])
async def test_the_same_answers(running: Fleet, given: dict[str, Any]) -> None:
    async with both(running) as (client, stub):

        async def ask(number: int) -> tuple[Outcome, ...]:
            body = {"model": running.model, "max_tokens": 8, "cache_salt": str(number), **given, **PARAMETERS[number]}
            return tuple(await four_ways(client, stub, body))

        # Every other one: each input meets half of the parameters, each parameter half of the inputs.
        numbers = range(INPUTS.index(given) % 2, len(PARAMETERS), 2)
        for number, outcomes in zip(numbers, await asyncio.gather(*map(ask, numbers)), strict=True):
            whole, whole_grpc, stream, stream_grpc = outcomes
            assert whole.error is None, PARAMETERS[number]
            assert whole_grpc == whole, PARAMETERS[number]
            assert stream_grpc == stream, PARAMETERS[number]
            assert [answer[:3] for answer in stream.answers] == [answer[:3] for answer in whole.answers]
            assert whole.usage["completion_tokens"] == sum(len(answer[1]) for answer in whole.answers)
            assert whole.usage["prompt_tokens"] == len(whole.answers[0][4])
    running.quiet()


async def test_the_same_errors(running: Fleet) -> None:
    """R35 among them: too long an input is INVALID_ARGUMENT, with the limit and the value."""
    async with both(running) as (client, stub):
        for fields in WRONG:
            body = {"model": running.model, "max_tokens": 8, **fields}
            expected = await over_http(client, body)
            assert expected.error is not None, str(body)[:200]
            for stream in (False, True):
                assert (await over_grpc(stub, body, stream=stream)).error == expected.error
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(model=running.model, token_ids=pb.TokenIds(ids=[5] * 9000)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "8192" in (caught.value.details() or "")
        assert "9000" in (caught.value.details() or "")
    assert running.settled()["requests"]["open"] == 0


@pytest.mark.parametrize("when", ["before the first token", "midway"])
async def test_a_cancelled_call_frees_everything(running: Fleet, when: str) -> None:
    before = running.metric("baton_requests_total", reason="cancelled")
    prompt = random_text_ids(30 + len(when), 2000 if when == "before the first token" else 20)
    async with AsyncClient(grpc_url(running), model=running.model) as client:
        stream = client.stream(prompt, max_tokens=2000, ignore_eos=True)
        if when == "midway":
            async for chunk in stream:
                if chunk.finish_reason is None and chunk.token_ids:
                    break
            await stream.close()
            record = await asyncio.to_thread(running.record, stream.request_id)
            assert record["state"] == "cancelled"
            assert record["tokens"]["emitted"] <= 20
        else:
            reading = asyncio.ensure_future(anext(stream))
            await asyncio.to_thread(wait_for_work, running)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        await asyncio.to_thread(running.quiet, SOON_S)
    assert running.metric("baton_requests_total", reason="cancelled") == before + 1


def wait_for_work(running: Fleet) -> None:
    """Until a worker holds blocks."""
    while not any(worker["holders"] for worker in running.get("/ledger")["workers"]):
        pass


def test_the_client_and_the_record_agree(running: Fleet) -> None:
    with Client(grpc_url(running)) as client:
        with client.stream_chat([{"role": "user", "content": "Count to five."}], max_tokens=10) as chunks:
            received = list(chunks)
        usage = received[-1].usage
        assert usage is not None
        record = running.record(chunks.request_id)
        assert record["tokens"]["prompt"] == usage.prompt_tokens
        assert record["tokens"]["emitted"] == usage.completion_tokens
        assert record["tokens"]["cached_prefill"] == usage.cached_tokens
        text = "".join(chunk.text for chunk in received)
        ids = [token for chunk in received for token in chunk.token_ids]
        assert client.detokenize(ids).startswith(text)
        assert client.models()[0].max_model_len == client.tokenize("x").max_model_len == 8192


async def test_health_of_a_real_router(running: Fleet) -> None:
    async with grpc.aio.insecure_channel(grpc_url(running).removeprefix("grpc://")) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", "baton.v1.Generation"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def run_example(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, timeout=120)


def test_the_example(running: Fleet) -> None:
    done = run_example(grpc_url(running))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    model, request, answer, *_ = done.stdout.splitlines()
    assert model.startswith(f"{running.model}, up to 8192 tokens")
    assert request.startswith("request gen-")
    assert "Paris" in answer
    assert "refused: max_tokens: input should be greater than or equal to 1, got 0 (field: max_tokens)" in done.stdout
    prompt = "The sun rises in the"
    fields = {"model": running.model, "prompt": prompt, "max_tokens": 8, "temperature": 0.0}
    expected = running.client.post(f"{running.url}/v1/completions", json=fields).json()["choices"][0]["text"]
    assert f"{prompt!r} → {expected!r} (length)" in done.stdout
    running.quiet()


def test_the_example_without_a_cluster(running: Fleet) -> None:
    done = run_example(running.url)
    assert done.returncode == 1
    assert done.stderr.startswith("config: ")
    assert "grpc://" in done.stderr
    assert "Traceback" not in done.stderr
