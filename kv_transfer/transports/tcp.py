"""A TCP connection of its own for each pair of workers: frames with their payload right behind.

    sender                                             receiver
      connect to the offer's address ─────────────────▶ accept
      hello + the offer's token ──────────────────────▶ equal? (within a deadline)
      ◀───────────────────────────────────── welcome
      lengths, header, blocks (one sendmsg) ──────────▶ received into the pool's blocks, verified
      ◀───────────────────────────── acknowledgement    one for all pieces that lay ready

Offers travel over channels that authenticate their peers, and the token with them: whoever has it has been
given a ticket. Nothing is encrypted. What is no frame ends the channel, never the worker. While a piece is
verified, the next ones arrive in the kernel's buffers.

Blocks go from pool to pool without a copy of our own where they are large enough and alike on both sides; else
they are copied together into one buffer, and from one. Either way it is the receiver's process that writes into
its pool, and it asks before each write whether the ticket is still live.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Sequence

import numpy as np

from common.errors import HandoffError, WorkerLostError
from common.handoff import TransportOffer
from kv_transfer.channel import Bytes, FrameChannel, Staged
from kv_transfer.frames import (
    MAX_PAYLOAD_BYTES,
    Frame,
    Piece,
    decode,
    encode,
    piece_header,
)
from kv_transfer.transport import Serve
from kv_transfer.transports.acknowledging import Acknowledgements
from kv_transfer.transports.connection import ClosedHereError, Connection
from kv_transfer.transports.inline import check_inline
from kv_transfer.transports.listening import SocketListener
from kv_transfer.transports.staging import Buffers

HELLO = b"baton-kv-tcp-1:"
WELCOME = b"+"
TOKEN_HEX = 32
HANDSHAKE_TIMEOUT_S = 4.0
MAX_HEADER_BYTES = 32 << 10
"""Of a frame without its payload."""

SOCKET_BUFFER_BYTES = 4 << 20
ACKS_TOGETHER = 8
WASTE_BYTES = 256 << 10
TURN_BYTES = 4 << 20
"""After so much without a wait the loop's other tasks have their turn."""

_LENGTHS = struct.Struct("<II")
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000),
)
"""A peer that does not answer for 10 s is gone."""


