"""Frames on a carrier, payloads beside it: what `group.py` and `nixl.py` have in common.

    sender                                                      receiver
      stage: room in the ring                                     staging area of the same size
      send(Piece): header ───── carrier, several in a message ─▶  posts the receive as soon as it hears
                   payload ════ mover, several at once ════════▶  at the same offset
      release ◀──────────────── PieceAck, several in one ──────   receive() gives the piece when it is there

Both ends have a staging area of ``capacity`` bytes and use the same offsets, so the sender's ring decides for
both: a place is free again when its acknowledgement is back, and when the mover is done with it. Receives
are posted when headers arrive, long before the session asks for the pieces: while one is verified and
copied, those behind it are on their way.

A message over the carrier costs as much as a few hundred KiB of payload, so headers wait while enough announced
payload is under way, and acknowledgements while more pieces are sure to come. What is believed of a payload
is its checksum, which starts from the ticket's secret: the mover's own path need not be trusted.
"""

from __future__ import annotations

import asyncio
import struct
from functools import partial

from common.errors import BatonError, HandoffError, WorkerLostError
from common.lifecycle import Tasks
from kv_transfer.channel import ByteChannel, Bytes, Staged
from kv_transfer.frames import INLINE, Frame, Piece, PieceAck, decode, encode
from kv_transfer.transports.mover import MoverThread
from kv_transfer.transports.staging import Ring

AHEAD_BYTES = 32 << 20
"""Headers wait while this much announced payload is under way."""

RUN_BYTES = 4 << 20
"""Pieces of one message that lie one behind the other move in one operation, up to so many bytes."""

ACKS_PER_CAPACITY = 4
"""Acknowledgements wait for at most this part of the capacity."""

MAX_WAITING = 1024
"""Frames read ahead; more wait in the carrier."""

_ENTRY = struct.Struct("<II")
"""Length of the frame that follows, and of its payload beside the carrier."""


