"""A scripted worker, its server, and clients of it, all on one loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rpc.clients import GrpcDecodeClient, GrpcPrefillClient
from rpc.servers import WorkerServer
from tests.rpc.scripted_worker import Worker, serving


@pytest.fixture
async def worker() -> Worker:
    return Worker()


@pytest.fixture
async def server(worker: Worker) -> AsyncIterator[WorkerServer]:
    async with serving(worker) as server:
        yield server


@pytest.fixture
async def prefill(server: WorkerServer) -> AsyncIterator[GrpcPrefillClient]:
    client = GrpcPrefillClient(server.address)
    yield client
    await client.close()


@pytest.fixture
async def decode(server: WorkerServer) -> AsyncIterator[GrpcDecodeClient]:
    client = GrpcDecodeClient(server.address)
    yield client
    await client.close()
