"""One handoff, both ends of it: `Push` on the prefill side, `Arrival` on the decode side. Its life:

    sender                                                receiver
                                                            expect(ticket, listener)
    open(ticket, blocks)
      Open(secret, layout, number of blocks) ────────────▶  ticket known, secret equal, layout equal,
      ◀────────────────────────────────────────── OpenAck   nobody else at it?
    push(layer, first, count), as layers become complete
      wait for room in staging, copy, checksum
      Piece(layer, first, count) ────────────────────────▶  in bounds, verified, ticket still live?
                                                            copy into the pool, listener.progressed
      ◀───────────────────────────────────────── PieceAck   (always: it gives the room back)
    commit(first token)
      Commit, behind the last piece ─────────────────────▶  every piece there? listener.committed
      ◀────────────────────────────────────────── Receipt

It ends early by Abort from the sender, by Error from the receiver (a wrong secret, bytes that do not
verify, a forgotten ticket, …) or with its channel. In each case `commit` raises, and the listener of a
live ticket hears `failed`. Until the listener forgets the ticket a sender with the secret may open it
again, on this or another channel: pieces are idempotent by (ticket, layer, block), those that have
arrived stay arrived. A commit is accepted once.

Two promises carry the rest of the house. After `Push.abort` or `Push.commit` nothing reads the
sender's blocks, and after `Receiver.forget` nothing writes the receiver's: each waits for the copy that
is under way. Knows neither channels nor how many handoffs share one (`sender.py`, `receiver.py`).
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import BatonError, HandoffError, IntegrityError, TicketError
from common.messages import ContextTokens, FinishReason, HandoffCommit, HandoffReceipt, KVLayout, Ticket
from kv_transfer.blocking import RunBlocking, uninterrupted
from kv_transfer.channel import Bytes
from kv_transfer.frames import TRANSFER_VERSION, Commit, Open, Piece, checksum
from kv_transfer.layout import check_equal
from kv_transfer.pieces import PieceQueue, PieceSet
from kv_transfer.pool import BlockPool


@dataclass(slots=True)
class TransferCounters:
    """What one end has done since it started. A piece is one block of one layer.

    ``duplicates`` came again and were not written again; ``stale`` pieces came for a ticket or an
    opening that was over; ``fallbacks``: a preferred transport did not work and the next one was tried.
    """

    num_bytes: int = 0
    pieces: int = 0
    handoffs: int = 0
    failures: int = 0
    duplicates: int = 0
    stale: int = 0
    fallbacks: int = 0


# ── the sender's end ──────────────────────────────────────────────────────────────────────────────


class PushLine(Protocol):
    """What carries a push (`link.Link`)."""

    def schedule(self, push: Push) -> None:
        """``push`` has something to send."""
        ...

    def detach(self, push: Push, abort_reason: str | None) -> None:
        """``push`` is over; with a reason the peer is told."""
        ...

    def stalled(self, push: Push) -> None:
        """``push`` has made no progress for its lease: it has to fail."""
        ...


class Push:
    """A KVPush. The line takes runs with `next_run` and a commit with `take_commit`, and reports."""

    def __init__(self, line: PushLine, stream: int, ticket: Ticket, block_ids: Sequence[int], transport: str) -> None:
        self.transport = transport
        self.stream = stream
        self.ticket = ticket
        self.error: BatonError | None = None
        self.verify = True
        self._line = line
        self._block_ids = tuple(block_ids)
        self._queue = PieceQueue()
        self._commit: Commit | None = None
        self._receipt: HandoffReceipt | None = None
        self._opened = asyncio.Event()
        self._over = asyncio.Event()
        self._reading = asyncio.Lock()
        self._progress_at = asyncio.get_running_loop().time()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    # what the prefill worker calls

    def push(self, layer: int, first: int, count: int) -> None:
        """Queues pieces. Raises HandoffError for pieces that the ticket does not have."""
        num_layers, num_blocks = self.ticket.layout.num_layers, len(self._block_ids)
        if not (0 <= layer < num_layers and first >= 0 and count >= 0 and first + count <= num_blocks):
            raise HandoffError(
                f"ticket {self.ticket.ticket_id} has {num_layers} layers of {num_blocks} blocks, "
                f"cannot push blocks {first} to {first + count} of layer {layer}"
            )
        if not self.is_over:
            self._queue.add(layer, first, count)
            self._line.schedule(self)

    async def commit(self, commit: HandoffCommit) -> HandoffReceipt:
        finish = commit.finish.value if commit.finish is not None else ""
        context = (commit.context.cached, commit.context.moved, commit.context.computed)
        self._commit = Commit(
            self.stream, commit.token, commit.index, commit.num_pieces, finish, *context, commit.logprobs
        )
        if not self.is_over:
            self._line.schedule(self)
        await self._wait_for(self._over)
        if self.error is not None:
            raise self.error
        assert self._receipt is not None
        return self._receipt

    async def abort(self, reason: str) -> None:
        self._end(HandoffError(f"handoff {self.ticket.ticket_id} was aborted: {reason}"), reason)
        await self._quiesce()

    async def wait_open(self) -> None:
        """Returns when the receiver has agreed. Raises what it answered instead, or WorkerLostError."""
        await self._wait_for(self._opened)
        if self.error is not None:
            raise self.error

    # what the line calls

    def next_run(self, most: int) -> tuple[int, int, int] | None:
        """(layer, first, count) of what to send next, at most ``most`` blocks; None when all is sent."""
        return self._queue.peek(most) if self._queue else None

    async def read(
        self, run: tuple[int, int, int], out: Bytes, pool: BlockPool, run_blocking: RunBlocking
    ) -> int | None:
        """Takes ``run`` off the queue and copies its blocks into ``out``, uint8 [count * block_layer_bytes].

        Returns the checksum, None when the push was over before the copy or after it.
        """
        layer, first, count = run
        self._queue.drop(count)
        async with self._reading:
            if self.is_over:
                return None
            block_ids = self._block_ids[first : first + count]
            digest = await uninterrupted(run_blocking(self._copy_out, pool, layer, first, block_ids, out))
            return None if self.is_over else digest

    def take_commit(self) -> Commit | None:
        """The commit, once, when every piece is on its way."""
        commit, self._commit = self._commit, None
        return commit

    def opened(self, verify: bool) -> None:
        self.verify = verify
        self.progressed()
        self._opened.set()

    def progressed(self) -> None:
        self._progress_at = asyncio.get_running_loop().time()

    def received(self, num_pieces: int, num_bytes: int) -> None:
        if not self.is_over:
            self._receipt = HandoffReceipt(self.ticket.ticket_id, num_pieces, num_bytes)
            self._end(None)

    def fail(self, error: BatonError, abort_reason: str | None = None) -> None:
        """The push is over because of ``error``; with a reason the peer is told."""
        self._end(error, abort_reason)

    def _end(self, error: BatonError | None, abort_reason: str | None = None) -> None:
        if self.is_over:
            return
        self.error = error
        self._over.set()
        self._opened.set()
        self._queue.clear()
        self._line.detach(self, abort_reason)

    async def _wait_for(self, event: asyncio.Event) -> None:
        """Waits for ``event`` as long as there is progress within the ticket's lease."""
        loop = asyncio.get_running_loop()
        self.progressed()
        try:
            while not event.is_set():
                patience_s = self._progress_at + self.ticket.lease_s - loop.time()
                if patience_s <= 0:
                    self._line.stalled(self)
                    break
                try:
                    async with asyncio.timeout(patience_s):
                        await event.wait()
                except TimeoutError:
                    pass
        finally:
            if self.is_over:
                await self._quiesce()

    async def _quiesce(self) -> None:
        """Waits for a copy under way; `read` starts none after the end."""
        async with self._reading:
            pass

    def _copy_out(self, pool: BlockPool, layer: int, first: int, block_ids: Sequence[int], out: Bytes) -> int:
        count = len(block_ids)
        pool.read_blocks(layer, block_ids, out.reshape(count, -1))
        return checksum(out.data, self.stream, layer, first, count) if self.verify else 0


