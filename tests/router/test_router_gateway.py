"""HTTP and gRPC on one router: for a generated table of requests the same tokens, text, usage and errors."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest

from common.config import RouterConfig
from common.errors import EngineError
from common.messages import FinishReason, GenerationRequest
from router.schemas import ChatBody, CompletionBody
from rpc.generation_form import INPUTS
from rpc.v1 import generation_pb2 as pb
from rpc.v1.generation_pb2_grpc import GenerationStub
from tests.http_and_grpc import TEMPLATE_FIELDS, four_ways, over_grpc, over_http
from tests.router.two_interfaces import both, collected

INPUT: dict[str, dict[str, Any]] = {
    "text": {"prompt": "Hello world, this is longer than a block"},
    "unicode": {"prompt": "größer 語 \n"},
    "ids": {"prompt": [1, 2, 3, 250]},
    "chat": {"messages": [{"role": "user", "content": "Hello"}]},
    "turns": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi", "name": "me"},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": ""},
        ],
        "add_generation_prompt": False,
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "What is 1 + 1?"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
            {"role": "assistant", "content": "It is"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        "tool_choice": "none",
        "chat_template_kwargs": {"thinking": True, "depth": 3},
        "continue_final_message": True,
    },
}
GOOD: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1},
    {"max_tokens": 9, "min_tokens": 9},
    {"temperature": 0.0},
    {"temperature": 1.5, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "seed": 11},
    {"top_k": -1, "top_p": 1.0, "min_p": 0.0},
    {"seed": -1},
    {"presence_penalty": -1.5, "frequency_penalty": 2.0, "repetition_penalty": 1.25},
    {"logit_bias": {"0": -100.0, "7": 2.5}},
    {"ignore_eos": True, "stop_token_ids": [97, 98, 99, 99]},
    {"stop": "x"},
    {"stop": ["e", "zz"], "include_stop_str_in_output": True, "max_tokens": 30},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"n": 3},
    {"n": 2, "logprobs": True, "top_logprobs": 1, "stop": ["j"], "max_tokens": 20},
    {"skip_special_tokens": False},
    {"truncate_prompt_tokens": 3},
    {"truncate_prompt_tokens": -1, "truncation_side": "right"},
    {"priority": -4, "timeout_s": 7.5, "cache_salt": "s", "slo": {"ttft_s": 1.5, "tpot_s": 0.25}},
    {"return_token_ids": True},
]
BAD: list[dict[str, Any]] = [
    {"model": "other"},
    {"max_tokens": 0},
    {"max_tokens": -3},
    {"max_tokens": 2**40},
    {"max_tokens": 300},
    {"min_tokens": -1},
    {"min_tokens": 6},
    {"temperature": -0.5},
    {"temperature": 2.5},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"top_k": -2},
    {"min_p": 1.5},
    {"presence_penalty": 2.5},
    {"frequency_penalty": -2.5},
    {"repetition_penalty": 0.0},
    {"logit_bias": {"300": 1.5}},
    {"logit_bias": {"3": 100.5}},
    {"n": 0},
    {"n": 1000},
    {"stop": ["a"] * 8 + [""]},
    {"stop": [str(number) for number in range(17)]},
    {"stop": ["a" * 1025]},
    {"stop_token_ids": [300]},
    {"stop_token_ids": [2**32 - 1]},
    {"logprobs": True, "top_logprobs": 21},
    {"truncate_prompt_tokens": 0},
    {"truncate_prompt_tokens": -2},
    {"truncation_side": "middle"},
    {"priority": 2**33},
    {"timeout_s": 0.0},
    {"timeout_s": -1.5},
    {"cache_salt": "x" * 1025},
    {"slo": {"ttft_s": 0.0}},
    {"slo": {"tpot_s": -0.5}},
]
BAD_ALONE: list[dict[str, Any]] = [
    {},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [256]},
    {"prompt": [2**31]},
    {"prompt": [1] * 200},
    {"prompt": [1] * 197, "max_tokens": 4},
    {"prompt": "a", "echo": True, "logprobs": True, "top_logprobs": 21},
    {"prompt": "a", "model": ""},
    {"messages": []},
    {"messages": [{"role": "user", "content": "x" * 300}]},
    {"messages": [{"role": "robot", "content": "x"}]},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": False},
    {"messages": [{"role": "user", "content": "x"}], "echo": True},
    {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
    {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
    {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"},
    {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": 1}},
    {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": [1]},
    {
        "messages": [{"role": "assistant", "content": "x"}],
        "add_generation_prompt": True,
        "continue_final_message": True,
    },
]


def without_chance(request: GenerationRequest, body: dict[str, Any]) -> GenerationRequest:
    """``request`` as far as the client determines it."""
    sampling = request.sampling if "seed" in body else replace(request.sampling, seed=0)
    return replace(request, request_id="", sampling=sampling, timeout_s=round(request.timeout_s))


# ── the table ─────────────────────────────────────────────────────────────────────────────────────


def test_both_have_the_same_fields() -> None:
    """A field that HTTP gets and gRPC does not is found here."""
    grpc_fields = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} - INPUTS
    chat_fields = {field.name for field in pb.Chat.DESCRIPTOR.fields}
    http_fields = set(ChatBody.model_fields) | set(CompletionBody.model_fields)
    elsewhere = {"prompt", "stream", "stream_options"}  # the input, and which call it is
    synonym = {"max_completion_tokens"}
    assert grpc_fields | chat_fields == http_fields - elsewhere - synonym
    assert chat_fields == set(TEMPLATE_FIELDS)


@pytest.mark.parametrize("kind", INPUT)
async def test_the_same_answers(kind: str) -> None:
    async with both(step_s=0.0, max_model_len=1000) as (client, stub, _, fleet):
        for fields in GOOD:
            body = {"model": "fake", "max_tokens": 5, **INPUT[kind], **fields}
            fleet.workers["d0"].seen.clear()
            whole, whole_grpc, stream, stream_grpc = await four_ways(client, stub, body)
            assert whole.answers, (body, whole.error)
            assert whole_grpc == whole, body
            assert stream_grpc == stream, body
            assert [answer[:3] for answer in stream.answers] == [answer[:3] for answer in whole.answers], body
            seen = [without_chance(request, body) for request in fleet.workers["d0"].seen]
            num_answers = fields.get("n", 1)
            first = seen[:num_answers]
            assert seen == first * 5, body


@pytest.mark.parametrize("kind", ["text", "ids", "chat"])
async def test_the_same_errors(kind: str) -> None:
    async with both(max_model_len=200) as (client, stub, _, fleet):
        for fields in BAD:
            await check_error(client, stub, {"model": "fake", "max_tokens": 5, **INPUT[kind], **fields})
        assert not fleet.workers["d0"].seen


@pytest.mark.parametrize("prompt", ["a", "a longer one", [5, 6, 7]])
async def test_the_same_is_told_of_an_echoed_prompt(prompt: Any) -> None:
    async with both() as (client, stub, _, _):
        body = {"model": "fake", "prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": True, "top_logprobs": 2}
        expected = await over_http(client, body)
        assert len(expected.answers[0][3]) == len(prompt) - 1 + 3
        for stream in (False, True):
            assert await over_grpc(stub, body, stream=stream) == expected


async def test_the_same_errors_of_single_requests() -> None:
    async with both(max_model_len=200) as (client, stub, _, fleet):
        for fields in BAD_ALONE:
            body = {"model": "fake", "max_tokens": 1, **fields}
            if body["model"] == "":
                await check_error(client, stub, body, http_body={key: body[key] for key in body.keys() - {"model"}})
            else:
                await check_error(client, stub, body)
        assert not fleet.workers["d0"].seen


async def check_error(
    client: httpx.AsyncClient, stub: GenerationStub, body: dict[str, Any], *, http_body: dict[str, Any] | None = None
) -> None:
    expected = await over_http(client, http_body or body)
    assert expected.error is not None, body
    code, message, param = expected.error
    if param == "logprobs":  # a completion's one number is two fields of a message; the number is the second
        message, param = message.replace("logprobs", "top_logprobs", 1), "top_logprobs"
    for stream in (False, True):
        assert (await over_grpc(stub, body, stream=stream)).error == (code, message, param), body


async def test_pairs_of_parameters() -> None:
    """One input, two rows of the table together."""
    pairs = random.Random(7).sample(list(itertools.combinations(GOOD[1:], 2)), 60)
    async with both(step_s=0.0, max_model_len=1000) as (client, stub, _, _):
        for one, other in pairs:
            body = {"model": "fake", "max_tokens": 5, "cache_salt": "s", **INPUT["chat"], **one, **other}
            await over_http(client, body)  # so that both find the same cache
            expected = await over_http(client, body)
            assert await over_grpc(stub, body) == expected, body


async def test_the_context_limit_to_the_token() -> None:
    """R35: never an empty answer with an OK."""
    async with both(max_model_len=64) as (client, stub, _, _):
        for num_prompt, max_tokens in itertools.product((62, 63, 64), (1, 2)):
            body = {"model": "fake", "prompt": [1] * num_prompt, "max_tokens": max_tokens}
            expected = await over_http(client, body)
            assert (expected.error is None) == (num_prompt + max_tokens <= 64)
            for stream in (False, True):
                outcome = await over_grpc(stub, body, stream=stream)
                assert outcome.error == expected.error
                if outcome.error is not None:
                    assert outcome.error[0] == "context_length_exceeded"
                    assert "64" in outcome.error[1]
                    assert str(num_prompt) in outcome.error[1]


async def test_numbers_that_json_does_not_have() -> None:
    async with both() as (_, stub, _, _):
        for value in (float("nan"), float("inf")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(pb.GenerateRequest(model="fake", text="x", temperature=value))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"finite number, got {value}" in (caught.value.details() or "")


async def test_tokenizing_is_the_same() -> None:
    async with both() as (client, stub, _, _):
        messages = [{"role": "user", "content": "x"}]
        expected = (await client.post("/tokenize", json={"messages": messages})).json()
        asked = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
        answer = await stub.Tokenize(pb.TokenizeRequest(chat=asked))
        assert [list(answer.tokens), answer.count, answer.max_model_len] == list(expected.values())
        assert (await stub.Detokenize(pb.DetokenizeRequest(tokens=[97, 98]))).text == "ab"
        served = (await client.get("/v1/models")).json()["data"][0]
        (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
        assert (model.id, model.max_model_len, model.owned_by) == ("fake", 4096, "baton")
        assert (served["id"], served["max_model_len"], served["owned_by"]) == ("fake", 4096, "baton")
        for body, call in (({}, stub.Tokenize(pb.TokenizeRequest())),
                           ({"tokens": [999]}, stub.Detokenize(pb.DetokenizeRequest(tokens=[999])))):  # fmt: skip
            error = (await client.post("/detokenize" if body else "/tokenize", json=body)).json()["error"]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.details() == error["message"]


async def test_errors_of_the_service_are_the_same() -> None:
    async with both(config=RouterConfig(max_attempts=1)) as (client, stub, _, fleet):
        body = {"model": "fake", "max_tokens": 5, **INPUT["chat"]}
        outcomes = []
        for ask in (over_http(client, body), over_grpc(stub, body), over_grpc(stub, body, stream=True)):
            fleet.workers["p0"].error = EngineError("the engine broke")
            outcomes.append((await ask).error)
        assert outcomes == [("engine", "the engine broke", None)] * 3
        fleet.workers["d0"].skip_index = 3
        call = stub.GenerateStream(pb.GenerateRequest(model="fake", text="x", max_tokens=5))
        assert (await call.read()).text
        with pytest.raises(grpc.aio.AioRpcError, match="token 3 is missing"):
            await collected(call)


def test_every_end_that_succeeds_has_a_name() -> None:
    success = {FinishReason.STOP, FinishReason.LENGTH}
    assert {f"FINISH_REASON_{reason.name}" for reason in success} == set(pb.FinishReason.keys()[1:])
