"""Tickets: blocks promised to a handoff, with a lease, a secret and one way to end.

    reserve ──▶ live ──commit──▶ joined
                  │
                  ├─ cancel, lease over, transfer failed ──▶ forgotten: the receiver refuses it first,
                  │                                          and only then are its blocks free
                  └─ progress ──▶ the lease starts again

It knows tickets and time; sequences only as what a ticket is for.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import BatonError, HandoffError, PeerLostError, TicketError, WorkerLostError
from common.failpoints import Failpoints
from common.handoff import HandoffCommit, Ticket
from common.lifecycle import Tasks
from common.metrics import WorkerMetrics
from common.workers import WorkerInfo
from engine.ports import KVReceiver
from engine.sequence import Sequence


@dataclass(slots=True)
class Reservation:
    ticket: Ticket
    sequence: Sequence
    expires_at: float
    timer: asyncio.TimerHandle | None = None
    received_bytes: int = 0


class Reservations:
    """The live tickets of one worker.

    ``joined(sequence, commit)`` when a handoff is complete; ``ended(sequence, error)`` when it failed:
    called once nothing can write to the blocks any more.
    """

    def __init__(
        self,
        info: WorkerInfo,
        receiver: KVReceiver,
        lease_s: float,
        joined: Callable[[Sequence, HandoffCommit], None],
        ended: Callable[[Sequence, BatonError], None],
        tasks: Tasks,
        metrics: WorkerMetrics,
        failpoints: Failpoints,
    ) -> None:
        self._info = info
        self._receiver = receiver
        self._lease_s = lease_s
        self._joined = joined
        self._ended = ended
        self._tasks = tasks
        self._metrics = metrics
        self._failpoints = failpoints
        self._live: dict[str, Reservation] = {}
        self._by_key: dict[str, Reservation] = {}
        self._serial = 0
        self.received_bytes = 0

    def __len__(self) -> int:
        return len(self._live)

    def add(self, sequence: Sequence) -> Ticket:
        """A ticket for a sequence that holds its blocks. Raises what the receiver refuses it with."""
        block_size = self._info.layout.block_size
        cached = sequence.context.cached
        self._serial += 1
        ticket = Ticket(
            ticket_id=f"{self._info.worker_id}.{self._info.epoch}.{self._serial}",
            request_id=sequence.request.request_id,
            attempt=sequence.request.attempt,
            worker_id=self._info.worker_id,
            epoch=self._info.epoch,
            context_tokens=sequence.num_context,
            cached_tokens=cached,
            block_ids=tuple(sequence.block_ids[cached // block_size : -(-sequence.num_context // block_size)]),
            layout=self._info.layout,
            offers=self._receiver.offers,
            secret=secrets.token_bytes(16),
            lease_s=self._lease_s,
        )
        self._receiver.expect(ticket, self)
        reservation = Reservation(ticket, sequence, asyncio.get_running_loop().time() + self._lease_s)
        self._live[ticket.ticket_id] = reservation
        self._by_key[sequence.key] = reservation
        self._watch(reservation)
        return ticket

    def end(self, key: str, error: BatonError) -> bool:
        """Ends the reservation of an attempt (one that is ending already ends once); False when it has
        none, so that its blocks are the scheduler's alone."""
        reservation = self._by_key.get(key)
        if reservation is None:
            return False
        if reservation.ticket.ticket_id in self._live:
            self._forget(reservation, error)
        return True

    # ── what the receiver tells (HandoffListener) ─────────────────────────────────────────────────

    def progressed(self, ticket_id: str, num_bytes: int) -> None:
        reservation = self._live.get(ticket_id)
        if reservation is not None:
            reservation.received_bytes += num_bytes
            self.received_bytes += num_bytes
            self._metrics.kv_bytes_received.inc(num_bytes)
            reservation.expires_at = asyncio.get_running_loop().time() + self._lease_s

    def committed(self, commit: HandoffCommit) -> None:
        reservation = self._live.get(commit.ticket_id)
        if reservation is None:
            raise TicketError(f"ticket {commit.ticket_id} is not live on {self._info.worker_id}")
        expected = reservation.sequence.num_generated
        if commit.index != expected:
            raise TicketError(f"the commit of {commit.ticket_id} must bring token {expected}, it brings {commit.index}")
        vocab_size = self._info.model.vocab_size
        if not 0 <= commit.token < vocab_size:
            raise HandoffError(f"the commit of {commit.ticket_id} brings token {commit.token} of {vocab_size}")
        if self._failpoints:
            self._failpoints.reach_now("join")
        self._remove(reservation)
        del self._by_key[reservation.sequence.key]
        # The receiver has written all it will; forgetting only clears its own books.
        self._tasks.spawn(self._receiver.forget(commit.ticket_id), f"forget {commit.ticket_id}")
        self._joined(reservation.sequence, commit)

    def failed(self, ticket_id: str, error: BatonError) -> None:
        reservation = self._live.get(ticket_id)
        if reservation is not None:
            if isinstance(error, WorkerLostError):
                error = PeerLostError(f"{self._info.worker_id} lost the prefill worker: {error.message}")
            self._forget(reservation, error)

    # ── leases and ends ───────────────────────────────────────────────────────────────────────────

    def _watch(self, reservation: Reservation) -> None:
        loop = asyncio.get_running_loop()
        reservation.timer = loop.call_at(reservation.expires_at, self._check_lease, reservation)

    def _check_lease(self, reservation: Reservation) -> None:
        if asyncio.get_running_loop().time() < reservation.expires_at:
            self._watch(reservation)
            return
        self._metrics.tickets_expired.inc()
        self._forget(
            reservation,
            TicketError(f"ticket {reservation.ticket.ticket_id} made no progress in its lease of {self._lease_s} s"),
        )

    def _forget(self, reservation: Reservation, error: BatonError) -> None:
        self._remove(reservation)
        self._tasks.spawn(self._finish(reservation, error), f"end {reservation.ticket.ticket_id}")

    async def _finish(self, reservation: Reservation, error: BatonError) -> None:
        await self._receiver.forget(reservation.ticket.ticket_id)
        del self._by_key[reservation.sequence.key]
        self._ended(reservation.sequence, error)

    def _remove(self, reservation: Reservation) -> None:
        del self._live[reservation.ticket.ticket_id]
        if reservation.timer is not None:
            reservation.timer.cancel()
