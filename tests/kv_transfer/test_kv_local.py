"""Both ends in one process: who is reached, that the end of one end is heard by the other, and unlike receivers."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.config import TransferConfig
from common.errors import BatonError, HandoffError, LayoutMismatchError, WorkerLostError
from common.handoff import TransportOffer
from kv_transfer.channel import FrameChannel
from kv_transfer.frames import Abort, Piece
from kv_transfer.host import host_id
from kv_transfer.pool import NumpyPool
from kv_transfer.receiver import Receiver
from kv_transfer.transports import local
from kv_transfer.transports.local import Local, frames_pair
from tests.kv_transfer.conftest import LAYOUT, Listener, MakePair, Pair

ELSEWHERE = """
import asyncio, sys
from kv_transfer.transports.local import Local
async def main():
    async def serve(channel): ...
    print(await Local(1 << 20).listen(serve), flush=True)
    await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


@contextmanager
def another_process() -> Iterator[str]:
    """The address at which another process listens."""
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


@contextmanager
def another_loop() -> Iterator[str]:
    """The address at which another event loop of this process listens."""
    loop, transport = asyncio.new_event_loop(), Local(1 << 20)

    async def serve(channel: FrameChannel) -> None:
        await channel.close()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    address = asyncio.run_coroutine_threadsafe(transport.listen(serve), loop).result(5)
    assert address is not None
    try:
        yield address
    finally:
        asyncio.run_coroutine_threadsafe(transport.close(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def receive_all(channel: FrameChannel) -> None:
    while await channel.receive() is not None:
        pass
    await channel.close()


# ── who is reached ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("elsewhere", [another_process, another_loop])
async def test_nobody_else_is_reached(make_pair: MakePair, elsewhere: object) -> None:
    """The next transport is taken instead."""
    pair = await make_pair(transports=("local", "tcp"))
    mine, tcp = pair.receiver.offers
    with elsewhere() as address:  # type: ignore[operator]
        other = dataclasses.replace(mine, address=address)
        transport = pair.transports[0]
        assert transport.reaches(mine)
        assert not transport.reaches(other)
        with pytest.raises(WorkerLostError, match="nobody in this process listens"):
            await transport.connect(address)
        ticket, _ = pair.expect([1], offers=(other, tcp))
        push = await pair.sender.open(ticket, [2])
        assert push.transport == "tcp"
        await push.abort("seen")


async def test_only_offers_of_its_own_name_are_reached(make_pair: MakePair) -> None:
    pair = await make_pair(transports=("local",))
    (mine,) = pair.receiver.offers
    assert pair.transports[0].reaches(TransportOffer("local", mine.address, "another-host"))  # the address is enough
    assert not pair.transports[0].reaches(dataclasses.replace(mine, name="shm"))


async def test_what_has_closed_is_reached_no_more() -> None:
    listeners = len(local._listeners)
    transport = Local(1 << 20)
    address = await transport.listen(receive_all)
    assert address is not None
    await transport.close()
    await transport.close()
    assert not transport.reaches(TransportOffer("local", address))
    with pytest.raises(WorkerLostError, match="any more"):
        await transport.connect(address)
    assert len(local._listeners) == listeners


# ── one end and the other ─────────────────────────────────────────────────────────────────────────


async def test_an_end_is_heard_by_the_other() -> None:
    near, far = frames_pair(1 << 20)
    reading = asyncio.ensure_future(far.receive())
    await near.send(Abort(1, "first"))
    assert await reading == Abort(1, "first")
    await near.send(Abort(2, "second"))
    waiting = asyncio.ensure_future(near.receive())
    await asyncio.sleep(0)
    await near.close()
    assert await waiting is None
    assert await far.receive() == Abort(2, "second")  # what was sent before arrives
    assert await far.receive() is None
    for end in (near, far):
        with pytest.raises(WorkerLostError, match="closed"):
            await end.send(Abort(3, "third"))


@pytest.mark.parametrize("turns", range(4))
async def test_a_listener_that_closes_ends_every_channel(turns: int) -> None:
    """Also one whose other end has not been served yet."""
    transport = Local(1 << 20)
    address = await transport.listen(receive_all)
    assert address is not None
    channel = await transport.connect(address)
    for _ in range(turns):
        await asyncio.sleep(0)
    await transport.close()
    async with asyncio.timeout(1):
        assert await channel.receive() is None


async def test_a_server_that_breaks_ends_its_channel_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def serve(channel: FrameChannel) -> None:
        if await channel.receive() == Abort(1, "break"):
            raise RuntimeError("a bug")
        await channel.send(Abort(2, "served"))

    transport = Local(1 << 20)
    address = await transport.listen(serve)
    assert address is not None
    broken, beside = await transport.connect(address), await transport.connect(address)
    await broken.send(Abort(1, "break"))
    await beside.send(Abort(1, "go on"))
    async with asyncio.timeout(1):
        assert await broken.receive() is None
        assert await beside.receive() == Abort(2, "served")
    assert "a bug" in caplog.text
    await transport.close()


async def test_staging_is_bounded_and_payloads_are_read_only() -> None:
    near, far = frames_pair(1000)
    staged = near.stage(600)
    assert staged is not None
    assert near.stage(401) is None
    staged.buffer[:] = 7
    piece = Piece(1, 1, 0, 0, 1, 0, staged.offset, staged.buffer.data)
    await near.send(piece)
    arrived = await far.receive()
    assert arrived is piece
    payload = await far.payload(piece, 600)
    assert (payload == 7).all()
    with pytest.raises(ValueError, match="read-only"):
        payload[0] = 1
    with pytest.raises(HandoffError, match="a piece of 599 bytes came with 600"):
        await far.payload(piece, 599)
    near.release(staged)
    assert near.stage(1000) is not None
    assert far.stage(1) is None  # only senders stage


# ── unlike receivers ──────────────────────────────────────────────────────────────────────────────


async def test_one_sender_and_unlike_receivers(make_pair: MakePair) -> None:
    """Each gets the same tokens in blocks of its own size; one of another model gets nothing."""
    pair = await make_pair(transports=("local",))
    tokens = 8 * LAYOUT.block_size
    for block_size in (2, 4, 8):
        layout = dataclasses.replace(LAYOUT, block_size=block_size)
        pool = NumpyPool(layout, tokens // block_size)
        receiver = Receiver(pool, TransferConfig(), host_id(), [Local(1 << 20)])
        await receiver.start()
        blocks = tuple(range(tokens // block_size))
        ticket = pair.ticket(blocks, layout=layout, context_tokens=tokens, offers=receiver.offers)
        receiver.expect(ticket, Listener())
        push = await pair.sender.open(ticket, list(range(8)))
        for layer in range(LAYOUT.num_layers):
            push.push(layer, 0, 8)
        await push.commit(pair.commit(ticket))
        for layer in range(LAYOUT.num_layers):
            assert tokens_of(pool, layer) == tokens_of(pair.source, layer, 8)
        await receiver.close()
    stranger = pair.ticket([1], layout=dataclasses.replace(LAYOUT, model="another"))
    with pytest.raises(LayoutMismatchError, match=r"another.*tiny|tiny.*another"):
        await pair.sender.open(stranger, [2])


def tokens_of(pool: NumpyPool, layer: int, num_blocks: int | None = None) -> tuple[bytes, bytes]:
    """(keys, values) of a layer in the order of the tokens: a block has its keys first."""
    blocks = pool.data[layer, :num_blocks]
    halves = blocks.reshape(len(blocks), 2, -1)
    return halves[:, 0].tobytes(), halves[:, 1].tobytes()


async def test_a_killed_neighbour_takes_nobody_with_it(make_pair: MakePair) -> None:
    """Two receivers in one process: one closes half-way, the handoff to the other goes on."""
    one: Pair = await make_pair(transports=("local",))
    other: Pair = await make_pair(transports=("local",))
    ticket, _ = one.expect([1])
    kept, _ = other.expect([3])
    lost_push = await one.sender.open(ticket, [2])
    kept_push = await one.sender.open(kept, [4])
    for push in (lost_push, kept_push):
        push.push(0, 0, 1)
    await one.receiver.close()
    for layer in (1, 2):
        kept_push.push(layer, 0, 1)
    await kept_push.commit(other.commit(kept))
    assert one.source.block(4) == other.target.block(3)
    with pytest.raises(BatonError, match=r"withdrawn|closed"):
        await lost_push.commit(one.commit(ticket))
