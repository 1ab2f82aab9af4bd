"""Clients of the e2e tests: prompts in, token ids out, over the real HTTP endpoints; and clients that go away."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.e2e.fleet import Fleet, check_balance

TIMEOUT_S = 600.0
GREEDY: tuple[tuple[str, Any], ...] = (("temperature", 0.0),)


@dataclass(frozen=True)
class Prompt:
    """Token ids and how to go on from them."""

    token_ids: tuple[int, ...]
    max_tokens: int
    parameters: tuple[tuple[str, Any], ...] = GREEDY

    path = "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        return _body(model, {"prompt": list(self.token_ids)}, self.max_tokens, self.parameters)


@dataclass(frozen=True)
class Chat:
    """What a user says, and how to go on from there."""

    text: str
    max_tokens: int
    parameters: tuple[tuple[str, Any], ...] = GREEDY

    path = "/v1/chat/completions"

    def body(self, model: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.text}]
        return _body(model, {"messages": messages}, self.max_tokens, self.parameters)


def _body(
    model: str, asked: dict[str, Any], max_tokens: int, parameters: tuple[tuple[str, Any], ...]
) -> dict[str, Any]:
    common = {"model": model, "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
    return common | asked | dict(parameters)


@dataclass(frozen=True)
class Reply:
    request_id: str
    token_ids: tuple[int, ...]
    usage: dict[str, Any]
    finish_reason: str
    prompt_token_ids: tuple[int, ...]
    first_token_s: float = 0.0
    """From sending to the first event, when streamed."""

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


@dataclass(frozen=True)
class Failure:
    """An error, as a response of its own (``status``) or as the last event of a stream (200)."""

    status: int
    code: str
    message: str
    after_s: float
    request_id: str


async def complete(client: httpx.AsyncClient, fleet: Fleet, prompt: Prompt | Chat) -> Reply:
    response = await client.post(fleet.url + prompt.path, json=prompt.body(fleet.model), timeout=TIMEOUT_S)
    assert response.status_code == httpx.codes.OK, response.text
    reply = _reply(response.json())
    assert not isinstance(prompt, Prompt) or reply.prompt_token_ids == prompt.token_ids
    return reply


async def stream(client: httpx.AsyncClient, fleet: Fleet, prompt: Prompt | Chat) -> Reply:
    """The same by streaming: the tokens of all chunks in order. The stream must end as it should."""
    body, started = _streamed(prompt, fleet), time.monotonic()
    async with client.stream("POST", fleet.url + prompt.path, json=body, timeout=TIMEOUT_S) as response:
        assert response.status_code == httpx.codes.OK, await response.aread()
        reply = await _read_stream(response, started)
    assert isinstance(reply, Reply), reply
    return reply


async def outcome(
    client: httpx.AsyncClient, fleet: Fleet, prompt: Prompt | Chat, *, streaming: bool = False
) -> Reply | Failure:
    """What became of a request that may fail. A failure must say so: in its status, or in the stream."""
    started = time.monotonic()
    body = _streamed(prompt, fleet) if streaming else prompt.body(fleet.model)
    async with client.stream("POST", fleet.url + prompt.path, json=body, timeout=TIMEOUT_S) as response:
        if response.status_code == httpx.codes.OK and streaming:
            return await _read_stream(response, started)
        answer = json.loads(await response.aread())
        if response.status_code != httpx.codes.OK:
            return _failure(answer, started, response)
        return _reply(answer)


def _failure(answer: dict[str, Any], started: float, response: httpx.Response) -> Failure:
    error, after_s = answer["error"], time.monotonic() - started
    return Failure(response.status_code, error["code"], error["message"], after_s, response.headers["x-request-id"])


def _reply(answer: dict[str, Any]) -> Reply:
    (choice,) = answer["choices"]
    given = tuple(choice["prompt_token_ids"])
    return Reply(answer["id"], tuple(choice["token_ids"]), answer["usage"], choice["finish_reason"], given)


async def _read_stream(response: httpx.Response, started: float) -> Reply | Failure:
    tokens: list[int] = []
    given: tuple[int, ...] = ()
    usage: dict[str, Any] = {}
    request_id = finish_reason = data = ""
    first_token_s = 0.0
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        first_token_s = first_token_s or time.monotonic() - started
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            return _failure(chunk, started, response)
        request_id = chunk["id"]
        for choice in chunk["choices"]:
            assert not finish_reason, f"a chunk after the last one: {chunk}"
            tokens.extend(choice.get("token_ids") or ())
            given = tuple(choice.get("prompt_token_ids") or given)
            finish_reason = choice["finish_reason"] or ""
        usage = chunk.get("usage") or usage
    assert data == "[DONE]", f"the stream of {request_id} ended without [DONE]: {data}"
    assert finish_reason, f"the stream of {request_id} has no finish_reason"
    return Reply(request_id, tuple(tokens), usage, finish_reason, given, first_token_s)


def _streamed(prompt: Prompt | Chat, fleet: Fleet) -> dict[str, Any]:
    return {**prompt.body(fleet.model), "stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Leave:
    """When a client closes its connection: ``after_s`` seconds after the request, or as soon as it has
    read ``after_events`` events of the stream. ``sent`` is the share of its body that it gets to send.
    """

    after_s: float = TIMEOUT_S
    after_events: int = 1_000_000
    sent: float = 1.0


async def leave(fleet: Fleet, prompt: Prompt | Chat, moment: Leave, *, streaming: bool) -> None:
    """Asks, and is gone at ``moment`` without a word. One that has its answer before that has it."""
    address = urlsplit(fleet.url)
    body = json.dumps(_streamed(prompt, fleet) if streaming else prompt.body(fleet.model)).encode()
    head = (
        f"POST {prompt.path} HTTP/1.1\r\nHost: baton\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body[: int(len(body) * moment.sent)])
        await writer.drain()
        async with asyncio.timeout(moment.after_s):
            num_events = 0
            while num_events < moment.after_events and (line := await reader.readline()):
                num_events += line.startswith(b"data: ")
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()


@dataclass(frozen=True)
class Visit:
    """One client: what it asks, how, and when it is gone (None: it stays for its answer)."""

    prompt: Prompt | Chat
    streaming: bool = False
    leaving: Leave | None = None


def receive(fleet: Fleet, visits: Sequence[Visit], *, concurrency: int = 1000) -> list[Reply | None]:
    """All visits, ``concurrency`` at a time: the replies, None for those who left. Who stays must get an
    answer, and at no moment may a block be unaccounted for (law 3)."""

    async def main() -> list[Reply | None]:
        gate, over = asyncio.Semaphore(concurrency), asyncio.Event()
        async with httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=None)) as client:

            async def one(visit: Visit) -> Reply | None:
                async with gate:
                    if visit.leaving is None:
                        return await (stream if visit.streaming else complete)(client, fleet, visit.prompt)
                    await leave(fleet, visit.prompt, visit.leaving, streaming=visit.streaming)
                    return None

            async def audit() -> None:
                while not over.is_set():
                    check_balance((await client.get(f"{fleet.url}/ledger", timeout=TIMEOUT_S)).json())
                    await asyncio.sleep(0.2)

            auditor = asyncio.create_task(audit())
            replies = await asyncio.gather(*(one(visit) for visit in visits))
            over.set()
            await auditor
            return replies

    return asyncio.run(main())


def outcomes(
    fleet: Fleet, visits: Sequence[Visit], meanwhile: Callable[[], None] = lambda: None
) -> list[Reply | Failure]:
    """What becomes of all visits, while something happens to the cluster, in a thread of its own."""

    async def main() -> list[Reply | Failure]:
        async with httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=None)) as client:
            asked = [outcome(client, fleet, visit.prompt, streaming=visit.streaming) for visit in visits]
            *ends, _ = await asyncio.gather(*asked, asyncio.to_thread(meanwhile))
            return ends

    return asyncio.run(main())


def ask_all(
    fleet: Fleet, prompts: Sequence[Prompt | Chat], *, concurrency: int, streaming: bool = False
) -> list[Reply]:
    """All prompts, ``concurrency`` at a time; replies in the order of the prompts."""

    async def main() -> list[Reply]:
        gate = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency + 1)
        async with httpx.AsyncClient(trust_env=False, limits=limits) as client:

            async def one(prompt: Prompt | Chat) -> Reply:
                async with gate:
                    return await (stream if streaming else complete)(client, fleet, prompt)

            return await asyncio.gather(*(one(prompt) for prompt in prompts))

    return asyncio.run(main())


def ask(fleet: Fleet, prompt: Prompt | Chat, *, streaming: bool = False) -> Reply:
    """One prompt, alone."""
    (reply,) = ask_all(fleet, [prompt], concurrency=1, streaming=streaming)
    return reply


def check_record(fleet: Fleet, reply: Reply) -> dict[str, Any]:
    """Law 4 for one finished request: its tokens add up on both sides, and its usage is what its record
    says. Returns the record."""
    record = fleet.record(reply.request_id)
    tokens, usage = record["tokens"], reply.usage
    assert record["state"] == "finished", record
    assert record["finish_reason"] == reply.finish_reason, record
    assert tokens["prompt"] == len(reply.prompt_token_ids) == usage["prompt_tokens"], record
    assert tokens["cached_prefill"] + tokens["pulled"] + tokens["computed_prefill"] == tokens["prompt"], record
    assert tokens["cached_decode"] + tokens["received"] + tokens["computed_decode"] == tokens["prompt"], record
    assert tokens["cached_prefill"] == reply.cached_tokens <= tokens["prompt"], record
    assert tokens["emitted"] == len(reply.token_ids) == usage["completion_tokens"], record
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], usage
    return record  # type: ignore[no-any-return]


def random_text_ids(seed: int, length: int) -> tuple[int, ...]:
    """Ordinary words of the small model's vocabulary (ids that are neither special nor bytes)."""
    rng = random.Random(seed)
    return tuple(rng.randrange(300, 20_000) for _ in range(length))
