"""TCP between workers: who is let in, what a stranger can do (nothing), what is left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psutil
import pytest

from common.config import TransferConfig
from common.errors import BatonError, WorkerLostError
from kv_transfer.channel import FrameChannel
from kv_transfer.frames import INLINE, MAX_PAYLOAD_BYTES, Abort, Frame, Piece, encode, piece_header
from kv_transfer.host import host_id
from kv_transfer.pool import NumpyPool
from kv_transfer.receiver import Receiver
from kv_transfer.transports import tcp
from kv_transfer.transports.tcp import Tcp
from tests.kv_transfer.conftest import LAYOUT, MakePair, Pair

LENGTHS = struct.Struct("<II")
HERE = "127.0.0.1:1"
OTHER_TOKEN = "0" * 32


class Served:
    """A listening transport and what its channels brought: frames, then the error or None that each ended with."""

    def __init__(self, server_address: str = HERE) -> None:
        self.transport = Tcp(server_address, 1 << 20)
        self.frames: list[Frame] = []
        self.ends: asyncio.Queue[BatonError | None] = asyncio.Queue()
        self.address = ""

    async def serve(self, channel: FrameChannel) -> None:
        end: BatonError | None = None
        try:
            while (frame := await channel.receive()) is not None:
                self.frames.append(frame)
        except BatonError as error:
            end = error
        finally:
            await channel.close()
            self.ends.put_nowait(end)

    async def next_end(self) -> BatonError | None:
        async with asyncio.timeout(5):
            return await self.ends.get()


@asynccontextmanager
async def listening(server_address: str = HERE) -> AsyncIterator[Served]:
    served = Served(server_address)
    address = await served.transport.listen(served.serve)
    assert address is not None
    served.address = address
    try:
        yield served
    finally:
        await served.transport.close()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with listening() as served:
        yield served


@asynccontextmanager
async def stranger(address: str, says: bytes = b"") -> AsyncIterator[socket.socket]:
    """A plain connection to an offer's address."""
    host, _, port = address.partition("#")[0].rpartition(":")
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        await loop.sock_connect(sock, (host, int(port)))
        await loop.sock_sendall(sock, says)
        yield sock


async def rest(sock: socket.socket) -> bytes:
    """All that still comes. A connection that is closed with something unread in it is reset."""
    got = b""
    async with asyncio.timeout(5):
        try:
            while more := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
                got += more
        except ConnectionResetError:
            pass
    return got


def hello(address: str) -> bytes:
    """What opens the door."""
    return tcp.HELLO + address.partition("#")[2].encode()


async def assert_serves(served: Served) -> None:
    """A sender with the token gets in, and its frame arrives."""
    channel = await served.transport.connect(served.address)
    before = len(served.frames)
    await channel.send(Abort(7, "hello"))
    await channel.close()
    assert await served.next_end() is None
    assert served.frames[before:] == [Abort(7, "hello")]


async def hand_off(pair: Pair, source: int, target: int) -> None:
    """One block, by the sender of ``pair`` to its receiver."""
    ticket, _ = pair.expect([target])
    push = await pair.sender.open(ticket, [source])
    for layer in range(LAYOUT.num_layers):
        push.push(layer, 0, 1)
    await push.commit(pair.commit(ticket))
    await pair.receiver.forget(ticket.ticket_id)
    pair.assert_moved([source], [target])


async def settled(condition: Callable[[], bool]) -> None:
    """The other end hears of a close through the kernel."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# ── who is let in ─────────────────────────────────────────────────────────────────────────────────


async def test_a_wrong_token_is_refused(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    place = served.address.partition("#")[0]
    with pytest.raises(WorkerLostError, match="it does not know the token") as refused:
        await served.transport.connect(f"{place}#{OTHER_TOKEN}")
    assert OTHER_TOKEN not in str(refused.value)  # errors are logged, and tokens are not
    said = [record.getMessage() for record in caplog.records]
    assert said == ["refused a tcp connection: a stranger knocked, without the token of this listener"]
    assert served.address.partition("#")[2] not in caplog.text
    await assert_serves(served)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:80",
        "127.0.0.1:80#",
        "127.0.0.1:80#short",
        f"127.0.0.1#{OTHER_TOKEN}",
        f"127.0.0.1:http#{OTHER_TOKEN}",
        f"127.0.0.1:٣#{OTHER_TOKEN}",
        f"127.0.0.1:99999#{OTHER_TOKEN}",
        f"nobody.invalid:80#{OTHER_TOKEN}",
        f"{'a' * 64}.invalid:80#{OTHER_TOKEN}",
        f"a\0b:80#{OTHER_TOKEN}",
        "",
    ],
)
async def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(WorkerLostError):
        await Tcp(HERE, 1 << 20).connect(address)


async def test_a_silent_stranger_is_shown_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT_S", 0.05)
    async with stranger(served.address) as silent, stranger(served.address, hello(served.address)[:-1]) as nearly:
        assert await rest(silent) == await rest(nearly) == b""
    await assert_serves(served)


async def test_a_listener_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else may have the port by now."""
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(WorkerLostError, match=f"no TCP connection to {place}"):
            await Tcp(HERE, 1 << 20).connect(f"{place}#{OTHER_TOKEN}")


