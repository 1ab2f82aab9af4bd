"""What ends a handoff early: what the sender is told, what the listener hears, what is not written."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from common.errors import (
    ConfigError,
    DrainingError,
    HandoffError,
    IntegrityError,
    LayoutMismatchError,
    TicketError,
    WorkerLostError,
)
from common.handoff import TransportOffer
from kv_transfer.blocking import uninterrupted
from kv_transfer.frames import (
    TRANSFER_VERSION,
    Abort,
    Commit,
    Error,
    Frame,
    Open,
    OpenAck,
    Piece,
    Receipt,
    decode,
    encode,
)
from kv_transfer.pool import NumpyPool
from kv_transfer.transports.inline import InlineFrames
from kv_transfer.transports.memory import MemoryChannel, channel_pair


class Gate:
    """A RunBlocking that holds each copy until it is let through."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()

    def __call__(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._copy(function, *args))

    async def _copy(self, function: Callable[..., Any], *args: Any) -> Any:
        self.entered.set()
        await self.open.wait()
        return function(*args)


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()  # a failed test must not leave a copy that is waited for


class Tampered:
    """The sender's end of a channel on which ``change`` may alter or swallow what is sent."""

    def __init__(self, channel: MemoryChannel, change: Callable[[Frame], Frame | None]) -> None:
        self._channel = channel
        self._change = change

    async def send(self, data: bytes) -> None:
        frame = self._change(decode(data))
        if frame is not None:
            await self._channel.send(encode(frame))

    async def receive(self) -> bytes:
        return await self._channel.receive()

    async def close(self) -> None:
        await self._channel.close()


async def push_all(pair: Any, ticket: Any, source: list[int]) -> Any:
    push = await pair.sender.open(ticket, source)
    for layer in range(ticket.layout.num_layers):
        push.push(layer, 0, len(source))
    return push


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never came true")


async def assert_works(pair: Any) -> None:
    """The pair is as good as new: another ticket goes through."""
    ticket, _ = pair.expect([0, 1])
    push = await push_all(pair, ticket, [14, 15])
    await push.commit(pair.commit(ticket))
    pair.assert_moved([14, 15], [0, 1])
    await pair.receiver.forget(ticket.ticket_id)


# ── tickets ───────────────────────────────────────────────────────────────────────────────────────


async def test_wrong_secret(make_pair: Any) -> None:
    pair = await make_pair()
    ticket, listener = pair.expect([1])
    with pytest.raises(TicketError, match="secret"):
        await pair.sender.open(dataclasses.replace(ticket, secret=b"guess"), [2])
    assert not listener.heard  # a stranger cannot end a handoff
    push = await push_all(pair, ticket, [2])
    await push.commit(pair.commit(ticket))


async def test_unknown_ticket(make_pair: Any) -> None:
    pair = await make_pair()
    with pytest.raises(TicketError, match="ticket t1 is not known here"):
        await pair.sender.open(pair.ticket([1]), [2])
    await assert_works(pair)


async def test_a_ticket_is_expected_once(make_pair: Any) -> None:
    pair = await make_pair()
    ticket, listener = pair.expect([1])
    with pytest.raises(TicketError, match="expected already"):
        pair.receiver.expect(ticket, listener)


async def test_a_ticket_is_open_on_one_channel_at_a_time(make_pair: Any) -> None:
    pair = await make_pair()
    ticket, listener = pair.expect([1])
    other = pair.new_sender()
    push = await push_all(pair, ticket, [2])
    with pytest.raises(TicketError, match="open on another channel"):
        await other.open(ticket, [3])
    await push.commit(pair.commit(ticket))
    with pytest.raises(TicketError, match="committed already"):
        await other.open(ticket, [3])
    await other.close()
    assert [kind for kind, _ in listener.heard if kind != "progressed"] == ["committed"]


async def test_block_counts_must_agree(make_pair: Any) -> None:
    pair = await make_pair()
    ticket, listener = pair.expect([1, 2])
    with pytest.raises(HandoffError, match="t1 takes 2 blocks of 4 tokens, 3 were given"):
        await pair.sender.open(ticket, [1, 2, 3])
    forged = dataclasses.replace(ticket, block_ids=(1, 2, 3))
    with pytest.raises(HandoffError, match="has 3 blocks of 4 tokens for tokens 0 to 8, which take 2"):
        await pair.sender.open(forged, [1, 2, 3])
    assert not listener.heard
    forged = dataclasses.replace(forged, context_tokens=12)
    with pytest.raises(HandoffError, match="for 2 blocks, the sender has 3"):
        await pair.sender.open(forged, [1, 2, 3])
    assert len(listener.all("failed")) == 1


