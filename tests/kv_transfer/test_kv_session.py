"""A handoff that goes well, and what may come twice or out of order without harm."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest

from common.errors import HandoffError
from common.handoff import HandoffReceipt
from common.messages import FinishReason
from engine.ports import KVPush, KVReceiver, KVSender
from kv_transfer.blocking import run_inline
from kv_transfer.frames import (
    TRANSFER_VERSION,
    Error,
    Open,
    OpenAck,
    Piece,
    PieceAck,
    checksum,
    decode,
    encode,
    shard_seed,
)
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transports.inline import InlineFrames
from kv_transfer.transports.memory import channel_pair


@pytest.mark.parametrize("transports", [("memory",), ("local",), ("shm",), ("tcp",)])
async def test_blocks_arrive_layer_by_layer(make_pair: Any, transports: Any) -> None:
    pair = await make_pair(transports=transports)
    source, target = [3, 9, 1, 0], [5, 2, 7, 15]
    ticket, listener = pair.expect(target)
    push = await pair.sender.open(ticket, source)
    assert push.transport == transports[0]
    for layer in range(3):
        push.push(layer, 0, 3)
    for layer in range(3):
        push.push(layer, 3, 1)
    receipt = await push.commit(pair.commit(ticket, token=11, index=4, finish=FinishReason.STOP))
    moved = 4 * pair.target.layout.block_bytes
    assert receipt == HandoffReceipt(ticket.ticket_id, 12, moved)
    assert listener.all("committed") == [pair.commit(ticket, token=11, index=4, finish=FinishReason.STOP)]
    assert sum(listener.all("progressed")) == moved
    assert not listener.all("failed")
    pair.assert_moved(source, target)
    untouched = set(range(16)) - set(target)
    assert not pair.target.data[:, sorted(untouched)].any()
    for counters in (pair.sender.counters, pair.receiver.counters):
        assert (counters.num_bytes, counters.pieces, counters.handoffs, counters.failures) == (moved, 12, 1, 0)
    await pair.receiver.forget(ticket.ticket_id)
    await push.abort("harmless after a commit")
    assert not listener.all("failed")


async def test_a_ticket_without_blocks_is_a_commit_only(make_pair: Any) -> None:
    pair = await make_pair()
    ticket, listener = pair.expect([])
    push = await pair.sender.open(ticket, [])
    receipt = await push.commit(pair.commit(ticket))
    assert receipt == HandoffReceipt(ticket.ticket_id, 0, 0)
    assert len(listener.all("committed")) == 1


async def test_copies_run_in_line_when_told_to(make_pair: Any) -> None:
    pair = await make_pair(run_blocking=run_inline)
    ticket, _ = pair.expect([1, 2])
    push = await pair.sender.open(ticket, [4, 5])
    for layer in (2, 0, 1):
        push.push(layer, 0, 2)
    await push.commit(pair.commit(ticket))
    pair.assert_moved([4, 5], [1, 2])


async def test_pieces_in_any_order_and_more_than_once(make_pair: Any) -> None:
    pair = await make_pair()
    source, target = list(range(8)), list(range(8, 16))
    ticket, _ = pair.expect(target)
    push = await pair.sender.open(ticket, source)
    runs = [(layer, first, 2) for layer in range(3) for first in range(7)]
    random.Random(3).shuffle(runs)
    for run in runs:
        push.push(*run)
    receipt = await push.commit(pair.commit(ticket))
    assert receipt.num_pieces == 24
    assert receipt.num_bytes == 8 * ticket.layout.block_bytes
    pair.assert_moved(source, target)
    assert pair.receiver.counters.pieces == 24
    assert pair.receiver.counters.duplicates == pair.sender.counters.pieces - 24 > 0


async def test_pushing_beyond_the_ticket_is_refused_at_once(make_pair: Any) -> None:
    pair = await make_pair()
    ticket, _ = pair.expect([1, 2])
    push = await pair.sender.open(ticket, [1, 2])
    with pytest.raises(HandoffError, match="3 layers of 2 blocks, cannot push blocks 1 to 3 of layer 0"):
        push.push(0, 1, 2)
    with pytest.raises(HandoffError, match="layer 3"):
        push.push(3, 0, 1)


async def test_one_channel_carries_all_handoffs_of_a_pair(make_pair: Any) -> None:
    pair = await make_pair()
    tickets = [pair.expect([number])[0] for number in range(8)]
    pushes = await asyncio.gather(*(pair.sender.open(ticket, [9]) for ticket in tickets))
    for push in pushes:
        for layer in range(3):
            push.push(layer, 0, 1)
    await asyncio.gather(*(push.commit(pair.commit(push.ticket)) for push in pushes))
    assert len(pair.channels) == 1
    pair.assert_moved([9] * 8, range(8))


@pytest.mark.parametrize("transports", [("memory",), ("local",), ("shm",), ("tcp",)])
async def test_concurrent_transfers_of_random_blocks(make_pair: Any, transports: Any) -> None:
    """32 handoffs at once into one receiver, through staging that holds a fraction of them."""
    pair = await make_pair(num_blocks=512, transports=transports, staging_bytes=1 << 16)
    rng = random.Random(11)
    targets = rng.sample(range(512), 32 * 15)

    async def handoff(number: int) -> None:
        count = rng.randrange(1, 16)
        source = [rng.randrange(512) for _ in range(count)]
        target = targets[number * 15 : number * 15 + count]
        ticket, _ = pair.expect(target)
        push = await pair.sender.open(ticket, source)
        start = 0
        while start < count:  # chunks of a prompt
            size = rng.randrange(1, count - start + 1)
            for layer in range(3):
                push.push(layer, start, size)
                await asyncio.sleep(0)
            start += size
        await push.commit(pair.commit(ticket))
        pair.assert_moved(source, target)
        await pair.receiver.forget(ticket.ticket_id)

    await asyncio.gather(*(handoff(number) for number in range(32)))
    assert pair.receiver.counters.handoffs == 32
    assert pair.receiver.counters.num_bytes == pair.sender.counters.num_bytes


async def test_both_ends_fit_the_seams_of_the_roles(make_pair: Any) -> None:
    """mypy checks the assignments; that the names exist is checked here as well."""
    pair = await make_pair()
    sender: KVSender = cast(Sender, pair.sender)
    receiver: KVReceiver = cast(Receiver, pair.receiver)
    ticket, _ = pair.expect([1])
    push: KVPush = await sender.open(ticket, [1])
    await push.abort("seen enough")
    for seam, real in ((KVSender, sender), (KVReceiver, receiver), (KVPush, push)):
        assert all(hasattr(real, name) for name in (*vars(seam), *seam.__annotations__) if not name.startswith("_"))


async def test_bytes_in_flight_stay_within_staging(make_pair: Any) -> None:
    """Nobody acknowledges: the sender stops after as many bytes as staging has."""
    pair = await make_pair(num_blocks=600, staging_bytes=1 << 16, run_blocking=run_inline)
    near, far = channel_pair()

    async def connect(address: str) -> Any:
        return near

    pair.connect = connect
    ticket = pair.ticket(range(600))
    opening = asyncio.ensure_future(pair.sender.open(ticket, range(600)))
    frame = decode(await far.receive())
    assert isinstance(frame, Open)
    await far.send(encode(OpenAck(frame.stream, True)))
    push = await opening
    block_bytes = ticket.layout.block_layer_bytes
    for layer in range(3):
        push.push(layer, 0, 600)

    most = received = 0
    while received < 1800:
        for _ in range(100):  # copies run in line: by now the sender has done all that it may
            await asyncio.sleep(0)
        frames = [decode(far.receive_nowait()) for _ in range(far.num_waiting)]
        pieces = [frame for frame in frames if isinstance(frame, Piece)]
        assert len(pieces) == len(frames)
        assert all(len(piece.payload) == piece.count * block_bytes for piece in pieces)
        most = max(most, sum(len(piece.payload) for piece in pieces))
        received += sum(piece.count for piece in pieces)
        for piece in pieces:
            await far.send(encode(PieceAck(piece.sequence)))
    assert (1 << 16) - (1 << 14) <= most <= 1 << 16
    await push.abort("enough")


async def test_a_short_prompt_is_not_held_up_by_a_long_one(make_pair: Any) -> None:
    pair = await make_pair(num_blocks=1200, staging_bytes=1 << 16)
    long_ticket, long_listener = pair.expect(range(1000))
    short_ticket, _ = pair.expect(range(1000, 1004))
    long_push = await pair.sender.open(long_ticket, range(1000))
    short_push = await pair.sender.open(short_ticket, range(4))
    for layer in range(3):
        long_push.push(layer, 0, 1000)
    for layer in range(3):
        short_push.push(layer, 0, 4)
    await short_push.commit(pair.commit(short_ticket))
    assert len(long_listener.all("progressed")) <= 12  # of 94 frames
    await long_push.commit(pair.commit(long_ticket))
    pair.assert_moved(range(1000), range(1000))


async def test_reopening_keeps_what_has_arrived(make_pair: Any) -> None:
    """The channel dies half-way; until the listener forgets the ticket, a retry goes on from there."""
    pair = await make_pair()
    ticket, listener = pair.expect([1, 2, 3])
    first = await pair.sender.open(ticket, [4, 5, 6])
    first.push(0, 0, 3)
    await listener.until("progressed")
    pair.channels[0].cut()
    await listener.until("failed")
    second = await pair.sender.open(ticket, [4, 5, 6])
    for layer in range(3):
        second.push(layer, 0, 3)
    receipt = await second.commit(pair.commit(ticket))
    assert receipt.num_pieces == 9
    assert pair.receiver.counters.duplicates == 3
    pair.assert_moved([4, 5, 6], [1, 2, 3])


async def test_a_second_opening_on_the_same_channel_replaces_the_first(make_pair: Any) -> None:
    pair = await make_pair()
    ticket, listener = pair.expect([1])
    near, far = channel_pair()
    served = asyncio.ensure_future(pair.receiver.serve_frames(InlineFrames(far, 0)))
    await near.send(encode(Open(1, TRANSFER_VERSION, 1, ticket.secret, ticket.ticket_id, ticket.layout)))
    await near.send(encode(Open(2, TRANSFER_VERSION, 1, ticket.secret, ticket.ticket_id, ticket.layout)))
    assert [decode(await near.receive()) for _ in range(2)] == [OpenAck(1, True), OpenAck(2, True)]
    payload = bytes(ticket.layout.block_layer_bytes)
    for sequence, stream in ((1, 1), (2, 2)):
        digest = checksum(shard_seed(ticket.ticket_id, ticket.secret, stream, 0), 0, 0, 1)
        digest.update(payload)
        await near.send(encode(Piece(stream, sequence, 0, 0, 1, digest.intdigest(), -1, payload)))
        assert decode(await near.receive()) == PieceAck(sequence)
    assert (pair.receiver.counters.stale, pair.receiver.counters.pieces) == (1, 1)
    assert not listener.all("failed")
    await near.send(encode(Open(2, TRANSFER_VERSION, 1, ticket.secret, ticket.ticket_id, ticket.layout)))
    answer = decode(await near.receive())
    assert isinstance(answer, Error)
    assert "stream 2 cannot be opened" in answer.message
    await near.close()
    await served
