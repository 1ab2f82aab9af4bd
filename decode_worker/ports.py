"""What the decode role needs from a transport: the receiving side of the handoff seam.

`kv_transfer/` implements it for real bytes, `sim/` for modelled links.
"""

from __future__ import annotations

from typing import Protocol

from common.errors import BatonError
from common.messages import HandoffCommit, Ticket, TransportOffer


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

    async def forget(self, ticket_id: str) -> None:
        """Refuses the ticket from now on. After it returns no write of it touches the pool any more."""
        ...

    async def close(self) -> None: ...
