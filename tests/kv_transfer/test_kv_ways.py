"""Which of several ways a handoff takes, on virtual time: one that does not work is not waited for every time, and
taken again when it works."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from common.config import TransferConfig
from common.errors import BatonError, WorkerLostError
from common.handoff import TransportOffer
from kv_transfer.blocking import run_inline
from kv_transfer.channel import FrameChannel
from kv_transfer.sender import CONNECT_TIMEOUT_S, Sender
from sim.loop import run
from tests.kv_transfer.conftest import LAYOUT, InMemory, Pair

T = TypeVar("T")

SOON_S = 0.1


class Moody(InMemory):
    """A way that hangs, refuses, or works, as told."""

    name = "moody"

    def __init__(self, pair: Pair, mood: str) -> None:
        super().__init__(pair)
        self.mood = mood
        self.num_tries = 0

    async def connect(self, address: str) -> FrameChannel:
        self.num_tries += 1
        if self.mood == "hangs":
            await asyncio.Event().wait()
        if self.mood == "refuses":
            raise WorkerLostError("nobody listens")
        return await super().connect(address)


class Ways:
    """A sender that prefers the moody way to one that works."""

    def __init__(self, mood: str) -> None:
        self.pair = Pair(LAYOUT, 16, TransferConfig(), ["memory"], run_inline)
        self.moody = Moody(self.pair, mood)
        self.sender = Sender(self.pair.source, self.pair.config, [self.moody, *self.pair.transports], run_inline)

    @property
    def offers(self) -> tuple[TransportOffer, ...]:
        return TransportOffer("moody", "here"), *self.pair.receiver.offers

    async def hand_off(self) -> tuple[str, float]:
        return await self.hand_off_blocks(0)

    async def hand_off_blocks(self, block: int) -> tuple[str, float]:
        """Hands off one block, to where it lies here. The way that it took, and for how long it was being opened.
        Raises what broke it."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        ticket, _ = self.pair.expect([block], offers=self.offers)
        try:
            push = await self.sender.open(ticket, [block])
            took_s = loop.time() - started
            for layer in range(LAYOUT.num_layers):
                push.push(layer, 0, 1)
            await push.commit(self.pair.commit(ticket))
        finally:
            await self.pair.receiver.forget(ticket.ticket_id)
        self.pair.assert_moved([block], [block])
        return push.transport, took_s

    async def break_channels(self) -> None:
        for channel in self.pair.channels:
            await channel.close()
        self.pair.channels.clear()
        await asyncio.sleep(SOON_S)


def story(mood: str, tell: Callable[[Ways], Awaitable[T]]) -> T:
    async def main() -> T:
        ways = Ways(mood)
        await ways.pair.receiver.start()
        try:
            return await tell(ways)
        finally:
            await ways.sender.close()
            await ways.pair.close()

    return run(main())


def test_a_way_that_hangs_is_waited_for_by_few(caplog: pytest.LogCaptureFixture) -> None:
    """Ten minutes with a handoff every second: those that waited, and the same after it works again."""

    async def tell(ways: Ways) -> None:
        loop = asyncio.get_running_loop()
        waited: list[float] = []
        while loop.time() < 600:
            transport, took_s = await ways.hand_off()
            assert transport == "memory"
            assert took_s in (0.0, pytest.approx(CONNECT_TIMEOUT_S))
            if took_s:
                waited.append(loop.time())
            await asyncio.sleep(1.0)
        assert ways.moody.num_tries == len(waited)
        pauses = [round(later - earlier) for earlier, later in itertools.pairwise(waited)]
        # The next one, then 1, 2, 4 … 60 s of penalty, and each time a second at most until a handoff tries, and 5 s
        # until that has failed.
        limits = [6, 7, 8, 10, 14, 22, 38, *[66] * 20]
        assert len(waited) > 7
        assert all(limit <= pause + 1 <= limit + 2 for pause, limit in zip(pauses, limits, strict=False)), pauses
        assert ways.sender.counters.fallbacks == ways.sender.counters.handoffs > 400
        ways.moody.mood = "works"
        await asyncio.sleep(60.0)
        before = ways.sender.counters.fallbacks
        assert [await ways.hand_off() for _ in range(3)] == [("moody", 0.0)] * 3
        assert ways.sender.counters.fallbacks == before
        # It has shown that it works: one failure is forgiven again.
        ways.moody.mood = "refuses"
        await ways.break_channels()
        assert (await ways.hand_off())[0] == "memory"
        ways.moody.mood = "works"
        await asyncio.sleep(1.0)
        assert (await ways.hand_off())[0] == "moody"

    with caplog.at_level(logging.WARNING, "kv_transfer"):
        story("hangs", tell)
    said = [record.getMessage() for record in caplog.records]
    assert sum("passed over for" in text for text in said) >= 7
    assert any("falls back to memory: no moody connection to here within 5.0 s" in text for text in said)
    assert any("falls back to memory: moody is passed over after failures" in text for text in said)


def test_handoffs_that_fail_together_cost_a_second_at_most() -> None:
    """However many of them waited for the same connection."""

    async def tell(ways: Ways) -> None:
        plan = [ways.hand_off_blocks(number) for number in range(8)]
        assert await asyncio.gather(*plan) == [("memory", pytest.approx(CONNECT_TIMEOUT_S))] * 8
        assert ways.moody.num_tries == 1
        ways.moody.mood = "works"
        await asyncio.sleep(1.0)
        assert await ways.hand_off() == ("moody", 0.0)

    story("hangs", tell)


def test_a_peer_that_is_gone_is_not_held_against_its_ways() -> None:
    async def tell(ways: Ways) -> None:
        other = ways.pair.transports[0]
        assert isinstance(other, InMemory)

        async def refuse(address: str) -> FrameChannel:
            raise WorkerLostError(f"nobody at {address}")

        connect, other.connect = other.connect, refuse  # type: ignore[method-assign]
        for _ in range(20):
            with pytest.raises(WorkerLostError):
                await ways.hand_off()
        other.connect = connect  # type: ignore[method-assign]
        ways.moody.mood = "works"
        assert await ways.hand_off() == ("moody", 0.0)

    story("refuses", tell)


def test_a_way_whose_links_break_in_service_is_passed_over_too() -> None:
    """It connects every time, and never delivers anything."""

    async def tell(ways: Ways) -> None:
        for _ in range(2):
            ways.moody.mood = "works"
            ticket, _ = ways.pair.expect([0, 1], offers=ways.offers)
            push = await ways.sender.open(ticket, [14, 15])
            assert push.transport == "moody"
            await ways.break_channels()
            with pytest.raises(BatonError):
                await push.commit(ways.pair.commit(ticket))
            await ways.pair.receiver.forget(ticket.ticket_id)
        assert (await ways.hand_off())[0] == "memory"
        await asyncio.sleep(1.0)
        assert (await ways.hand_off())[0] == "moody"

    story("works", tell)