async def test_closing_does_not_wait_for_strangers() -> None:
    before = psutil.Process().num_fds()
    async with listening() as served, stranger(served.address) as silent:
        await settled(lambda: psutil.Process().num_fds() == before + 3)  # the listener, and both ends
        async with asyncio.timeout(1):
            await served.transport.close()
        assert await rest(silent) == b""
    assert psutil.Process().num_fds() == before


# ── what a stranger can do ────────────────────────────────────────────────────────────────────────

ABORT = encode(Abort(1, "x"))
PIECE = piece_header(Piece(1, 1, 0, 0, 1, 0, INLINE))
BROKEN = {
    "half a length": (b"\x01\x00", "in the middle of a frame"),
    "half a header": (LENGTHS.pack(len(ABORT), 0) + ABORT[:-1], "in the middle of a frame"),
    "half a payload": (LENGTHS.pack(len(PIECE), 1000) + PIECE + bytes(999), "in the middle of a frame"),
    "a huge header": (LENGTHS.pack(2**32 - 1, 0), "at most 32768 bytes and 4194304 of payload, this one 4294967295"),
    "a huge payload": (LENGTHS.pack(len(PIECE), MAX_PAYLOAD_BYTES + 1) + PIECE, f"and {MAX_PAYLOAD_BYTES + 1}$"),
    "no header": (LENGTHS.pack(0, 0), "this one has 0"),
    "a payload of no piece": (
        LENGTHS.pack(len(ABORT), 5) + ABORT + bytes(5),
        "a frame of kind Abort came with 5 bytes of payload",
    ),
    "damage": (LENGTHS.pack(len(ABORT), 0) + ABORT[:-1] + b"!", "does not verify"),
    "noise": (random.Random(4).randbytes(1000), "a frame has at most"),
}


@pytest.mark.parametrize(("says", "error"), BROKEN.values(), ids=BROKEN)
async def test_what_is_no_frame_ends_the_channel_alone(served: Served, says: bytes, error: str) -> None:
    beside = await served.transport.connect(served.address)
    async with stranger(served.address, hello(served.address) + says) as sock:
        sock.shutdown(socket.SHUT_WR)
        end = await served.next_end()
        assert end is not None
        assert re.search(error, end.message), end.message
        assert await rest(sock) == tcp.WELCOME
    await beside.send(Abort(2, "beside"))
    await beside.close()
    assert await served.next_end() is None
    assert served.frames[-1] == Abort(2, "beside")


async def test_nothing_that_is_said_breaks_a_receiver(make_pair: MakePair, caplog: pytest.LogCaptureFixture) -> None:
    """A real handoff's beginning, cut and bitten anywhere, from one that has the token: nothing is written, nothing
    is left, and others are served."""
    pair = await make_pair(transports=("tcp",))
    address = pair.receiver.offers[0].address
    await hand_off(pair, 2, 1)
    before, fds = pair.target.data.copy(), psutil.Process().num_fds()
    rng = random.Random(11)
    whole = b"".join(LENGTHS.pack(len(frame), 0) + frame for frame in (ABORT, PIECE, ABORT)) * 3
    for _ in range(60):
        said = bytearray(hello(address) + whole)
        for _ in range(rng.randrange(4)):
            said[rng.randrange(len(said))] = rng.randrange(256)
        async with stranger(address, bytes(said[: rng.randrange(len(said) + 1)])):
            pass
    await settled(lambda: psutil.Process().num_fds() == fds)
    assert (pair.target.data == before).all()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    await hand_off(pair, 3, 1)