async def test_layout_mismatch_names_both_sides(make_pair: Any, layout: Any) -> None:
    pair = await make_pair()
    ticket, listener = pair.expect([1])
    other = pair.new_sender(NumpyPool(dataclasses.replace(layout, block_size=8, model="other"), 4))
    with pytest.raises(LayoutMismatchError, match="model is 'other' and 'tiny'"):
        await other.open(ticket, [0])
    forged = dataclasses.replace(ticket, layout=other._pool.layout, context_tokens=8)
    with pytest.raises(LayoutMismatchError, match="model is 'other' and 'tiny'"):  # the receiver's word
        await other.open(forged, [0])
    await other.close()
    assert isinstance(listener.all("failed")[0], LayoutMismatchError)
    with pytest.raises(LayoutMismatchError):
        pair.receiver.expect(dataclasses.replace(forged, ticket_id="new"), listener)


async def test_protocol_version_mismatch(make_pair: Any) -> None:
    pair = await make_pair()
    pair.wrap = lambda channel: Tampered(
        channel, lambda frame: dataclasses.replace(frame, version=99) if isinstance(frame, Open) else frame
    )
    ticket, _ = pair.expect([1])
    with pytest.raises(HandoffError, match=f"protocol is {TRANSFER_VERSION} here, the sender speaks 99"):
        await pair.sender.open(ticket, [1])


# ── forgetting and aborting ───────────────────────────────────────────────────────────────────────


async def test_forget_waits_for_the_write_under_way_and_stops_the_rest(make_pair: Any, gate: Gate) -> None:
    pair = await make_pair()
    pair.receiver._run_blocking = gate
    ticket, listener = pair.expect([1, 2])
    push = await push_all(pair, ticket, [3, 4])
    await gate.entered.wait()
    await until(lambda: pair.sender.counters.pieces == 6)  # all are under way, one is being written
    forgetting = asyncio.ensure_future(pair.receiver.forget(ticket.ticket_id))
    await asyncio.sleep(0.01)
    assert not forgetting.done()
    gate.open.set()
    await forgetting
    pair.target.data[:] = 170  # the blocks have a new owner
    with pytest.raises(TicketError, match="withdrawn by the receiver"):
        await push.commit(pair.commit(ticket))
    await assert_works(pair)  # on the same channel, so behind all that was in flight
    assert (pair.target.data[:, 2:] == 170).all()
    assert not listener.heard
    assert pair.receiver.counters.stale == 6


async def test_abort_waits_for_the_read_under_way_and_stops_the_rest(make_pair: Any, gate: Gate) -> None:
    pair = await make_pair()
    pair.sender._run_blocking = gate
    ticket, listener = pair.expect([1, 2])
    push = await push_all(pair, ticket, [3, 4])
    await gate.entered.wait()
    aborting = asyncio.ensure_future(push.abort("client left"))
    await asyncio.sleep(0.01)
    assert not aborting.done()
    gate.open.set()
    await aborting
    failed = await listener.until("failed")
    assert failed[0].message == "the sender gave up: client left"
    assert not listener.all("progressed")
    push.push(0, 0, 2)  # nothing happens
    with pytest.raises(HandoffError, match="aborted: client left"):
        await push.commit(pair.commit(ticket))
    await push.abort("again")
    assert pair.sender.counters.pieces == 0


async def test_a_cancelled_commit_leaves_the_blocks_read_until_abort(make_pair: Any, gate: Gate) -> None:
    pair = await make_pair()
    pair.sender._run_blocking = gate
    ticket, listener = pair.expect([1])
    push = await push_all(pair, ticket, [3])
    committing = asyncio.ensure_future(push.commit(pair.commit(ticket)))
    await gate.entered.wait()
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    aborting = asyncio.ensure_future(push.abort("cancelled"))
    await asyncio.sleep(0.01)
    assert not aborting.done()
    gate.open.set()
    await aborting
    await listener.until("failed")


async def test_a_cancelled_copy_is_waited_for(gate: Gate) -> None:
    done: list[int] = []
    task = asyncio.ensure_future(uninterrupted(gate(done.append, 1)))
    await gate.entered.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [1]


