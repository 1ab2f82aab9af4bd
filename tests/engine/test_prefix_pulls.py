"""A pull between two workers' real senders and receivers, over shared memory, without engines: the bytes are those
of the holder, or none count; and both books are as before."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from common.config import TransferConfig
from common.errors import InvalidRequestError
from common.failpoints import Failpoints
from common.handoff import KVLayout, PrefixReply, PrefixRequest
from common.hashing import HASH_UNIT_TOKENS
from common.lifecycle import Tasks
from common.messages import GenerationRequest, PrefixSource, SamplingParams
from common.metrics import WorkerMetrics
from common.workers import ModelInfo, Role, WorkerInfo
from engine.blocks import BlockPool, BlockState
from engine.ports import Exchange
from engine.prefix_cache import PrefixCache
from engine.prefix_pull import PrefixPulls
from engine.prefix_push import PrefixPushes
from engine.sequence import Sequence
from kv_transfer.host import host_id
from kv_transfer.pool import NumpyPool
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transports.shm import Shm

NUM_BLOCKS = 32
PROMPT = tuple(range(100, 200))
LAYERS = 3


class End:
    """One worker's KV, its books, and its ways in and out. It is reached by its name."""

    def __init__(self, name: str, block_size: int, ends: dict[str, End], failpoints: str = "") -> None:
        layout = KVLayout("tiny", LAYERS, 2, 8, block_size, "float32", total_kv_heads=2)
        model = ModelInfo("tiny", "tiny", 1000, 4096, (0,))
        self.info = WorkerInfo(name, Role.BOTH, 1, "h", "h", (1,), name, model, layout, 99, 4096, HASH_UNIT_TOKENS)
        config, transport = TransferConfig(retries=1), Shm(host_id(), 1 << 20)
        broken = Failpoints({"piece": failpoints} if failpoints else {})
        self.kv = NumpyPool(layout, NUM_BLOCKS)
        self.books = BlockPool(NUM_BLOCKS, block_size, PrefixCache(block_size))
        self.metrics = WorkerMetrics("both")
        self.receiver = Receiver(self.kv, config, host_id(), [transport])
        self.sender = Sender(self.kv, config, [transport], failpoints=broken)
        self.pushes = PrefixPushes(self.info, self.books, self.sender, self.metrics, Failpoints(), lambda: None)
        self.tasks = Tasks()
        exchange = Exchange(self.sender, self.receiver, self)
        self.pulls = PrefixPulls(self.info, exchange, 1.0, self.tasks, self.metrics, self._ended)
        self.ended: asyncio.Queue[int] = asyncio.Queue()
        self._ends = ends
        ends[name] = self

    def _ended(self, sequence: Sequence, num_tokens: int) -> None:
        self.ended.put_nowait(num_tokens)

    async def send_prefix(self, address: str, request: PrefixRequest) -> PrefixReply:
        return await self._ends[address].pushes.send(request)

    def sequence(self, name: str) -> Sequence:
        source = PrefixSource("holder", "holder", 96)
        request = GenerationRequest(name, PROMPT, SamplingParams(4), prefix_source=source)
        return Sequence(request, "tiny", asyncio.get_running_loop().time())

    def compute(self) -> None:
        """The KV of the prompt, made up, is in the cache."""
        sequence = self.sequence("earlier")
        holding = self.books.allocate("earlier", self.books.blocks_for(100), BlockState.RUNNING, 0.0)
        assert holding is not None
        self.kv.data[:] = np.random.default_rng(7).integers(0, 256, self.kv.data.shape, dtype=np.uint8)
        self.books.publish("earlier", PROMPT, sequence.root, 100)
        self.books.release("earlier")

    async def pull(self, cached: int, end: int) -> tuple[Sequence, int]:
        """Pulls tokens ``cached`` to ``end`` into new blocks."""
        sequence = self.sequence("r")
        holding = self.books.allocate("r#0", self.books.blocks_for(100), BlockState.RESERVED, 0.0)
        assert holding is not None
        sequence.block_ids, sequence.num_computed, sequence.num_pulling = holding.block_ids, cached, end - cached
        self.pulls.begin(sequence)
        async with asyncio.timeout(10):
            return sequence, await self.ended.get()

    def tokens(self, block_ids: list[int], first: int, end: int) -> np.ndarray[Any, Any]:
        """KV of tokens, uint8 [layers, halves, tokens, bytes]."""
        size = self.info.layout.block_size
        shaped = self.kv.data[:, block_ids].reshape(LAYERS, len(block_ids), 2, size, -1)
        return shaped.swapaxes(1, 2).reshape(LAYERS, 2, len(block_ids) * size, -1)[:, :, first:end]


