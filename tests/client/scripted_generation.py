"""A generation service that does what a test tells it, and the gRPC port it is served on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rpc.gateway import GatewayServer
from rpc.generation_service import (
    AnswerChunk,
    AnswerUsage,
    ChosenToken,
    Fields,
    LikelyToken,
    ServedModel,
    TokenizedText,
)

USAGE = AnswerUsage(3, 2, 5, 1)
LIKELY = (LikelyToken(8, "é", "é".encode(), -0.5), LikelyToken(9, "\ufffd", b"\xc3", -1.5))
CHUNKS = (
    AnswerChunk(0, "a", (7,), (ChosenToken(7, "a", b"a", -0.25, LIKELY),), prompt_token_ids=(1, 2, 3)),
    AnswerChunk(1, "x", (9,)),
    AnswerChunk(0, "b", (8,), finish_reason="stop"),
    AnswerChunk(1, "", (), finish_reason="length", usage=USAGE),
)


class ScriptedGeneration:
    """``refusals`` are raised by the next calls, one each; ``failure`` after ``fail_after`` chunks; with
    ``pause_after`` set, the answer stands still after so many chunks."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.refusals: list[BaseException] = []
        self.failure: BaseException | None = None
        self.fail_after = 0
        self.pause_after: int | None = None
        self.pausing = asyncio.Event()
        self.finalized = asyncio.Event()
        self.ready = True
        self.served: list[ServedModel] = [ServedModel("m", 100, "baton")]
        self._num_ids = 0

    @property
    def model_name(self) -> str:
        return "m"

    def draw_id(self) -> str:
        self._num_ids += 1
        return f"gen-{self._num_ids}"

    async def open(
        self, request_id: str, fields: Fields, *, chat: bool, deadline_s: float | None
    ) -> AsyncGenerator[AnswerChunk, None]:
        self._ask("open", request_id, dict(fields), chat, deadline_s)
        return self._chunks()

    async def _chunks(self) -> AsyncGenerator[AnswerChunk, None]:
        try:
            for number, chunk in enumerate(CHUNKS):
                if self.pause_after == number:
                    self.pausing.set()
                    await asyncio.Event().wait()
                if self.failure is not None and self.fail_after == number:
                    raise self.failure
                yield chunk
        finally:
            await asyncio.sleep(0)  # a service may have to wait while it cleans up
            self.finalized.set()

    async def tokenize(self, fields: Fields) -> TokenizedText:
        self._ask("tokenize", dict(fields))
        return TokenizedText([1, 2, 3], 100)

    async def detokenize(self, fields: Fields) -> str:
        self._ask("detokenize", dict(fields))
        return "abc"

    def models(self) -> Sequence[ServedModel]:
        self._ask("models")
        return self.served

    async def is_ready(self) -> bool:
        return self.ready

    def _ask(self, *what: Any) -> None:
        self.asked.append(what)
        if self.refusals:
            raise self.refusals.pop(0)


@asynccontextmanager
async def served(
    service: ScriptedGeneration, port: int = 0, *, grace_s: float = 0.0, watch_interval_s: float = 2.0
) -> AsyncIterator[str]:
    """``host:port`` where ``service`` is reached."""
    server = GatewayServer(watch_interval_s)
    address = server.bind("127.0.0.1", port)
    await server.start(service)
    try:
        yield address
    finally:
        await server.stop(grace_s)
