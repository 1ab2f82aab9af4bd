"""Whatever ends a handoff, at whatever state of it, over whatever transport: within the lease nobody holds a block,
nothing was written into blocks of others, and the next handoff goes well.

A failpoint holds the handoff in the state. Where the prefill side hangs in one, only its router's cancel helps it,
as in a fleet: the router hears of the end from the decode side.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import psutil
import pytest

from common.errors import (
    BatonError,
    DeadlineError,
    LayoutMismatchError,
    RequestCancelledError,
    TicketError,
    WorkerLostError,
)
from kv_transfer.pool import NumpyPool
from tests.kv_transfer.ends import FREE, LAYOUT, TRANSPORTS, DecodeEnd, PrefillEnd, both, until

PREFILL_STATES = ("open", "push", "piece", "commit")
DECODE_STATES = ("receive", "receipt")
STATES = (*PREFILL_STATES, *DECODE_STATES)
CHANNEL_STATES = ("piece", "receive", "receipt")
"""Who hangs there holds up the channel itself. The next handoff finds that out, within its own lease."""
ENDS = ("cancel", "prefill leaves", "decode leaves", "deadline", "prefill dies", "decode dies", "expiry")
BLOCKS = 4
AT_ONCE = 8
UNHURRIED = [
    name if name == "memory" else pytest.param(name, marks=pytest.mark.slow)  # leases pass when the machine is busy
    for name in TRANSPORTS
]
DEADLINE_S = 1.0
MARGIN_S = 4.0
"""What a busy machine may add."""


def failpoints(state: str, action: str) -> tuple[dict[str, str], dict[str, str]]:
    """For the prefill and for the decode side."""
    return ({state: action}, {}) if state in PREFILL_STATES else ({}, {state: action})


def cancelled() -> BatonError:
    return RequestCancelledError("the client left")


async def serve(prefill: PrefillEnd, decode: DecodeEnd, name: str) -> None:
    await prefill.hand_off(name, decode.reserve(name, BLOCKS))
    decode.check(name)


async def all_of(cases: Sequence[Coroutine[Any, Any, None]]) -> list[BaseException | None]:
    """What became of each, a few at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(case: Coroutine[Any, Any, None]) -> None:
        async with gate:
            await case

    return await asyncio.gather(*(one(case) for case in cases), return_exceptions=True)


async def play(transport: str, state: str, end: str) -> None:
    async with both(transport, *failpoints(state, "1*hang")) as (prefill, decode):
        side = prefill if state in PREFILL_STATES else decode
        ticket = decode.reserve("stuck", BLOCKS)
        deadline_s = DEADLINE_S if end == "deadline" else None
        going = asyncio.ensure_future(prefill.hand_off("stuck", ticket, deadline_s))
        await until(lambda: side.failpoints.happened[state, "hang"] == 1)
        await asyncio.sleep(0.02)  # what is under way besides comes to rest
        loop = asyncio.get_running_loop()
        started = loop.time()
        hub = prefill.hub
        match end:
            case "cancel":
                going.cancel()
                decode.cancel("stuck", cancelled())
            case "prefill leaves":
                going.cancel()
            case "decode leaves":
                decode.cancel("stuck", cancelled())
            case "deadline":
                loop.call_later(DEADLINE_S, decode.cancel, "stuck", DeadlineError("too late"))
            case "prefill dies":
                await prefill.close()
                going.cancel()
                prefill = PrefillEnd(transport, hub=hub)
                await prefill.start()
            case "decode dies":
                port = decode.port
                await decode.close()
                decode = DecodeEnd(transport, hub=hub)
                await decode.start(port)
        try:
            await until(lambda: decode.at_baseline, decode.config.lease_s + MARGIN_S)
            if state in PREFILL_STATES:
                going.cancel()
            await until(going.done, decode.config.lease_s + MARGIN_S)
            assert loop.time() - started < decode.config.lease_s + MARGIN_S
            assert going.cancelled() or isinstance(going.exception(), BatonError | TimeoutError)
            assert prefill.at_baseline
            assert len(decode.reservations) == 0
            if state == "receipt" and end != "decode dies":
                decode.check("stuck")  # it had joined before
            else:
                assert "stuck" not in decode.joined
            if state in CHANNEL_STATES:
                with suppress(WorkerLostError, TicketError):
                    await serve(prefill, decode, "next")
                await until(lambda: decode.at_baseline, decode.config.lease_s + MARGIN_S)
            await serve(prefill, decode, "after")
            assert prefill.at_baseline
            for pool in (prefill.pool, decode.pool):
                assert (pool.data == FREE).all(), "something wrote into blocks that it had lost"
        finally:
            await prefill.close()
            await decode.close()


