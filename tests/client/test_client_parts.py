"""What the client is made of, without a network: addresses, requests, failures, retries."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import grpc
import pytest

from baton_client.addresses import addresses
from baton_client.failures import Failure, failure
from baton_client.options import ChatOptions, Options, chat_request, generate_request
from baton_client.retries import Attempts, RetryPolicy
from common.errors import (
    BY_CODE,
    BatonError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
)
from rpc.status import status_code, to_metadata
from rpc.v1 import generation_pb2 as pb


def test_importing_it_is_light() -> None:
    """Nobody needs torch, ray or a web server to ask a question."""
    code = "import baton_client, sys; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "grpc" in loaded
    assert not {"engine", "fastapi", "numpy", "pydantic", "ray", "router", "starlette", "torch"} & set(loaded)


# ── addresses ─────────────────────────────────────────────────────────────────────────────────────


def test_addresses() -> None:
    assert addresses("grpc://127.0.0.1:40213") == ["127.0.0.1:40213"]
    assert addresses(["host:1", "grpc://[::1]:2/"]) == ["host:1", "[::1]:2"]


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:8000", "grpc://", "host", "host:", "host:port", "host:1/path", "host:1?x=1", "host:99999", ""],
)
def test_what_is_no_address_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"grpc://"):
        addresses([url])
    with pytest.raises(ConfigError, match="at least one"):
        addresses([])


# ── requests ──────────────────────────────────────────────────────────────────────────────────────

SAMPLES: dict[str, Any] = {
    "model": "m",
    "stop": ["x"],
    "stop_token_ids": [1, 2],
    "logit_bias": {7: 0.5},
    "slo": {"ttft_s": 1.0},
    "truncation_side": "left",
    "cache_salt": "s",
}


def test_every_option_reaches_the_wire() -> None:
    """Options and protobuf fields are the same names; a new field that the client lacks is found here."""
    fields = {field.name: field for field in pb.GenerateRequest.DESCRIPTOR.fields}
    assert set(Options.__annotations__) == set(fields) - {"text", "token_ids", "chat"}
    chat_fields = {field.name for field in pb.Chat.DESCRIPTOR.fields} - {"messages"}
    assert set(ChatOptions.__annotations__) == set(Options.__annotations__) | chat_fields
    for name in Options.__annotations__:
        field = fields[name]
        plain: Any = {field.TYPE_DOUBLE: 0.5, field.TYPE_INT64: 3, field.TYPE_BOOL: False}.get(field.type)
        value = SAMPLES.get(name, plain)
        request = generate_request("x", {name: value})
        set_fields = {field.name: sent for field, sent in request.ListFields()}
        assert set_fields.keys() == {"text", name}, name
        if name == "slo":
            assert request.slo.ttft_s == 1.0
        elif name == "logit_bias":
            assert dict(request.logit_bias) == value
        else:
            assert set_fields[name] == value


def test_prompts_and_conversations() -> None:
    assert generate_request("", {}) == pb.GenerateRequest(text="")
    assert generate_request([], {}).WhichOneof("input") == "token_ids"
    assert generate_request((1, 2), {"stop": "a", "seed": None}) == pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2]), stop=["a"]
    )
    assert chat_request([], {}).WhichOneof("input") == "chat"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: Any = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    options: Any = {"tools": [{"a": 1}], "chat_template_kwargs": {"b": True}, "tool_choice": "none", "max_tokens": 2}
    tool_call = pb.ToolCall(id="c", type="function", function=pb.ToolFunction(name="f", arguments="{}"))
    assert chat_request(messages, options) == pb.GenerateRequest(
        max_tokens=2,
        chat=pb.Chat(
            messages=[
                pb.ChatMessage(role="user", content="x"),
                pb.ChatMessage(role="assistant", tool_calls=[tool_call]),
            ],
            tools=['{"a": 1}'],
            chat_template_kwargs='{"b": true}',
            tool_choice="none",
        ),
    )


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {-1: 0.5}}, "logit_bias"),
        ({"slo": {"ttft": 1.0}}, "slo.ttft"),
        ({"stop": [1]}, "stop"),
        ({"max_tokens": [1]}, "max_tokens"),
        ({"stop_token_ids": 1}, "stop_token_ids"),
        ({"slo": 1.0}, "slo"),
    ],
)
def test_what_the_wire_cannot_carry_is_named(options: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError, match=param) as caught:
        generate_request("x", options)
    assert caught.value.param == param


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="'temprature'; the nearest one is 'temperature'"):
        generate_request("x", {"temprature": 0.5})
    with pytest.raises(TypeError, match="'tools'"):
        generate_request("x", {"tools": []})
    with pytest.raises(TypeError, match="'contents'; the nearest one is 'content'"):
        chat_request([{"role": "user", "contents": "x"}], {})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(InvalidRequestError, match=r"messages\.0\.tool_calls"):
        chat_request([{"role": "user", "tool_calls": [{"what": 1}]}], {})


# ── failures ──────────────────────────────────────────────────────────────────────────────────────


def rpc_error(code: grpc.StatusCode, details: str = "", initial: Any = (), trailing: Any = ()) -> Any:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(*initial), grpc.aio.Metadata(*trailing), details)


def raised(error: BatonError) -> Any:
    return rpc_error(status_code(error), error.message, (("x-request-id", "gen-1"),), to_metadata(error))


def test_the_servers_errors_keep_their_class() -> None:
    for kind in BY_CODE.values():
        outcome = failure(raised(kind("text", param="n", retry_after_s=2.0)), "h:1")
        assert (type(outcome.error), outcome.error.message, outcome.error.param) == (kind, "text", "n")
        assert outcome.error.__notes__ == ["x-request-id: gen-1"]
        assert outcome.never_started == (kind.code in {"unavailable", "draining", "overloaded", "no_capacity"})
        assert not failure(raised(kind("text")), "h:1", got_message=True).never_started
    assert not failure(raised(OverloadedError("no time is named")), "h:1").never_started


@pytest.mark.parametrize(
    ("code", "details", "kind", "never_started"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Connection refused", UnavailableError, True),
        (grpc.StatusCode.CANCELLED, "", RequestCancelledError, False),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", DeadlineError, False),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", ConfigError, False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max (9 vs. 8)", InvalidRequestError, False),
        (grpc.StatusCode.UNKNOWN, "Stream removed", UnavailableError, True),
        (grpc.StatusCode.INTERNAL, "Exception deserializing response!", BatonError, False),
    ],
)
def test_what_grpcs_own_status_means(
    code: grpc.StatusCode, details: str, kind: type[BatonError], never_started: bool
) -> None:
    outcome = failure(rpc_error(code, details), "h:1")
    assert (type(outcome.error), outcome.never_started) == (kind, never_started)
    assert "h:1" in outcome.error.message
    # The server had begun: who knows what it did.
    assert not failure(rpc_error(code, details, (("x-request-id", "gen-1"),)), "h:1").never_started


# ── retries ───────────────────────────────────────────────────────────────────────────────────────

GONE = Failure(UnavailableError("gone"), never_started=True)


def attempts(num_places: int = 1, deadline: float | None = None, **policy: Any) -> Attempts:
    return Attempts(RetryPolicy(**policy), num_places, 0, deadline, random.Random(1))


def test_waits_grow_and_are_jittered() -> None:
    policy = RetryPolicy(first_wait_s=0.1, max_wait_s=1.0)
    rng = random.Random(3)
    for num_failed in range(1, 12):
        longest = min(1.0, 0.1 * 2 ** (num_failed - 1))
        waits = [policy.wait_s(num_failed, rng) for _ in range(200)]
        assert all(longest / 2 <= wait <= longest for wait in waits)
        assert len(set(waits)) > 190


def test_only_what_never_started_is_tried_again() -> None:
    begun = Failure(UnavailableError("broke"), never_started=False)
    with pytest.raises(UnavailableError) as caught:
        attempts().after(begun, 0.0)
    assert caught.value is begun.error


def test_the_number_of_tries_is_limited() -> None:
    tries = attempts(max_attempts=3)
    assert tries.after(GONE, 0.0) > 0.0
    assert tries.after(GONE, 0.0) > 0.0
    with pytest.raises(UnavailableError):
        tries.after(GONE, 0.0)
    with pytest.raises(UnavailableError):
        attempts(max_attempts=1).after(GONE, 0.0)


def test_the_servers_wish_counts() -> None:
    assert attempts().after(Failure(OverloadedError("full", retry_after_s=3.0), True), 0.0) == 3.0
    assert (
        attempts(first_wait_s=8.0, max_wait_s=8.0).after(Failure(OverloadedError("", retry_after_s=3.0), True), 0) >= 4
    )


def test_the_deadline_covers_all_tries() -> None:
    tries = attempts(deadline=10.0)
    assert tries.left_s(4.0) == 6.0
    assert tries.after(GONE, 9.0) < 1.0
    with pytest.raises(UnavailableError):  # what happened says more than that time ran out
        tries.after(GONE, 9.999)
    with pytest.raises(DeadlineError):
        tries.left_s(10.0)
    assert attempts().left_s(1e9) is None


def test_the_others_are_asked_before_anybody_waits() -> None:
    tries = attempts(num_places=3, max_attempts=5)
    waits = []
    places = [tries.place]
    for _ in range(4):
        waits.append(tries.after(GONE, 0.0))
        places.append(tries.place)
    assert places == [0, 1, 2, 0, 1]
    assert waits[:2] == [0.0, 0.0]
    assert min(waits[2:]) > 0.0