@asynccontextmanager
async def two_ends(holder_block: int, puller_block: int, failpoints: str = "") -> AsyncIterator[tuple[End, End]]:
    ends: dict[str, End] = {}
    holder, puller = End("holder", holder_block, ends, failpoints), End("puller", puller_block, ends)
    for end in (holder, puller):
        await end.receiver.start()
    holder.compute()
    yield holder, puller
    ledger = holder.books.ledger("holder", Role.BOTH, 0.0)
    assert (ledger.holders, ledger.free + ledger.cached) == ((), NUM_BLOCKS)
    for end in (puller, holder):
        await end.tasks.close()
        await end.sender.close()
        await end.receiver.close()


@pytest.mark.parametrize(("holder_block", "puller_block"), [(16, 16), (8, 16), (16, 8)])
async def test_the_tokens_that_are_missing_come(holder_block: int, puller_block: int) -> None:
    async with two_ends(holder_block, puller_block) as (holder, puller):
        before = puller.kv.data.copy()
        sequence, came = await puller.pull(32, 96)
        assert came == 64
        source = holder.books.match(PROMPT, sequence.root, 96)
        assert (puller.tokens(sequence.block_ids, 32, 96) == holder.tokens(source, 32, 96)).all()
        untouched = [
            b for b in range(NUM_BLOCKS) if b not in sequence.block_ids[32 // puller_block : 96 // puller_block]
        ]
        assert (puller.kv.data[:, untouched] == before[:, untouched]).all()
        num_bytes = 64 * puller.info.layout.block_bytes // puller_block
        assert puller.pulls.received_bytes == holder.pushes.sent_bytes == num_bytes
        assert puller.metrics.pulled_tokens._value.get() == 64


async def test_a_prefix_may_end_within_a_block_of_the_holder() -> None:
    async with two_ends(32, 16) as (holder, puller):
        sequence, came = await puller.pull(32, 80)
        assert came == 48
        source = holder.books.match(PROMPT, sequence.root, 96)
        assert (puller.tokens(sequence.block_ids, 32, 80) == holder.tokens(source, 32, 80)).all()


async def test_bytes_that_do_not_verify_are_not_believed() -> None:
    async with two_ends(16, 16, "corrupt") as (_, puller):
        _, came = await puller.pull(32, 96)
        assert came == 0
        assert (puller.metrics.pulls._value.get(), puller.metrics.pulls_failed._value.get()) == (0, 1)
        assert puller.receiver.counters.corrupt > 0


async def test_bytes_that_stay_away_are_not_waited_for() -> None:
    """The first piece is on its way for 30 s: the puller gives up after its patience, and so does the holder."""
    async with two_ends(16, 16, "delay:30") as (holder, puller):
        started = asyncio.get_running_loop().time()
        _, came = await puller.pull(32, 96)
        assert came == 0
        assert 1.0 <= asyncio.get_running_loop().time() - started < 3.0
        async with asyncio.timeout(3):
            while holder.pushes.num_open:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)


async def test_another_salt_shares_nothing_and_a_ticket_must_fit_its_tokens() -> None:
    async with two_ends(16, 16) as (holder, puller):
        sequence = puller.sequence("r")
        sequence.block_ids = list(range(6))
        ticket = puller.pulls._ticket(sequence, 0, 96)
        assert await holder.pushes.send(PrefixRequest(ticket, PROMPT[:96], "another")) == PrefixReply(0)
        with pytest.raises(InvalidRequestError, match="tokens 0 to 96, got 95 tokens"):
            await holder.pushes.send(PrefixRequest(ticket, PROMPT[:95]))
        with pytest.raises(InvalidRequestError, match="tokens 96 to 96, got 96"):
            await holder.pushes.send(PrefixRequest(dataclasses.replace(ticket, cached_tokens=96), PROMPT[:96]))
