"""The puller's side of a pull: the KV of a prefix comes from another worker, instead of being computed.

    the sequence holds its blocks ─▶ ticket for those of the prefix ─▶ the holder is asked to push
        ◀── it has less: once more, for what it has
        ◀── all there and verified ─▶ they count as the sequence's own
        ◀── lost, refused, no progress, cancelled ─▶ nothing came; the sequence computes

A pull is a handoff with the roles reversed: here the blocks are promised, there is the sender. It is a
bet that may be lost: whatever happens it ends, and what has not come is computed. Nothing writes the
blocks any more when it is told to have ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import BatonError, HandoffError, TicketError
from common.handoff import HandoffCommit, PrefixRequest, Ticket
from common.lifecycle import Tasks
from common.messages import PrefixSource
from common.metrics import WorkerMetrics
from common.workers import WorkerInfo
from engine.ports import Exchange
from engine.sequence import Sequence

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Arrival:
    """What the receiver and the holder tell of one ticket."""

    ticket: Ticket
    expires_at: float
    held_tokens: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """So much of the prefix the holder has; when that is all, it has arrived."""
    num_bytes: int = 0

    def __post_init__(self) -> None:
        # It may come to nothing after nobody waits for it any more.
        self.held_tokens.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def complete(self) -> bool:
        over = self.held_tokens
        return over.done() and not over.exception() and over.result() >= self.ticket.context_tokens

    # HandoffListener

    def progressed(self, ticket_id: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.expires_at = asyncio.get_running_loop().time() + self.ticket.lease_s

    def committed(self, commit: HandoffCommit) -> None:
        if self.held_tokens.done():
            raise TicketError(f"ticket {commit.ticket_id} is over")
        self.held_tokens.set_result(self.ticket.context_tokens)

    def failed(self, ticket_id: str, error: BatonError) -> None:
        self.fail(error)

    # the holder's answer

    def fail(self, error: BatonError) -> None:
        if not self.held_tokens.done():
            self.held_tokens.set_exception(error)

    def refused(self, held_tokens: int) -> None:
        if not self.held_tokens.done():
            self.held_tokens.set_result(held_tokens)


class PrefixPulls:
    """The pulls of one worker. ``ended(sequence, num_tokens)``: the sequence's next ``num_tokens`` tokens have
    come (0: none), and nothing writes its blocks any more."""

    def __init__(
        self,
        info: WorkerInfo,
        exchange: Exchange,
        patience_s: float,
        tasks: Tasks,
        metrics: WorkerMetrics,
        ended: Callable[[Sequence, int], None],
    ) -> None:
        self._info = info
        self._exchange = exchange
        self._patience_s = patience_s
        self._tasks = tasks
        self._metrics = metrics
        self._ended = ended
        self._live: dict[str, asyncio.Task[int]] = {}
        self._serial = 0
        self.received_bytes = 0

    def begin(self, sequence: Sequence) -> None:
        """Pulls the next ``num_pulling`` tokens of a sequence, which has a prefix source, into its blocks."""
        task = self._tasks.spawn(self._pull(sequence), f"pull for {sequence.key}")
        self._live[sequence.key] = task
        # Not in `_pull`: a task that is cancelled before its first step never runs.
        task.add_done_callback(lambda done: self._end(sequence, 0 if done.cancelled() else done.result()))

    def cancel(self, key: str) -> None:
        """Nobody needs it any more; `ended` follows. Unknown ones are ignored."""
        task = self._live.get(key)
        # Only once: it has to see to it that nothing writes any more.
        if task is not None and not task.cancelling():
            task.cancel()

    def _end(self, sequence: Sequence, num_tokens: int) -> None:
        del self._live[sequence.key]
        self._ended(sequence, num_tokens)

    async def _pull(self, sequence: Sequence) -> int:
        """How many tokens came."""
        source = sequence.request.prefix_source
        assert source is not None
        first, block_size = sequence.num_computed, self._info.layout.block_size
        end = first + sequence.num_pulling
        try:
            held = await self._fetch(sequence, source, first, end)
            if held < end:
                # The router's belief was too good. What there is may still be worth it.
                end = held // block_size * block_size
                if end > first:
                    held = await self._fetch(sequence, source, first, end)
                if not first < end <= held:
                    raise HandoffError(f"{source.worker_id} holds {held} tokens of the prefix, {first} are here")
        except BatonError as error:
            self._metrics.pulls_failed.inc()
            log.warning("pull failed: %s", error, extra=sequence.log_fields | {"error_code": error.code})
            return 0
        self._metrics.pulls.inc()
        self._metrics.pulled_tokens.inc(end - first)
        return end - first

    async def _fetch(self, sequence: Sequence, source: PrefixSource, first: int, end: int) -> int:
        """How many tokens of the context the source holds; when that is ``end`` or more, those from ``first`` on
        have come. However it ends, nothing more does."""
        loop = asyncio.get_running_loop()
        ticket = self._ticket(sequence, first, end)
        arrival = _Arrival(ticket, loop.time() + ticket.lease_s)
        receiver = self._exchange.receiver
        receiver.expect(ticket, arrival)
        asking = self._tasks.spawn(self._ask(sequence, source, arrival), f"ask for {ticket.ticket_id}")
        try:
            while (patience_s := arrival.expires_at - loop.time()) > 0:
                if (await asyncio.wait([arrival.held_tokens], timeout=patience_s))[0]:
                    return arrival.held_tokens.result()
            raise TicketError(f"{source.worker_id} made no progress with {ticket.ticket_id} in {ticket.lease_s:g} s")
        finally:
            if not arrival.complete:  # else the holder's answer is on its way, and it shall hear that all is well
                asking.cancel()
            self.received_bytes += arrival.num_bytes
            self._metrics.kv_bytes_received.inc(arrival.num_bytes)
            await receiver.forget(ticket.ticket_id)

    async def _ask(self, sequence: Sequence, source: PrefixSource, arrival: _Arrival) -> None:
        """Asks the source to push, and tells the arrival what it answers."""
        request, ticket = sequence.request, arrival.ticket
        tokens = tuple(sequence.tokens[: max(ticket.context_tokens, source.num_tokens)])
        timeout_s = None
        if request.timeout_s is not None:
            timeout_s = max(0.0, sequence.arrival + request.timeout_s - asyncio.get_running_loop().time())
        wanted = PrefixRequest(ticket, tokens, request.cache_salt, timeout_s)
        try:
            reply = await self._exchange.peers.send_prefix(source.address, wanted)
        except BatonError as error:
            arrival.fail(error)
            return
        if reply.held_tokens < ticket.context_tokens:
            arrival.refused(reply.held_tokens)
        else:
            arrival.fail(HandoffError(f"{source.worker_id} says that it pushed {ticket.ticket_id}; nothing came"))

    def _ticket(self, sequence: Sequence, first: int, end: int) -> Ticket:
        info, block_size = self._info, self._info.layout.block_size
        self._serial += 1
        return Ticket(
            ticket_id=f"{info.worker_id}.{info.epoch}.pull-{self._serial}",
            request_id=sequence.request.request_id,
            attempt=sequence.request.attempt,
            worker_id=info.worker_id,
            epoch=info.epoch,
            context_tokens=end,
            cached_tokens=first,
            block_ids=tuple(sequence.block_ids[first // block_size : end // block_size]),
            layout=info.layout,
            offers=self._exchange.receiver.offers,
            secret=secrets.token_bytes(16),
            lease_s=self._patience_s,
        )