class TcpFrames:
    """A DirectFrames over a connected socket. ``capacity_bytes`` bounds what is not acknowledged."""

    def __init__(self, sock: socket.socket, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._connection = Connection(sock, "a TCP channel")
        self._buffers = Buffers(capacity_bytes)
        self._unsaid = Acknowledgements(ACKS_TOGETHER)
        self._lengths = bytearray(_LENGTHS.size)
        self._header = bytearray(MAX_HEADER_BYTES)
        self._arrived: Bytes = np.empty(0, dtype=np.uint8)
        self._due_bytes = 0
        """Payload of the frame that was received last and that nobody has asked for yet."""
        self._moved_bytes = 0

    def stage(self, num_bytes: int) -> Staged | None:
        return self._buffers.stage(num_bytes)

    def release(self, staged: Staged) -> None:
        self._buffers.release(staged)

    async def send(self, frame: Frame) -> None:
        for due in self._unsaid.before(frame):
            if isinstance(due, Piece):
                await self._connection.write([_header(piece_header(due), len(due.payload)), due.payload])
                if isinstance(due.payload, memoryview):
                    self._buffers.take_back(due.payload.obj)  # the kernel has its copy
                await self._turn(len(due.payload))
            else:
                await self._connection.write([_header(encode(due), 0)])

    async def send_parts(self, piece: Piece, staged: Staged, parts: Sequence[memoryview]) -> None:
        await self._connection.write([_header(piece_header(piece), len(staged.buffer)), *parts], staged.buffer.data)
        self._buffers.take_back(staged.buffer)
        await self._turn(len(staged.buffer))

    async def receive(self) -> Frame | None:
        self._connection.check()
        await self._skip()
        lengths = memoryview(self._lengths)
        if not await self._begins(lengths):
            return None
        header_bytes, payload_bytes = _LENGTHS.unpack(lengths)
        if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
            raise HandoffError(
                f"a frame has at most {MAX_HEADER_BYTES} bytes and {MAX_PAYLOAD_BYTES} of payload, "
                f"this one {header_bytes} and {payload_bytes}"
            )
        header = memoryview(self._header)[:header_bytes]
        await self._connection.fill([header])
        frame = decode(header)
        if payload_bytes and not isinstance(frame, Piece):
            raise HandoffError(f"a frame of kind {type(frame).__name__} came with {payload_bytes} bytes of payload")
        self._due_bytes = payload_bytes
        return frame

    async def payload(self, piece: Piece, num_bytes: int) -> Bytes:
        check_inline(piece, num_bytes, self._due_bytes)
        if len(self._arrived) < num_bytes:
            self._arrived = np.empty(num_bytes, dtype=np.uint8)
        payload = self._arrived[:num_bytes]
        await self._take([payload.data])
        payload = payload.view()
        payload.flags.writeable = False
        return payload

    async def receive_parts(self, piece: Piece, parts: Sequence[memoryview], live: Callable[[], bool]) -> bool:
        check_inline(piece, sum(map(len, parts)), self._due_bytes)
        return await self._take(parts, live)

    async def close(self) -> None:
        await self._connection.close(linger=True)

    async def _take(self, parts: Sequence[memoryview], live: Callable[[], bool] | None = None) -> bool:
        """The payload that is due into ``parts``; False when ``live`` said no before all was there."""
        due, left = self._due_bytes, await self._connection.fill(parts, live)
        self._due_bytes = left
        await self._turn(due - left)
        return left == 0

    async def _skip(self) -> None:
        """What came is not wanted."""
        waste = memoryview(bytearray(min(self._due_bytes, WASTE_BYTES)))
        while self._due_bytes:
            some = waste[: self._due_bytes]
            await self._connection.fill([some])
            self._due_bytes -= len(some)

    async def _begins(self, view: memoryview) -> bool:
        """Receives ``view``, the beginning of a frame; False at the end of the channel."""
        try:
            count = self._connection.read_now([view])
            while count is None:
                for due in self._unsaid.take():
                    await self._connection.write([_header(encode(due), 0)])
                await self._connection.readable()
                count = self._connection.read_now([view])
        except ClosedHereError:
            return False
        if count:
            await self._connection.fill([view[count:]])
        return count > 0

    async def _turn(self, num_bytes: int) -> None:
        """Lets the loop's other tasks have their turn from time to time."""
        self._moved_bytes += num_bytes
        if self._moved_bytes >= TURN_BYTES:
            self._moved_bytes = 0
            await asyncio.sleep(0)


def _header(frame: bytes, payload_bytes: int) -> bytes:
    """What goes before the payload."""
    if len(frame) > MAX_HEADER_BYTES:
        raise HandoffError(f"a TCP channel takes frames of {MAX_HEADER_BYTES} bytes, got {len(frame)}")
    return _LENGTHS.pack(len(frame), payload_bytes) + frame


class Tcp:
    """The Transport. ``server_address`` (host:port): where others reach this worker's server; the listener
    takes a free port beside it.
    """

    name = "tcp"

    def __init__(self, server_address: str, staging_bytes: int) -> None:
        self._host = server_address.rpartition(":")[0].strip("[]")
        self._staging_bytes = staging_bytes
        self._token = secrets.token_hex(TOKEN_HEX // 2).encode()
        self._listener: SocketListener | None = None

    def reaches(self, offer: TransportOffer) -> bool:
        return offer.name == self.name

    async def listen(self, serve: Serve) -> str | None:
        sock: socket.socket | None = None
        try:
            family, place = await _resolve(self._host, 0)
            sock = _socket(family)
            sock.bind(place)
            self._listener = SocketListener(self.name, sock, self._welcome, serve)
        except OSError as error:
            if sock is not None:
                sock.close()
            raise WorkerLostError(f"cannot listen on {self._host}: {error.strerror or error}") from error
        self._listener.start()
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{sock.getsockname()[1]}#{self._token.decode()}"

    async def connect(self, address: str) -> FrameChannel:
        place, _, token = address.partition("#")
        host, _, port = place.rpartition(":")
        host = host.strip("[]")
        if len(token) != TOKEN_HEX or not (port.isascii() and port.isdigit()):
            raise WorkerLostError("a TCP address is host:port#token, this one is not")
        loop = asyncio.get_running_loop()
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                family, numeric = await _resolve(host, int(port))
                sock = _socket(family)
                await loop.sock_connect(sock, numeric)
                await loop.sock_sendall(sock, HELLO + token.encode())
                answer = await loop.sock_recv(sock, len(WELCOME))
            if answer != WELCOME:
                raise ConnectionRefusedError("it does not know the token")
        except BaseException as error:
            if sock is not None:
                sock.close()
            if isinstance(error, OSError | OverflowError):  # TimeoutError included
                raise WorkerLostError(f"no TCP connection to {place}: {error}") from error
            raise
        return TcpFrames(sock, self._staging_bytes)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()

    async def _welcome(self, sock: socket.socket) -> FrameChannel:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        wanted = HELLO + self._token
        hello = b""
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            while len(hello) < len(wanted):
                more = await loop.sock_recv(sock, len(wanted) - len(hello))
                if not more:
                    break
                hello += more
            if not hmac.compare_digest(hello, wanted):
                raise WorkerLostError("a stranger knocked, without the token of this listener")
            await loop.sock_sendall(sock, WELCOME)
        return TcpFrames(sock, capacity_bytes=0)


async def _resolve(host: str, port: int) -> tuple[int, tuple[str, int]]:
    """(family, numeric place) of the first address of ``host``. Raises OSError."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label of more than 63 characters, say
        raise OSError(f"{host!r} is no host name: {error}") from error
    family, _, _, _, place = found[0]
    return family, (str(place[0]), int(place[1]))


def _socket(family: int) -> socket.socket:
    """What a listener accepts has the same options."""
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    for level, option, value in _OPTIONS:
        sock.setsockopt(level, option, value)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    return sock
