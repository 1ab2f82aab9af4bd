"""Blocks that go from pool to pool with no copy between: nobody reads or writes them after their owner was told so."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from common.errors import HandoffError, WorkerLostError
from kv_transfer.channel import DirectFrames
from kv_transfer.frames import INLINE, Abort, Piece
from kv_transfer.transports.tcp import TcpFrames
from tests.kv_transfer.conftest import LAYOUT, Pair

BLOCK_BYTES, NUM_BLOCKS = 100_000, 8
SIZE = BLOCK_BYTES * NUM_BLOCKS


@pytest.fixture
async def ends() -> AsyncIterator[tuple[TcpFrames, TcpFrames]]:
    """Sender and receiver, with so little room between them that no payload fits."""
    sockets = socket.socketpair()
    for sock in sockets:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    near, far = TcpFrames(sockets[0], 4 * SIZE), TcpFrames(sockets[1], 0)
    yield near, far
    await asyncio.gather(near.close(), far.close())


def blocks(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)


def views(pool: np.ndarray) -> list[memoryview]:
    return [row.data for row in pool]


def piece(sequence: int = 1) -> Piece:
    return Piece(1, sequence, 0, 0, NUM_BLOCKS, 99, INLINE)


async def send(end: TcpFrames, pool: np.ndarray, sequence: int = 1) -> None:
    staged = end.stage(SIZE)
    assert staged is not None
    await end.send_parts(piece(sequence), staged, views(pool))


async def begin(end: TcpFrames, pool: np.ndarray) -> asyncio.Task[None]:
    """A send that has filled what is between the ends, and waits."""
    sending = asyncio.ensure_future(send(end, pool))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not sending.done()
    return sending


async def test_the_bytes_arrive_where_they_belong(ends: tuple[TcpFrames, TcpFrames]) -> None:
    near, far = ends
    assert isinstance(near, DirectFrames)
    source, target = blocks(1), blocks(2)
    sending = await begin(near, source)
    assert await far.receive() == piece()
    assert await far.receive_parts(piece(), views(target), lambda: True)
    await sending
    assert (target == source).all()
    await near.send(Abort(1, "bye"))
    assert await far.receive() == Abort(1, "bye")


async def test_a_waiting_sender_does_not_read_the_pool(ends: tuple[TcpFrames, TcpFrames]) -> None:
    near, far = ends
    source, target = blocks(1), blocks(2)
    sent = source.copy()
    sending = await begin(near, source)
    source[:] = 0  # the next owner of these blocks
    assert await far.receive() == piece()
    assert await far.receive_parts(piece(), views(target), lambda: True)
    await sending
    assert (target == sent).all()


async def test_a_receiver_writes_only_while_the_ticket_is_live(ends: tuple[TcpFrames, TcpFrames]) -> None:
    near, far = ends
    source, target = blocks(1), np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    sending = await begin(near, source)
    assert await far.receive() == piece()
    asked = 0

    def live() -> bool:
        nonlocal asked
        asked += 1
        return asked <= 2

    assert not await far.receive_parts(piece(), views(target), live)
    written = np.count_nonzero(target.any(axis=1))
    assert 0 < written < NUM_BLOCKS
    before = target.copy()
    # What is left of it is skipped, and the channel goes on.
    following = asyncio.ensure_future(far.receive())
    await sending
    second = asyncio.ensure_future(send(near, source, sequence=2))
    assert await following == piece(2)
    assert (target == before).all()
    assert await far.receive_parts(piece(2), views(target), lambda: True)
    await second
    assert (target == source).all()


async def test_a_payload_that_nobody_takes_is_skipped(ends: tuple[TcpFrames, TcpFrames]) -> None:
    near, far = ends
    sending = await begin(near, blocks(1))
    assert await far.receive() == piece()
    following = asyncio.ensure_future(far.receive())
    await sending
    await near.send(Abort(1, "bye"))
    assert await following == Abort(1, "bye")


@pytest.mark.parametrize("count", [NUM_BLOCKS - 1, NUM_BLOCKS + 1])
async def test_a_payload_of_another_length_is_refused(ends: tuple[TcpFrames, TcpFrames], count: int) -> None:
    near, far = ends
    sending = await begin(near, blocks(1))
    assert await far.receive() == piece()
    target = np.zeros((count, BLOCK_BYTES), dtype=np.uint8)
    with pytest.raises(HandoffError, match=f"a piece of {count * BLOCK_BYTES} bytes came with {SIZE}"):
        await far.receive_parts(piece(), views(target), lambda: True)
    assert not target.any()
    sending.cancel()
    await asyncio.wait([sending])


async def test_a_sender_that_dies_in_the_middle(ends: tuple[TcpFrames, TcpFrames]) -> None:
    near, far = ends
    sending = await begin(near, blocks(1))
    assert await far.receive() == piece()
    sending.cancel()
    await asyncio.wait([sending])
    with pytest.raises(WorkerLostError, match="ended in the middle of a frame"):
        await far.receive_parts(piece(), views(blocks(2)), lambda: True)


@pytest.fixture(params=[1, 1 << 30], ids=["direct", "copied"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("kv_transfer.copies.DIRECT_BYTES", request.param)
    return "direct" if request.param == 1 else "copied"


async def test_a_withdrawn_ticket_is_not_written_to_any_more(make_pair: Any, way: str) -> None:
    """Its blocks belong to somebody else while its payload is still coming."""
    layout = dataclasses.replace(LAYOUT, num_layers=1, head_dim=4096)
    pair: Pair = await make_pair(transports=["tcp"], layout=layout, num_blocks=16)
    for round_number in range(30):
        ticket, _ = pair.expect(range(16))
        push = await pair.sender.open(ticket, range(16))
        push.push(0, 0, 16)
        for _ in range(round_number % 10):
            await asyncio.sleep(0)
        await pair.receiver.forget(ticket.ticket_id)
        pair.target.data[:] = round_number
        with pytest.raises(HandoffError):
            await push.commit(pair.commit(ticket))
        assert (pair.target.data == round_number).all()
    ticket, _ = pair.expect(range(16))
    push = await pair.sender.open(ticket, range(16))
    push.push(0, 0, 16)
    await push.commit(pair.commit(ticket))
    pair.assert_moved(range(16), range(16))


async def test_an_aborted_push_does_not_read_any_more(make_pair: Any, way: str) -> None:
    """The sender's blocks are overwritten as soon as `abort` has returned; what was sent before is what counts."""
    layout = dataclasses.replace(LAYOUT, num_layers=1, head_dim=4096)
    pair: Pair = await make_pair(transports=["tcp"], layout=layout, num_blocks=16)
    original = pair.source.data.copy()
    for round_number in range(20):
        ticket, _ = pair.expect(range(16))
        push = await pair.sender.open(ticket, range(16))
        push.push(0, 0, 16)
        for _ in range(round_number % 10):
            await asyncio.sleep(0)
        await push.abort("client left")
        pair.source.data[:] = 0
        await pair.receiver.forget(ticket.ticket_id)
        pair.source.data[:] = original
    assert pair.receiver.counters.corrupt == 0
