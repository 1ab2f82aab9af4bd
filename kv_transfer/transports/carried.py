"""Transports over a byte channel that both sides authenticate: gRPC's, which `rpc/` makes and accepts.

    sender                                        receiver's server
      connect ─────────────────────────────────────▶ accept
      hello: version, name of the transport ───────▶ `read_hello`, then that transport's `accept`
      … whatever the transport needs to begin …

`Inline` sends payloads in the messages themselves. Others (`group.py`, `nixl.py`) move payloads beside
the carrier and use it for frames, and to pass what has to stay secret.
"""

from __future__ import annotations

import struct

from common.errors import HandoffError
from common.handoff import TransportOffer
from kv_transfer.channel import ByteChannel, Connector, FrameChannel
from kv_transfer.transport import Serve
from kv_transfer.transports.inline import InlineFrames

CARRIER_VERSION = 2
_HELLO = struct.Struct("<8sH")
_MAGIC = b"baton-kv"
MAX_NAME_BYTES = 32


class Inline:
    """A CarriedTransport without anything beside its carrier. ``address``: of this worker's server,
    None when it takes no senders. ``capacity_bytes`` bounds what is not acknowledged.
    """

    def __init__(self, name: str, address: str | None, connector: Connector, capacity_bytes: int) -> None:
        self.name = name
        self._address = address
        self._connector = connector
        self._capacity_bytes = capacity_bytes

    def reaches(self, offer: TransportOffer) -> bool:
        return offer.name == self.name

    async def listen(self, serve: Serve) -> str | None:
        del serve  # the worker's server accepts, and calls `Receiver.serve`
        return self._address

    async def connect(self, address: str) -> FrameChannel:
        return InlineFrames(await connect_carrier(self._connector, address, self.name), self._capacity_bytes)

    async def accept(self, carrier: ByteChannel) -> FrameChannel:
        return InlineFrames(carrier, capacity_bytes=0)

    async def close(self) -> None:
        """The worker's server ends with the worker."""


async def connect_carrier(connector: Connector, address: str, name: str) -> ByteChannel:
    """A byte channel to ``address`` whose other end knows that it is for transport ``name``."""
    carrier = await connector(address)
    try:
        await carrier.send(_HELLO.pack(_MAGIC, CARRIER_VERSION) + name.encode())
    except BaseException:
        await carrier.close()
        raise
    return carrier


async def read_hello(carrier: ByteChannel) -> str:
    """The name of the transport that a new carrier is for, "" when it ended before it said so.

    Raises HandoffError for anything that `connect_carrier` does not send, WorkerLostError.
    """
    hello = await carrier.receive()
    if not hello:
        return ""
    if len(hello) < _HELLO.size or len(hello) > _HELLO.size + MAX_NAME_BYTES or not hello.startswith(_MAGIC):
        raise HandoffError(f"a KV channel begins with a hello, got {bytes(hello[:40])!r} ({len(hello)} bytes)")
    _, version = _HELLO.unpack_from(hello)
    if version != CARRIER_VERSION:
        raise HandoffError(f"KV channels are of version {CARRIER_VERSION} here, the sender's is {version}")
    return bytes(hello[_HELLO.size :]).decode(errors="replace")
