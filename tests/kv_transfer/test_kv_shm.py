"""Shared memory: two real processes, one of them killed; what is refused; what is left behind."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import BatonError, HandoffError, IntegrityError, WorkerLostError
from common.handoff import HandoffCommit
from kv_transfer.frames import INLINE, Piece
from kv_transfer.host import host_id
from kv_transfer.pool import NumpyPool
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transports import shm

sys.path.insert(0, str(Path(__file__).parent))
import shm_peer

pytestmark = pytest.mark.skipif(not host_id(), reason="needs Linux")


def footprint() -> tuple[int, int]:
    """(open descriptors, mapped staging memories) of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("baton-kv-staging")


@asynccontextmanager
async def peer(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("shm_peer.py")),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(30):
        return (await process.stdout.readline()).decode().strip()


async def test_a_killed_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sends; the blocks' hash comes back; then the other is killed in the middle."""
    source = shm_peer.make_pool(5)
    sender = Sender(source, shm_peer.CONFIG, [shm.Shm(host_id(), shm_peer.CONFIG.staging_bytes)])
    async with peer("receive") as process:
        address = await line_of(process)
        before = footprint()
        await shm_peer.push_everything(sender, shm_peer.make_ticket("t1", address))
        assert await line_of(process) == f"t1 {shm_peer.digest(source)}"
        assert footprint()[1] == 1
        ticket = shm_peer.make_ticket("t2", address)
        push = await sender.open(ticket, ticket.block_ids)
        process.kill()
        for layer in range(4):
            push.push(layer, 0, shm_peer.NUM_BLOCKS)
        with pytest.raises(WorkerLostError):
            await push.commit(HandoffCommit("t2", 1, 0, 4 * shm_peer.NUM_BLOCKS))
        await process.wait()
        with pytest.raises(WorkerLostError, match="no shared memory connection"):
            await sender.open(ticket, ticket.block_ids)
        assert footprint()[1] == 0
        assert footprint()[0] <= before[0]  # the pipe to the process has ended as well
    await sender.close()


async def test_a_killed_sender() -> None:
    """This process receives; the sender is killed with a ticket half-way."""
    pool = NumpyPool(shm_peer.LAYOUT, shm_peer.NUM_BLOCKS)
    receiver = Receiver(pool, shm_peer.CONFIG, host_id(), [shm.Shm(host_id(), shm_peer.CONFIG.staging_bytes)])
    await receiver.start()
    before = footprint()
    address = receiver.offers[0].address
    heard: dict[str, str] = {}
    lost = asyncio.Event()

    class Listener(shm_peer.Announcer):
        def committed(self, commit: HandoffCommit) -> None:
            heard[commit.ticket_id] = shm_peer.digest(pool)

        def failed(self, ticket_id: str, error: BatonError) -> None:
            heard[ticket_id] = type(error).__name__
            lost.set()

    for ticket_id in ("t1", "t2"):
        receiver.expect(shm_peer.make_ticket(ticket_id, address), Listener(pool))
    async with peer("send", address) as process:
        assert await line_of(process) == "half-way"
        process.kill()
        async with asyncio.timeout(5):
            await lost.wait()
    assert heard == {"t1": shm_peer.digest(shm_peer.make_pool(5)), "t2": "WorkerLostError"}
    await asyncio.sleep(0)
    assert footprint() == before
    await receiver.close()


async def test_nothing_is_left_after_closing(make_pair: Any) -> None:
    before = footprint()
    pair = await make_pair(transports=("shm",))
    for _ in range(3):
        ticket, _ = pair.expect([1])
        push = await pair.sender.open(ticket, [2])
        for layer in range(3):
            push.push(layer, 0, 1)
        await push.commit(pair.commit(ticket))
        await pair.receiver.forget(ticket.ticket_id)
        assert footprint()[1] == 2  # both ends are in this process
        await pair.sender.close()
        pair.sender = pair.new_sender()
    await pair.close()
    assert footprint() == before


