"""The two kinds of connection that a handoff can run over.

A `ByteChannel` carries whole messages and is what a transport's maker provides (gRPC: `rpc/`). A
`FrameChannel` is what the protocol speaks to: it carries frames, and decides how the payload of a
piece travels, inside the message (`transports/inline.py`) or beside it in shared memory
(`transports/shm.py`). Neither knows tickets.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from kv_transfer.frames import Frame, Piece

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ByteChannel(Protocol):
    """An ordered, reliable connection; one message is one encoded frame, at most
    `frames.MAX_FRAME_BYTES` long. One task sends and one receives at a time.
    """

    async def send(self, data: bytes) -> None:
        """Returns when the message is on its way. Raises WorkerLostError when the peer is gone."""
        ...

    async def receive(self) -> bytes:
        """The next message, ``b""`` at a clean end. Raises WorkerLostError when the peer is gone. Cancelling it
        loses nothing.
        """
        ...

    async def close(self) -> None:
        """Ends the connection; a peer in `receive` hears it. Harmless when it has ended already."""
        ...


@runtime_checkable
class PartsChannel(ByteChannel, Protocol):
    """A ByteChannel that need not have a message in one piece: large ones cost a copy less at either end."""

    async def send_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        """`send` of the message that ``parts`` (contiguous bytes) make; none is read any more once this waits."""
        ...

    async def receive_parts(self) -> list[memoryview]:
        """The next message in the parts in which it came, none at a clean end; raises as `receive`."""
        ...


Connector = Callable[[str], Awaitable[ByteChannel]]
"""Connects to an address. Raises WorkerLostError when nobody answers there, other BatonErrors when the
peer refuses.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """Room for the payload of one piece on the sender's side. ``offset``: where it lies in shared
    memory, `frames.INLINE` when it will travel in the message.
    """

    buffer: Bytes
    offset: int


class FrameChannel(Protocol):
    """Frames over one connection, with a bounded amount of payload in flight."""

    capacity_bytes: int
    """The most payload that may be staged at once."""

    def stage(self, num_bytes: int) -> Staged | None:
        """Room for ``num_bytes`` of payload, or None when staged pieces have to be released first."""
        ...

    def release(self, staged: Staged) -> None:
        """The peer has acknowledged the piece (or it was never sent): its room is free again."""
        ...

    async def send(self, frame: Frame) -> None: ...

    async def receive(self) -> Frame | None:
        """The next frame, None at the end. Raises WorkerLostError, or HandoffError for what is no frame."""
        ...

    async def payload(self, piece: Piece, num_bytes: int) -> Bytes:
        """The payload of the piece that was received last, read-only, valid until its acknowledgement goes
        through `send`.

        Raises HandoffError when it is not ``num_bytes`` long or lies outside the shared memory.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class DirectFrames(FrameChannel, Protocol):
    """Takes payloads where they lie in the sender's pool, and puts them where they belong in the receiver's: with
    no staging, there is no copy that the kernel does not make.
    """

    async def send_parts(self, piece: Piece, staged: Staged, parts: Sequence[memoryview]) -> None:
        """Sends ``piece`` with ``parts`` as its payload. Nothing reads them once this waits: what is not on its
        way by then has been copied to ``staged``.
        """
        ...

    async def receive_parts(self, piece: Piece, parts: Sequence[memoryview], live: Callable[[], bool]) -> bool:
        """The payload of the piece that was received last into ``parts``.

        ``live`` is asked before each write. Once it says no, the rest is skipped, and the answer is False.
        Raises HandoffError when the payload has another length.
        """
        ...