async def test_a_cancelled_server_does_not_hide_a_write(make_pair: Any, gate: Gate) -> None:
    """The server drops a channel in the middle of a copy: forget still waits for the copy."""
    pair = await make_pair()
    pair.receiver._run_blocking = gate
    ticket, listener = pair.expect([1])
    await push_all(pair, ticket, [3])
    await gate.entered.wait()
    pair.served[0].cancel()
    forgetting = asyncio.ensure_future(pair.receiver.forget(ticket.ticket_id))
    await asyncio.sleep(0.01)
    assert not forgetting.done()
    gate.open.set()
    await forgetting
    assert not listener.all("progressed")


async def test_closing_the_sender_waits_for_the_read_under_way(make_pair: Any, gate: Gate) -> None:
    pair = await make_pair()
    pair.sender._run_blocking = gate
    ticket, _ = pair.expect([1])
    push = await push_all(pair, ticket, [3])
    await gate.entered.wait()
    closing = asyncio.ensure_future(pair.sender.close())
    aborting = asyncio.ensure_future(push.abort("shutting down"))
    await asyncio.sleep(0.01)
    assert not closing.done()
    assert not aborting.done()
    gate.open.set()
    await asyncio.gather(closing, aborting)


async def test_closing_the_sender_fails_what_is_under_way(make_pair: Any) -> None:
    pair = await make_pair()
    pair.wrap = lambda channel: Tampered(channel, lambda frame: None if isinstance(frame, Piece) else frame)
    ticket, listener = pair.expect([1])
    push = await push_all(pair, ticket, [1])
    pushed = asyncio.ensure_future(push.commit(pair.commit(ticket)))
    await asyncio.sleep(0)
    await pair.sender.close()
    with pytest.raises(WorkerLostError, match="this sender was closed"):
        await pushed
    await listener.until("failed")
    with pytest.raises(WorkerLostError, match="this sender was closed"):
        await pair.sender.open(ticket, [1])


async def test_closing_the_receiver_refuses_everything(make_pair: Any) -> None:
    pair = await make_pair()
    ticket, listener = pair.expect([1])
    push = await push_all(pair, ticket, [1])
    await pair.receiver.close()
    with pytest.raises(TicketError):
        await push.commit(pair.commit(ticket))
    assert not listener.all("committed")


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────


def flip(frame: Frame) -> Frame:
    if isinstance(frame, Piece) and frame.layer == 1:
        payload = bytearray(frame.payload)
        payload[17] ^= 4
        return dataclasses.replace(frame, payload=bytes(payload))
    return frame


def misplace(frame: Frame) -> Frame:
    return dataclasses.replace(frame, layer=2) if isinstance(frame, Piece) and frame.layer == 1 else frame


@pytest.mark.parametrize(("damage", "corrupt", "duplicates"), [(flip, 8, 0), (misplace, 2, 6)])
async def test_damaged_pieces_do_not_count(make_pair: Any, damage: Any, corrupt: int, duplicates: int) -> None:
    """Two pieces of layer 1, sent four times. (What claims to be a piece that is there is not looked at.)"""
    pair = await make_pair(staging_bytes=1 << 16)
    pair.wrap = lambda channel: Tampered(channel, damage)
    ticket, listener = pair.expect([1, 2])
    push = await pair.sender.open(ticket, [3, 4])
    for layer in range(3):
        push.push(layer, 0, 1)
    for layer in range(3):
        push.push(layer, 1, 1)
    with pytest.raises(IntegrityError, match="t1 needs 6 pieces, the sender commits 6, 4 arrived intact in 4 tries"):
        await push.commit(pair.commit(ticket))
    assert isinstance((await listener.until("failed"))[0], IntegrityError)
    others = [block for block in range(16) if block not in (1, 2)]
    assert not pair.target.data[:, others].any()
    for layer in (0, 2):
        assert (pair.target.data[layer, [1, 2]] == pair.source.data[layer, [3, 4]]).all()
    assert not listener.all("committed")
    assert (pair.receiver.counters.corrupt, pair.receiver.counters.duplicates) == (corrupt, duplicates)
    assert pair.sender.counters.resent == 6


async def test_without_verification_nobody_checks(make_pair: Any) -> None:
    pair = await make_pair(verify=False)
    pair.wrap = lambda channel: Tampered(channel, flip)
    ticket, _ = pair.expect([1])
    push = await push_all(pair, ticket, [3])
    await push.commit(pair.commit(ticket))
    assert pair.target.block(1) != pair.source.block(3)


