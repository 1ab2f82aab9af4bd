"""A worker that does what a test tells it, behind a real server, and one message of every kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from common.handoff import KVLayout, PrefixReply, PrefixRequest, Ticket, TransportOffer
from common.messages import (
    ContextTokens,
    Finish,
    FinishReason,
    FirstToken,
    GenerationRequest,
    HandoffDone,
    PrefillEvent,
    SamplingParams,
    TokenBatch,
    TokenDelta,
)
from common.workers import Holder, ModelInfo, Role, WorkerEvent, WorkerInfo, WorkerLedger, WorkerLoad, WorkerState
from rpc.servers import WorkerServer

LAYOUT = KVLayout("fingerprint", 2, 2, 8, 16, "float32", total_kv_heads=2)
MODEL = ModelInfo("tiny", "fingerprint", 100, 2048, (0, 2))
INFO = WorkerInfo("w-0", Role.BOTH, 7, "127.0.0.1", "h", (1, 2), "127.0.0.1:1", MODEL, LAYOUT, 64, 1024, 16, ("shm",))
REQUEST = GenerationRequest("r-1", tuple(range(50)), SamplingParams(8, seed=-3), 2, (5, 6), "salt", -1, 30.0, "trace")
TICKET = Ticket(
    "t-1", "r-1", 2, "w-0", 7, 52, 16, (3, 4, 9), LAYOUT, (TransportOffer("grpc", "a:1", "h"),), b"\x00\xff", 30.0
)
LEDGER = WorkerLedger("w-0", Role.BOTH, 64, 60, 1, 1, 1, 1, (Holder("r-1#2", "reserved", 1, 0.5),))
EVENT = WorkerEvent(1, WorkerLoad(WorkerState.READY, total_blocks=64), True, (b"\x00" * 16,), ())
FIRST = FirstToken("r-1", 2, 2, 77, ContextTokens(16, 0, 36), None, 0.25, 0.5)
DONE = HandoffDone("r-1", 2, 4096, 3, "grpc", 0.125)
BATCH = TokenBatch(
    (
        TokenDelta("r-1", 2, 3, (9,)),
        TokenDelta("r-2", 0, 0, (1, 2), Finish(FinishReason.LENGTH, ContextTokens(0, 4, 0), decode_s=1.5)),
    )
)


class Worker:
    """All services of a worker; records what it was asked, does what ``script`` says."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.script: dict[str, Callable[[], Any]] = {}
        self.info = INFO
        self.waiting = asyncio.Event()
        self.finalized = asyncio.Event()

    async def _record(self, name: str, *arguments: Any) -> None:
        self.asked.append((name, *arguments))
        if name in self.script:
            await self.script[name]()

    async def _items(self, name: str, *items: Any) -> AsyncGenerator[Any, None]:
        """Yields ``items``, then waits for ever."""
        try:
            await self._record(name)
            for item in items:
                yield item
            self.waiting.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # a service may have to wait while it cleans up
            self.finalized.set()

    async def describe(self) -> WorkerInfo:
        await self._record("describe")
        return self.info

    def watch(self) -> AsyncGenerator[WorkerEvent, None]:
        return self._items("watch", EVENT)

    async def ledger(self) -> WorkerLedger:
        await self._record("ledger")
        return LEDGER

    async def drain(self) -> None:
        await self._record("drain")

    async def send_prefix(self, request: PrefixRequest) -> PrefixReply:
        await self._record("send_prefix", request)
        return PrefixReply(len(request.tokens), 4096)

    async def prefill(self, request: GenerationRequest, ticket: Ticket) -> AsyncGenerator[PrefillEvent, None]:
        try:
            yield FIRST
            await self._record("prefill", request, ticket)
            yield DONE
        finally:
            self.finalized.set()

    async def tokens(self, router_id: str) -> AsyncGenerator[TokenBatch, None]:
        self.asked.append(("tokens", router_id))
        async with aclosing(self._items("batches", BATCH, BATCH)) as batches:
            async for batch in batches:
                yield batch

    async def reserve(self, router_id: str, request: GenerationRequest) -> Ticket:
        await self._record("reserve", router_id, request)
        return TICKET

    async def submit(self, router_id: str, request: GenerationRequest) -> None:
        await self._record("submit", router_id, request)

    async def cancel(self, request_id: str, attempt: int) -> None:
        await self._record("cancel", request_id, attempt)


@asynccontextmanager
async def serving(worker: Worker, port: int = 0, **options: Any) -> AsyncIterator[WorkerServer]:
    server = WorkerServer(**options)
    server.bind("127.0.0.1", port)
    await server.start(worker, prefill=worker, decode=worker)
    try:
        yield server
    finally:
        await server.stop(0)


def raising(error: BaseException) -> Callable[[], Any]:
    async def script() -> None:
        raise error

    return script


async def forever() -> None:
    await asyncio.Event().wait()
