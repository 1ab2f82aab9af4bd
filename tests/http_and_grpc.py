"""One request over HTTP and over gRPC, and what came back in one form, for tests that the two are the same.

A request is what its JSON body is. How it looks in protobuf is google.protobuf's own reading of that JSON,
not Baton's; only the prompt's place differs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from google.protobuf import json_format

from common.errors import GRPC_STATUS, HTTP_STATUS
from rpc.status import raised_by_peer
from rpc.v1 import generation_pb2 as pb
from rpc.v1.generation_pb2_grpc import GenerationStub
from tests.both_ways import events_of

TEMPLATE_FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)


@dataclass(frozen=True)
class Outcome:
    """``answers``: (text, token ids, finish reason, logprobs, prompt ids) of each choice; ``usage`` as HTTP
    has it. ``error``: (code, message, param) and the gRPC status that goes with it.
    """

    answers: tuple[Any, ...] = ()
    usage: Any = None
    error: Any = None


def endpoint(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def http_body(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` as its endpoint has it: completions have one number for ``logprobs`` and ``top_logprobs``."""
    body = {"return_token_ids": True, **body}
    if "messages" not in body and "logprobs" in body:
        num_top = body.pop("top_logprobs", 0)
        body["logprobs"] = num_top if body["logprobs"] else None
    return body


def protobuf(body: dict[str, Any]) -> pb.GenerateRequest:
    rest = {"return_token_ids": True, **body}
    if "stop" in rest and isinstance(rest["stop"], str):
        rest["stop"] = [rest["stop"]]
    if "messages" in rest:
        chat = {name: rest.pop(name) for name in TEMPLATE_FIELDS if name in rest}
        if "tools" in chat:
            chat["tools"] = [json.dumps(tool) for tool in chat["tools"]]
        if "chat_template_kwargs" in chat:
            chat["chat_template_kwargs"] = json.dumps(chat["chat_template_kwargs"])
        rest["chat"] = chat
    elif "prompt" in rest:
        prompt = rest.pop("prompt")
        rest |= {"text": prompt} if isinstance(prompt, str) else {"token_ids": {"ids": prompt}}
    return json_format.ParseDict(rest, pb.GenerateRequest())


async def over_http(client: httpx.AsyncClient, body: dict[str, Any], *, stream: bool = False) -> Outcome:
    sent = http_body(body)
    if stream:
        sent |= {"stream": True, "stream_options": {"include_usage": True}}
    response = await client.post(endpoint(body), json=sent)
    if response.status_code != httpx.codes.OK:
        error = response.json()["error"]
        assert HTTP_STATUS[error["code"]] == (response.status_code, error["type"])
        return Outcome(error=(error["code"], error["message"], error["param"]))
    if not stream:
        whole = response.json()
        return Outcome(tuple(_http_choice(choice) for choice in whole["choices"]), _usage(whole["usage"]))
    *events, done = events_of(response.text)
    assert done == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        so_far = choices.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": None})
        so_far["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        so_far["token_ids"] += choice["token_ids"]
        so_far["finish_reason"] = choice["finish_reason"]
        so_far.setdefault("prompt_token_ids", choice.get("prompt_token_ids"))
        if so_far["logprobs"] is None:
            so_far["logprobs"] = choice["logprobs"]
        elif choice["logprobs"] is not None:
            so_far["logprobs"] = {
                key: joined + choice["logprobs"][key] for key, joined in so_far["logprobs"].items() if joined
            }
    return Outcome(tuple(_http_choice(choices[index]) for index in sorted(choices)), _usage(events[-1]["usage"]))


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} | {"cached": cached}


def _http_choice(choice: dict[str, Any]) -> tuple[Any, ...]:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    logprobs: Any = ()
    if choice["logprobs"] is not None and "content" in choice["logprobs"]:
        logprobs = tuple((*_spelled(e), tuple(map(_spelled, e["top_logprobs"]))) for e in choice["logprobs"]["content"])
    elif choice["logprobs"] is not None:  # completions tell less
        told = choice["logprobs"]
        logprobs = tuple(zip(told["tokens"], told["token_logprobs"], strict=True))
        if logprobs and logprobs[0][1] is None:  # an echoed prompt's first token, of which nothing can be told
            logprobs = logprobs[1:]
    return text, choice["token_ids"], choice["finish_reason"], logprobs, choice["prompt_token_ids"]


def _spelled(entry: dict[str, Any]) -> tuple[str, bytes, float]:
    return entry["token"], bytes(entry["bytes"]), entry["logprob"]


async def over_grpc(stub: GenerationStub, body: dict[str, Any], *, stream: bool = False) -> Outcome:
    request = protobuf(body)
    try:
        if not stream:
            response = await stub.Generate(request)
            choices = [_choice(choice, "messages" in body) for choice in response.choices]
            return Outcome(tuple(choices), _grpc_usage(response.usage))
        chunks = [chunk async for chunk in stub.GenerateStream(request)]
    except grpc.aio.AioRpcError as status:
        return Outcome(error=_error(status))
    joined: dict[int, pb.Choice] = {}
    for chunk in chunks:
        choice = joined.setdefault(chunk.index, pb.Choice(index=chunk.index))
        assert not choice.finish_reason, "a chunk after the last one"
        choice.text += chunk.text
        choice.token_ids.extend(chunk.token_ids)
        choice.prompt_token_ids.extend(chunk.prompt_token_ids)
        choice.logprobs.extend(chunk.logprobs)
        choice.prompt_logprobs.extend(chunk.prompt_logprobs)
        choice.finish_reason = chunk.finish_reason
    answers = tuple(_choice(joined[index], "messages" in body) for index in sorted(joined))
    return Outcome(answers, _grpc_usage(chunks[-1].usage))


def _error(status: grpc.aio.AioRpcError) -> tuple[str, str, str | None]:
    error = raised_by_peer(status)
    assert error is not None, status
    assert status.details() == error.message
    assert status.code().name == GRPC_STATUS[error.code]
    return error.code, error.message, error.param


def _grpc_usage(usage: pb.Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "cached": usage.cached_tokens,
    }


def _choice(choice: pb.Choice, chat: bool) -> tuple[Any, ...]:
    reason = pb.FinishReason.Name(choice.finish_reason).removeprefix("FINISH_REASON_").lower()
    logprobs: Any
    if chat:
        logprobs = tuple(
            (e.token, e.bytes, e.logprob, tuple((t.token, t.bytes, t.logprob) for t in e.top)) for e in choice.logprobs
        )
    else:
        logprobs = tuple((entry.token, entry.logprob) for entry in (*choice.prompt_logprobs, *choice.logprobs))
    assert [entry.token_id for entry in choice.logprobs] in ([], list(choice.token_ids))
    return choice.text, list(choice.token_ids), reason, logprobs, list(choice.prompt_token_ids)


async def four_ways(client: httpx.AsyncClient, stub: GenerationStub, body: dict[str, Any]) -> list[Outcome]:
    """Whole over HTTP and gRPC, streamed over HTTP and gRPC; once before, so that each finds the same cache."""
    await over_http(client, body)
    ways = [(over_http, client, False), (over_grpc, stub, False), (over_http, client, True), (over_grpc, stub, True)]
    return [await way(where, body, stream=stream) for way, where, stream in ways]  # type: ignore[operator]