async def test_nothing_is_committed_before_all_is_pushed(make_pair: Any) -> None:
    """What the worker never said is complete must not be read for a peer that misses it."""
    pair = await make_pair()
    ticket, _ = pair.expect([1, 2])
    push = await pair.sender.open(ticket, [3, 4])
    for layer, count in ((0, 2), (1, 1), (2, 2)):
        push.push(layer, 0, count)
    with pytest.raises(IntegrityError, match="6 blocks over all layers, 5 were pushed"):
        await push.commit(pair.commit(ticket))
    push.push(1, 1, 1)
    await push.commit(pair.commit(ticket))
    pair.assert_moved([3, 4], [1, 2])


@pytest.mark.parametrize("claimed", [5, 7])
async def test_commit_with_a_wrong_count(make_pair: Any, claimed: int) -> None:
    pair = await make_pair()
    pair.wrap = lambda channel: Tampered(
        channel, lambda frame: dataclasses.replace(frame, num_pieces=claimed) if isinstance(frame, Commit) else frame
    )
    ticket, listener = pair.expect([1, 2])
    push = await push_all(pair, ticket, [3, 4])
    with pytest.raises(IntegrityError, match=f"needs 6 pieces, the sender commits {claimed}, 6 arrived"):
        await push.commit(pair.commit(ticket))
    assert not listener.all("committed")
    assert len(listener.all("failed")) == 1


@pytest.mark.parametrize("error", [TicketError("expired in the queue"), DrainingError("leaving")])
async def test_the_listener_refuses_the_commit(make_pair: Any, error: Any) -> None:
    pair = await make_pair()
    ticket, listener = pair.expect([1])
    listener.refuse = error
    push = await push_all(pair, ticket, [3])
    with pytest.raises(type(error), match=error.message):
        await push.commit(pair.commit(ticket))
    assert not listener.all("failed")
    await assert_works(pair)


async def test_a_listener_that_breaks_ends_one_handoff_only(make_pair: Any) -> None:
    """An error that nobody expected, in the middle of a commit: neighbours on the channel go on."""
    pair = await make_pair()
    ticket, listener = pair.expect([1, 2])
    other, other_listener = pair.expect([3, 4])
    push, neighbour = await push_all(pair, ticket, [5, 6]), await push_all(pair, other, [7, 8])
    listener.refuse = KeyError("a bug")
    with pytest.raises(HandoffError, match="a bug"):
        await push.commit(pair.commit(ticket))
    await neighbour.commit(pair.commit(other))
    assert len(other_listener.all("committed")) == 1
    pair.assert_moved([7, 8], [3, 4])


@pytest.mark.parametrize(
    "change",
    [
        lambda piece: dataclasses.replace(piece, layer=3),
        lambda piece: dataclasses.replace(piece, first=1),
        lambda piece: dataclasses.replace(piece, count=2**32 - 1),
        lambda piece: dataclasses.replace(piece, count=0),
        lambda piece: dataclasses.replace(piece, offset=0),
        lambda piece: dataclasses.replace(piece, payload=piece.payload[:-1]),
    ],
)
async def test_pieces_out_of_bounds(make_pair: Any, change: Any) -> None:
    pair = await make_pair()
    pair.wrap = lambda channel: Tampered(
        channel, lambda frame: change(frame) if isinstance(frame, Piece) and frame.sequence == 1 else frame
    )
    ticket, listener = pair.expect([1])
    push = await push_all(pair, ticket, [3])
    with pytest.raises(HandoffError):
        await push.commit(pair.commit(ticket))
    assert len(listener.all("failed")) == 1
    assert not pair.target.data.any()
    await assert_works(pair)


@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_pool_that_raises_ends_one_handoff_only(make_pair: Any, side: str) -> None:
    pair = await make_pair()
    blocks = {"source": [99], "target": [1]}[side], {"source": [1], "target": [99]}[side]
    ticket, listener = pair.expect(blocks[1])
    push = await push_all(pair, ticket, blocks[0])
    with pytest.raises(HandoffError, match="pool"):
        await push.commit(pair.commit(ticket))
    assert len(await listener.until("failed")) == 1
    await assert_works(pair)
    assert len(pair.channels) == 1


# ── channels ──────────────────────────────────────────────────────────────────────────────────────


