"""The HTTP gateway on a fake fleet, with a tokenizer of one token a byte."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from router.app import create_app
from router.fakes import VOCAB_SIZE, FakeFleet, fake_answer
from router.gateway import Gateway
from router.readiness import Readiness
from router.text_answer import Tokenizer
from tests.router.fleet import serving


class ByteTokenizer:
    """One token a byte; the router's tokenizer as far as the gateway needs it."""

    bos_token_id: int | None = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [min(byte, VOCAB_SIZE - 2) for byte in text.encode()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("latin-1")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return text + ("<assistant>" if add_generation_prompt else "")

    def stream(self, skip_special_tokens: bool = True) -> ByteStream:
        return ByteStream()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return chr(token_id)


class ByteStream:
    def push(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("latin-1")

    def flush(self) -> str:
        return ""


@asynccontextmanager
async def http(
    tokenizer: Tokenizer | None = None, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Gateway, FakeFleet]]:
    async with serving(**options) as (service, fleet):
        readiness = Readiness(service, timeout_s=0.3)
        gateway = Gateway(service, tokenizer or ByteTokenizer(), readiness, service.config, "fake", "http://here")
        transport = httpx.ASGITransport(create_app(gateway), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            yield client, gateway, fleet
        await readiness.close()


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], "max_tokens": 5, **fields}


def answer_to(text: str, num_tokens: int) -> str:
    prompt = ByteTokenizer().encode(f"<user>{text}<assistant>", False)
    return bytes(fake_answer(prompt, num_tokens)).decode()