@pytest.mark.parametrize("ends", [ENDS[:4], ENDS[4:]], ids=["somebody leaves", "somebody dies"])
@pytest.mark.parametrize("transport", UNHURRIED)
async def test_ends_at_every_state_leave_nothing(transport: str, ends: tuple[str, ...]) -> None:
    """Each with a pair of its own, several at once: most of the time is that of the leases."""
    cases = [(state, end) for end in ends for state in STATES]
    outcomes = await all_of([play(transport, *case) for case in cases])
    failed = {case: repr(outcome) for case, outcome in zip(cases, outcomes, strict=True) if outcome is not None}
    assert not failed


@pytest.mark.parametrize("transport", UNHURRIED)
async def test_errors_at_every_state_end_one_handoff_and_leave_nothing(transport: str) -> None:
    """Whatever is raised there; a delay ends nothing."""
    actions = ("error:handoff", "error:internal", "error:worker_lost", "delay:0.05")

    async def play_error(state: str, action: str) -> None:
        async with both(transport, *failpoints(state, f"1*{action}")) as (prefill, decode):
            ticket = decode.reserve("hit", BLOCKS)
            if action.startswith("delay"):
                await prefill.hand_off("hit", ticket)
                decode.check("hit")
            else:
                with pytest.raises(BatonError):
                    await prefill.hand_off("hit", ticket)
            await until(lambda: decode.at_baseline, decode.config.lease_s + MARGIN_S)
            assert prefill.at_baseline
            if state == "receipt":
                decode.check("hit")
            await serve(prefill, decode, "next")
            assert (decode.pool.data == FREE).all()

    cases = [(state, action) for state in (*STATES, "join") for action in actions]
    cases.remove(("join", actions[-1]))  # that one cannot wait
    outcomes = await all_of([play_error(*case) for case in cases])
    failed = {case: repr(outcome) for case, outcome in zip(cases, outcomes, strict=True) if outcome is not None}
    assert not failed


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_r21_stale_writers_never_touch_reused_blocks(transport: str) -> None:
    """Pools of eight blocks, three handoffs at a time, of which many are given up by one side or by both at any
    moment; their blocks go to the next one at once. (For a thousand rounds in memory: `test_kv_failures.py`.)"""
    async with both(transport, num_blocks=8, staging_bytes=1 << 16, lease_s=10) as (prefill, decode):
        numbers = iter(range(400))
        admission = asyncio.Lock()
        given_up = 0

        async def client() -> None:
            nonlocal given_up
            for number in numbers:
                rng = random.Random(2100 + number)  # whichever client comes to it, and when
                name, num_blocks = f"r{number}", rng.randrange(1, 4)
                async with admission:  # one at a time, until it has its blocks on both sides
                    await until(lambda wanted=num_blocks: min(e.books.num_free for e in (prefill, decode)) >= wanted)
                    going = asyncio.ensure_future(prefill.hand_off(name, decode.reserve(name, num_blocks)))
                    await asyncio.sleep(0)
                if (fate := rng.choice(["goes well", "cancel", "prefill leaves", "decode leaves"])) != "goes well":
                    given_up += 1
                    await asyncio.sleep(rng.random() * 0.004)
                    if fate != "prefill leaves":
                        decode.cancel(name, cancelled())
                    if fate != "decode leaves":
                        going.cancel()
                await asyncio.wait([going])
                if fate == "prefill leaves":  # its router says so; the other side knows already if they had met
                    await asyncio.sleep(rng.random() * 0.004)
                    decode.cancel(name, cancelled())
                if not going.cancelled() and going.exception() is None:
                    decode.check(name)
                elif fate == "goes well":
                    going.result()

        await asyncio.gather(client(), client(), client())
        await until(lambda: prefill.at_baseline and decode.at_baseline)
        assert given_up > 200
        assert len(decode.joined) > 80
        for name in decode.joined:
            decode.check(name)
        assert (decode.pool.data == FREE).all(), "something wrote into blocks that it had lost"
        assert decode.receiver.counters.corrupt == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_r23_concurrent_transfers_into_one_worker_keep_apart(transport: str) -> None:
    """32 at once, from two prefill workers, through staging that holds a fraction of them."""
    rng = random.Random(23)
    settings = {"num_blocks": 512, "staging_bytes": 1 << 16, "lease_s": 10}
    async with both(transport, **settings) as (prefill, decode):
        other = PrefillEnd(transport, hub=prefill.hub, **settings)
        await other.start()
        sizes = {f"r{number}": rng.randrange(1, 16) for number in range(32)}
        tickets = {name: decode.reserve(name, size) for name, size in sizes.items()}
        order = rng.sample(sorted(sizes), len(sizes))
        await asyncio.gather(*(rng.choice((prefill, other)).hand_off(name, tickets[name]) for name in order))
        for name in sizes:
            decode.check(name)
        assert decode.receiver.counters.handoffs == 32
        assert prefill.at_baseline
        assert other.at_baseline
        assert decode.at_baseline
        await other.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_r14_prefill_workers_that_come_and_go_leave_no_handles(transport: str) -> None:
    """Fifteen of them, each gone in the middle of three handoffs."""
    process = psutil.Process()
    async with both(transport, decode_failpoints={"receive": "30%delay:0.01"}) as (prefill, decode):
        fds = threads = 0
        for number in range(15):
            guest = PrefillEnd(transport, hub=prefill.hub)
            await guest.start()
            await serve(guest, decode, f"whole-{number}")
            names = [f"half-{number}-{which}" for which in range(3)]
            going = [asyncio.ensure_future(guest.hand_off(name, decode.reserve(name, 8))) for name in names]
            await until(lambda start=decode.receiver.counters.pieces: decode.receiver.counters.pieces > start)
            await guest.close()
            await asyncio.wait(going)
            assert all(isinstance(one.exception(), BatonError | None) for one in going)
            await until(lambda: decode.at_baseline, decode.config.lease_s + MARGIN_S)
            assert guest.at_baseline
            del guest, going
            if number == 4:
                gc.collect()
                fds, threads = process.num_fds(), process.num_threads()
        gc.collect()
        # Ten have come and gone in between. gRPC closes its connections when it gets to it.
        await until(lambda: process.num_fds() - fds < 8)
        await until(lambda: process.num_threads() - threads < 8)
        assert (decode.pool.data == FREE).all()