class CutAfter(Tampered):
    """Breaks the channel instead of passing the ``after``-th message, counted over both directions."""

    def __init__(self, channel: MemoryChannel, after: int) -> None:
        super().__init__(channel, lambda frame: frame)
        self._left = after

    async def send(self, data: bytes) -> None:
        self._count()
        await super().send(data)

    async def receive(self) -> bytes:
        data = await super().receive()
        self._count()
        return data

    def _count(self) -> None:
        if self._left == 0:
            self._channel.cut()
            raise WorkerLostError("cut")
        self._left -= 1

    def disarm(self) -> None:
        self._left = -1


async def test_channel_cut_at_every_message(make_pair: Any) -> None:
    """Each handoff ends for both sides, alike or with the receiver ahead by one receipt; the next works."""
    outcomes = set()
    for after in range(14):
        pair = await make_pair()
        cutters: list[CutAfter] = []

        def wrap(channel: MemoryChannel, after: int = after, cutters: list[CutAfter] = cutters) -> CutAfter:
            cutters.append(CutAfter(channel, after))
            return cutters[-1]

        pair.wrap = wrap
        ticket, listener = pair.expect([1, 2])
        sent = "lost"
        try:
            push = await push_all(pair, ticket, [3, 4])
            await push.commit(pair.commit(ticket))
            sent = "committed"
        except WorkerLostError:
            pass
        await asyncio.gather(*(pair.served if sent == "lost" else []))
        ended = [kind for kind, _ in listener.heard if kind != "progressed"]
        assert len(ended) <= 1
        outcomes.add((sent, *ended))
        if sent == "committed":
            pair.assert_moved([3, 4], [1, 2])
        await pair.receiver.forget(ticket.ticket_id)
        cutters[0].disarm()
        pair.wrap = lambda channel: channel
        await assert_works(pair)
    assert outcomes == {("lost",), ("lost", "failed"), ("lost", "committed"), ("committed", "committed")}


async def test_a_dying_sender_fails_its_tickets_at_once(make_pair: Any) -> None:
    pair = await make_pair()
    expected = [pair.expect([number]) for number in range(4)]
    for ticket, _ in expected:
        await pair.sender.open(ticket, [0])
    pair.channels[0].cut()
    for _, listener in expected:
        assert isinstance((await listener.until("failed"))[0], WorkerLostError)
    assert len(pair.channels) == 1
    await assert_works(pair)
    assert len(pair.channels) == 2


async def test_a_restarted_receiver_is_met_with_a_fresh_channel(make_pair: Any) -> None:
    """The old channel broke without a word; the first handoff after it must not pay for that."""
    pair = await make_pair()
    await assert_works(pair)
    pair.channels[0]._peer._ended = True  # sends fail, no receive has noticed
    await assert_works(pair)
    assert len(pair.channels) == 2


async def test_silence_ends_with_the_lease(make_pair: Any) -> None:
    pair = await make_pair()
    pair.wrap = lambda channel: Tampered(channel, lambda frame: frame if isinstance(frame, Open) else None)
    ticket, _ = pair.expect([1], lease_s=0.05)
    push = await push_all(pair, ticket, [1])
    with pytest.raises(WorkerLostError, match=r"no progress for 0\.05 s"):
        await push.commit(pair.commit(ticket))
    pair.wrap = lambda channel: channel
    await assert_works(pair)
    assert len(pair.channels) == 2  # the silent link was dropped whole


