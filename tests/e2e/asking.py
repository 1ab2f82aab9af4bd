"""Clients of the e2e tests: token ids in, token ids out, over the real HTTP endpoint."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.fleet import Fleet

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Prompt:
    """Token ids and how to go on from them."""

    token_ids: tuple[int, ...]
    max_tokens: int
    parameters: tuple[tuple[str, Any], ...] = (("temperature", 0.0),)

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": list(self.token_ids),
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **dict(self.parameters),
        }


@dataclass(frozen=True)
class Reply:
    request_id: str
    token_ids: tuple[int, ...]
    usage: dict[str, Any]

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


async def complete(client: httpx.AsyncClient, fleet: Fleet, prompt: Prompt) -> Reply:
    response = await client.post(f"{fleet.url}/v1/completions", json=prompt.body(fleet.model), timeout=TIMEOUT_S)
    assert response.status_code == httpx.codes.OK, response.text
    body = response.json()
    assert body["choices"][0]["prompt_token_ids"] == list(prompt.token_ids)
    return Reply(body["id"], tuple(body["choices"][0]["token_ids"]), body["usage"])


async def stream(client: httpx.AsyncClient, fleet: Fleet, prompt: Prompt) -> Reply:
    """The same by streaming: the tokens of all chunks in order."""
    body = {**prompt.body(fleet.model), "stream": True, "stream_options": {"include_usage": True}}
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    request_id = ""
    async with client.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=TIMEOUT_S) as response:
        assert response.status_code == httpx.codes.OK, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            request_id = chunk["id"]
            for choice in chunk["choices"]:
                tokens.extend(choice.get("token_ids") or ())
            usage = chunk.get("usage") or usage
    return Reply(request_id, tuple(tokens), usage)


def ask_all(fleet: Fleet, prompts: Sequence[Prompt], *, concurrency: int, streaming: bool = False) -> list[Reply]:
    """All prompts, ``concurrency`` at a time; replies in the order of the prompts."""

    async def main() -> list[Reply]:
        gate = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency + 1)
        async with httpx.AsyncClient(trust_env=False, limits=limits) as client:

            async def one(prompt: Prompt) -> Reply:
                async with gate:
                    return await (stream if streaming else complete)(client, fleet, prompt)

            return await asyncio.gather(*(one(prompt) for prompt in prompts))

    return asyncio.run(main())


def random_text_ids(seed: int, length: int) -> tuple[int, ...]:
    """Ordinary words of the small model's vocabulary (ids that are neither special nor bytes)."""
    rng = random.Random(seed)
    return tuple(rng.randrange(300, 20_000) for _ in range(length))