# ── workers come and go ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("host", ["nobody.invalid", "a" * 64 + ".invalid", "192.0.2.1"])
async def test_a_host_that_is_not_here_cannot_listen(host: str) -> None:
    with pytest.raises(WorkerLostError, match=f"cannot listen on {host}"):
        await Tcp(f"{host}:1", 1 << 20).listen(Served().serve)


async def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    async with listening("[::1]:1") as served:
        assert served.address.startswith("[::1]:")
        await assert_serves(served)


async def test_two_workers_of_one_host_are_not_taken_for_each_other() -> None:
    async with listening() as one, listening() as other:
        await assert_serves(one)
        await assert_serves(other)
        token = one.address.partition("#")[2]
        with pytest.raises(WorkerLostError, match="does not know the token"):
            await one.transport.connect(f"{other.address.partition('#')[0]}#{token}")


async def test_a_worker_that_was_started_again(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the very port it had before: its old offers are of no use, whoever has them goes on with new ones."""
    made = tcp._socket
    monkeypatch.setattr(tcp, "_socket", lambda family: reusing(made(family)))
    pair = await make_pair(transports=("tcp",))
    await hand_off(pair, 2, 1)
    (old,) = pair.receiver.offers
    port = int(old.address.partition("#")[0].rpartition(":")[2])
    await pair.receiver.close()
    with pytest.raises(WorkerLostError, match="no TCP connection"):
        await pair.transports[0].connect(old.address)

    async def resolve(host: str, _: int) -> tuple[int, tuple[str, int]]:
        return socket.AF_INET, (host, port)

    with monkeypatch.context() as same_port:
        same_port.setattr(tcp, "_resolve", resolve)
        pair.receiver = Receiver(NumpyPool(LAYOUT, 16), TransferConfig(), host_id(), [Tcp(HERE, 1 << 20)])
        await pair.receiver.start()
    pair.target = pair.receiver._pool  # type: ignore[assignment]
    (new,) = pair.receiver.offers
    assert new.address.partition("#")[0] == old.address.partition("#")[0]
    with pytest.raises(WorkerLostError, match="does not know the token"):
        await pair.transports[0].connect(old.address)
    await hand_off(pair, 3, 1)


def reusing(sock: socket.socket) -> socket.socket:
    """The kernel keeps the port of an old connection for a minute otherwise."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock


async def test_many_at_once(served: Served) -> None:
    channels = await asyncio.gather(*(served.transport.connect(served.address) for _ in range(200)))
    for number, channel in enumerate(channels):
        await channel.send(Abort(number, "here"))
    await asyncio.gather(*(channel.close() for channel in channels))
    for _ in channels:
        assert await served.next_end() is None
    assert sorted(frame.stream for frame in served.frames if isinstance(frame, Abort)) == list(range(200))


async def leave(served: Served) -> None:
    await (await served.transport.connect(served.address)).close()


async def die(served: Served) -> None:
    """In the middle of a frame, with something unread: the kernel says so with a reset."""
    async with stranger(served.address, hello(served.address) + b"\x01"):
        pass


async def knock(served: Served) -> None:
    with pytest.raises(WorkerLostError):
        await served.transport.connect(f"{served.address.partition('#')[0]}#{OTHER_TOKEN}")


async def turn_away(served: Served) -> None:
    """Connects, and is cancelled somewhere on the way."""
    connecting = asyncio.ensure_future(served.transport.connect(served.address))
    for _ in range(served.ends.qsize() % 7):
        await asyncio.sleep(0)
    connecting.cancel()
    try:
        await (await connecting).close()
    except asyncio.CancelledError:
        pass


@pytest.mark.parametrize("visit", [leave, die, knock, turn_away])
async def test_two_hundred_visits_leave_no_descriptor(
    served: Served, visit: Callable[[Served], Awaitable[None]]
) -> None:
    process = psutil.Process(os.getpid())
    await leave(served)
    await settled(lambda: served.ends.qsize() == 1)
    before = process.num_fds()
    for _ in range(200):
        await visit(served)
    await settled(lambda: process.num_fds() <= before)
    assert process.num_fds() == before