async def test_damage_in_staging_does_not_count(make_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, mapped = footprint()
    pair = await make_pair(transports=("shm",))
    ticket, listener = pair.expect([1])
    push = await pair.sender.open(ticket, [2])
    channel = push._line._channel

    send = channel.send

    async def send_damaged(frame: Any) -> None:
        if isinstance(frame, Piece):
            channel._memory[frame.offset + 3] ^= 1
        await send(frame)

    monkeypatch.setattr(channel, "send", send_damaged)
    for layer in range(3):
        push.push(layer, 0, 1)
    with pytest.raises(IntegrityError, match="0 arrived intact in 4 tries"):
        await push.commit(pair.commit(ticket))
    assert not np.delete(pair.target.data, 1, axis=1).any()  # nothing but the ticket's block was touched
    await pair.close()
    assert len(listener.all("failed")) == 1  # an error that somebody keeps does not keep the memory
    assert footprint()[1] == mapped


@pytest.mark.parametrize("offset", [INLINE, -2, (1 << 16) - 255, 1 << 40])
async def test_pieces_outside_the_shared_memory(make_pair: Any, monkeypatch: Any, offset: int) -> None:
    pair = await make_pair(transports=("shm",), staging_bytes=1 << 16)
    ticket, listener = pair.expect([1])
    push = await pair.sender.open(ticket, [2])
    send = push._line._channel.send

    async def send_misplaced(frame: Any) -> None:
        if isinstance(frame, Piece):
            frame = Piece(frame.stream, frame.sequence, 0, 0, 1, frame.checksum, offset)
        await send(frame)

    monkeypatch.setattr(push._line._channel, "send", send_misplaced)
    for layer in range(3):
        push.push(layer, 0, 1)
    with pytest.raises(HandoffError, match="shared memory"):
        await push.commit(pair.commit(ticket))
    assert len(listener.all("failed")) == 1


# ── who is let in ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def listener() -> AsyncIterator[shm.ShmListener]:
    async def serve(channel: shm.SharedFrames) -> None:
        while await channel.receive() is not None:
            pass

    listener = shm.ShmListener(serve)
    listener.start()
    yield listener
    await listener.close()


async def knock(listener: shm.ShmListener, hello: bytes, seals: int, *, with_memory: bool = True) -> bytes:
    """Sends a hello; returns what comes back, b"" when the door is closed."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    descriptor = os.memfd_create("baton-kv-staging", os.MFD_ALLOW_SEALING)
    try:
        await loop.sock_connect(sock, "\0" + listener.address[1:])
        os.ftruncate(descriptor, 4096)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        socket.send_fds(sock, [hello], [descriptor] if with_memory else [])
        async with asyncio.timeout(2):
            return await loop.sock_recv(sock, 100)
    finally:
        os.close(descriptor)
        sock.close()


async def test_strange_hellos_are_refused(listener: shm.ShmListener, caplog: pytest.LogCaptureFixture) -> None:
    before = footprint()
    assert await knock(listener, b"GET /", shm._SEALS) == b""
    assert await knock(listener, shm.HELLO, shm._SEALS, with_memory=False) == b""
    assert await knock(listener, shm.HELLO, fcntl.F_SEAL_GROW) == b""
    reasons = [record.getMessage() for record in caplog.records]
    assert len(reasons) == 3
    assert "b'GET /' with 1" in reasons[0]
    assert "with 0" in reasons[1]
    assert "sealed in size" in reasons[2]
    descriptors, mapped = footprint()
    assert descriptors <= before[0]
    assert mapped <= before[1]


async def test_another_user_is_refused(listener: shm.ShmListener, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(WorkerLostError, match=f"must run as user {user + 1}, the other is user {user}"):
        await shm.connect(listener.address, 1 << 16)


async def test_a_silent_connection_is_closed(listener: shm.ShmListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "HANDSHAKE_TIMEOUT_S", 0.02)
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as sock:
        await loop.sock_connect(sock, "\0" + listener.address[1:])
        async with asyncio.timeout(2):
            assert await loop.sock_recv(sock, 100) == b""


async def test_addresses_that_are_none() -> None:
    for address in ("127.0.0.1:80", "@baton-kv-nobody"):
        with pytest.raises(WorkerLostError):
            await shm.connect(address, 1 << 16)


async def test_a_receive_under_way_ends_with_close(listener: shm.ShmListener) -> None:
    channel = await shm.connect(listener.address, 1 << 16)
    receiving = asyncio.ensure_future(channel.receive())
    await asyncio.sleep(0.01)
    await channel.close()
    assert await receiving is None
    assert channel._connection.socket.fileno() == -1
    with pytest.raises(WorkerLostError):
        await channel.receive()
    with pytest.raises(WorkerLostError):
        channel.stage(1)


def test_host_id_is_stable() -> None:
    assert host_id() == host_id() != ""
