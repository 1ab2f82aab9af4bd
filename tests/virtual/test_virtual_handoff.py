"""The handoff under faults, as the whole cluster lives through it: whatever ends a request at whatever state of its
handoff, within the lease nobody holds a block, with no traffic to help; and the next request is served.

The failpoint of the state holds the handoff there. `tests/kv_transfer/test_kv_leaks.py` does the same with real
bytes over real sockets, `tests/e2e/test_handoff_faults.py` with real processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from typing import Any

import pytest

from common.config import load_config
from common.errors import DeadlineError
from common.workers import Role
from sim.cluster import Outcome, SimCluster, SimConfig
from tests.virtual.scenario import assert_right, request, scenario

LEASE_S = 2.0
PATIENCE_S = 1.0
SOON_S = 0.02
"""By then whoever can hear of an end has heard of it."""

STATES = ("open", "push", "commit")
ENDS = ("the client leaves", "deadline", "prefill dies", "decode dies", "both die", "expiry")


def config(**changes: Any) -> SimConfig:
    overrides = [
        "prefill.chunk_tokens=64",
        "decode.chunk_tokens=32",
        f"transfer.lease_s={LEASE_S}",
        f"router.worker_patience_s={PATIENCE_S}",
    ]
    return SimConfig(**{"num_blocks": 256, "base": load_config(None, overrides), **changes})


async def assert_nothing_is_held(cluster: SimCluster, why: object) -> None:
    for ledger in await cluster.ledgers():
        assert ledger.holders == (), (why, ledger)
        assert ledger.free + ledger.cached == ledger.total


async def revive(cluster: SimCluster) -> None:
    for name, host in list(cluster.hosts.items()):
        if not host.alive:
            cluster.restart(name)
    while not all(cluster.service.registry.ready(role) for role in (Role.PREFILL, Role.DECODE)):  # noqa: ASYNC110
        await asyncio.sleep(SOON_S)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("state", STATES)
def test_ends_at_every_state_leave_nothing(state: str, end: str) -> None:
    settings = config(failpoints={"prefill-0": {state: "1*hang"}})

    async def story(cluster: SimCluster) -> None:
        deadline_s = 1.0 if end == "deadline" else 600.0
        asking = asyncio.ensure_future(cluster.ask(request("stuck", 150, 40, timeout_s=deadline_s)))
        await asyncio.sleep(0.3)  # it hangs by now
        ledgers = {ledger.worker_id: ledger for ledger in await cluster.ledgers()}
        assert ledgers["prefill-0"].holders, state
        assert ledgers["decode-0"].reserved
        held_s = SOON_S
        match end:
            case "the client leaves":
                asking.cancel()
            case "deadline":
                held_s += deadline_s - 0.3
            case "prefill dies":
                await cluster.kill("prefill-0")
            case "decode dies":
                await cluster.kill("decode-0")
            case "both die":
                await cluster.kill("prefill-0")
                await cluster.kill("decode-0")
        if end == "expiry":
            # Nobody says anything; the lease ends, and the router tries again.
            outcome = await asking
            assert_right(outcome, settings)
            record = cluster.service.records.find("stuck")
            assert record is not None
            assert len(record.attempts) == 2
            assert outcome.ended_at is not None
            assert LEASE_S < outcome.ended_at < 2 * LEASE_S + 3
            await asyncio.sleep(SOON_S)
        else:
            await asyncio.sleep(held_s)
        await assert_nothing_is_held(cluster, (state, end))
        await revive(cluster)
        if end == "the client leaves":
            await asyncio.wait([asking])
        elif end == "deadline":
            assert isinstance((await asking).error, DeadlineError)
        else:
            assert_right(await asking, settings)
        assert_right(await cluster.ask(request("next", 150, 40)), settings)

    scenario(settings, story)


@pytest.mark.parametrize("code", ["internal", "handoff", "integrity", "worker_lost"])
@pytest.mark.parametrize(("name", "state"), [*(("prefill-0", state) for state in STATES), ("decode-0", "join")])
def test_errors_at_every_state_free_both_sides_at_once(name: str, state: str, code: str) -> None:
    settings = config(failpoints={name: {state: f"1*error:{code}"}})

    async def story(cluster: SimCluster) -> None:
        outcome = await cluster.ask(request("hit", 150, 40))
        if outcome.error is None:
            assert_right(outcome, settings)
        else:
            assert outcome.error.code == code
        await asyncio.sleep(SOON_S)
        await assert_nothing_is_held(cluster, (state, code))
        assert_right(await cluster.ask(request("next", 150, 40)), settings)

    scenario(settings, story)


def test_r7_a_prefill_that_fails_at_once_is_heard_at_once() -> None:
    """Every time: the client gets the reason, and not after somebody's patience; nothing stays reserved."""
    settings = config(failpoints={"prefill-0": {"prefill_start": "error:internal"}})

    async def story(cluster: SimCluster) -> None:
        outcomes = await asyncio.gather(*(cluster.ask(request(f"r{number}", 150, 40)) for number in range(8)))
        for outcome in outcomes:
            assert outcome.error is not None
            assert "prefill_start" in outcome.error.message
            assert outcome.ended_at is not None
            assert outcome.ended_at - outcome.arrived_at < 2.0
        await asyncio.sleep(SOON_S)
        await assert_nothing_is_held(cluster, "r7")

    scenario(settings, story)


