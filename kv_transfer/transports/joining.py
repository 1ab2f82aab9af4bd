"""How two workers begin to move payloads beside a carrier, whatever library moves them.

    sender (rank 0)                                              receiver (rank 1)
      connect the carrier, hello: "gloo" ─────────────────────────▶ accept
      Greeting: versions, capacity, epoch ────────────────────────▶ equal versions?
      ◀──────────────────────── Greeting: the smaller capacity
      entries ◀─────────────────── carrier, both ways ────────────▶ where each is, keys, …  (`Entries`)
      make a mover                                                 make a mover
      the epoch ════════════════ through the movers ══════════════▶ equal?
      done ◀────────────────────────── carrier ───────────────────▶ done
      frames ◀─ carrier ─▶   payloads ══ movers ══════════════════▶ (`beside.py`)

The carrier is authenticated, so all that opens a door to strangers goes over it, and the movers prove to each
other that they are those of the two ends: the epoch, 16 random bytes, is known to nobody else. What is
made here is made for one channel, is known to no other part of the process, and ends with the channel: a
peer that dies takes down nothing but that, and the next handoff meets it under a new epoch.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import HandoffError, WorkerLostError
from common.handoff import TransportOffer
from kv_transfer.channel import ByteChannel, Bytes, Connector, FrameChannel
from kv_transfer.transport import Serve
from kv_transfer.transports.beside import BesideFrames
from kv_transfer.transports.carried import connect_carrier
from kv_transfer.transports.mover import Mover, MoverThread

BESIDE_VERSION = 1
JOIN_S = 4.0
"""How long the two may take to meet; less than a sender allows a connection."""
MAX_ENTRY_BYTES = 64 << 10
MAX_ENTRIES = 64

_DONE = b"done"
_GREETING = struct.Struct("<HQ16s")
_MAX_TEXT_BYTES = 512
_KEY = struct.Struct("<H")


class Entries:
    """What two ends set for each other, by key. For the threads that make movers: `get` blocks.

    ``send`` takes an entry for the other end's `arrived`; it is called from any thread, and must not block.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._values: dict[str, bytes] = {}
        self.has_ended = False
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        self._put(key, value)
        name = key.encode()
        self._send(_KEY.pack(len(name)) + name + value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """What either end has set. Raises WorkerLostError when it has not within ``timeout_s``, or at the `end`."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_ended or key in self._values, timeout_s)
            if self.has_ended or key not in self._values:
                raise WorkerLostError(f"the peer of a new channel did not say {key!r} within {timeout_s} s")
            return self._values[key]

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def arrived(self, entry: bytes) -> None:
        """The other end has set something. Raises HandoffError for what is no entry."""
        if not _KEY.size <= len(entry) <= MAX_ENTRY_BYTES or len(self._values) >= MAX_ENTRIES:
            raise HandoffError(
                f"a new channel takes {MAX_ENTRIES} entries of up to {MAX_ENTRY_BYTES} bytes, "
                f"got one more, of {len(entry)}"
            )
        (length,) = _KEY.unpack_from(entry)
        self._put(entry[_KEY.size : _KEY.size + length].decode(errors="replace"), entry[_KEY.size + length :])

    def end(self) -> None:
        """Nothing more will arrive: whoever waits here raises."""
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()

    def _put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = bytes(value)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a mover is made from. ``own_host`` (it may block): the name or address under which the other end
    reaches this machine."""

    rank: int
    epoch: bytes
    staging: Bytes
    entries: Entries
    own_host: Callable[[], str]

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class BesideTransport:
    """A CarriedTransport. ``address``: of this worker's server, "host:port". ``versions`` says what both ends have
    to have the same of; ``make`` blocks until the other end is there, and raises what it likes.
    """

    def __init__(
        self,
        name: str,
        address: str,
        connector: Connector,
        capacity_bytes: int,
        versions: Callable[[], str],
        make: Callable[[Meeting], Mover],
    ) -> None:
        self.name = name
        self._address = address
        self._connector = connector
        self._capacity_bytes = capacity_bytes
        self._versions = versions
        self._make = make

    def reaches(self, offer: TransportOffer) -> bool:
        return offer.name == self.name

    async def listen(self, serve: Serve) -> str | None:
        del serve  # the worker's server accepts, and calls `Receiver.serve`
        return self._address

    async def connect(self, address: str) -> FrameChannel:
        carrier = await connect_carrier(self._connector, address, self.name)
        try:
            await carrier.send(_Greeting(self._capacity_bytes, secrets.token_bytes(16), self._versions()).encode())
            agreed = _Greeting.decode(await carrier.receive())
            return await self._meet(carrier, 0, agreed, lambda: _address_towards(address))
        except HandoffError as error:
            await carrier.close()
            raise WorkerLostError(f"no {self.name} channel with {address}: {error.message}") from error
        except BaseException:
            await carrier.close()
            raise

    async def accept(self, carrier: ByteChannel) -> FrameChannel:
        offered = _Greeting.decode(await carrier.receive())
        here = self._versions()
        if offered.versions != here:  # nothing is known of what one release makes of another's bytes
            raise WorkerLostError(f"{self.name} is between equals: {here} here, {offered.versions} there")
        agreed = _Greeting(min(offered.capacity_bytes, self._capacity_bytes), offered.epoch, here)
        await carrier.send(agreed.encode())
        return await self._meet(carrier, 1, agreed, lambda: _host(self._address))

    async def close(self) -> None:
        """The worker's server ends with the worker."""

    async def _meet(
        self, carrier: ByteChannel, rank: int, agreed: _Greeting, own_host: Callable[[], str]
    ) -> FrameChannel:
        """This rank's end. Raises WorkerLostError or HandoffError; the carrier stays open."""
        loop = asyncio.get_running_loop()
        outgoing: asyncio.Queue[bytes] = asyncio.Queue()

        def send(entry: bytes) -> None:
            loop.call_soon_threadsafe(outgoing.put_nowait, entry)

        entries = Entries(send)
        staging: Bytes = np.empty(agreed.capacity_bytes, dtype=np.uint8)
        meeting = Meeting(rank, agreed.epoch, staging, entries, own_host)
        mover = MoverThread(f"kv-{self.name}-{agreed.epoch.hex()[:6]}", lambda: self._make(meeting))
        try:
            await _all_or_none(_start(mover, outgoing), _send(carrier, outgoing), _receive(carrier, entries))
        except BaseException:
            entries.end()
            mover.stop()
            raise
        return BesideFrames(carrier, mover, staging, is_sender=meeting.is_sender)


@dataclass(frozen=True, slots=True)
class _Greeting:
    capacity_bytes: int
    epoch: bytes
    versions: str

    def encode(self) -> bytes:
        return _GREETING.pack(BESIDE_VERSION, self.capacity_bytes, self.epoch) + self.versions.encode()

    @classmethod
    def decode(cls, data: bytes) -> _Greeting:
        if not data:
            raise WorkerLostError("the carrier ended before its ends had met")
        if not _GREETING.size <= len(data) <= _GREETING.size + _MAX_TEXT_BYTES:
            raise HandoffError(f"a channel begins with a greeting, got {data[:40]!r} ({len(data)} bytes)")
        version, capacity, epoch = _GREETING.unpack_from(data)
        if version != BESIDE_VERSION:
            raise WorkerLostError(f"greetings are of version {BESIDE_VERSION} here, the peer's is {version}")
        return cls(capacity, epoch, bytes(data[_GREETING.size :]).decode(errors="replace"))


async def _start(mover: MoverThread, outgoing: asyncio.Queue[bytes]) -> None:
    await mover.start()
    outgoing.put_nowait(_DONE)


async def _send(carrier: ByteChannel, outgoing: asyncio.Queue[bytes]) -> None:
    message = b""
    while message != _DONE:
        message = await outgoing.get()
        await carrier.send(message)


async def _receive(carrier: ByteChannel, entries: Entries) -> None:
    while (message := await carrier.receive()) != _DONE:
        if not message:
            raise WorkerLostError("the carrier ended before its ends had met")
        entries.arrived(message)


async def _all_or_none(*steps: Coroutine[Any, Any, None]) -> None:
    """Runs the steps side by side; the first that fails ends the others, and is raised."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _host(address: str) -> str:
    """Of "host:port" or "[host]:port"."""
    match = re.fullmatch(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:/]+)):\d+", address)
    if match is None:
        raise HandoffError(f"an address is host:port, got {address!r}")
    return match["v6"] or match["host"]


def _address_towards(address: str) -> str:
    """This machine's own address on the way to ``address``. Nothing is sent. Blocks while a name is looked up."""
    family, _, _, _, peer = socket.getaddrinfo(_host(address), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])
