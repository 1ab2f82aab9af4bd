"""Pairwise gloo groups."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from common.errors import HandoffError, WorkerLostError
from common.handoff import HandoffCommit
from kv_transfer.transports import group
from kv_transfer.transports.group import Group, GroupMover, is_available
from kv_transfer.transports.joining import Entries, Meeting, _host
from kv_transfer.transports.memory import MemoryChannel
from tests.kv_transfer.beside_cases import LAYOUT, BesideCases, Make, ProcessCases, Rig, mover_threads, until

pytestmark = pytest.mark.skipif(not is_available("gloo"), reason="this PyTorch has no gloo")


class TestGloo(BesideCases):
    @pytest.fixture
    def make(self) -> Make:
        return partial(Group, "gloo")


@pytest.mark.e2e
class TestGlooProcesses(ProcessCases):
    name = "gloo"


async def test_an_operation_that_takes_too_long_ends_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender never says that a piece is coming, so nobody takes it. The next handoff has a new group."""
    rig = Rig(partial(Group, "gloo", operation_s=0.2))
    await rig.start()
    ticket, heard = rig.expect([1])
    push = await rig.sender.open(ticket, [2])

    async def send_nothing(self: MemoryChannel, data: bytes) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(MemoryChannel, "send", send_nothing)
        for layer in range(LAYOUT.num_layers):
            push.push(layer, 0, 1)
        await until(lambda: push.is_over)
    with pytest.raises(WorkerLostError, match="Timed out waiting 200ms"):
        await push.commit(HandoffCommit(ticket.ticket_id, 42, 0, 3))
    async with asyncio.timeout(5):
        await heard.failure.wait()
    await until(lambda: not mover_threads())
    await rig.receivers[0].forget(ticket.ticket_id)
    await rig.round_trip([2], [1])
    assert len(rig.carriers) == 2
    await rig.close()


async def test_other_versions_are_another_transports_business(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are named, and the error is one that makes a sender try its next transport."""
    versions = iter(["torch 2.6", "torch 2.13"])
    monkeypatch.setattr(group, "_versions", lambda backend: next(versions))
    rig = Rig(partial(Group, "gloo"))
    await rig.start()
    ticket, _ = rig.expect([1])
    with pytest.raises(WorkerLostError):
        await rig.sender.open(ticket, [1])
    with pytest.raises(WorkerLostError, match=r"torch 2\.13 here, torch 2\.6 there"):
        await rig.served[0]
    await rig.close()


def test_a_stranger_in_the_group_is_found_out() -> None:
    """Both ends agree on where they are, not on the epoch."""
    ends: list[Entries] = []
    ends += [Entries(lambda entry: ends[1].arrived(entry)), Entries(lambda entry: ends[0].arrived(entry))]
    found: dict[int, Any] = {}

    def meet(rank: int) -> None:
        meeting = Meeting(rank, bytes([rank] * 16), np.empty(64, np.uint8), ends[rank], lambda: "127.0.0.1")
        try:
            found[rank] = GroupMover("gloo", meeting)
        except WorkerLostError as error:
            found[rank] = error.message

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found[1] == "a stranger is at the other end of a new group"
    found[0].close()


def test_entries() -> None:
    sent: list[bytes] = []
    here, there = Entries(sent.append), Entries(sent.append)
    here.set("where", b"\x00\xff")
    there.arrived(sent[0])
    assert there.get("where", 0.0) == b"\x00\xff" == here.get("where", 0.0)
    assert "where" in there
    with pytest.raises(WorkerLostError, match=r"'when' within 0\.01 s"):
        there.get("when", 0.01)
    with pytest.raises(HandoffError, match="of 1"):
        there.arrived(b"x")
    with pytest.raises(HandoffError, match="of 70000"):
        there.arrived(bytes(70_000))

    def wait() -> None:
        with pytest.raises(WorkerLostError):
            there.get("never", 30.0)

    waiting = threading.Thread(target=wait)
    waiting.start()
    there.end()
    waiting.join(5)
    assert not waiting.is_alive()


def test_hosts() -> None:
    assert _host("127.0.0.1:80") == "127.0.0.1"
    assert _host("node-3.pool:5") == "node-3.pool"
    assert _host("[::1]:80") == "::1"
    with pytest.raises(HandoffError, match="host:port, got '::1:80'"):
        _host("::1:80")
