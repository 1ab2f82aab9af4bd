"""One router with fake workers, asked over HTTP and over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx

from router.fakes import FakeFleet
from router.gateway import Gateway
from router.generation import GatewayGeneration
from rpc.gateway import GatewayServer
from rpc.v1.generation_pb2_grpc import GenerationStub
from tests.router.gateway import http


@asynccontextmanager
async def both(**options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, GenerationStub, Gateway, FakeFleet]]:
    async with http(**options) as (client, gateway, fleet):
        server = GatewayServer()
        address = server.bind("127.0.0.1", 0)
        await server.start(GatewayGeneration(gateway))
        reporting = asyncio.ensure_future(_report(fleet))
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                yield client, GenerationStub(channel), gateway, fleet
        finally:
            reporting.cancel()
            await server.stop(0.0)


async def _report(fleet: FakeFleet) -> None:
    """Real workers report from time to time; without a word for 5 s, which a busy machine takes, they are suspect."""
    while True:
        await asyncio.sleep(1.0)
        for worker in fleet.workers.values():
            worker.report()


async def collected(call: Any) -> list[Any]:
    """The messages of a stream to its end."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        messages.append(message)
    return messages
