"""One channel to one receiver, on which many handoffs take turns.

A writer task sends one frame at a time: control frames first, then one run of each handoff that has
something to send, round after round, so that a long prompt does not hold up a short one. A reader
task hands answers to the handoffs. What is staged and not acknowledged is bounded by the channel's
capacity. When the channel ends, so do all its handoffs; the link is not used again.

Knows nothing of how peers are found (`sender.py`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from common.config import TransferConfig
from common.errors import BatonError, HandoffError, WorkerLostError, from_wire
from common.handoff import Ticket, TransferCounters
from common.lifecycle import Tasks
from kv_transfer.blocking import RunBlocking
from kv_transfer.channel import DirectFrames, FrameChannel, Staged
from kv_transfer.frames import (
    INLINE,
    TRANSFER_VERSION,
    Abort,
    Error,
    Frame,
    Missing,
    Open,
    OpenAck,
    Piece,
    PieceAck,
    Receipt,
)
from kv_transfer.plan import ShardPlan
from kv_transfer.pool import BlockPool
from kv_transfer.push import Push

FRAME_BYTES = 2 << 20
LEAST_FRAME_BYTES = 256 << 10
"""Payload of one piece frame: as much as is under way already, within these. So the receiver has something to do
soon, and a long prompt takes few frames.
"""

FRAMES_IN_FLIGHT = 4
"""At least so many piece frames fit into staging: while one is copied, others travel."""


class Link:
    """The sender's end of a channel."""

    def __init__(
        self,
        channel: FrameChannel,
        transport: str,
        pool: BlockPool,
        config: TransferConfig,
        run_blocking: RunBlocking,
        counters: TransferCounters,
        on_lost: Callable[[Link], None],
    ) -> None:
        self.transport = transport
        self.lost: BatonError | None = None
        self.num_delivered = 0
        """Handoffs that ended well."""
        self._channel = channel
        self._direct = channel if isinstance(channel, DirectFrames) else None
        self._pool = pool
        self._wires = config.wire_formats
        self._frame_bytes = max(1, min(FRAME_BYTES, config.staging_bytes // FRAMES_IN_FLIGHT))
        self._run_blocking = run_blocking
        self._counters = counters
        self._on_lost = on_lost
        self._streams = itertools.count(1)
        self._last_sequence = 0
        self._pushes: dict[int, Push] = {}
        self._turns: dict[int, Push] = {}
        self._control: deque[Frame] = deque()
        self._in_flight: dict[int, tuple[Staged, Push]] = {}
        self._in_flight_bytes = 0
        self._opened_behind: dict[int, int] = {}
        """Stream → the last piece that left before its `Open`, until that is answered."""
        self._wake = asyncio.Event()
        self._heard_at = asyncio.get_running_loop().time()
        self._tasks = Tasks(on_failure=lambda error: self.drop(HandoffError(f"transfer to a peer failed: {error!r}")))
        self._tasks.spawn(self._write(), f"kv {transport} write")
        self._tasks.spawn(self._read(), f"kv {transport} read")

    async def open(self, ticket: Ticket, plan: ShardPlan, block_ids: Sequence[int]) -> Push:
        """A handoff that the receiver has agreed to. Raises what it answered, or WorkerLostError."""
        if self.lost is not None:
            raise self.lost
        push = Push(self, next(self._streams), ticket, plan, block_ids, self.transport)
        self._pushes[push.stream] = push
        self._send(
            Open(
                push.stream,
                TRANSFER_VERSION,
                plan.num_blocks,
                ticket.secret,
                ticket.ticket_id,
                plan.source,
                self._wires,
            )
        )
        try:
            await push.wait_open()
        except BaseException:
            await push.abort("it was given up while opening")
            raise
        return push

    def schedule(self, push: Push) -> None:
        self._turns.setdefault(push.stream, push)
        self._wake.set()

    def detach(self, push: Push, abort_reason: str | None) -> None:
        self._turns.pop(push.stream, None)
        self._opened_behind.pop(push.stream, None)
        if self._pushes.pop(push.stream, None) is None:
            return
        if push.error is None:
            self._counters.handoffs += 1
            self.num_delivered += 1
        else:
            self._counters.failures += 1
        if abort_reason is not None and self.lost is None:
            self._send(Abort(push.stream, abort_reason))

    def stalled(self, push: Push) -> None:
        """Fails ``push``, and with it the whole link when that has been silent as long."""
        lease_s = push.ticket.lease_s
        error = WorkerLostError(f"handoff {push.ticket.ticket_id} made no progress for {lease_s} s")
        if asyncio.get_running_loop().time() - self._heard_at >= lease_s:
            self.drop(error)
        else:
            push.fail(error, error.message)

    def drop(self, error: BatonError) -> None:
        """The channel is of no use any more: every handoff on it fails with ``error``."""
        if self.lost is not None:
            return
        self.lost = error.with_traceback(None)  # whoever keeps it would keep the staging memory
        for push in list(self._pushes.values()):
            push.fail(error)
        self._in_flight.clear()
        self._in_flight_bytes = 0
        self._control.clear()
        self._wake.set()
        self._on_lost(self)
        self._tasks.spawn(self._channel.close(), f"kv {self.transport} close")

    async def close(self, error: BatonError) -> None:
        self.drop(error)
        await self._channel.close()
        await self._tasks.close()

    def _send(self, frame: Frame) -> None:
        self._control.append(frame)
        self._wake.set()

    async def _write(self) -> None:
        try:
            while self.lost is None:
                self._wake.clear()
                if self._control:
                    frame = self._control.popleft()
                    if isinstance(frame, Open):
                        self._opened_behind[frame.stream] = self._last_sequence
                    await self._channel.send(frame)
                elif not await self._take_turn():
                    await self._wake.wait()
        except BatonError as error:
            self.drop(error)

    async def _take_turn(self) -> bool:
        """Sends one frame of the next handoff; False when none has anything, or there is no room."""
        stream, push = next(iter(self._turns.items()), (0, None))
        if push is None:
            return False
        frame_bytes = min(self._frame_bytes, max(LEAST_FRAME_BYTES, self._in_flight_bytes))
        run = push.next_run(max(1, frame_bytes // push.block_bytes))
        if run is None:
            del self._turns[stream]
            commit = push.take_commit()
            if commit is not None:
                await self._channel.send(commit)
            return True
        layer, first, count = run
        staged = self._channel.stage(count * push.block_bytes)
        if staged is None:
            return False
        self._turns[stream] = self._turns.pop(stream)  # behind all others
        try:
            lent = push.lend(run, self._pool) if self._direct is not None else None
            if lent is not None:
                digest: int | None = lent[0]
            else:
                digest = await push.read(run, staged.buffer, self._pool, self._run_blocking)
        except Exception as error:  # the top of this handoff: its neighbours go on
            text = f"cannot read blocks {first} to {first + count} of layer {layer} from the pool: {error!r}"
            push.fail(HandoffError(text), text)
            digest = None
        if digest is None:
            self._channel.release(staged)
            return True
        self._last_sequence = sequence = self._last_sequence + 1
        self._in_flight[sequence] = staged, push
        self._in_flight_bytes += len(staged.buffer)
        self._counters.pieces += count
        self._counters.num_bytes += len(staged.buffer)
        payload = staged.buffer.data if staged.offset == INLINE else b""
        piece = Piece(stream, sequence, layer, first, count, digest, staged.offset, payload)
        if self._direct is not None and lent is not None:
            await self._direct.send_parts(piece, staged, lent[1])
        else:
            await self._channel.send(piece)
        return True

    def _open(self, push: Push, verify: bool, wire: str) -> None:
        push.opened(verify, wire)
        if push.block_bytes > self._channel.capacity_bytes:
            error = HandoffError(
                f"a block of the receiver takes {push.block_bytes} bytes a layer on its way, "
                f"transfer.staging_bytes is {self._channel.capacity_bytes}"
            )
            push.fail(error, error.message)

    def _release_through(self, sequence: int) -> None:
        """What is sent arrives in order: the pieces up to this one have arrived, or never will."""
        self._wake.set()  # whatever was released already, there may be room now
        while self._in_flight and (oldest := next(iter(self._in_flight))) <= sequence:
            self._release(oldest)

    def _release(self, sequence: int) -> None:
        """The room of this piece is free again."""
        staged, push = self._in_flight.pop(sequence)
        self._in_flight_bytes -= len(staged.buffer)
        self._channel.release(staged)
        push.progressed()
        self._wake.set()

    async def _read(self) -> None:
        try:
            while (frame := await self._channel.receive()) is not None:
                self._handle(frame)
            self.drop(WorkerLostError(f"the receiver closed the {self.transport} channel"))
        except BatonError as error:
            self.drop(error)

    def _handle(self, frame: Frame) -> None:
        if not isinstance(frame, Error):  # those of withdrawn tickets come although the channel hangs
            self._heard_at = asyncio.get_running_loop().time()
        match frame:
            case PieceAck(sequence):
                if sequence > self._last_sequence:
                    raise HandoffError(f"the receiver acknowledged piece {sequence}, which was never sent")
                self._release_through(sequence)
            case OpenAck(stream, verify, wire):
                self._release_through(self._opened_behind.pop(stream, 0))
                if stream in self._pushes:
                    self._open(self._pushes[stream], verify, wire)
            case Missing(stream, runs):
                if stream in self._pushes:
                    push = self._pushes[stream]
                    # What it has not acknowledged by now was lost.
                    for number in [number for number, (_, owner) in self._in_flight.items() if owner is push]:
                        self._release(number)
                    self._counters.resent += push.missing(runs)
            case Receipt(stream, num_pieces, num_bytes):
                if stream in self._pushes:
                    self._pushes[stream].received(num_pieces, num_bytes)
            case Error(stream, code, message):
                error = from_wire(code, message)
                if stream == 0:
                    raise error
                if stream in self._pushes:
                    self._pushes[stream].fail(error)
            case _:
                raise HandoffError(f"a receiver does not send {type(frame).__name__} frames")
