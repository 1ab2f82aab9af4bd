"""Shared memory between two processes of one host.

    sender                                              receiver
      connect to the abstract Unix socket ──────────────▶ accept; same user? (SO_PEERCRED)
      anonymous memory file, sealed in size
      hello + its descriptor (SCM_RIGHTS) ──────────────▶ seals and size checked, mapped read-only
      copy blocks into the ring, piece frame ───────────▶ copy into the pool, verify
      room free again ◀────────────────── acknowledgement

Nothing has a name: the memory lives as long as the two mappings, the socket address as long as its
listener, so a crash leaves nothing behind. The sender writes into staging only: once a piece is
acknowledged it lies in the receiver's pool, where no late writer can reach it. The socket keeps
message borders (SOCK_SEQPACKET), so one message is one frame.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
import socket
import struct

import numpy as np

from common.errors import HandoffError, WorkerLostError
from common.handoff import TransportOffer
from kv_transfer.channel import Bytes, FrameChannel, Staged
from kv_transfer.frames import INLINE, Frame, Piece, decode, encode
from kv_transfer.transport import Serve
from kv_transfer.transports.acknowledging import Acknowledgements
from kv_transfer.transports.connection import ClosedHereError, Connection
from kv_transfer.transports.listening import SocketListener
from kv_transfer.transports.staging import Ring

HELLO = b"baton-kv-1"
HANDSHAKE_TIMEOUT_S = 5.0
MAX_MESSAGE_BYTES = 32 << 10
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_CREDENTIALS = struct.Struct("3i")

WINDOW_BYTES = 16 << 20
"""Staging is no larger: what is used again soon is still in the cache, for both ends."""

ACKS_TOGETHER = 4
FRAMES_IN_A_TURN = 8


class SharedFrames:
    """A FrameChannel whose payload lies in ``memory``; only the sender's end allocates in it."""

    def __init__(self, sock: socket.socket, memory: mmap.mmap, *, is_sender: bool) -> None:
        self.capacity_bytes = len(memory) if is_sender else 0
        self._connection = Connection(sock, "a shared memory channel")
        self._memory: Bytes | None = np.frombuffer(memory, dtype=np.uint8)
        self._ring = Ring(self.capacity_bytes)
        self._message = bytearray(MAX_MESSAGE_BYTES)
        self._unsaid = Acknowledgements(ACKS_TOGETHER)
        self._without_wait = 0

    def stage(self, num_bytes: int) -> Staged | None:
        memory = self._mapped()
        offset = self._ring.allocate(num_bytes)
        return None if offset is None else Staged(memory[offset : offset + num_bytes], offset)

    def release(self, staged: Staged) -> None:
        self._ring.release(staged.offset)

    async def send(self, frame: Frame) -> None:
        for due in self._unsaid.before(frame):
            await self._send(due)

    async def receive(self) -> Frame | None:
        self._mapped()
        view = memoryview(self._message)
        try:
            self._without_wait += 1
            if self._without_wait >= FRAMES_IN_A_TURN:  # others on this loop have to have theirs
                self._without_wait = 0
                await asyncio.sleep(0)
            count = self._connection.read_now([view])
            while count is None:
                self._without_wait = 0
                for due in self._unsaid.take():
                    await self._send(due)
                await self._connection.readable()
                count = self._connection.read_now([view])
        except ClosedHereError:
            return None
        return decode(view[:count]) if count else None

    async def payload(self, piece: Piece, num_bytes: int) -> Bytes:
        memory = self._mapped()
        if piece.offset == INLINE or len(piece.payload):
            raise HandoffError(f"a piece of {num_bytes} bytes came in its frame instead of shared memory")
        if not 0 <= piece.offset <= len(memory) - num_bytes:
            raise HandoffError(
                f"a piece of {num_bytes} bytes at {piece.offset} exceeds the {len(memory)} bytes of shared memory"
            )
        return memory[piece.offset : piece.offset + num_bytes]

    async def close(self) -> None:
        """The mapping goes with its last user: a copy under way keeps it until it is done."""
        self._memory = None
        await self._connection.close()

    async def _send(self, frame: Frame) -> None:
        data = encode(frame)
        if len(data) > MAX_MESSAGE_BYTES:
            raise HandoffError(f"a shared memory channel takes frames of {MAX_MESSAGE_BYTES} bytes, got {len(data)}")
        await self._connection.write([data])

    def _mapped(self) -> Bytes:
        if self._memory is None:
            raise WorkerLostError("this shared memory channel is closed")
        return self._memory


async def connect(address: str, capacity_bytes: int) -> SharedFrames:
    """Connects to a listener's ``address`` and shares ``capacity_bytes`` of staging memory with it.

    Raises WorkerLostError when nobody of this user listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(sock, _socket_name(address))
        _check_same_user(sock)
        descriptor = os.memfd_create("baton-kv-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, capacity_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            memory = mmap.mmap(descriptor, capacity_bytes)
            socket.send_fds(sock, [HELLO], [descriptor])
        finally:
            os.close(descriptor)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):  # TimeoutError included
            raise WorkerLostError(f"no shared memory connection to {address}: {error}") from error
        raise
    return SharedFrames(sock, memory, is_sender=True)


class Shm:
    """The Transport. ``host_id`` names this machine in offers (`host.py`)."""

    name = "shm"

    def __init__(self, host_id: str, staging_bytes: int) -> None:
        self._host_id = host_id
        self._staging_bytes = min(staging_bytes, WINDOW_BYTES)
        self._listener: ShmListener | None = None

    def reaches(self, offer: TransportOffer) -> bool:
        return offer.name == self.name and offer.host_id == self._host_id

    async def listen(self, serve: Serve) -> str | None:
        self._listener = ShmListener(serve)
        self._listener.start()
        return self._listener.address

    async def connect(self, address: str) -> FrameChannel:
        return await connect(address, self._staging_bytes)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()


class ShmListener(SocketListener):
    """Accepts senders of this host and user, and hands each one's channel to ``serve``."""

    def __init__(self, serve: Serve) -> None:
        self.address = f"@baton-kv-{os.getpid()}-{secrets.token_hex(8)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        sock.bind(_socket_name(self.address))
        super().__init__("shared memory", sock, _welcome, serve)


async def _welcome(sock: socket.socket) -> FrameChannel:
    _check_same_user(sock)
    return SharedFrames(sock, await _receive_memory(sock), is_sender=False)


async def _receive_memory(sock: socket.socket) -> mmap.mmap:
    """The memory file of the sender's hello, mapped read-only."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await readable.wait()
    finally:
        loop.remove_reader(sock)
    hello, descriptors, _, _ = socket.recv_fds(sock, len(HELLO) + 1, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if hello != HELLO or len(descriptors) != 1:
            raise HandoffError(f"a hello is {HELLO!r} with 1 descriptor, got {hello!r} with {len(descriptors)}")
        seals = fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS)
        if seals & _SEALS != _SEALS:  # a file that shrinks later would kill whoever reads it (SIGBUS)
            raise HandoffError(f"staging memory has to be sealed in size (seals {_SEALS}), its seals are {seals}")
        size = os.fstat(descriptors[0]).st_size
        return mmap.mmap(descriptors[0], size, prot=mmap.PROT_READ)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _socket_name(address: str) -> str:
    """The abstract socket name (it starts with a zero byte) of an offer's address."""
    if not address.startswith("@"):
        raise WorkerLostError(f"a shared memory address starts with '@', got {address!r}")
    return "\0" + address[1:]


def _check_same_user(sock: socket.socket) -> None:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise WorkerLostError(f"shared memory peers must run as user {os.geteuid()}, the other is user {user}")
