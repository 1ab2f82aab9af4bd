"""gRPC calls that are cancelled, late, or in the way of a router that stops; and its health."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.config import Config
from common.workers import Role
from router.fakes import FakeFleet, FakeWorker, fake_answer
from router.gateway_process import GrpcInterface
from router.process import RunningRouter, run_router
from rpc.gateway import GatewayServer
from rpc.v1 import generation_pb2 as pb
from rpc.v1.generation_pb2_grpc import GenerationStub
from tests.router.fleet import until
from tests.router.gateway import ByteTokenizer
from tests.router.two_interfaces import both, collected

# ── calls that end early ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("when", ["before the first token", "midway", "queued"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_call_frees_everything(stream: bool, when: str) -> None:
    async with both() as (_, stub, gateway, fleet):
        prefill, decode = fleet.workers["p0"], fleet.workers["d0"]
        if when == "before the first token":
            prefill.step_s = 30.0
        if when == "queued":
            decode.num_blocks = 0
            decode.report()
        request = pb.GenerateRequest(model="fake", text="Hello", max_tokens=4000, n=2)
        call: Any = stub.GenerateStream(request) if stream else stub.Generate(request)
        conditions = {
            "before the first token": lambda: prefill.holding,
            "midway": lambda: decode.steps > 3,
            "queued": lambda: gateway.service.num_queued,
        }
        await until(conditions[when])
        if stream and when == "midway":
            await call.read()
        call.cancel()
        await until(lambda: fleet.idle and gateway.service.records.num_live == 0, timeout_s=2.0)
        steps = decode.steps
        await asyncio.sleep(10 * decode.step_s)
        assert decode.steps <= steps + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_calls_deadline_is_the_requests(stream: bool) -> None:
    """The caller hears it from the router, and the record says it."""
    async with both() as (client, stub, gateway, fleet):
        fleet.workers["d0"].mute_after = 2
        request = pb.GenerateRequest(model="fake", text="Hello", max_tokens=4000, timeout_s=9.0)
        call = collected(stub.GenerateStream(request, timeout=0.5)) if stream else stub.Generate(request, timeout=0.5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: fleet.idle and gateway.service.records.num_live == 0, timeout_s=2.0)
        request_id = fleet.workers["d0"].seen[0].request_id
        assert 0.0 < fleet.workers["d0"].seen[0].timeout_s < 0.55
        assert (await client.get(f"/requests/{request_id}")).json()["finish_reason"] != "length"


async def test_a_shorter_timeout_of_the_request_counts() -> None:
    async with both() as (_, stub, _, fleet):
        fleet.workers["d0"].mute_after = 0
        request = pb.GenerateRequest(model="fake", text="Hello", timeout_s=0.1)
        with pytest.raises(grpc.aio.AioRpcError, match=r"took longer than its 0\.1 s"):
            await stub.Generate(request, timeout=20.0)


async def test_of_many_calls_a_third_is_cancelled() -> None:
    """At random moments; who stays gets the right answer, and of those who left nothing remains."""
    rng = random.Random(4)
    async with both(prefill=2, decode=2) as (_, stub, gateway, fleet):

        async def visit(number: int) -> None:
            prompt = [number % 7 + 1] * rng.randint(1, 40)
            max_tokens = rng.randint(1, 40)
            request = pb.GenerateRequest(model="fake", token_ids=pb.TokenIds(ids=prompt), max_tokens=max_tokens)
            streaming, leaving, after_s = rng.random() < 0.5, rng.random() < 0.33, 0.1 * rng.random()
            call: Any = stub.GenerateStream(request) if streaming else stub.Generate(request)
            if leaving:
                await asyncio.sleep(after_s)
                call.cancel()
                return
            chunks = await collected(call) if streaming else [(await call).choices[0]]
            assert [token for chunk in chunks for token in chunk.token_ids] == fake_answer(prompt, max_tokens)
            assert chunks[-1].finish_reason == pb.FINISH_REASON_LENGTH

        await asyncio.gather(*map(visit, range(90)))
        await until(lambda: fleet.idle and gateway.service.records.num_live == 0, timeout_s=2.0)


async def test_who_does_not_read_stalls_nobody() -> None:
    async with both(step_s=0.0) as (_, stub, gateway, fleet):
        request = pb.GenerateRequest(model="fake", text="Hello", max_tokens=2000, logprobs=True, top_logprobs=20)
        lazy = [stub.GenerateStream(request) for _ in range(3)]
        begun = [await call.read() for call in lazy]
        answers = await asyncio.gather(
            *(stub.Generate(pb.GenerateRequest(model="fake", text=str(n), max_tokens=20)) for n in range(20))
        )
        assert [answer.usage.completion_tokens for answer in answers] == [20] * 20
        await until(lambda: fleet.idle)  # the workers do not wait for them either
        first, *others = lazy
        for call in others:
            call.cancel()
        assert sum(len(chunk.token_ids) for chunk in [begun[0], *await collected(first)]) == 2000
        assert gateway.service.records.num_live == 0


# ── a router's process ────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def a_router(stop: asyncio.Event) -> AsyncIterator[tuple[RunningRouter, FakeFleet, grpc.aio.Channel]]:
    fleet = FakeFleet()
    fleet.add(FakeWorker("p0", Role.PREFILL))
    fleet.add(FakeWorker("d0", Role.DECODE))
    config = Config.model_validate(
        {
            "router": {"port": 0},
            "model": {"name": "fake"},
            "prefill": {"addresses": ("p0",)},
            "decode": {"addresses": ("d0",)},
        }
    )
    ready: asyncio.Future[RunningRouter] = asyncio.get_running_loop().create_future()
    server = GatewayServer()
    address = server.bind("127.0.0.1", 0)
    running = asyncio.ensure_future(
        run_router(config, fleet, ByteTokenizer(), stop=stop, beside=[GrpcInterface(server)], on_ready=ready.set_result)
    )
    await asyncio.wait([running, ready], timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
    router = ready.result()
    await until(lambda: router.service.registry.missing(0.0) is None)
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield router, fleet, channel
    finally:
        stop.set()
        await asyncio.wait_for(running, 10.0)


async def test_stopping_tells_streams_why_and_health_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.process.GRACE_S", 0.2)
    stop = asyncio.Event()
    status = health_pb2.HealthCheckResponse
    async with a_router(stop) as (_, fleet, channel):
        stub, health = GenerationStub(channel), health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == status.SERVING
        watching = health.Watch(health_pb2.HealthCheckRequest(service="baton.v1.Generation"))
        assert (await watching.read()).status == status.SERVING
        short = stub.GenerateStream(pb.GenerateRequest(model="fake", text="Hello", max_tokens=20))
        endless = stub.GenerateStream(pb.GenerateRequest(model="fake", text="Hello", max_tokens=4000))
        await short.read()
        await endless.read()
        stop.set()
        assert (await watching.read()).status == status.NOT_SERVING
        assert (await collected(short))[-1].finish_reason == pb.FINISH_REASON_LENGTH
        with pytest.raises(grpc.aio.AioRpcError, match="the router is stopping") as caught:
            await collected(endless)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: fleet.idle)


async def test_health_looks_through_the_whole() -> None:
    async with a_router(asyncio.Event()) as (_, fleet, channel):
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        fleet.workers["p0"].kill()
        stub = GenerationStub(channel)
        await until(lambda: fleet.workers["p0"].dead.is_set())
        for _ in range(200):
            answer = await health.Check(health_pb2.HealthCheckRequest())
            if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                break
            await asyncio.sleep(0.01)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await stub.ListModels(pb.ListModelsRequest())).models[0].id == "fake"
