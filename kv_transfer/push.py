"""The sender's end of one handoff: what is complete, what has to be sent, and how it ended.

It counts pieces in the receiver's blocks (`plan.py`), whatever the size of its own. Knows no channels: the
line that carries it takes runs with `next_run` and a commit with `take_commit`, and reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from common.errors import BatonError, HandoffError, IntegrityError
from common.handoff import HandoffCommit, HandoffReceipt, Ticket
from kv_transfer.blocking import RunBlocking, uninterrupted
from kv_transfer.channel import Bytes
from kv_transfer.copies import Gather, make_wire, nobody
from kv_transfer.frames import Commit, checksum, shard_seed
from kv_transfer.pieces import PieceQueue
from kv_transfer.plan import ShardPlan
from kv_transfer.pool import BlockPool


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
    """A KVPush. ``block_ids``: the sender's blocks of the context, from the one on that holds the ticket's
    first token.
    """

    def __init__(
        self,
        line: PushLine,
        stream: int,
        ticket: Ticket,
        plan: ShardPlan,
        block_ids: Sequence[int],
        transport: str,
    ) -> None:
        self.transport = transport
        self.stream = stream
        self.ticket = ticket
        self.plan = plan
        self.error: BatonError | None = None
        self._verify = True
        self._line = line
        self._block_ids = tuple(block_ids)
        self._gather: Gather | None = None
        self._seed = shard_seed(ticket.ticket_id, ticket.secret, stream, plan.source.tp_rank)
        self._queue = PieceQueue()
        self._complete = np.zeros((plan.source.num_layers, len(self._block_ids)), dtype=np.bool_)
        """Which of the sender's blocks were pushed."""
        self._commit: Commit | None = None
        self._last_commit: Commit | None = None
        self._receipt: HandoffReceipt | None = None
        self._opened = asyncio.Event()
        self._over = asyncio.Event()
        self._reading = asyncio.Lock()
        self._progress_at = asyncio.get_running_loop().time()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    # what the worker calls

    def push(self, layer: int, first: int, count: int) -> None:
        """Queues pieces. Raises HandoffError for blocks that were not given."""
        num_layers, num_blocks = self._complete.shape
        if not (0 <= layer < num_layers and first >= 0 and count >= 0 and first + count <= num_blocks):
            raise HandoffError(
                f"ticket {self.ticket.ticket_id} has {num_layers} layers of {num_blocks} blocks, "
                f"cannot push blocks {first} to {first + count} of layer {layer}"
            )
        if self.is_over or count == 0:
            return
        complete = self._complete[layer]
        complete[first : first + count] = True
        if self.plan.same_blocks:
            self._queue.add(layer, first, count)
        else:
            for block in self.plan.touched_blocks(first, count):
                parts = self.plan.source_blocks(block, 1)
                if complete[parts.start : parts.stop].all():
                    self._queue.add(layer, block, 1)
        if self._queue:
            self._line.schedule(self)

    async def commit(self, commit: HandoffCommit) -> HandoffReceipt:
        if not (self.is_over or self._complete.all()):
            raise IntegrityError(
                f"the handoff of {self.ticket.ticket_id} has {self._complete.size} blocks over all layers, "
                f"{np.count_nonzero(self._complete)} were pushed: there is nothing to commit"
            )
        finish = commit.finish.value if commit.finish is not None else ""
        context = (commit.context.cached, commit.context.moved, commit.context.computed)
        self._commit = self._last_commit = Commit(
            self.stream, commit.token, commit.index, self.plan.num_pieces, finish, *context, commit.logprobs
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

    @property
    def block_bytes(self) -> int:
        """Payload of one piece; known once the receiver has agreed."""
        assert self._gather is not None
        return self._gather.block_bytes

    def next_run(self, most: int) -> tuple[int, int, int] | None:
        """(layer, first, count) of what to send next, at most ``most`` pieces; None when all is sent."""
        return self._queue.peek(most) if self._queue else None

    async def read(
        self, run: tuple[int, int, int], out: Bytes, pool: BlockPool, run_blocking: RunBlocking
    ) -> int | None:
        """Takes ``run`` off the queue and copies its blocks into ``out``, uint8 [count * block_bytes].

        Returns the checksum, None when the push was over before the copy or after it.
        """
        layer, first, count = run
        self._queue.drop(count)
        async with self._reading:
            if self.is_over:
                return None
            digest = await uninterrupted(run_blocking(self._copy_out, pool, layer, first, count, out))
            return None if self.is_over else digest

    def lend(self, run: tuple[int, int, int], pool: BlockPool) -> tuple[int, list[memoryview]] | None:
        """Takes ``run`` off the queue: the checksum of its blocks, and the blocks where they lie in the pool. They
        may be read until the caller's task waits. None when they have to be copied (`read`).
        """
        layer, first, count = run
        assert self._gather is not None
        views = self._gather.views(pool, layer, first, count)
        if views is None:
            return None
        self._queue.drop(count)
        digest = checksum(self._seed, layer, first, count)
        for view in views if self._verify else ():
            digest.update(view)
        return digest.intdigest(), views

    def take_commit(self) -> Commit | None:
        """The commit, once, when every piece is on its way."""
        commit, self._commit = self._commit, None
        return commit

    def opened(self, verify: bool, wire: str) -> None:
        """The receiver has agreed. Raises HandoffError for a wire format that there is not."""
        self._verify = verify
        self._gather = Gather(self.plan, make_wire(self.plan, wire), self._block_ids)
        self.progressed()
        self._opened.set()

    def progressed(self) -> None:
        self._progress_at = asyncio.get_running_loop().time()

    def missing(self, runs: Sequence[tuple[int, int, int]]) -> int:
        """The receiver lacks ``runs``: they are pushed again, then the commit. Returns how many pieces.

        Raises HandoffError for pieces that the handoff does not have.
        """
        if self.is_over or self._last_commit is None:
            return 0
        for layer, first, count in runs:
            if layer >= self.plan.target.num_layers or first + count > self.plan.num_blocks:
                raise HandoffError(f"the receiver lacks pieces that there are not: {first}+{count} of layer {layer}")
            self._queue.add(layer, first, count)
        self._commit = self._last_commit
        self.progressed()
        self._line.schedule(self)
        return sum(count for _, _, count in runs)

    def received(self, num_pieces: int, num_bytes: int) -> None:
        if not self.is_over:
            self._receipt = HandoffReceipt(self.ticket.ticket_id, num_pieces, num_bytes)
            self._end(None)

    def fail(self, error: BatonError, abort_reason: str | None = None) -> None:
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

    def _copy_out(self, pool: BlockPool, layer: int, first: int, count: int, out: Bytes) -> int:
        assert self._gather is not None
        digest = checksum(self._seed, layer, first, count)
        self._gather.read(pool, layer, first, count, out, digest.update if self._verify else nobody)
        return digest.intdigest()
