"""Which part of a ticket's blocks each sending rank fills, and from which of its own. Pure.

A ticket is for the blocks of one receiving rank. Its heads are dealt among the sending ranks so that each
head comes from exactly one of them (`sending_heads`); a head that several hold is taken from a different
one by different receivers. Within its heads a sender fills whole *blocks of the receiver*, whatever the
size of its own (`ShardPlan`):

    context       0        cached                                  context_tokens
    sender's      |.....|.....|.....|.....|.....|.....|.....|.....|..
    ticket's                  |........|........|........|........|..      <- pieces

Knows neither pools nor frames, and no number formats (`wire.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import HandoffError
from common.handoff import KVLayout, Ticket
from kv_transfer.layout import check_compatible, rank_heads, total_heads


def sending_heads(source: KVLayout, target: KVLayout) -> dict[int, range]:
    """Rank of ``source``'s group → the KV heads (numbered over the whole model) that it sends to
    ``target``; ranks that send none are left out.

    ``source``: the layout of any rank of the group. Raises LayoutMismatchError.
    """
    check_compatible(source, target)
    total = total_heads(source)
    held = [rank_heads(total, source.tp_size, rank) for rank in range(source.tp_size)]
    chosen: dict[int, range] = {}
    for head in range(target.head_start, target.head_start + target.num_kv_heads):
        holders = [rank for rank, heads in enumerate(held) if head in heads]
        rank = holders[target.tp_rank % len(holders)]
        first = chosen[rank].start if rank in chosen else head
        chosen[rank] = range(first, head + 1)
    return chosen


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What one sending rank moves under one ticket.

    Pieces are blocks of the receiver, counted from the ticket's first one. ``first_token``: where that
    begins in the context; ``skipped_tokens``: how much of the sender's first block lies before it.
    """

    source: KVLayout
    target: KVLayout
    heads: range
    first_token: int
    num_tokens: int
    skipped_tokens: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the receiver."""
        return -(-self.num_tokens // self.target.block_size)

    @property
    def num_source_blocks(self) -> int:
        return -(-(self.skipped_tokens + self.num_tokens) // self.source.block_size) if self.num_tokens else 0

    @property
    def num_pieces(self) -> int:
        return self.target.num_layers * self.num_blocks

    @property
    def source_columns(self) -> slice:
        """Where the heads lie among the bytes of one of the sender's tokens."""
        return _columns(self.source, self.heads)

    @property
    def target_columns(self) -> slice:
        return _columns(self.target, self.heads)

    @property
    def same_blocks(self) -> bool:
        """Block i of the receiver is block i of the sender."""
        return self.source.block_size == self.target.block_size

    def tokens(self, first: int, count: int) -> range:
        """The tokens, counted from ``first_token``, in the receiver's blocks ``first .. first + count``."""
        size = self.target.block_size
        return range(first * size, min((first + count) * size, self.num_tokens))

    def source_blocks(self, first: int, count: int) -> range:
        """Which of the sender's blocks hold the tokens of the receiver's ``first .. first + count``."""
        tokens, size = self.tokens(first, count), self.source.block_size
        return range((self.skipped_tokens + tokens.start) // size, -(-(self.skipped_tokens + tokens.stop) // size))

    def touched_blocks(self, first: int, count: int) -> range:
        """The receiver's blocks that have tokens in the sender's ``first .. first + count``."""
        size = self.source.block_size
        start = max(0, first * size - self.skipped_tokens)
        stop = min(self.num_tokens, (first + count) * size - self.skipped_tokens)
        if start >= stop:
            return range(0)
        return range(start // self.target.block_size, -(-stop // self.target.block_size))


def shard_plan(source: KVLayout, ticket: Ticket) -> ShardPlan:
    """The plan of the rank with layout ``source``.

    Raises LayoutMismatchError, or HandoffError when the ticket contradicts itself or this rank has
    nothing to send to it.
    """
    target = ticket.layout
    heads = sending_heads(source, target).get(source.tp_rank)
    if heads is None:
        raise HandoffError(
            f"rank {source.tp_rank} of {source.tp_size} sends nothing to rank {target.tp_rank} of {target.tp_size}"
        )
    first_token = ticket.cached_tokens // target.block_size * target.block_size
    plan = ShardPlan(
        source,
        target,
        heads,
        first_token,
        max(0, ticket.context_tokens - first_token),
        skipped_tokens=first_token % source.block_size,
    )
    if plan.num_blocks != len(ticket.block_ids):
        raise HandoffError(
            f"ticket {ticket.ticket_id} has {len(ticket.block_ids)} blocks of {target.block_size} tokens for tokens "
            f"{first_token} to {ticket.context_tokens}, which take {plan.num_blocks}"
        )
    return plan


def _columns(layout: KVLayout, heads: range) -> slice:
    head_bytes = layout.head_dim * layout.dtype_bytes
    return slice((heads.start - layout.head_start) * head_bytes, (heads.stop - layout.head_start) * head_bytes)
