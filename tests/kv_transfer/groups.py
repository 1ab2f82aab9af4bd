"""Workers of several ranks, each with a pool, a sender or a receiver of its own, joined in memory."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from common.config import TransferConfig
from common.errors import BatonError
from common.handoff import HandoffCommit, HandoffReceipt, KVLayout, Ticket, TransportOffer
from kv_transfer.blocking import run_inline
from kv_transfer.channel import FrameChannel
from kv_transfer.layout import rank_heads
from kv_transfer.plan import sending_heads
from kv_transfer.pool import NumpyPool
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transport import Serve
from kv_transfer.transports.inline import InlineFrames
from kv_transfer.transports.memory import channel_pair

CAPACITY = 1 << 20


class Hub:
    """A Transport between everybody who has it."""

    name = "memory"

    def __init__(self) -> None:
        self._listeners: list[Serve] = []
        self.served: list[asyncio.Future[None]] = []

    def reaches(self, offer: TransportOffer) -> bool:
        return True

    async def listen(self, serve: Serve) -> str | None:
        self._listeners.append(serve)
        return str(len(self._listeners) - 1)

    async def connect(self, address: str) -> FrameChannel:
        near, far = channel_pair()
        self.served.append(asyncio.ensure_future(self._listeners[int(address)](InlineFrames(far, 0))))  # type: ignore[arg-type]
        return InlineFrames(near, CAPACITY)

    async def close(self) -> None:
        pass


class Committed:
    """A listener that counts."""

    def __init__(self) -> None:
        self.commits: list[HandoffCommit] = []
        self.errors: list[BatonError] = []
        self.num_bytes = 0

    def progressed(self, ticket_id: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def committed(self, commit: HandoffCommit) -> None:
        self.commits.append(commit)

    def failed(self, ticket_id: str, error: BatonError) -> None:
        self.errors.append(error)


def rank_layout(whole: KVLayout, tp_size: int, rank: int, block_size: int, dtype: str) -> KVLayout:
    heads = rank_heads(whole.total_kv_heads, tp_size, rank)
    return dataclasses.replace(
        whole,
        tp_size=tp_size,
        tp_rank=rank,
        head_start=heads.start,
        num_kv_heads=len(heads),
        block_size=block_size,
        dtype=dtype,
    )


def fill(pool: NumpyPool, block_ids: Sequence[int], numbers: torch.Tensor, first_token: int) -> None:
    """Puts the tokens from ``first_token`` on of ``numbers`` [layers, halves, tokens, heads, head_dim] (float32, the
    whole model's) into the blocks, as a step would."""
    data = laid_out(pool.layout, numbers, first_token, len(block_ids))
    pool.data[:, list(block_ids)] = data


def laid_out(layout: KVLayout, numbers: torch.Tensor, first_token: int, count: int) -> np.ndarray[Any, Any]:
    """The bytes of ``count`` blocks, uint8 [layers, count, block_layer_bytes]; zeros behind the last token."""
    heads = numbers[:, :, first_token:, layout.head_start : layout.head_start + layout.num_kv_heads]
    size = count * layout.block_size
    padded = torch.zeros(*heads.shape[:2], size, *heads.shape[3:])
    padded[:, :, : heads.shape[2]] = heads[:, :, :size]
    blocks = padded.unflatten(2, (count, layout.block_size)).transpose(1, 2).contiguous()
    stored = blocks.to(getattr(torch, layout.dtype))
    return stored.view(torch.uint8).reshape(layout.num_layers, count, -1).numpy()


def numbers_of(pool: NumpyPool, block_ids: Sequence[int]) -> torch.Tensor:
    """What lies in the blocks, float32 [layers, halves, tokens, heads, head_dim]."""
    layout = pool.layout
    stored = torch.from_numpy(pool.data[:, list(block_ids)]).contiguous().view(getattr(torch, layout.dtype))
    shape = (layout.num_layers, len(block_ids), layout.halves, layout.block_size, layout.num_kv_heads, layout.head_dim)
    return stored.view(shape).transpose(1, 2).flatten(2, 3).float()


class Group:
    """The ranks of a prefill worker (they send) and of a decode worker (they receive)."""

    def __init__(self, sources: Sequence[KVLayout], targets: Sequence[KVLayout], num_blocks: int, **config: Any):
        self.hub = Hub()
        self.config = TransferConfig(**config)
        self.sources = [NumpyPool(layout, num_blocks) for layout in sources]
        self.targets = [NumpyPool(layout, num_blocks) for layout in targets]
        self.senders = [Sender(pool, self.config, [self.hub], run_inline) for pool in self.sources]
        self.receivers = [Receiver(pool, self.config, "host", [self.hub], run_inline) for pool in self.targets]

    async def start(self) -> None:
        for receiver in self.receivers:
            await receiver.start()

    def expect(self, rank: int, block_ids: Sequence[int], context: int, cached: int) -> tuple[Ticket, Committed]:
        """A ticket of one receiving rank."""
        receiver, layout, listener = self.receivers[rank], self.targets[rank].layout, Committed()
        name = f"t{rank}"
        ticket = Ticket(
            name, "r", 0, "d", 1, context, cached, tuple(block_ids), layout, receiver.offers, b"secret", 5.0
        )
        receiver.expect(ticket, listener)
        return ticket, listener

    async def send(self, ticket: Ticket, block_ids: Sequence[int], chunk: int) -> dict[int, HandoffReceipt]:
        """All that the ranks have for ``ticket``, ``chunk`` blocks at a time; by rank."""
        ranks = sending_heads(self.sources[0].layout, ticket.layout)
        sent = await asyncio.gather(*(self._send_share(rank, ticket, block_ids, chunk) for rank in ranks))
        return dict(zip(ranks, sent, strict=True))

    async def _send_share(self, rank: int, ticket: Ticket, block_ids: Sequence[int], chunk: int) -> HandoffReceipt:
        push = await self.senders[rank].open(ticket, block_ids)
        for first in range(0, len(block_ids), chunk):
            for layer in range(ticket.layout.num_layers):
                push.push(layer, first, min(chunk, len(block_ids) - first))
            await asyncio.sleep(0)
        return await push.commit(HandoffCommit(ticket.ticket_id, 7, 0, 0))

    async def close(self) -> None:
        for end in (*self.senders, *self.receivers):
            await end.close()
        await asyncio.gather(*self.hub.served, return_exceptions=True)
