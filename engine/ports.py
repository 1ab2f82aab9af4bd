"""How KV gets out of a worker and into it: the seams of the handoff, and of a pull, which is one with the
roles reversed.

`kv_transfer/` implements sender and receiver for real bytes, `rpc/` the peers; `sim/` models them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import BatonError
from common.handoff import (
    HandoffCommit,
    HandoffReceipt,
    PrefixReply,
    PrefixRequest,
    Ticket,
    TransferCounters,
    TransportOffer,
)


class KVPush(Protocol):
    """One handoff under way. Blocks are counted as in the list that `KVSender.open` was given; which of the
    receiver's blocks they fill is the push's business.
    """

    transport: str

    def push(self, layer: int, first: int, count: int) -> None:
        """Queues blocks ``first .. first + count`` of ``layer``, whose KV is complete. Never waits.
        The blocks must stay as they are until `commit` or `abort` has returned.
        """
        ...

    async def commit(self, commit: HandoffCommit) -> HandoffReceipt:
        """Waits until the receiver has verified all pieces and accepted the commit.

        Raises HandoffError (TicketError, IntegrityError, …) or WorkerLostError.
        """
        ...

    async def abort(self, reason: str) -> None:
        """Gives up; after it returns the blocks are not read any more. Harmless after `commit`."""
        ...


class KVSender(Protocol):
    async def open(self, ticket: Ticket, block_ids: Sequence[int]) -> KVPush:
        """Starts a handoff of ``block_ids`` (this pool's blocks of the context, from the one on that holds
        token ``ticket.cached_tokens``) over the first transport that both sides have.

        Raises LayoutMismatchError with both layouts, TicketError, or WorkerLostError.
        """
        ...

    @property
    def counters(self) -> TransferCounters: ...

    async def close(self) -> None: ...


class HandoffListener(Protocol):
    """Who reserved the blocks and wants to know. Called on the event loop."""

    def progressed(self, ticket_id: str, num_bytes: int) -> None:
        """Pieces arrived, were verified and written into the pool: the lease renews."""
        ...

    def committed(self, commit: HandoffCommit) -> None:
        """All pieces are there. Raises TicketError when the ticket is void by now; the sender hears it."""
        ...

    def failed(self, ticket_id: str, error: BatonError) -> None:
        """The sender gave up, vanished, or sent what does not verify. Nothing more will arrive."""
        ...


class KVReceiver(Protocol):
    @property
    def offers(self) -> tuple[TransportOffer, ...]:
        """The ways in, in this worker's order of preference."""
        ...

    def expect(self, ticket: Ticket, listener: HandoffListener) -> None:
        """From now on writes under ``ticket`` are accepted into its blocks."""
        ...

    @property
    def counters(self) -> TransferCounters: ...

    async def forget(self, ticket_id: str) -> None:
        """Refuses the ticket from now on. After it returns no write of it touches the pool any more."""
        ...

    async def close(self) -> None: ...


class Peers(Protocol):
    """Other workers, by address."""

    async def send_prefix(self, address: str, request: PrefixRequest) -> PrefixReply:
        """See `PrefixPushes.send`. Raises WorkerLostError when nobody answers there, else what the worker
        raised. Cancelling the call ends the push."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Exchange:
    """All the ways of a worker's KV."""

    sender: KVSender
    receiver: KVReceiver
    peers: Peers