MISMATCHES = {
    "another model": ({"model": "other"}, "model is 'other' and 'tiny'"),
    "another depth": ({"num_layers": 4}, "num_layers is 4 and 3"),
    "another width": ({"head_dim": 16}, "head_dim is 16 and 8"),
    "other heads": ({"num_kv_heads": 4}, "total_kv_heads is .*"),
    "heads that cannot be dealt": (
        {"num_kv_heads": 1, "total_kv_heads": 2, "tp_size": 3},
        "2 KV heads cannot be dealt to 3 ranks",
    ),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_r10_pairs_that_do_not_go_together_are_refused_at_once(transport: str) -> None:
    """With both sides' values, by either side: a forged ticket brings it to the receiver. Nothing is held."""
    loop = asyncio.get_running_loop()
    async with both(transport, lease_s=30) as (prefill, decode):
        for name, (changes, told) in MISMATCHES.items():
            layout = dataclasses.replace(LAYOUT, **changes)  # type: ignore[arg-type]
            stranger = PrefillEnd(transport, hub=prefill.hub)
            stranger.pool = NumpyPool(layout, 4)
            await stranger.start()
            ticket = decode.reserve(name, 1)
            started = loop.time()
            with pytest.raises(LayoutMismatchError, match=told):
                await stranger.sender.open(ticket, [0])
            decode.cancel(name, cancelled())  # its router has heard
            forged = dataclasses.replace(decode.reserve(f"{name}, forged", 1), layout=layout)
            if "dealt" not in name:  # nobody can even forge that
                with pytest.raises(LayoutMismatchError, match=told):
                    await stranger.sender.open(forged, [0])
                await until(lambda forged=f"{name}, forged": forged in decode.ended)
                assert isinstance(decode.ended[f"{name}, forged"], LayoutMismatchError)
            decode.cancel(f"{name}, forged", cancelled())
            await until(lambda: decode.at_baseline)
            assert loop.time() - started < 2.0
            await stranger.close()
        stranger = PrefillEnd(transport, hub=prefill.hub, wire_formats=("int8", "bfloat16"))
        await stranger.start()
        started = loop.time()
        with pytest.raises(LayoutMismatchError, match="the sender has int8, bfloat16, the receiver native"):
            await stranger.hand_off("wire", decode.reserve("wire", BLOCKS))
        await until(lambda: decode.at_baseline)
        assert isinstance(decode.ended["wire"], LayoutMismatchError)
        assert loop.time() - started < 2.0
        assert stranger.at_baseline
        await stranger.close()
        await serve(prefill, decode, "a pair that does")