async def test_connecting_has_a_deadline(make_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.sender.CONNECT_TIMEOUT_S", 0.02)
    pair = await make_pair()

    async def never(address: str) -> Any:
        await asyncio.Event().wait()

    pair.connect = never
    ticket, _ = pair.expect([1])
    with pytest.raises(WorkerLostError, match=r"within 0\.02 s"):
        await pair.sender.open(ticket, [1])


async def test_fallback_to_the_next_transport_is_counted(make_pair: Any) -> None:
    pair = await make_pair(transports=("shm", "memory"))
    shm, memory = pair.receiver.offers
    assert (shm.name, memory.name) == ("shm", "memory")
    broken = TransportOffer("shm", "@baton-kv-nobody", shm.host_id)
    ticket, _ = pair.expect([1], offers=(broken, memory))
    push = await push_all(pair, ticket, [2])
    assert push.transport == "memory"
    await push.commit(pair.commit(ticket))
    assert pair.sender.counters.fallbacks == 1


async def test_shared_memory_is_for_the_same_host(make_pair: Any) -> None:
    pair = await make_pair(transports=("shm", "memory"))
    shm, memory = pair.receiver.offers
    elsewhere = dataclasses.replace(shm, host_id="elsewhere")
    ticket, _ = pair.expect([1], offers=(elsewhere, memory))
    assert (await pair.sender.open(ticket, [2])).transport == "memory"
    assert pair.sender.counters.fallbacks == 0
    alone, _ = pair.expect([1], offers=(elsewhere,))
    with pytest.raises(
        HandoffError, match=r"no common transport: here shm, memory, worker decode-0 offers shm on host else"
    ):
        await pair.sender.open(alone, [2])


@pytest.mark.parametrize(
    "data", [b"\0", b"\xff" * 40, b"\x01\x01", encode(OpenAck(1, True)), encode(Receipt(1, 1, 1)), b"\x03" + b"\0" * 9]
)
async def test_a_broken_frame_ends_its_channel(make_pair: Any, data: bytes) -> None:
    pair = await make_pair()
    ticket, listener = pair.expect([1])
    near, far = channel_pair()
    served = asyncio.ensure_future(pair.receiver.serve_frames(InlineFrames(far, 0)))
    await near.send(encode(Open(1, TRANSFER_VERSION, 1, ticket.secret, ticket.ticket_id, ticket.layout)))
    assert decode(await near.receive()) == OpenAck(1, True)
    await near.send(data)
    answer = decode(await near.receive())
    assert isinstance(answer, Error)
    assert (answer.stream, answer.code) == (0, "handoff")
    await served
    assert type(listener.all("failed")[0]) is HandoffError
    await pair.receiver.forget(ticket.ticket_id)
    await assert_works(pair)


async def test_frames_for_streams_that_are_over_do_no_harm(make_pair: Any) -> None:
    pair = await make_pair()
    near, far = channel_pair()
    served = asyncio.ensure_future(pair.receiver.serve_frames(InlineFrames(far, 0)))
    await near.send(encode(Abort(7, "never opened")))
    await near.close()
    await served


async def test_a_block_that_no_staging_holds_is_refused_at_start(make_pair: Any, layout: Any) -> None:
    wide = dataclasses.replace(layout, head_dim=1 << 12)
    with pytest.raises(ConfigError, match="262144 bytes, a transfer takes at most 65536"):
        await make_pair(layout=wide, num_blocks=1, staging_bytes=1 << 16)


# ── a pool of few blocks, for many rounds ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", [1, 2])
async def test_stale_writers_never_touch_reused_blocks(make_pair: Any, seed: int) -> None:
    """Tickets are withdrawn and aborted at any moment, their blocks given out again at once, while
    their senders go on; whoever owns blocks finds in them exactly what belongs there.
    """
    rng = random.Random(seed)

    async def late(function: Callable[..., Any], *args: Any) -> Any:
        """A copy that the loop goes on beside, as beside a thread, but the same in each run."""
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        return function(*args)

    def run_late(*call: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(late(*call))

    pair = await make_pair(num_blocks=6, staging_bytes=1 << 16, run_blocking=run_late)
    free = list(range(6))
    stale: list[asyncio.Task[Any]] = []
    finished = 0

    async def go_on(push: Any, ticket: Any) -> None:
        for layer in range(3):
            push.push(layer, 0, len(ticket.block_ids))
        with pytest.raises(HandoffError):
            await push.commit(pair.commit(ticket))

    for round_number in range(1000):
        rng.shuffle(free)
        target = free[: rng.randrange(1, 5)]
        source = [rng.randrange(6) for _ in target]
        ticket, _ = pair.expect(target)
        push = await pair.sender.open(ticket, source)
        for layer in range(rng.randrange(4)):
            push.push(layer, 0, len(target))
        for _ in range(rng.randrange(8)):
            await asyncio.sleep(0)
        fate = rng.choice(["withdraw", "abort", "commit"])
        if fate == "commit":
            for layer in range(3):
                push.push(layer, 0, len(target))
            await push.commit(pair.commit(ticket))
            pair.assert_moved(source, target)
            finished += 1
        elif fate == "abort":
            await push.abort("client left")
        await pair.receiver.forget(ticket.ticket_id)
        if fate == "withdraw":
            stale.append(asyncio.ensure_future(go_on(push, ticket)))
            # the next owner computes here: what it wrote must still be there some loops later
            pair.target.data[:, target] = round_number % 251
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            assert (pair.target.data[:, target] == round_number % 251).all()
    await asyncio.gather(*stale)
    assert finished > 200
    assert pair.receiver.counters.stale > 0