@pytest.mark.parametrize("warm", [16, 80, 96, 144])
def test_r24_a_decode_worker_that_holds_a_part_gets_the_rest(warm: int) -> None:
    """Its own blocks come first and the new ones behind them; only those move."""
    settings = config()

    async def story(cluster: SimCluster) -> None:
        whole = request("whole", 150, 40)
        first = dataclasses.replace(request("first", warm, 3), prompt=whole.prompt[:warm])
        assert_right(await cluster.ask(first), settings)
        await asyncio.sleep(SOON_S)
        decode = cluster.decode_workers["decode-0"]
        before = decode.load().kv_bytes_received
        assert_right(await cluster.ask(whole), settings)
        moved = decode.load().kv_bytes_received - before
        assert moved == (10 - warm // 16) * decode.info.layout.block_bytes

    scenario(settings, story)


def gaps(cluster: SimCluster, names: set[str]) -> list[float]:
    """Between the tokens of each of these requests, in virtual seconds, sorted."""
    last: dict[str, float] = {}
    found: list[float] = []
    for line in cluster.log.lines:
        at, name, what, *_ = line.split(" ")
        if name in names and what.isdigit():
            if name in last:
                found.append(float(at) - last[name])
            last[name] = float(at)
    return sorted(found)


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def test_a_stalled_transfer_does_not_slow_the_others_on_that_worker() -> None:
    """Handoffs into decode-0 that do not move, and hold blocks until their lease is over; the tokens of the others
    come as ever."""

    def run(stalled: bool) -> list[float]:
        settings = config(prefill=2)

        async def story(cluster: SimCluster) -> list[float]:
            if stalled:
                cluster.links["prefill-1", "decode-0"].bytes_per_s = 1e3
            asking: list[asyncio.Future[Outcome]] = []
            for number in range(12):
                asking.append(asyncio.ensure_future(cluster.ask(request(f"r{number}", 150, 200, seed=number))))
                await asyncio.sleep(0.01)
            for outcome in await asyncio.gather(*asking):
                assert_right(outcome, settings)
            records = [cluster.service.records.find(f"r{number}") for number in range(12)]
            smooth = {record.id for record in records if record is not None and len(record.attempts) == 1}
            assert (len(smooth) < 12) is stalled
            return gaps(cluster, smooth)

        return scenario(settings, story)

    assert p99(run(True)) <= 1.1 * p99(run(False))
