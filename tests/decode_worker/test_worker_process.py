"""Both roles as whole processes, with a tiny model: how they end, and what their health service says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.config import load_config
from common.errors import BatonError
from decode_worker.process import run_decode_worker
from decode_worker.scheduler import DecodeScheduler
from prefill_worker.process import run_prefill_worker
from prefill_worker.scheduler import PrefillScheduler
from rpc.clients import GrpcDecodeClient, GrpcPrefillClient
from tests.tiny_model import build_tiny_llama

ROLES: dict[str, tuple[Any, Any, Any]] = {
    "prefill": (run_prefill_worker, PrefillScheduler, GrpcPrefillClient),
    "decode": (run_decode_worker, DecodeScheduler, GrpcDecodeClient),
}
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def running(role: str, model: Path) -> AsyncIterator[tuple[asyncio.Task[None], str, Callable[[], None]]]:
    """A worker process's coroutine, its address, and what asks it to stop."""
    config = load_config(None, [f"model.name={model}", "engine.pool_bytes=4000000", "engine.threads=1"])
    stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    work = ROLES[role][0](config, f"{role}-0", address.set_result, stop, lambda text: None)
    process = asyncio.ensure_future(work)
    try:
        await asyncio.wait([process, address], return_when=asyncio.FIRST_COMPLETED, timeout=60)
        if process.done():
            process.result()
        yield process, address.result(), stop.set
    finally:
        stop.set()
        await asyncio.wait([process], timeout=20)
        assert process.done()


async def health(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        return answer.status  # type: ignore[no-any-return]


@pytest.mark.parametrize("role", ROLES)
async def test_it_ends_when_it_is_asked_to(role: str, model: Path) -> None:
    async with running(role, model) as (process, address, stop):
        assert await health(address) == SERVING
        stop()
        await asyncio.wait_for(process, 10)


@pytest.mark.parametrize("role", ROLES)
async def test_it_ends_when_it_has_drained(role: str, model: Path) -> None:
    async with running(role, model) as (process, address, _):
        client = ROLES[role][2](address)
        await client.drain()
        await asyncio.wait_for(process, 10)
        await client.close()


@pytest.mark.parametrize("role", ROLES)
async def test_it_fails_when_its_engine_dies(role: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the code's own must not leave a process that looks alive and computes nothing."""

    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(ROLES[role][1], "schedule", broken)
    with pytest.raises(BatonError, match=r"broke down.*a bug"):
        async with running(role, model) as (process, _, _):
            await asyncio.wait_for(process, 10)