class BesideFrames:
    """A FrameChannel. ``staging``: uint8 [capacity], which ``mover`` works in."""

    def __init__(self, carrier: ByteChannel, mover: MoverThread, staging: Bytes, *, is_sender: bool) -> None:
        self.capacity_bytes = len(staging) if is_sender else 0
        self._carrier = carrier
        self._mover = mover
        self._staging = staging
        self._is_sender = is_sender
        self._error: BatonError | None = None
        self._sending = asyncio.Lock()
        self._held: list[tuple[Frame, int]] = []
        """Frames for the next message, and the sizes of their payloads."""
        self._flushing = False
        self._tasks = Tasks()
        # sender
        self._ring = Ring(len(staging))
        self._moving: dict[int, asyncio.Future[None]] = {}
        """Sequence → its (latest) way through the mover."""
        self._sizes: dict[int, int] = {}
        """offset → size of what was last staged there; kept, as a piece may be sent again after its release."""
        self._under_way_bytes = 0
        # receiver
        self._arrived: asyncio.Queue[tuple[Frame | BatonError | None, int, asyncio.Future[None] | None]]
        self._arrived = asyncio.Queue(MAX_WAITING)
        self._size = 0
        self._coming = 0
        self._unsaid: PieceAck | None = None
        self._unsaid_bytes = 0
        self._highest = 0
        mover.on_lost = self._lose
        self._tasks.spawn(self._read(), "kv read ahead")

    def stage(self, num_bytes: int) -> Staged | None:
        self._check()
        offset = self._ring.allocate(num_bytes)
        if offset is None:
            return None
        self._sizes[offset] = num_bytes
        return Staged(self._staging[offset : offset + num_bytes], offset)

    def release(self, staged: Staged) -> None:
        self._ring.release(staged.offset)

    async def send(self, frame: Frame) -> None:
        self._check()
        match frame:
            case Piece():
                self._held.append((frame, self._sizes[frame.offset]))
                self._announce()
                await asyncio.sleep(0)  # the header on its way before the next piece is copied
            case PieceAck():
                overtaken = frame.sequence < self._highest
                self._highest = max(self._highest, frame.sequence)
                if overtaken:  # by one that did not speak for it
                    self._hold_ack()
                self._unsaid = frame
                self._unsaid_bytes += self._size
                if overtaken or not self._coming or self._unsaid_bytes >= len(self._staging) // ACKS_PER_CAPACITY:
                    self._hold_ack()
                    self._flush_soon()
            case _:
                self._hold_ack()
                self._held.append((frame, 0))
                await self._flush()

    async def receive(self) -> Frame | None:
        if self._error is not None and self._arrived.empty():
            raise self._error
        frame, self._size, moved = await self._arrived.get()
        if moved is not None:
            await moved
            self._coming -= 1
        if isinstance(frame, PieceAck):
            await self._left(frame.sequence)
        if isinstance(frame, BatonError):
            raise frame
        return frame

    async def payload(self, piece: Piece, num_bytes: int) -> Bytes:
        self._check()
        if self._size != num_bytes:
            raise HandoffError(f"a piece of {num_bytes} bytes was announced with {self._size}")
        payload = self._staging[piece.offset : piece.offset + num_bytes]
        payload.flags.writeable = False
        return payload

    async def close(self) -> None:
        """The staging area stays pinned until the mover is done with it."""
        if isinstance(self._error, _ClosedHereError):
            return
        self._error = _ClosedHereError("this channel is closed")
        self._mover.stop()
        self._end(None)
        try:
            await self._carrier.close()
        finally:
            await self._mover.close()
            await self._tasks.close()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # sending

    def _post(self, pieces: list[tuple[Piece, int]]) -> None:
        """Begins to move the pieces of a message."""

        def left(size: int, _: asyncio.Future[None]) -> None:
            self._under_way_bytes -= size
            self._announce()

        for run in _runs(pieces):
            size = sum(size for _, size in run)
            moving = self._mover.move(run[0][0].offset, size)
            self._under_way_bytes += size
            self._moving.update((piece.sequence, moving) for piece, _ in run)
            moving.add_done_callback(partial(left, size))

    async def _left(self, sequence: int) -> None:
        """Returns when the pieces up to this one have left: acknowledged or not, their bytes stay until then."""
        for number in [number for number in self._moving if number <= sequence]:
            await self._moving[number]
            del self._moving[number]

    def _announce(self) -> None:
        if self._held and self._under_way_bytes < AHEAD_BYTES:
            self._flush_soon()

    def _hold_ack(self) -> None:
        if self._unsaid is not None:
            self._held.append((self._unsaid, 0))
            self._unsaid, self._unsaid_bytes = None, 0

    def _flush_soon(self) -> None:
        """In a task, so that the next piece is prepared meanwhile; what comes before its turn goes along."""
        if not self._flushing and self._error is None:
            self._flushing = True
            self._tasks.spawn(self._flush_if_possible(), "kv flush")

    async def _flush(self) -> None:
        async with self._sending:
            held, self._held = self._held, []
            if held:
                self._post([(frame, size) for frame, size in held if isinstance(frame, Piece)])
                await self._carrier.send(_pack(held))

    async def _flush_if_possible(self) -> None:
        try:
            await self._flush()
        except WorkerLostError:
            pass  # `receive` hears it too
        finally:
            self._flushing = False
            self._announce()

    # receiving

    async def _read(self) -> None:
        try:
            while message := await self._carrier.receive():
                frames = _unpack(message)
                pieces = [(frame, size) for frame, size in frames if isinstance(frame, Piece)]
                moving = {} if self._is_sender else self._expect(pieces)
                for frame, size in frames:
                    await self._arrived.put((frame, size, moving.get(id(frame))))
            await self._arrived.put((None, 0, None))
        except BatonError as error:
            await self._arrived.put((error, 0, None))

    def _expect(self, pieces: list[tuple[Piece, int]]) -> dict[int, asyncio.Future[None]]:
        """Begins to receive the pieces of a message; by identity, when each is there. Raises HandoffError."""
        for piece, size in pieces:
            if piece.offset == INLINE or len(piece.payload):
                raise HandoffError(f"a piece of {size} bytes came in its frame instead of beside the carrier")
            if not (size > 0 and 0 <= piece.offset <= len(self._staging) - size):
                raise HandoffError(
                    f"a piece of {size} bytes at {piece.offset} exceeds the {len(self._staging)} bytes of the "
                    "staging area"
                )
        self._coming += len(pieces)
        moving: dict[int, asyncio.Future[None]] = {}
        for run in _runs(pieces):
            moved = self._mover.move(run[0][0].offset, sum(size for _, size in run))
            moving.update((id(piece), moved) for piece, _ in run)
        return moving

    def _lose(self, error: WorkerLostError) -> None:
        if self._error is None:
            self._error = error
            self._end(error)

    def _end(self, error: BatonError | None) -> None:
        """Whoever waits in `receive`, or will, hears it."""
        while not self._arrived.empty():
            self._arrived.get_nowait()
        self._arrived.put_nowait((error, 0, None))


class _ClosedHereError(WorkerLostError):
    """`close` was called on this side."""


def _runs(pieces: list[tuple[Piece, int]]) -> list[list[tuple[Piece, int]]]:
    """The pieces of one message by operation. Both ends come to the same."""
    runs: list[list[tuple[Piece, int]]] = []
    end = length = 0
    for piece, size in pieces:
        if runs and piece.offset == end and length + size <= RUN_BYTES:
            runs[-1].append((piece, size))
            length += size
        else:
            runs.append([(piece, size)])
            length = size
        end = piece.offset + size
    return runs


def _pack(frames: list[tuple[Frame, int]]) -> bytes:
    parts: list[bytes] = []
    for frame, size in frames:
        data = encode(frame)
        parts += _ENTRY.pack(len(data), size), data
    return b"".join(parts)


def _unpack(message: bytes) -> list[tuple[Frame, int]]:
    """The frames of a message and the sizes of their payloads. Raises HandoffError."""
    frames: list[tuple[Frame, int]] = []
    position = 0
    while position < len(message):
        if len(message) - position < _ENTRY.size:
            raise HandoffError(f"a message of {len(message)} bytes ends in the middle of a frame's length")
        length, size = _ENTRY.unpack_from(message, position)
        position += _ENTRY.size
        frames.append((decode(message[position : position + length]), size))
        position += length
    return frames
