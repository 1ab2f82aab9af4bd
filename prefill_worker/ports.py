"""What the prefill role needs from a transport: the sending side of the handoff seam.

`kv_transfer/` implements it for real bytes, `sim/` for modelled links.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.messages import HandoffCommit, HandoffReceipt, Ticket


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

    async def close(self) -> None: ...
