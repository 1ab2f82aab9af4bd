"""A sender and a receiver over pools of plain numpy, joined in memory, by shared memory or by TCP."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from common.config import TransferConfig
from common.errors import BatonError, WorkerLostError
from common.handoff import HandoffCommit, KVLayout, Ticket, TransportOffer
from kv_transfer.channel import ByteChannel, Connector, FrameChannel
from kv_transfer.host import host_id
from kv_transfer.pool import NumpyPool
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transport import Serve, Transport
from kv_transfer.transports.inline import InlineFrames
from kv_transfer.transports.local import Local
from kv_transfer.transports.memory import MemoryChannel, channel_pair
from kv_transfer.transports.shm import Shm
from kv_transfer.transports.tcp import Tcp

LAYOUT = KVLayout(model="tiny", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")


class Listener:
    """Remembers what it heard, in order; refuses commits when told to."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.refuse: BatonError | None = None
        self.changed = asyncio.Event()

    def progressed(self, ticket_id: str, num_bytes: int) -> None:
        self._hear("progressed", num_bytes)

    def committed(self, commit: HandoffCommit) -> None:
        if self.refuse is not None:
            raise self.refuse
        self._hear("committed", commit)

    def failed(self, ticket_id: str, error: BatonError) -> None:
        self._hear("failed", error)

    def all(self, kind: str) -> list[Any]:
        return [value for heard, value in self.heard if heard == kind]

    async def until(self, kind: str, count: int = 1) -> list[Any]:
        async with asyncio.timeout(5):
            while len(self.all(kind)) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.all(kind)

    def _hear(self, kind: str, value: Any) -> None:
        self.heard.append((kind, value))
        self.changed.set()


class InMemory:
    """A Transport between the two ends of a `Pair`."""

    name = "memory"

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def reaches(self, offer: TransportOffer) -> bool:
        return offer.name == self.name

    async def listen(self, serve: Serve) -> str | None:
        return "here"

    async def connect(self, address: str) -> FrameChannel:
        return InlineFrames(await self._pair.connect(address), self._pair.config.staging_bytes)

    async def close(self) -> None:
        pass


def make_transport(name: str, staging_bytes: int) -> Transport:
    match name:
        case "shm":
            return Shm(host_id(), staging_bytes)
        case "tcp":
            return Tcp("127.0.0.1:1", staging_bytes)
        case _:
            return Local(staging_bytes)


class Pair:
    """One sender and one receiver. ``wrap`` may put something around the sender's end of a channel."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, config: TransferConfig, transports: Sequence[str], run_blocking: Any
    ) -> None:
        rng = np.random.default_rng(7)
        self.source = NumpyPool(layout, num_blocks)
        self.source.data[:] = rng.integers(0, 256, self.source.data.shape, dtype=np.uint8)
        self.target = NumpyPool(layout, num_blocks)
        self.config = config
        self.run_blocking = run_blocking
        self.channels: list[MemoryChannel] = []
        self.served: list[asyncio.Task[None]] = []
        self.wrap: Callable[[MemoryChannel], ByteChannel] = lambda channel: channel
        self.connect: Connector = self._connect
        self.transports: list[Transport] = [
            InMemory(self) if name == "memory" else make_transport(name, config.staging_bytes) for name in transports
        ]
        self.receiver = Receiver(self.target, config, host_id(), self.transports, run_blocking)
        self.sender = self.new_sender()
        self._tickets = 0

    def new_sender(self, pool: NumpyPool | None = None) -> Sender:
        return Sender(pool or self.source, self.config, self.transports, self.run_blocking)

    async def _connect(self, address: str) -> ByteChannel:
        if address != "here":
            raise WorkerLostError(f"nobody at {address}")
        near, far = channel_pair()
        self.channels.append(near)
        self.served.append(asyncio.ensure_future(self.receiver.serve_frames(InlineFrames(far, 0))))
        return self.wrap(near)

    def ticket(self, block_ids: Sequence[int], **changes: Any) -> Ticket:
        self._tickets += 1
        ticket = Ticket(
            ticket_id=f"t{self._tickets}",
            request_id=f"r{self._tickets}",
            attempt=0,
            worker_id="decode-0",
            epoch=1,
            context_tokens=len(block_ids) * self.target.layout.block_size,
            cached_tokens=0,
            block_ids=tuple(block_ids),
            layout=self.target.layout,
            offers=self.receiver.offers,
            secret=b"s3cret",
            lease_s=5.0,
        )
        return dataclasses.replace(ticket, **changes)

    def expect(self, block_ids: Sequence[int], **changes: Any) -> tuple[Ticket, Listener]:
        ticket, listener = self.ticket(block_ids, **changes), Listener()
        self.receiver.expect(ticket, listener)
        return ticket, listener

    def commit(self, ticket: Ticket, **changes: Any) -> HandoffCommit:
        commit = HandoffCommit(ticket.ticket_id, 42, 0, ticket.layout.num_layers * len(ticket.block_ids))
        return dataclasses.replace(commit, **changes)

    def assert_moved(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        for source, target in zip(source_ids, target_ids, strict=True):
            assert self.source.block(source) == self.target.block(target), (source, target)

    async def close(self) -> None:
        await self.sender.close()
        await self.receiver.close()
        for task in self.served:
            task.cancel()
        await asyncio.gather(*self.served, return_exceptions=True)


MakePair = Callable[..., Awaitable[Pair]]


@pytest.fixture
def layout() -> KVLayout:
    return LAYOUT


@pytest.fixture
async def make_pair() -> AsyncIterator[MakePair]:
    pairs: list[Pair] = []

    async def make(
        layout: KVLayout = LAYOUT,
        num_blocks: int = 16,
        transports: Sequence[str] = ("memory",),
        run_blocking: Any = None,
        **config: Any,
    ) -> Pair:
        pair = Pair(layout, num_blocks, TransferConfig(**config), transports, run_blocking)
        await pair.receiver.start()
        pairs.append(pair)
        return pair

    yield make
    for pair in pairs:
        await pair.close()
