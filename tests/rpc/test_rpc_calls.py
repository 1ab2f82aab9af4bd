"""Clients and servers over real loopback sockets: every call, and how it fails."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import (
    AuthenticationError,
    BatonError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    NoCapacityError,
    RequestCancelledError,
    WorkerLostError,
)
from common.workers import PROTOCOL_VERSION
from router.clients import DecodeClient, PrefillClient, WorkerClient
from rpc.clients import GrpcDecodeClient, GrpcPrefillClient, GrpcWorkerClient
from rpc.connection import MAX_MESSAGE_BYTES
from rpc.servers import WorkerServer
from tests.rpc.scripted_worker import (
    BATCH,
    DONE,
    EVENT,
    FIRST,
    INFO,
    LEDGER,
    REQUEST,
    TICKET,
    Worker,
    forever,
    raising,
    serving,
)


def test_clients_are_what_the_router_asks_for() -> None:
    """The types are checked by mypy, the names here too."""
    worker: type[WorkerClient] = GrpcWorkerClient
    prefill: type[PrefillClient] = GrpcPrefillClient
    decode: type[DecodeClient] = GrpcDecodeClient
    for protocol, client in ((WorkerClient, worker), (PrefillClient, prefill), (DecodeClient, decode)):
        assert {name for name in vars(protocol) if not name.startswith("_")} <= set(dir(client))


async def test_worker_calls(prefill: GrpcPrefillClient, worker: Worker) -> None:
    assert await prefill.describe() == INFO
    assert await prefill.ledger() == LEDGER
    await prefill.drain()
    async with aclosing(prefill.watch()) as events:
        assert await anext(events) == EVENT
    assert worker.asked == [("describe",), ("ledger",), ("drain",), ("watch",)]


async def test_prefill(prefill: GrpcPrefillClient, worker: Worker) -> None:
    assert [event async for event in prefill.prefill(REQUEST, TICKET)] == [FIRST, DONE]
    assert worker.asked == [("prefill", REQUEST, TICKET)]


async def test_decode_calls(decode: GrpcDecodeClient, worker: Worker) -> None:
    async with aclosing(decode.tokens("router-1")) as batches:
        assert [await anext(batches), await anext(batches)] == [BATCH, BATCH]
        assert await decode.reserve("router-1", REQUEST) == TICKET
        await decode.submit("router-1", REQUEST)
        await decode.cancel("r-1", 2)
    assert worker.asked == [
        ("tokens", "router-1"),
        ("batches",),
        ("reserve", "router-1", REQUEST),
        ("submit", "router-1", REQUEST),
        ("cancel", "r-1", 2),
    ]


async def test_a_reservation_waits_for_the_token_stream(decode: GrpcDecodeClient, worker: Worker) -> None:
    """Also when both are asked for in the same moment."""
    reserving = asyncio.create_task(decode.reserve("router-1", REQUEST))
    await asyncio.sleep(0.05)
    assert worker.asked == []
    async with aclosing(decode.tokens("router-1")) as batches:
        await anext(batches)
        assert await reserving == TICKET
    assert [name for name, *_ in worker.asked].index("tokens") < [name for name, *_ in worker.asked].index("reserve")
    with pytest.raises(WorkerLostError, match="token stream"):  # at once: the stream has ended
        await asyncio.wait_for(decode.reserve("router-1", REQUEST), 1)


async def test_prompts_beyond_grpcs_default_limit(decode: GrpcDecodeClient, worker: Worker) -> None:
    prompt = (2**32 - 1,) * 1_000_000  # five bytes each
    request = dataclasses.replace(REQUEST, prompt=prompt)
    async with aclosing(decode.tokens("router-1")) as batches:
        await anext(batches)
        assert await decode.reserve("router-1", request) == TICKET
        assert worker.asked[-1] == ("reserve", "router-1", request)
        with pytest.raises(InvalidRequestError, match=str(MAX_MESSAGE_BYTES)):
            await decode.reserve("router-1", dataclasses.replace(REQUEST, cache_salt="x" * MAX_MESSAGE_BYTES))


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("größer als 64 ✗\nsecond line", param="max_tokens"),
        NoCapacityError("5 blocks wanted, 3 free", retry_after_s=1.5),
        RequestCancelledError("gone"),
        DeadlineError("2 s were given"),
    ],
    ids=lambda error: error.code,
)
async def test_an_error_keeps_its_class_and_text(prefill: GrpcPrefillClient, worker: Worker, error: BatonError) -> None:
    worker.script = {"ledger": raising(error), "watch": raising(error), "prefill": raising(error)}
    events = prefill.prefill(REQUEST, TICKET)
    assert await anext(events) == FIRST
    for raised_by in (prefill.ledger(), anext(prefill.watch()), anext(events)):
        with pytest.raises(type(error)) as caught:
            await raised_by
        assert type(caught.value) is type(error)
        assert (caught.value.message, caught.value.param) == (error.message, error.param)
        assert caught.value.retry_after_s == error.retry_after_s


async def test_a_fault_in_the_worker_is_logged_and_not_shown(
    prefill: GrpcPrefillClient, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.script = {"ledger": raising(ZeroDivisionError("secret detail"))}
    with pytest.raises(BatonError, match="internal error in Ledger") as caught:
        await prefill.ledger()
    assert caught.value.code == "internal"
    assert "secret detail" not in caught.value.message
    assert "secret detail" in caplog.text


async def test_a_cancellation_inside_the_worker_is_an_answer(prefill: GrpcPrefillClient, worker: Worker) -> None:
    worker.script = {"ledger": raising(asyncio.CancelledError())}
    with pytest.raises(BatonError, match="cancelled by the worker"):
        await asyncio.wait_for(prefill.ledger(), 2)


async def test_a_worker_that_does_not_answer_is_lost(server: WorkerServer, worker: Worker) -> None:
    worker.script = {"ledger": forever, "reserve": forever}
    client = GrpcDecodeClient(server.address, timeout_s=0.2)
    with pytest.raises(WorkerLostError, match=r"LedgerRequest within 0\.2 s"):
        await client.ledger()
    with pytest.raises(WorkerLostError, match=r"not open within 0\.2 s"):
        await client.reserve("router-1", REQUEST)
    async with aclosing(client.tokens("router-1")) as batches:
        await anext(batches)
        with pytest.raises(DeadlineError):  # here it is the request that had no time left
            await client.reserve("router-1", dataclasses.replace(REQUEST, timeout_s=0.1))
    await client.close()


async def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refuses
        client = GrpcPrefillClient(f"127.0.0.1:{taken.getsockname()[1]}")
        for attempt in (client.describe(), anext(client.watch())):
            with pytest.raises(WorkerLostError, match=r"127\.0\.0\.1"):
                await asyncio.wait_for(attempt, 2)
        await client.close()


async def test_a_listener_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = GrpcPrefillClient(f"127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.3)
        for attempt in (client.describe(), anext(client.watch()), anext(client.prefill(REQUEST, TICKET))):
            with pytest.raises(WorkerLostError, match=r"within 0\.3 s"):
                await asyncio.wait_for(attempt, 2)
        await client.close()


async def test_another_protocol_version_is_refused_by_both(
    prefill: GrpcPrefillClient, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.info = dataclasses.replace(INFO, protocol_version=PROTOCOL_VERSION + 8)
    with pytest.raises(ConfigError, match=rf"version {PROTOCOL_VERSION + 8}, this router {PROTOCOL_VERSION}"):
        await prefill.describe()
    monkeypatch.setattr("rpc.clients.PROTOCOL_VERSION", 3)
    with pytest.raises(ConfigError, match=rf"version {PROTOCOL_VERSION}, the caller 3"):
        await prefill.describe()


async def test_a_role_that_the_worker_has_not(worker: Worker) -> None:
    server = WorkerServer()
    address = server.bind("127.0.0.1", 0)
    await server.start(worker)
    client = GrpcDecodeClient(address)
    with pytest.raises(ConfigError, match="does not serve"):
        await client.cancel("r-1", 0)
    await client.close()
    await server.stop(0)


# ── the port ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_taken_port_is_named(server: WorkerServer) -> None:
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use") as caught:
        WorkerServer().bind("127.0.0.1", port)
    assert "\n" not in caught.value.message
    with pytest.raises(ConfigError, match=f"localhost:{port}"):
        WorkerServer().bind("localhost", port)


async def test_a_foreign_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0: Cannot assign"):
        WorkerServer().bind("192.0.2.1", 0)


async def test_a_restarted_worker_is_found_again(worker: Worker) -> None:
    async with serving(worker) as first:
        client = GrpcWorkerClient(first.address)
        await client.describe()
    with pytest.raises(WorkerLostError):
        await client.describe()
    async with serving(worker, int(first.address.rpartition(":")[2])):
        async with asyncio.timeout(3):
            while True:
                try:
                    assert await client.describe() == INFO
                    break
                except WorkerLostError:
                    await asyncio.sleep(0.05)
    await client.close()


async def test_health(server: WorkerServer) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", "baton.rpc.v1.Worker", "baton.rpc.v1.Prefill", "baton.rpc.v1.Decode"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await server.set_serving(False)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="baton.rpc.v1.KV"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_follows_the_state_of_the_worker(server: WorkerServer) -> None:
    """A worker that hangs or drains is not serving; one that goes on is."""
    state = {"ready": True}
    following = asyncio.ensure_future(server.follow(lambda: state["ready"], 0.01))
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for ready, status in ((False, "NOT_SERVING"), (True, "SERVING"), (False, "NOT_SERVING")):
            state["ready"] = ready
            async with asyncio.timeout(3):
                async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                    if answer.status == health_pb2.HealthCheckResponse.ServingStatus.Value(status):
                        break
    following.cancel()


# ── the secret ──────────────────────────────────────────────────────────────────────────────────────


async def test_only_those_with_the_secret_are_served(worker: Worker) -> None:
    async with serving(worker, secret="sésame") as server:
        friend = GrpcDecodeClient(server.address, secret="sésame")
        assert await friend.describe() == INFO
        async with aclosing(friend.tokens("router-1")) as batches:
            assert await anext(batches) == BATCH
        await friend.close()
        worker.asked.clear()
        for secret, reason in ((None, "was not given"), ("sesame", "is another one")):
            stranger = GrpcDecodeClient(server.address, secret=secret)
            for attempt in (stranger.describe(), anext(stranger.tokens("router-1")), anext(stranger.watch())):
                with pytest.raises(AuthenticationError, match=reason):
                    await asyncio.wait_for(attempt, 2)
            await stranger.close()
        assert worker.asked == []
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
