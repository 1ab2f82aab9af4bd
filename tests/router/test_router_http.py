"""The HTTP layer: OpenAI's forms, every refusal by name, the operators' pages, readiness."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.config import RouterConfig
from common.errors import EngineError
from common.workers import Role
from router.fakes import fake_answer
from tests.both_ways import events_of
from tests.router.fleet import until
from tests.router.gateway import ByteTokenizer, answer_to, chat, http

# ── OpenAI's endpoints ────────────────────────────────────────────────────────────────────────────


async def test_chat_completion() -> None:
    async with http() as (client, _, _):
        response = await client.post("/v1/chat/completions", json=chat(return_token_ids=True, metadata={"a": "b"}))
        assert response.status_code == 200
        body = response.json()
        assert body["id"] == response.headers["x-request-id"]
        assert body["object"] == "chat.completion"
        (choice,) = body["choices"]
        assert choice["message"]["content"] == answer_to("Hello", 5)
        assert choice["finish_reason"] == "length"
        assert choice["prompt_token_ids"] == ByteTokenizer().encode("<user>Hello<assistant>", False)
        assert choice["token_ids"] == fake_answer(choice["prompt_token_ids"], 5)
        assert body["usage"] == {
            "prompt_tokens": 22,
            "completion_tokens": 5,
            "total_tokens": 27,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        again = (await client.post("/v1/chat/completions", json=chat())).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        record = (await client.get(f"/requests/{again['id']}")).json()
        assert record["tokens"]["cached_prefill"] == 16
        assert record["finish_reason"] == "length"


async def test_chat_stream() -> None:
    async with http() as (client, _, _):
        options = {"include_usage": True}
        response = await client.post("/v1/chat/completions", json=chat(stream=True, stream_options=options))
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, usage, done = events_of(response.text)
        assert done == "[DONE]"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 5
        assert all(chunk["usage"] is None for chunk in chunks)
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text == answer_to("Hello", 5)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert {chunk["id"] for chunk in chunks} == {response.headers["x-request-id"]}


async def test_completions_of_every_kind_of_prompt() -> None:
    async with http() as (client, _, _):
        for prompt, expected in [
            ("abc", [[97, 98, 99]]),
            (["abc", "d"], [[97, 98, 99], [100]]),
            ([1, 2, 3], [[1, 2, 3]]),
            ([[1, 2], [3]], [[1, 2], [3]]),
        ]:
            fields = {"model": "fake", "prompt": prompt, "max_tokens": 4, "return_token_ids": True}
            body = (await client.post("/v1/completions", json=fields)).json()
            assert [choice["prompt_token_ids"] for choice in body["choices"]] == expected
            assert [choice["token_ids"] for choice in body["choices"]] == [fake_answer(p, 4) for p in expected]
            assert body["usage"]["completion_tokens"] == 4 * len(expected)
            streamed = await client.post("/v1/completions", json={**fields, "stream": True})
            *chunks, done = events_of(streamed.text)
            assert done == "[DONE]"
            for index, ids in enumerate(expected):
                choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
                assert [i for choice in choices for i in choice["token_ids"]] == fake_answer(ids, 4)
                assert [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c] == [ids]


async def test_stop_token_is_not_text() -> None:
    async with http() as (client, _, _):
        last = fake_answer(ByteTokenizer().encode("<user>Hello<assistant>", False), 5)[-1]
        body = (await client.post("/v1/chat/completions", json=chat(stop_token_ids=[last]))).json()
        assert body["choices"][0]["message"]["content"] == answer_to("Hello", 4)


async def test_sampling_reaches_the_workers() -> None:
    async with http() as (client, _, fleet):
        fields = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": 11, "ignore_eos": True, "min_tokens": 2}
        fields |= {"priority": 3, "timeout_s": 9.0, "cache_salt": "s", "slo": {"ttft_s": 1.5}}
        body = chat(max_completion_tokens=7, **fields) | {"max_tokens": None}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200
        request = fleet.workers["d0"].seen[0]
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 0, 11)
        assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (7, 2, True)
        assert (request.priority, request.cache_salt) == (3, "s")
        assert 8.0 < request.timeout_s <= 9.0
        assert (await client.get(f"/requests/{response.json()['id']}")).json()["slo"] == {"ttft_s": 1.5}
        await client.post("/v1/chat/completions", json=chat())
        await client.post("/v1/chat/completions", json=chat())
        first, second = (seen.sampling.seed for seen in fleet.workers["d0"].seen[1:])
        assert first != second


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 0}, "n", "greater than or equal to 1, got 0"),
        ({"n": 257}, "n", "less than or equal to 256, got 257"),
        ({"logprobs": 5}, "logprobs", "valid boolean, got 5"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20, got 21"),
        ({"top_logprobs": 3}, "top_logprobs", "only be set when logprobs is true, got 3"),
        ({"stop": ["x"] * 3 + [str(i) for i in range(16)]}, "stop", "stop may hold 16 strings, got 17"),
        ({"stop": ["x", ""]}, "stop", "1 to 1024 characters, got one of 0"),
        ({"stop": ["x" * 1025]}, "stop", "1 to 1024 characters, got one of 1025"),
        ({"stop": 5}, "stop", "valid string, got 5"),
        ({"frequency_penalty": 2.1}, "frequency_penalty", "less than or equal to 2, got 2.1"),
        ({"presence_penalty": -2.1}, "presence_penalty", "greater than or equal to -2, got -2.1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01, got 0"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty", "greater than or equal to 0.01, got 1e-300"),
        ({"stream": 1}, "stream", "stream: input should be a valid boolean, got 1"),
        (
            {"stream": True, "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
            "valid boolean, got 'yes'",
        ),
        ({"min_p": 1.5}, "min_p", "less than or equal to 1, got 1.5"),
        ({"logit_bias": {"7": 101}}, "logit_bias.7", "less than or equal to 100, got 101"),
        ({"logit_bias": {"seven": 1}}, "logit_bias", "a key is a token id in decimal, got 'seven'"),
        ({"logit_bias": {"256": 1}}, "logit_bias", "token id 256 is out of range"),
        ({"logit_bias": {"1" * 400: 1}}, "logit_bias", "a key is a token id in decimal"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1, or 1 or more, got 0"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "middle"}, "truncation_side", "got 'middle'"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "may not hold 'messages'"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "only one of them may be true",
        ),
        ({"echo": True}, "echo", "echo = True is not served yet"),
        ({"tools": [{"type": "function"}]}, "tool_choice", "its calls are not parsed"),
        ({"tool_choice": "required"}, "tool_choice", "'required' needs tools"),
        ({"guided_json": {}}, "guided_json", "not served yet"),
        ({"temprature": 0}, "temprature", "nearest known one is 'temperature'"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2, got 2.5"),
        ({"temperature": "1"}, "temperature", "valid number, got '1'"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1, got 0"),
        ({"max_tokens": True}, "max_tokens", "got True"),
        ({"min_tokens": 9}, "min_tokens", "at most max_tokens = 5, got 9"),
        ({"stop_token_ids": [256]}, "stop_token_ids", "token id 256 is out of range"),
        ({"max_tokens": 200}, "max_tokens", "maximum context length is 200 tokens; you asked for 222"),
        ({"max_completion_tokens": 6}, "max_completion_tokens", "got 5 and 6"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "text"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "got 'wizard'"),
        ({"model": "other"}, "model", "'other' does not exist"),
        ({"slo": {"ttft_s": -1}}, "slo.ttft_s", "greater than 0, got -1"),
    ],
)
async def test_refusals_name_field_limit_and_value(
    stream: bool, fields: dict[str, Any], param: str | None, words: str
) -> None:
    async with http(max_model_len=200) as (client, _, fleet):
        response = await client.post("/v1/chat/completions", json=chat(**{"stream": stream, **fields}))
        assert response.status_code == (404 if "model" in fields else 400)
        error = response.json()["error"]
        assert words in error["message"]
        if param is not None:
            assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert not fleet.workers["d0"].seen


async def test_what_cannot_be_encoded_is_named_all_the_same() -> None:
    async with http() as (client, _, _):
        for body in (b'{"model": "fake", "prompt": "a", "\\ud800": 1}', b'{"model": "\\ud800", "prompt": "a"}'):
            response = await client.post("/v1/completions", content=body)
            assert response.status_code in (400, 404)
            assert "\\ud800" in response.json()["error"]["message"]


async def test_tokenizing_for_another_model_is_refused() -> None:
    async with http() as (client, _, _):
        for path, fields in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [65]})):
            assert (await client.post(path, json=fields | {"model": "fake"})).status_code == 200
            refused = await client.post(path, json=fields | {"model": "other"})
            assert refused.status_code == 404
            assert refused.json()["error"]["param"] == "model"


async def test_neutral_values_of_fields_that_are_not_served() -> None:
    async with http() as (client, _, _):
        neutral = {"n": 1, "stop": None, "logprobs": False, "presence_penalty": 0.0, "tools": None, "user": "u"}
        neutral |= {"response_format": {"type": "text"}, "store": False, "min_p": 0, "repetition_penalty": 1.0}
        assert (await client.post("/v1/chat/completions", json=chat(**neutral))).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_context_limit_to_the_token(stream: bool) -> None:
    """R8: one under, at, and one over the limit; a prompt leaves room for one token at least."""
    async with http(max_model_len=64) as (client, _, _):
        for num_prompt, max_tokens, status in [(62, 1, 200), (63, 1, 200), (64, 1, 400), (64, None, 400), (63, 2, 400)]:
            fields = {"model": "fake", "prompt": [1] * num_prompt, "max_tokens": max_tokens, "stream": stream}
            response = await client.post("/v1/completions", json=fields)
            assert response.status_code == status, (num_prompt, max_tokens)
            if status == 400:
                assert response.json()["error"]["code"] == "context_length_exceeded"
                assert str(num_prompt) in response.json()["error"]["message"]
        body = (await client.post("/v1/completions", json={"model": "fake", "prompt": [1] * 60})).json()
        assert body["usage"]["completion_tokens"] == 4


async def test_pool_limit_is_named() -> None:
    async with http(num_blocks=4) as (client, _, _):
        fields = {"model": "fake", "prompt": [1] * 60, "max_tokens": 5}
        response = await client.post("/v1/completions", json=fields)
        assert response.status_code == 400
        assert "KV pools hold 64 tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object, it is an array"),
        (b'{"temperature": NaN}', "NaN is no JSON number"),
        (b"\xff\xfe", "not JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a":' * 20_000, "not JSON"),
        (b"{}", "is required"),
        (b'{"model": "fake", "prompt": ""}', "must not be empty"),
        (b'{"model": "fake", "prompt": []}', "must not be empty"),
        (b'{"model": "fake", "prompt": [[]]}', "must not be empty"),
        (b'{"model": "fake", "prompt": [1, "a"]}', "prompt must be a string, a list"),
        (b'{"model": "fake", "prompt": [-1]}', "prompt must be a string, a list"),
        (b'{"model": "fake", "prompt": [300]}', "token id 300 is out of range, the vocabulary has ids 0 to 255"),
    ],
)
async def test_bodies_that_are_none(data: bytes, words: str) -> None:
    async with http() as (client, _, _):
        response = await client.post("/v1/completions", content=data)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
        assert response.headers["x-request-id"]


async def test_unknown_paths_and_methods() -> None:
    async with http() as (client, _, _):
        for path, status in [("/nowhere", 404), ("/v1/completions", 405), ("/requests/x", 404)]:
            response = await client.get(path)
            assert response.status_code == status
            assert response.json()["error"]["message"]
            assert response.headers["x-request-id"]


async def test_errors_of_the_service() -> None:
    async with http(config=RouterConfig(max_queue=0, max_attempts=1), num_blocks=4) as (client, _, fleet):
        fleet.workers["p0"].error = EngineError("the engine broke")
        for stream in (False, True):
            fleet.workers["p0"].error = EngineError("the engine broke")
            response = await client.post("/v1/chat/completions", json=chat(stream=stream))
            assert response.status_code == 500
            assert response.json()["error"]["message"] == "the engine broke"
        await until(lambda: fleet.idle)
        fleet.workers["d0"].mute_after = 0
        large = {"model": "fake", "prompt": [1] * 60, "max_tokens": 4}
        hog = asyncio.ensure_future(client.post("/v1/completions", json=large))
        await until(lambda: fleet.workers["d0"].holding)
        refused = await client.post("/v1/chat/completions", json=chat(stream=True))
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        hog.cancel()
        await asyncio.gather(hog, return_exceptions=True)


async def test_a_failure_midway_is_an_event() -> None:
    async with http(config=RouterConfig(max_attempts=1)) as (client, _, fleet):
        fleet.workers["d0"].skip_index = 3
        response = await client.post("/v1/chat/completions", json=chat(stream=True))
        assert response.status_code == 200
        *_, last = events_of(response.text)
        assert "token 3 is missing" in last["error"]["message"]


async def test_unforeseen_errors_are_500_in_openais_form() -> None:
    async with http() as (client, gateway, _):
        gateway.tokenizer.encode = None  # type: ignore[method-assign,assignment]
        response = await client.post("/v1/chat/completions", json=chat())
        assert response.status_code == 500
        assert "internal error" in response.json()["error"]["message"]
        assert response.headers["x-request-id"]


# ── the other endpoints ───────────────────────────────────────────────────────────────────────────


async def test_tokenize_and_back() -> None:
    async with http() as (client, _, _):
        body = (await client.post("/tokenize", json={"prompt": "abc"})).json()
        assert body == {"tokens": [97, 98, 99], "count": 3, "max_model_len": 4096}
        messages = [{"role": "user", "content": "x"}]
        body = (await client.post("/tokenize", json={"messages": messages})).json()
        assert body["tokens"] == ByteTokenizer().encode("<user>x<assistant>", False)
        assert (await client.post("/detokenize", json={"tokens": [97, 98]})).json() == {"prompt": "ab"}
        assert (await client.post("/detokenize", json={"tokens": [999]})).status_code == 400
        assert (await client.post("/tokenize", json={})).status_code == 400


async def test_pages_for_people_and_machines() -> None:
    async with http(prefill=2) as (client, _, _):
        await client.post("/v1/chat/completions", json=chat())
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "fake"
        assert (await client.get("/v1/models/fake")).json()["max_model_len"] == 4096
        assert (await client.get("/v1/models/other")).status_code == 404
        cluster = (await client.get("/cluster")).json()
        assert [(w["id"], w["role"], w["state"]) for w in cluster["workers"]] == [
            ("p0", "prefill", "ready"),
            ("p1", "prefill", "ready"),
            ("d0", "decode", "ready"),
        ]
        assert cluster["routers"][0]["url"] == "http://here"
        assert cluster["workers"][0]["load"]["total_blocks"] == 1000
        ledger = (await client.get("/ledger")).json()
        assert {w["id"]: w["free"] for w in ledger["workers"]} == {"p0": 1000, "p1": 1000, "d0": 1000}
        assert ledger["requests"]["open"] == 0
        metrics = (await client.get("/metrics")).text
        assert 'baton_requests_total{reason="length"} 1.0' in metrics
        assert 'baton_workers{role="prefill",state="ready"} 2.0' in metrics
        assert "baton_generated_tokens_total 5.0" in metrics
        assert 'baton_http_responses_total{route="/v1/chat/completions",status="200"} 1.0' in metrics


# ── readiness ─────────────────────────────────────────────────────────────────────────────────────


async def test_ready_goes_through_the_whole() -> None:
    async with http() as (client, _, fleet):
        assert (await client.get("/ready")).json() == {"status": "ready"}
        assert fleet.workers["p0"].seen[0].sampling.max_tokens == 2
        await client.get("/ready")
        assert len(fleet.workers["p0"].seen) == 1  # the first one is recent enough


async def test_real_traffic_is_proof() -> None:
    async with http() as (client, _, fleet):
        await client.post("/v1/chat/completions", json=chat())
        assert (await client.get("/ready")).status_code == 200
        assert len(fleet.workers["p0"].seen) == 1


async def test_a_hung_engine_is_not_ready() -> None:
    async with http() as (client, _, fleet):
        fleet.workers["d0"].mute_after = 0
        first, second = await asyncio.gather(client.get("/ready"), client.get("/ready"))
        assert first.status_code == second.status_code == 503
        assert "did not get through within 0.3 s" in first.json()["reasons"][0]
        assert len(fleet.workers["p0"].seen) == 1
        await until(lambda: fleet.idle)


async def test_busy_is_ready() -> None:
    async with http(num_blocks=4) as (client, gateway, fleet):
        large = {"model": "fake", "prompt": [1] * 50, "max_tokens": 14}
        hog = asyncio.ensure_future(client.post("/v1/completions", json=large))
        decode = fleet.workers["d0"]
        decode.mute_after = 0
        await until(lambda: decode.holding)

        async def work() -> None:
            while True:
                await asyncio.sleep(0.05)
                fleet.workers["p0"].steps += 1
                fleet.workers["p0"].report()
                decode.report()

        working = asyncio.ensure_future(work())
        assert (await client.get("/ready")).status_code == 200
        working.cancel()
        hog.cancel()
        await asyncio.gather(hog, working, return_exceptions=True)
        fleet.workers["p0"].kill()
        await until(lambda: not gateway.service.registry.ready(Role.PREFILL))
        response = await client.get("/ready")
        assert response.status_code == 503
        assert "no prefill worker is ready" in response.json()["error"]["message"]
