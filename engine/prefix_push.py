"""The holder's side of a pull: a cached prefix is pushed into the blocks of the worker that asks for it.

    asked ──▶ enough cached? ──no──▶ the answer says how much there is
                  │
                  └─ pinned (in transfer) ─▶ pushed, all layers ─▶ committed ─▶ unpinned, cached as before

While it is read a prefix has a holder in the ledger and cannot be evicted. However a push ends (the other
side is gone, withdraws its ticket, cancels; the time is over) its blocks are then cache again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.errors import DeadlineError, InvalidRequestError, TicketError
from common.failpoints import Failpoints
from common.handoff import HandoffCommit, HandoffReceipt, PrefixReply, PrefixRequest, Ticket
from common.hashing import root_hash
from common.messages import ContextTokens
from common.metrics import WorkerMetrics
from common.workers import WorkerInfo
from engine.blocks import BlockPool, BlockState
from engine.ports import KVSender


class PrefixPushes:
    """``changed`` is called whenever blocks change their state."""

    def __init__(
        self,
        info: WorkerInfo,
        pool: BlockPool,
        sender: KVSender,
        metrics: WorkerMetrics,
        failpoints: Failpoints,
        changed: Callable[[], None],
    ) -> None:
        self._info = info
        self._pool = pool
        self._sender = sender
        self._metrics = metrics
        self._failpoints = failpoints
        self._changed = changed
        self.num_open = 0
        self.sent_bytes = 0

    async def send(self, request: PrefixRequest) -> PrefixReply:
        """Pushes the prefix if all of it is cached here; returns when the other side has verified it.

        Raises HandoffErrors (the ticket is void by now, the layouts do not go together), WorkerLostError (no way to
        the other side), DeadlineError.
        """
        ticket = request.ticket
        if not 0 <= ticket.cached_tokens < ticket.context_tokens <= len(request.tokens):
            raise InvalidRequestError(
                f"ticket {ticket.ticket_id} is for tokens {ticket.cached_tokens} to {ticket.context_tokens}, "
                f"got {len(request.tokens)} tokens"
            )
        root = root_hash(self._info.model.fingerprint, request.cache_salt)
        cached = self._pool.match(request.tokens, root, len(request.tokens))
        held_tokens = len(cached) * self._pool.block_size
        if held_tokens < ticket.context_tokens:
            return PrefixReply(held_tokens)
        owner = f"{ticket.request_id}#{ticket.attempt} to {ticket.ticket_id}"
        if self._pool.holds(owner):
            raise TicketError(f"ticket {ticket.ticket_id} is being filled already")
        self._pool.allocate(owner, 0, BlockState.IN_TRANSFER, asyncio.get_running_loop().time(), cached)
        self.num_open += 1
        self._changed()
        try:
            async with asyncio.timeout(request.timeout_s):
                receipt = await self._push(ticket, cached)
        except TimeoutError:
            raise DeadlineError(f"the pull of {ticket.ticket_id} exceeded its {request.timeout_s} s") from None
        finally:
            self.num_open -= 1
            self._pool.release(owner)
            self._changed()
        self.sent_bytes += receipt.num_bytes
        self._metrics.kv_bytes_sent.inc(receipt.num_bytes)
        return PrefixReply(held_tokens, receipt.num_bytes)

    async def _push(self, ticket: Ticket, cached: Sequence[int]) -> HandoffReceipt:
        """Nothing reads the blocks after it has ended."""
        if self._failpoints:
            await self._failpoints.reach("pull")
        # The ticket counts in blocks of the receiver, from the one on that holds its first token.
        size, theirs = self._pool.block_size, ticket.layout.block_size
        first_token = ticket.cached_tokens // theirs * theirs
        block_ids = cached[first_token // size : self._pool.blocks_for(ticket.context_tokens)]
        push = await self._sender.open(ticket, block_ids)
        try:
            for layer in range(self._info.layout.num_layers):
                push.push(layer, 0, len(block_ids))
            num_pieces = ticket.layout.num_layers * len(ticket.block_ids)
            context = ContextTokens(cached=ticket.context_tokens)
            return await push.commit(HandoffCommit(ticket.ticket_id, 0, 0, num_pieces, context=context))
        except BaseException:
            await push.abort("the holder of the prefix gave up")
            raise
