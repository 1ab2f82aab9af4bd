"""How streams end: by the client, by the worker, by the death of either, and who notices how soon."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from common.errors import DeadlineError, WorkerLostError
from common.messages import TokenBatch
from common.workers import WorkerEvent
from rpc.clients import GrpcDecodeClient, GrpcPrefillClient, GrpcWorkerClient
from rpc.connection import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S
from rpc.servers import WorkerServer
from tests.rpc.scripted_worker import BATCH, EVENT, FIRST, REQUEST, TICKET, Worker, forever, serving


async def test_closing_a_stream_closes_the_services_generator(decode: GrpcDecodeClient, worker: Worker) -> None:
    batches = decode.tokens("router-1")
    await anext(batches)
    await worker.waiting.wait()
    await batches.aclose()
    await asyncio.wait_for(worker.finalized.wait(), 1)


async def test_cancelling_the_reader_closes_the_services_generator(decode: GrpcDecodeClient, worker: Worker) -> None:
    async def read() -> None:
        async with aclosing(decode.watch()) as events:
            async for _ in events:
                pass

    reader = asyncio.create_task(read())
    await worker.waiting.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await asyncio.wait_for(worker.finalized.wait(), 1)


async def test_a_cancel_before_the_first_item(prefill: GrpcPrefillClient, worker: Worker) -> None:
    asked = asyncio.Event()

    async def hang() -> None:
        asked.set()
        await forever()

    worker.script = {"watch": hang}
    reader = asyncio.ensure_future(anext(prefill.watch()))
    await asked.wait()
    reader.cancel()
    await asyncio.wait_for(worker.finalized.wait(), 1)


async def test_a_reader_that_does_not_read_can_still_be_closed(server: WorkerServer, worker: Worker) -> None:
    """The service waits in gRPC's flow control when its client goes away."""
    big = dataclasses.replace(EVENT, stored=(b"x" * (1 << 20),) * 16)

    async def flood() -> AsyncGenerator[WorkerEvent, None]:
        try:
            while True:
                yield big
        finally:
            worker.finalized.set()

    worker.watch = flood  # type: ignore[method-assign]
    client = GrpcPrefillClient(server.address)
    events = client.watch()
    await anext(events)
    await asyncio.sleep(0.1)
    assert not worker.finalized.is_set()
    await client.close()
    await asyncio.wait_for(worker.finalized.wait(), 1)


async def test_the_deadline_of_a_request_ends_a_prefill_that_hangs(server: WorkerServer, worker: Worker) -> None:
    worker.script = {"prefill": forever}
    client = GrpcPrefillClient(server.address, timeout_s=0.2)
    events = client.prefill(dataclasses.replace(REQUEST, timeout_s=0.1), TICKET)
    assert await anext(events) == FIRST
    with pytest.raises(DeadlineError):
        await asyncio.wait_for(anext(events), 2)
    await asyncio.wait_for(worker.finalized.wait(), 1)
    await client.close()


async def test_stopping_the_server_ends_its_streams(server: WorkerServer, worker: Worker) -> None:
    client = GrpcDecodeClient(server.address)
    batches = client.tokens("router-1")
    await anext(batches)
    await anext(batches)
    await worker.waiting.wait()
    await server.stop(0.1)
    with pytest.raises(WorkerLostError):
        await asyncio.wait_for(anext(batches), 1)
    await asyncio.wait_for(worker.finalized.wait(), 1)
    await client.close()


async def test_a_token_stream_that_the_worker_ends_is_a_lost_worker(decode: GrpcDecodeClient, worker: Worker) -> None:
    async def short(router_id: str) -> AsyncGenerator[TokenBatch, None]:
        yield BATCH

    worker.tokens = short  # type: ignore[method-assign]
    batches = decode.tokens("router-1")
    assert await anext(batches) == BATCH
    with pytest.raises(WorkerLostError, match="ended the stream"):
        await anext(batches)


async def test_a_watcher_that_lags_is_cut_off_and_may_watch_anew(decode: GrpcDecodeClient, worker: Worker) -> None:
    """A worker ends its events for a reader that is too slow. It is not lost by that, nor is what runs there."""

    async def short() -> AsyncGenerator[WorkerEvent, None]:
        yield EVENT

    worker.watch = short  # type: ignore[method-assign]
    for _ in range(2):
        assert [event async for event in decode.watch()] == [EVENT]


async def test_closing_the_client_is_not_a_cancellation_of_its_users(server: WorkerServer, worker: Worker) -> None:
    worker.script = {"ledger": forever}
    client = GrpcDecodeClient(server.address)
    batches = client.tokens("router-1")
    await anext(batches)
    await anext(batches)
    users = [asyncio.ensure_future(anext(batches)), asyncio.ensure_future(client.ledger())]
    await worker.waiting.wait()
    await client.close()
    for outcome in await asyncio.gather(*users, return_exceptions=True):
        assert isinstance(outcome, WorkerLostError)
    with pytest.raises(WorkerLostError, match="closed"):
        await client.describe()
    await asyncio.wait_for(worker.finalized.wait(), 1)


CHILD = """
import asyncio, sys
from tests.rpc.test_rpc_stream_ends import {main}
asyncio.run({main}(*sys.argv[1:]))
"""


async def serve_in_child() -> None:
    async with serving(Worker()) as server:
        print(server.address, flush=True)  # noqa: T201
        await asyncio.Event().wait()


async def watch_in_child(address: str) -> None:
    async with aclosing(GrpcWorkerClient(address).watch()) as events:
        async for _ in events:
            pass


@asynccontextmanager
async def child(main: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that runs one of the functions above."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CHILD.format(main=main),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


NOTICED_S = {signal.SIGKILL: 2.0, signal.SIGSTOP: KEEPALIVE_S + KEEPALIVE_TIMEOUT_S + 3.0}
DEATHS = [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]


@pytest.mark.parametrize("number", DEATHS)
async def test_a_client_notices_that_the_worker_is_gone(number: signal.Signals) -> None:
    async with child("serve_in_child") as process:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
        client = GrpcDecodeClient(address)
        batches = client.tokens("router-1")
        await anext(batches)
        await anext(batches)
        process.send_signal(number)
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(anext(batches), NOTICED_S[number])
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(client.cancel("r-1", 0), 6)
        await client.close()


@pytest.mark.parametrize("number", DEATHS)
async def test_a_worker_notices_that_a_client_is_gone(
    server: WorkerServer, worker: Worker, number: signal.Signals
) -> None:
    async with child("watch_in_child", server.address) as process:
        await asyncio.wait_for(worker.waiting.wait(), 30)
        process.send_signal(number)
        await asyncio.wait_for(worker.finalized.wait(), NOTICED_S[number])
