"""A TCP connection of its own for each pair of workers: frames with their payload right behind.

    sender                                             receiver
      connect to the offer's address ─────────────────▶ accept
      hello + the offer's token ──────────────────────▶ equal? (within a deadline)
      ◀───────────────────────────────────── welcome
      lengths, header, payload (one sendmsg) ─────────▶ received into one buffer, verified, copied into the pool
      ◀───────────────────────────── acknowledgement    one for all pieces that lay ready

Offers travel over channels that authenticate their peers, and the token with them: whoever has it has been
given a ticket. Nothing is encrypted. What is no frame ends the channel, never the worker. While a piece is
copied, the next ones arrive in the kernel's buffers.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct

import numpy as np

from common.errors import HandoffError, WorkerLostError
from common.messages import TransportOffer
from kv_transfer.channel import Bytes, FrameChannel, Staged
from kv_transfer.frames import (
    INLINE,
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
    """A FrameChannel over a connected socket. ``capacity_bytes`` bounds what is not acknowledged."""

    def __init__(self, sock: socket.socket, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._connection = Connection(sock, "a TCP channel")
        self._buffers = Buffers()
        self._staged_bytes = 0
        self._unsaid = Acknowledgements(ACKS_TOGETHER)
        self._lengths = bytearray(_LENGTHS.size)
        self._header = bytearray(MAX_HEADER_BYTES)
        self._arrived: Bytes = np.empty(0, dtype=np.uint8)
        self._sent_bytes = self._received_bytes = 0

    def stage(self, num_bytes: int) -> Staged | None:
        if self._staged_bytes + num_bytes > self.capacity_bytes:
            return None
        self._staged_bytes += num_bytes
        return Staged(self._buffers.lend(num_bytes), INLINE)

    def release(self, staged: Staged) -> None:
        self._staged_bytes -= len(staged.buffer)
        self._buffers.take_back(staged.buffer)

    async def send(self, frame: Frame) -> None:
        for due in self._unsaid.before(frame):
            await self._send(due)

    async def receive(self) -> Frame | None:
        self._connection.check()
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
        await self._fill(header)
        frame = decode(bytes(header))
        if payload_bytes:
            if not isinstance(frame, Piece):
                raise HandoffError(f"a {type(frame).__name__} frame came with {payload_bytes} bytes of payload")
            if len(self._arrived) < payload_bytes:
                self._arrived = np.empty(payload_bytes, dtype=np.uint8)
            payload = self._arrived[:payload_bytes].data
            await self._fill(payload)
            place = (frame.stream, frame.sequence, frame.layer, frame.first, frame.count)
            frame = Piece(*place, frame.checksum, frame.offset, payload.toreadonly())
            self._received_bytes = await _turn(self._received_bytes + payload_bytes)
        return frame

    def payload(self, piece: Piece, num_bytes: int) -> Bytes:
        if piece.offset != INLINE:
            raise HandoffError(f"this transport has no shared memory, a piece claims to lie at offset {piece.offset}")
        if len(piece.payload) != num_bytes:
            raise HandoffError(f"a piece of {num_bytes} bytes came with {len(piece.payload)}")
        return np.frombuffer(piece.payload, dtype=np.uint8)

    async def close(self) -> None:
        await self._connection.close(linger=True)

    async def _send(self, frame: Frame) -> None:
        payload: memoryview | bytes = b""
        if isinstance(frame, Piece):
            header, payload = piece_header(frame), frame.payload
        else:
            header = encode(frame)
        if len(header) > MAX_HEADER_BYTES:
            raise HandoffError(f"a TCP channel takes frames of {MAX_HEADER_BYTES} bytes, got {len(header)}")
        await self._connection.write([_LENGTHS.pack(len(header), len(payload)) + header, payload])
        if isinstance(payload, memoryview):
            self._buffers.take_back(payload.obj)  # the kernel has its copy
            self._sent_bytes = await _turn(self._sent_bytes + len(payload))

    async def _begins(self, view: memoryview) -> bool:
        """Receives ``view``, the beginning of a frame; False at the end of the channel."""
        try:
            count = self._connection.read_now(view)
            while count is None:
                for due in self._unsaid.take():
                    await self._send(due)
                await self._connection.readable()
                count = self._connection.read_now(view)
        except ClosedHereError:
            return False
        if count:
            await self._fill(view[count:])
        return count > 0

    async def _fill(self, view: memoryview) -> None:
        while len(view):
            count = self._connection.read_now(view)
            if count is None:
                await self._connection.readable()
            elif count == 0:
                raise WorkerLostError("a TCP channel ended in the middle of a frame")
            else:
                view = view[count:]


async def _turn(num_bytes: int) -> int:
    """Lets the loop's other tasks have their turn from time to time; returns how much has passed since."""
    if num_bytes < TURN_BYTES:
        return num_bytes
    await asyncio.sleep(0)
    return 0


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
        family, place = await _resolve(self._host, 0)
        sock = _socket(family)
        try:
            sock.bind(place)
            self._listener = SocketListener(self.name, sock, self._welcome, serve)
        except OSError as error:
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
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
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
