"""KV channels over real sockets: content, back-pressure, and every way that one ends."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from common.errors import AuthenticationError, BatonError, ConfigError, IntegrityError, WorkerLostError
from kv_transfer.channel import ByteChannel, Connector
from rpc.connection import open_channel
from rpc.kv_channel import MAX_DATA_BYTES, MAX_FRAMES, KVChannel, connect
from rpc.servers import WorkerServer
from rpc.v1 import worker_pb2, worker_pb2_grpc


class KVWorker:
    """A KV service whose behaviour a test puts in; its other services are never called."""

    def __init__(self) -> None:
        self.behaviour: Callable[[KVChannel], Awaitable[None]] = self.echo
        self.channel: KVChannel | None = None
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def serve(self, channel: KVChannel) -> None:
        self.channel = channel
        try:
            await self.behaviour(channel)
        except BaseException as error:
            self.outcome.set_result(error)
            raise
        self.outcome.set_result(None)

    async def echo(self, channel: KVChannel) -> None:
        while data := await channel.receive():
            await channel.send(data)

    async def hang(self, channel: KVChannel) -> None:
        await asyncio.Event().wait()


@pytest.fixture
async def worker() -> KVWorker:
    return KVWorker()


@pytest.fixture
async def server(worker: KVWorker) -> AsyncIterator[WorkerServer]:
    server = WorkerServer()
    server.bind("127.0.0.1", 0)
    await server.start(worker, kv=worker)  # type: ignore[arg-type]
    yield server
    await server.stop(0)


@asynccontextmanager
async def connected(server: WorkerServer) -> AsyncIterator[KVChannel]:
    channel = await connect(server.address)
    try:
        yield channel
    finally:
        await channel.close()


@pytest.fixture
async def channel(server: WorkerServer) -> AsyncIterator[KVChannel]:
    """To a worker that sends everything back."""
    async with connected(server) as channel:
        yield channel


def test_it_is_what_kv_transfer_asks_for() -> None:
    """The types are checked by mypy, the names here too."""
    channel: type[ByteChannel] = KVChannel
    connector: Connector = connect
    assert {name for name in vars(ByteChannel) if not name.startswith("_")} <= set(dir(channel))
    assert asyncio.iscoroutinefunction(connector)


async def test_64_mib_arrive_as_they_were_sent(server: WorkerServer, worker: KVWorker) -> None:
    """In messages of very different sizes, each answered by its digest."""

    async def digest(channel: KVChannel) -> None:
        while data := await channel.receive():
            await channel.send(hashlib.blake2b(data).digest())

    worker.behaviour = digest
    source = random.Random(1)
    messages = [source.randbytes(size) for size in (1, 2, (1 << 20) + 1, 65536, 16 << 20, *[3 << 20] * 16)]
    assert sum(map(len, messages)) > 64 << 20

    async with connected(server) as channel:

        async def send() -> None:
            for message in messages:
                await channel.send(message)

        sending = asyncio.ensure_future(send())
        for message in messages:
            assert await channel.receive() == hashlib.blake2b(message).digest()
        await sending


async def test_the_largest_message(server: WorkerServer, worker: KVWorker) -> None:
    async def measure(channel: KVChannel) -> None:
        while data := await channel.receive():
            await channel.send(str(len(data)).encode())

    worker.behaviour = measure
    async with connected(server) as channel:
        await channel.send(bytes(MAX_DATA_BYTES))
        assert await channel.receive() == str(MAX_DATA_BYTES).encode()
        for wrong in (b"", bytes(MAX_DATA_BYTES + 1)):
            with pytest.raises(BatonError, match=f"1 to {MAX_DATA_BYTES} bytes, this one {len(wrong)}"):
                await channel.send(wrong)


async def test_a_message_without_an_end(server: WorkerServer, worker: KVWorker) -> None:
    async with open_channel(server.address) as connection:
        call: Any = worker_pb2_grpc.KVStub(connection).Channel()  # type: ignore[no-untyped-call]
        for _ in range(MAX_FRAMES + 1):
            await call.write(worker_pb2.KVFrame(more=True))
        with pytest.raises(grpc.aio.AioRpcError, match=f"at most {MAX_FRAMES} frames"):
            await call.read()
    assert isinstance(await worker.outcome, BatonError)


async def test_a_sender_waits_for_a_receiver_that_does_not_read(
    server: WorkerServer, worker: KVWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpc.kv_channel.CLOSE_S", 0.1)
    worker.behaviour = worker.hang
    sent = 0

    async def flood(channel: KVChannel) -> None:
        nonlocal sent
        while True:
            await channel.send(bytes(1 << 20))
            sent += 1

    async with connected(server) as channel:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(flood(channel), 0.3)
    assert 0 < sent < 32


async def test_a_cancelled_wait_loses_nothing(channel: KVChannel) -> None:
    for round_number in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.receive(), 0.01)
        await channel.send(bytes([round_number + 1]))
        assert await channel.receive() == bytes([round_number + 1])


async def test_the_client_closes(channel: KVChannel, worker: KVWorker) -> None:
    await channel.send(b"last")
    assert await channel.receive() == b"last"
    await asyncio.wait_for(channel.close(), 1)
    await channel.close()
    assert await asyncio.wait_for(worker.outcome, 1) is None
    assert await channel.receive() == b""
    with pytest.raises(WorkerLostError, match="closed"):
        await channel.send(b"more")


async def test_the_client_closes_on_a_server_that_does_not_listen(
    server: WorkerServer, worker: KVWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpc.kv_channel.CLOSE_S", 0.1)
    worker.behaviour = worker.hang
    channel = await connect(server.address)
    waiting = asyncio.ensure_future(channel.receive())
    await asyncio.sleep(0)
    await asyncio.wait_for(channel.close(), 1)
    assert await waiting == b""
    assert isinstance(await asyncio.wait_for(worker.outcome, 1), asyncio.CancelledError)


async def test_the_server_closes_while_it_receives(channel: KVChannel, worker: KVWorker) -> None:
    await channel.send(b"hello")
    assert await channel.receive() == b"hello"
    assert worker.channel is not None
    await worker.channel.close()
    assert await asyncio.wait_for(channel.receive(), 1) == b""
    assert await asyncio.wait_for(channel.receive(), 1) == b""
    assert await worker.outcome is None
    with pytest.raises(WorkerLostError):
        await channel.send(b"more")


async def test_what_the_server_raises_reaches_the_client(server: WorkerServer, worker: KVWorker) -> None:
    async def refuse(channel: KVChannel) -> None:
        await channel.receive()
        raise IntegrityError("block 7: checksum 1, sent 2")

    worker.behaviour = refuse
    async with connected(server) as channel:
        await channel.send(b"x")
        with pytest.raises(IntegrityError, match="block 7: checksum 1, sent 2"):
            await asyncio.wait_for(channel.receive(), 1)


async def test_a_server_that_raises_ends_a_client_that_is_sending(server: WorkerServer, worker: KVWorker) -> None:
    async def refuse(channel: KVChannel) -> None:
        for _ in range(3):
            await channel.receive()
        raise IntegrityError("block 7: checksum 1, sent 2")

    async def flood(channel: KVChannel) -> None:
        while True:
            await channel.send(bytes(1 << 20))

    worker.behaviour = refuse
    async with connected(server) as channel:
        both = asyncio.gather(flood(channel), channel.receive(), return_exceptions=True)
        for outcome in await asyncio.wait_for(both, 2):
            assert isinstance(outcome, WorkerLostError | IntegrityError)


async def test_a_client_that_vanishes_is_no_clean_end(server: WorkerServer, worker: KVWorker) -> None:
    connection = open_channel(server.address)
    call: Any = worker_pb2_grpc.KVStub(connection).Channel()  # type: ignore[call-arg]
    await call.write(worker_pb2.KVFrame(data=b"x"))
    assert (await call.read()).data == b"x"
    await connection.close(None)
    assert isinstance(await asyncio.wait_for(worker.outcome, 1), WorkerLostError)


async def test_a_server_that_vanishes_is_no_clean_end(server: WorkerServer, channel: KVChannel) -> None:
    waiting = asyncio.ensure_future(channel.receive())
    await asyncio.sleep(0)
    await server.stop(0)
    with pytest.raises(WorkerLostError):
        await asyncio.wait_for(waiting, 1)
    with pytest.raises(WorkerLostError):
        await asyncio.wait_for(channel.send(b"more"), 1)


async def test_a_sender_in_back_pressure_hears_that_the_peer_is_gone(server: WorkerServer, worker: KVWorker) -> None:
    worker.behaviour = worker.hang

    async def flood(channel: KVChannel) -> None:
        while True:
            await channel.send(bytes(1 << 20))

    async with connected(server) as channel:
        flooding = asyncio.ensure_future(flood(channel))
        await asyncio.sleep(0.2)
        await server.stop(0)
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(flooding, 1)


async def test_nobody_there(server: WorkerServer) -> None:
    await server.stop(0)
    with pytest.raises(WorkerLostError, match=server.address):
        await asyncio.wait_for(connect(server.address), 2)


async def test_a_worker_without_kv(worker: KVWorker) -> None:
    server = WorkerServer(secret="s")
    address = server.bind("127.0.0.1", 0)
    await server.start(worker)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="does not serve"):
        await connect(address, secret="s")
    with pytest.raises(AuthenticationError):
        await connect(address)
    await server.stop(0)
