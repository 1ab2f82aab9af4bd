"""The sending side of the handoff seam (KVSender): finds the way to a ticket's blocks.

For each pair of workers the first transport wins, in this side's order of preference, that both have;
when it does not connect, the next one is tried, and that is counted. One link per (transport,
address) lives as long as its channel and carries all handoffs of the pair; after a failure the next
handoff connects anew. A way that fails again and again, while another one works, is passed over for a
while (`penalty.py`): not every handoff waits for it.

    sender = Sender(pool, config.transfer, transports)
    push = await sender.open(ticket, block_ids)
    push.push(layer=0, first=0, count=4)
    receipt = await push.commit(commit)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from common.config import TransferConfig
from common.errors import BatonError, ConfigError, HandoffError, WorkerLostError
from common.failpoints import Failpoints
from common.handoff import KVLayout, Ticket, TransferCounters, TransportOffer
from common.lifecycle import Tasks
from kv_transfer.blocking import CopyThread, RunBlocking
from kv_transfer.faults import FaultyFrames
from kv_transfer.frames import MAX_PAYLOAD_BYTES
from kv_transfer.link import Link
from kv_transfer.penalty import PenaltyBox, Way
from kv_transfer.plan import ShardPlan, shard_plan
from kv_transfer.pool import BlockPool
from kv_transfer.push import Push
from kv_transfer.transport import Transport

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


class Sender:
    """A KVSender. ``transports`` in order of preference. ``run_blocking`` runs the copies out of the pool
    (default: a thread of its own). ``failpoints``: of the worker; `piece` is passed here.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: TransferConfig,
        transports: Sequence[Transport],
        run_blocking: RunBlocking | None = None,
        failpoints: Failpoints | None = None,
    ) -> None:
        self.counters = TransferCounters()
        self._pool = pool
        self._config = config
        self._transports = tuple(transports)
        check_staging(pool.layout, config.staging_bytes)
        self._failpoints = failpoints
        self._thread = CopyThread("kv-send")
        self._run_blocking: RunBlocking = run_blocking or self._thread
        self._links: dict[Way, Link] = {}
        self._connecting: dict[Way, asyncio.Task[Link | BatonError]] = {}
        self._penalties = PenaltyBox()
        self._tasks = Tasks()
        self._closed = False

    async def open(self, ticket: Ticket, block_ids: Sequence[int]) -> Push:
        """Starts a handoff of ``block_ids`` over the first transport that works.

        Raises LayoutMismatchError, TicketError, other HandoffErrors, or WorkerLostError.
        """
        plan = shard_plan(self._pool.layout, ticket)
        if len(block_ids) != plan.num_source_blocks:
            raise HandoffError(
                f"ticket {ticket.ticket_id} takes {plan.num_source_blocks} blocks of {plan.source.block_size} tokens, "
                f"{len(block_ids)} were given"
            )
        ways = list(self._ways(ticket))
        order = self._penalties.preferred(ways, lambda way: _way(way[1]), asyncio.get_running_loop().time())
        lost: WorkerLostError | None = None
        left: list[Way] = []
        for transport, offer in order:
            if lost is not None or offer is not ways[0][1]:
                self.counters.fallbacks += 1
                why = lost or f"{ways[0][1].name} is passed over after failures"
                log.warning("transfer to %s falls back to %s: %s", ticket.worker_id, offer.name, why)
            try:
                push = await self._open_over(transport, offer, ticket, plan, block_ids)
            except WorkerLostError as error:
                lost = error
                left.append(_way(offer))
                continue
            for way in left:  # had none worked, it would be the peer's fault, not theirs
                self._blame(way)
            return push
        if lost is not None:
            raise lost
        offered = ", ".join(f"{offer.name} on host {offer.host_id or '?'}" for offer in ticket.offers)
        raise HandoffError(
            f"no common transport: here {', '.join(each.name for each in self._transports) or 'none'}, "
            f"worker {ticket.worker_id} offers {offered or 'none'} that can be reached from here"
        )

    async def close(self) -> None:
        """Fails what is under way and ends all links."""
        self._closed = True
        await self._tasks.close()
        for link in list(self._links.values()):
            await link.close(WorkerLostError("this sender was closed"))
        self._thread.close()

    def _ways(self, ticket: Ticket) -> Iterator[tuple[Transport, TransportOffer]]:
        for transport in self._transports:
            for offer in ticket.offers:
                if offer.name == transport.name and transport.reaches(offer):
                    yield transport, offer

    def _blame(self, way: Way) -> None:
        """Once for all handoffs that failed together."""
        now = asyncio.get_running_loop().time()
        if not self._penalties.holds(way, now) and (penalty_s := self._penalties.failed(way, now)):
            log.warning("%s to %s fails again and again: passed over for %g s", *way, penalty_s)

    async def _open_over(
        self, transport: Transport, offer: TransportOffer, ticket: Ticket, plan: ShardPlan, block_ids: Sequence[int]
    ) -> Push:
        known = self._links.get(_way(offer))
        if known is not None:
            try:
                push = await known.open(ticket, plan, block_ids)
                if known.num_delivered:
                    self._penalties.worked(_way(offer))
                return push
            except WorkerLostError:
                if known.lost is None:
                    raise
                # The channel had died unnoticed (the peer was restarted, say): one fresh attempt.
        link = await self._connect(transport, offer.address)
        return await link.open(ticket, plan, block_ids)

    async def _connect(self, transport: Transport, address: str) -> Link:
        """The link to ``address``; whoever comes while it is being made waits for the same one."""
        key = transport.name, address
        if self._closed:
            raise WorkerLostError("this sender was closed")
        if key in self._links:
            return self._links[key]
        if key not in self._connecting:
            task = self._tasks.spawn(self._make_link(transport, address), f"kv {transport.name} connect")
            self._connecting[key] = task
            task.add_done_callback(lambda _: self._connecting.pop(key, None))
        task = self._connecting[key]
        await asyncio.wait([task])
        if task.cancelled():
            raise WorkerLostError("this sender was closed")
        outcome = task.result()
        if isinstance(outcome, BatonError):
            raise outcome
        return outcome

    async def _make_link(self, transport: Transport, address: str) -> Link | BatonError:
        name = transport.name
        key = name, address
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                channel = await transport.connect(address)
        except BatonError as error:
            return error
        except TimeoutError:
            return WorkerLostError(f"no {name} connection to {address} within {CONNECT_TIMEOUT_S} s")

        def forget(link: Link) -> None:
            if self._links.get(key) is link:
                del self._links[key]
            if not self._closed:
                if link.num_delivered:
                    self._penalties.worked(key)
                self._blame(key)

        if self._failpoints is not None and self._failpoints.has("piece"):
            channel = FaultyFrames(channel, self._failpoints)
        link = Link(channel, name, self._pool, self._config, self._run_blocking, self.counters, forget)
        self._links[key] = link
        return link


def _way(offer: TransportOffer) -> Way:
    return offer.name, offer.address


def check_staging(layout: KVLayout, staging_bytes: int) -> None:
    """Raises ConfigError when not even one block of one layer fits into a frame."""
    limit = min(staging_bytes, MAX_PAYLOAD_BYTES)
    if layout.block_layer_bytes > limit:
        raise ConfigError(
            f"one block of one layer has {layout.block_layer_bytes} bytes, a transfer takes at most {limit} "
            f"(transfer.staging_bytes is {staging_bytes}): use a smaller engine.block_size"
        )