# ── the receiver's end ────────────────────────────────────────────────────────────────────────────


class ArrivalListener(Protocol):
    """Who reserved the blocks. The decode role's HandoffListener is one."""

    def progressed(self, ticket_id: str, num_bytes: int) -> None: ...

    def committed(self, commit: HandoffCommit) -> None: ...

    def failed(self, ticket_id: str, error: BatonError) -> None: ...


class ArrivalLine(Protocol):
    """What carries an arrival (a channel that `receiver.py` serves)."""

    async def refuse(self, opening: Opening, error: BatonError) -> None:
        """Tells the sender that ``opening`` is over."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """One opening of a ticket by one stream of one channel. Compared by identity."""

    line: ArrivalLine
    stream: int


class Arrival:
    """One ticket, from `expect` to `forget`. Only the latest opening may write."""

    def __init__(self, ticket: Ticket, listener: ArrivalListener, pool_layout: KVLayout) -> None:
        check_equal(ticket.layout, pool_layout)
        self.ticket = ticket
        self._listener = listener
        self._pieces = PieceSet(pool_layout.num_layers, len(ticket.block_ids))
        self._num_bytes = 0
        self._opening: Opening | None = None
        self._committed = False
        self._forgotten = False
        self._writing = asyncio.Lock()

    def check_secret(self, secret: bytes) -> None:
        if not hmac.compare_digest(secret, self.ticket.secret):
            raise TicketError(f"the secret for ticket {self.ticket.ticket_id} is wrong")

    def check_open(self, frame: Open) -> None:
        """Raises HandoffError when the sender does not push what the ticket is for."""
        if frame.version != TRANSFER_VERSION:
            raise HandoffError(f"transfer protocol is {TRANSFER_VERSION} here, the sender speaks {frame.version}")
        check_equal(frame.layout, self.ticket.layout)
        if frame.num_blocks != len(self.ticket.block_ids):
            raise HandoffError(
                f"ticket {self.ticket.ticket_id} is for {len(self.ticket.block_ids)} blocks, "
                f"the sender has {frame.num_blocks}"
            )

    def open(self, opening: Opening, *, replace: bool) -> None:
        """``opening`` may write from now on. ``replace``: also when another is at it."""
        if self._committed:
            raise TicketError(f"ticket {self.ticket.ticket_id} has been committed already")
        if self._opening is not None and not replace:
            raise TicketError(f"ticket {self.ticket.ticket_id} is open on another channel")
        self._opening = opening

    def accepts(self, opening: Opening) -> bool:
        return not self._forgotten and self._opening is opening

    def check_bounds(self, piece: Piece) -> None:
        if not self._pieces.holds(piece.layer, piece.first, piece.count):
            raise HandoffError(
                f"ticket {self.ticket.ticket_id} is for {self.ticket.layout.num_layers} layers of "
                f"{len(self.ticket.block_ids)} blocks, got a piece with blocks {piece.first} to "
                f"{piece.first + piece.count} of layer {piece.layer}"
            )

    async def write(
        self, opening: Opening, piece: Piece, payload: Bytes, pool: BlockPool, verify: bool, run_blocking: RunBlocking
    ) -> int | None:
        """Verifies the piece and copies into the pool what has not arrived yet.

        Returns how many of its blocks were new, None when ``opening`` was over before the copy began or
        when it ended. Raises IntegrityError.
        """
        async with self._writing:
            if not self.accepts(opening):
                return None
            await uninterrupted(run_blocking(self._copy_in, piece, payload, pool, verify))
            if not self.accepts(opening):
                return None
            fresh = self._pieces.add(piece.layer, piece.first, piece.count)
        if fresh:
            num_bytes = fresh * self.ticket.layout.block_layer_bytes
            self._num_bytes += num_bytes
            self._listener.progressed(self.ticket.ticket_id, num_bytes)
        return fresh

    def commit(self, opening: Opening, frame: Commit) -> HandoffReceipt:
        """Raises IntegrityError when pieces are missing, TicketError when the listener refuses."""
        if not self.accepts(opening):
            raise TicketError(f"ticket {self.ticket.ticket_id} is void, its commit comes too late")
        expected = self._pieces.expected
        if frame.num_pieces != expected or self._pieces.num_missing:
            raise IntegrityError(
                f"ticket {self.ticket.ticket_id} needs {expected} pieces, the sender commits "
                f"{frame.num_pieces}, {self._pieces.count} arrived intact"
            )
        try:
            finish = FinishReason(frame.finish) if frame.finish else None
        except ValueError as error:
            raise HandoffError(f"unknown finish reason {frame.finish!r} in a commit") from error
        context = ContextTokens(frame.cached, frame.pulled, frame.computed)
        commit = HandoffCommit(
            self.ticket.ticket_id, frame.token, frame.index, frame.num_pieces, finish, context, frame.logprobs
        )
        self._committed, self._opening = True, None  # whatever the listener says: nothing may write now
        self._listener.committed(commit)
        return HandoffReceipt(self.ticket.ticket_id, expected, self._num_bytes)

    def fail(self, opening: Opening, error: BatonError) -> None:
        """``opening`` is over without a commit; the listener hears it while the ticket is live."""
        if self.accepts(opening):
            self._opening = None
            self._listener.failed(self.ticket.ticket_id, error)

    def withdraw(self) -> Opening | None:
        """No write begins from now on. Returns the opening that is cut off, if any."""
        self._forgotten = True
        opening, self._opening = self._opening, None
        return opening

    async def settled(self) -> None:
        """Returns when no write is under way."""
        async with self._writing:
            pass

    def _copy_in(self, piece: Piece, payload: Bytes, pool: BlockPool, verify: bool) -> None:
        missing = self._pieces.missing(piece.layer, piece.first, piece.count)
        if len(missing) == 0:
            return
        if verify:
            found = checksum(payload.data, piece.stream, piece.layer, piece.first, piece.count)
            if found != piece.checksum:
                raise IntegrityError(
                    f"layer {piece.layer}, blocks {piece.first} to {piece.first + piece.count} of ticket "
                    f"{self.ticket.ticket_id}: checksum sent {piece.checksum:016x}, found {found:016x}"
                )
        rows = payload.reshape(piece.count, -1)
        block_ids = self.ticket.block_ids[piece.first : piece.first + piece.count]
        if len(missing) < piece.count:
            rows = rows[missing]
            block_ids = tuple(block_ids[index] for index in missing)
        pool.write_blocks(piece.layer, block_ids, rows)
