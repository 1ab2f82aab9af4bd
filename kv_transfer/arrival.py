"""The receiver's end of one ticket, from `expect` to `forget`: who may write, what has arrived, is it all there.

The ticket's blocks are filled by one or several sending ranks (`plan.py`); each has a *share*, its heads, with
books of its own. Knows no channels.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import BatonError, HandoffError, IntegrityError, LayoutMismatchError, TicketError
from common.handoff import HandoffCommit, HandoffReceipt, KVLayout, Ticket
from common.messages import ContextTokens, FinishReason
from kv_transfer.blocking import RunBlocking, uninterrupted
from kv_transfer.channel import Bytes
from kv_transfer.copies import Scatter, make_wire, nobody
from kv_transfer.frames import TRANSFER_VERSION, Commit, Open, Piece, checksum, shard_seed
from kv_transfer.layout import check_compatible
from kv_transfer.pieces import PieceSet
from kv_transfer.plan import sending_heads, shard_plan
from kv_transfer.pool import BlockPool

CORRUPT = -1
"""What `Arrival.write` returns for a piece that does not verify."""


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
    """One opening of a share by one stream of one channel. Compared by identity."""

    line: ArrivalLine
    stream: int
    tp_rank: int


@dataclass(slots=True, eq=False)
class _Share:
    """What one sending rank brings."""

    pieces: PieceSet
    opening: Opening | None = None
    scatter: Scatter | None = None
    seed: int = 0
    num_bytes: int = 0
    retries: int = 0
    commit: Commit | None = None
    """Accepted: everything of this share is there."""


@dataclass(slots=True)
class Agreed:
    """What an opening was answered with."""

    wire: str


@dataclass(slots=True, eq=False)
class Arrival:
    """One ticket. Of each share only the latest opening may write. ``retries``: how often a share may be
    told that pieces are missing.
    """

    ticket: Ticket
    listener: ArrivalListener
    wires: Sequence[str] = ("native",)
    retries: int = 3
    _shares: dict[int, _Share] = field(default_factory=dict)
    _tp_size: int = 0
    _forgotten: bool = False
    _committed: bool = False
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def check_secret(self, secret: bytes) -> None:
        if not hmac.compare_digest(secret, self.ticket.secret):
            raise TicketError(f"the secret for ticket {self.ticket.ticket_id} is wrong")

    def open(self, opening: Opening, frame: Open, *, replace: bool) -> Agreed:
        """``opening`` may write from now on. ``replace``: also when another is at it.

        Raises TicketError, LayoutMismatchError, or HandoffError when the sender does not push what the ticket is for.
        """
        if self._committed:
            raise TicketError(f"ticket {self.ticket.ticket_id} has been committed already")
        if frame.version != TRANSFER_VERSION:
            raise HandoffError(f"transfer protocol is {TRANSFER_VERSION} here, the sender speaks {frame.version}")
        plan = shard_plan(frame.layout, self.ticket)
        if frame.num_blocks != plan.num_blocks:
            raise HandoffError(
                f"ticket {self.ticket.ticket_id} is for {plan.num_blocks} blocks, the sender has {frame.num_blocks}"
            )
        wire = next((name for name in frame.wires if name in self.wires), None)
        if wire is None:
            raise LayoutMismatchError(
                f"no common wire format: the sender has {', '.join(frame.wires)}, the receiver {', '.join(self.wires)}"
            )
        share = self._share(frame.layout)
        if share.commit is not None:
            raise TicketError(f"rank {opening.tp_rank} has committed its share of {self.ticket.ticket_id} already")
        if share.opening is not None and not replace:
            raise TicketError(f"ticket {self.ticket.ticket_id} is open on another channel")
        share.opening = opening
        share.scatter = Scatter(plan, make_wire(plan, wire), self.ticket.block_ids)
        share.seed = shard_seed(self.ticket.ticket_id, self.ticket.secret, opening.stream, opening.tp_rank)
        return Agreed(wire)

    def _share(self, source: KVLayout) -> _Share:
        """The share of the rank with layout ``source``; all ranks must be of a group of one size."""
        if not self._shares:
            self._tp_size = source.tp_size
            for rank in sending_heads(source, self.ticket.layout):
                self._shares[rank] = _Share(PieceSet(self.ticket.layout.num_layers, len(self.ticket.block_ids)))
        if source.tp_size != self._tp_size:
            raise LayoutMismatchError(
                f"ticket {self.ticket.ticket_id} is being filled by a group of {self._tp_size} ranks, "
                f"this sender's group has {source.tp_size}"
            )
        return self._shares[source.tp_rank]

    def accepts(self, opening: Opening) -> bool:
        return not self._forgotten and self._of(opening) is not None

    def _of(self, opening: Opening) -> _Share | None:
        share = self._shares.get(opening.tp_rank)
        return share if share is not None and share.opening is opening else None

    def payload_bytes(self, opening: Opening, piece: Piece) -> int | None:
        """How long the payload of ``piece`` has to be; None when ``opening`` is over.

        Raises HandoffError for a piece outside the ticket.
        """
        share = self._of(opening)
        if share is None or share.scatter is None:
            return None
        if not share.pieces.holds(piece.layer, piece.first, piece.count):
            raise HandoffError(
                f"ticket {self.ticket.ticket_id} is for {self.ticket.layout.num_layers} layers of "
                f"{len(self.ticket.block_ids)} blocks, got a piece with blocks {piece.first} to "
                f"{piece.first + piece.count} of layer {piece.layer}"
            )
        return piece.count * share.scatter.block_bytes

    def views(self, opening: Opening, piece: Piece, pool: BlockPool) -> list[memoryview] | None:
        """Where the blocks of the piece belong, for a payload that is put there as it comes; None when it has to be
        copied. While `accepts`, nobody else writes there.
        """
        share = self._of(opening)
        if share is None or share.scatter is None:
            return None
        if share.pieces.num_missing_of(piece.layer, piece.first, piece.count) < piece.count:
            return None
        return share.scatter.views(pool, piece.layer, piece.first, piece.count)

    def written(self, opening: Opening, piece: Piece, views: Sequence[memoryview], verify: bool) -> int | None:
        """What `write` does and returns, for a payload that lies in ``views`` already. One that does not verify
        counts as missing, like before.
        """
        share = self._of(opening)
        if self._forgotten or share is None:
            return None
        if verify:
            digest = checksum(share.seed, piece.layer, piece.first, piece.count)
            for view in views:
                digest.update(view)
            if digest.intdigest() != piece.checksum:
                return CORRUPT
        return self._arrived(share, piece)

    async def write(
        self, opening: Opening, piece: Piece, payload: Bytes, pool: BlockPool, verify: bool, run_blocking: RunBlocking
    ) -> int | None:
        """Verifies the piece and copies into the pool what has not arrived yet.

        Returns how many of its blocks were new, CORRUPT when it does not verify, None when ``opening`` was
        over before the copy began or when it ended.
        """
        async with self._writing:
            share = self._of(opening)
            if self._forgotten or share is None:
                return None
            intact = await uninterrupted(run_blocking(self._copy_in, share, piece, payload, pool, verify))
            if not self.accepts(opening):
                return None
            if not intact:
                return CORRUPT
            return self._arrived(share, piece)

    def _arrived(self, share: _Share, piece: Piece) -> int:
        fresh = share.pieces.add(piece.layer, piece.first, piece.count)
        if fresh:
            assert share.scatter is not None
            num_bytes = fresh * share.scatter.block_bytes
            share.num_bytes += num_bytes
            self.listener.progressed(self.ticket.ticket_id, num_bytes)
        return fresh

    def commit(self, opening: Opening, frame: Commit) -> HandoffReceipt | list[tuple[int, int, int]]:
        """The receipt, or the runs that are missing. Raises IntegrityError when they are missing still after
        ``retries`` times, TicketError when the listener refuses.
        """
        share = self._of(opening)
        if self._forgotten or share is None:
            raise TicketError(f"ticket {self.ticket.ticket_id} is void, its commit comes too late")
        expected = share.pieces.expected
        if frame.num_pieces != expected or (share.pieces.num_missing and share.retries >= self.retries):
            raise IntegrityError(
                f"ticket {self.ticket.ticket_id} needs {expected} pieces, the sender commits "
                f"{frame.num_pieces}, {share.pieces.count} arrived intact in {share.retries + 1} tries"
            )
        if share.pieces.num_missing:
            share.retries += 1
            return share.pieces.missing_runs()
        commit = self._as_told(frame)
        if len(self._shares) > 1:
            self._check_agreement(frame)
        share.commit, share.opening = frame, None  # whatever the listener says: nothing may write now
        if all(each.commit is not None for each in self._shares.values()):
            self._committed = True
            self.listener.committed(commit)
        return HandoffReceipt(self.ticket.ticket_id, expected, share.num_bytes)

    def _as_told(self, frame: Commit) -> HandoffCommit:
        try:
            finish = FinishReason(frame.finish) if frame.finish else None
        except ValueError as error:
            raise HandoffError(f"unknown finish reason {frame.finish!r} in a commit") from error
        context = ContextTokens(frame.cached, frame.pulled, frame.computed)
        return HandoffCommit(
            self.ticket.ticket_id, frame.token, frame.index, frame.num_pieces, finish, context, frame.logprobs
        )

    def _check_agreement(self, frame: Commit) -> None:
        """All ranks of a worker have sampled the same token."""
        for rank, share in self._shares.items():
            other = share.commit
            if other is not None and (other.index, other.token) != (frame.index, frame.token):
                raise HandoffError(
                    f"the ranks of the sender disagree: rank {rank} commits token {other.token} at index "
                    f"{other.index}, another {frame.token} at {frame.index}"
                )

    def fail(self, opening: Opening, error: BatonError) -> None:
        """``opening`` is over without a commit; the listener hears it while the ticket is live."""
        share = self._of(opening)
        if share is not None and not self._forgotten:
            share.opening = None
            self.listener.failed(self.ticket.ticket_id, error)

    def refuse(self, error: BatonError) -> None:
        """A sender with the secret came, and cannot fill the ticket."""
        if not self._forgotten and not self._committed:
            self.listener.failed(self.ticket.ticket_id, error)

    def withdraw(self) -> list[Opening]:
        """No write begins from now on. Returns the openings that are cut off."""
        self._forgotten = True
        openings = [share.opening for share in self._shares.values() if share.opening is not None]
        for share in self._shares.values():
            share.opening = None
        return openings

    async def settled(self) -> None:
        """Returns when no write is under way."""
        async with self._writing:
            pass

    @staticmethod
    def _copy_in(share: _Share, piece: Piece, payload: Bytes, pool: BlockPool, verify: bool) -> bool:
        """False: the piece does not verify. What of it lies in the pool by then counts as missing, like before;
        blocks that have arrived are not touched.
        """
        scatter, place = share.scatter, (piece.layer, piece.first, piece.count)
        assert scatter is not None
        num_missing = share.pieces.num_missing_of(*place)
        if num_missing == 0:
            return True
        digest = checksum(share.seed, *place)
        if num_missing == piece.count:
            scatter.write(pool, *place, payload, digest.update if verify else nobody)
            return not verify or digest.intdigest() == piece.checksum
        digest.update(payload.data)
        if verify and digest.intdigest() != piece.checksum:
            return False
        scatter.write_some(pool, *place, payload, share.pieces.missing(*place))
        return True


def check_ticket(ticket: Ticket, pool: KVLayout) -> None:
    """Raises LayoutMismatchError or TicketError when ``ticket`` is not for a pool of this layout."""
    check_compatible(ticket.layout, pool)
    if ticket.layout != pool:
        raise LayoutMismatchError(f"the ticket is for a pool of {ticket.layout}, this one is of {pool}")
