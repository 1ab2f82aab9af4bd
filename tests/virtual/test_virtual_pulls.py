"""Pulls and local prefill on the virtual cluster: prefixes move to where they are wanted, the tokens stay right,
and whatever happens to a pull its blocks come back on both sides (`scenario` looks at every ledger)."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from common.config import load_config
from common.errors import DeadlineError
from common.messages import GenerationRequest
from sim.cluster import Outcome, SimCluster, SimConfig
from sim.device import CostModel
from tests.virtual.scenario import assert_right, request, scenario

BLOCK = 16
REPORTED_S = 0.5
"""By then the workers have told the router what they hold."""

PROMPT, ANSWER, NEW = 100, 140, 20
HELD = 224
"""Of turn 1's 240 tokens D has the KV of 239 (the last one was never computed), in 14 full blocks."""
CACHED = 96
"""P has the KV of turn 1's prompt, in 6 full blocks."""


def config(*sets: str, **changes: Any) -> SimConfig:
    base = load_config(None, ["prefill.chunk_tokens=64", "decode.chunk_tokens=32", *sets])
    return SimConfig(**{"num_blocks": 256, "block_size": BLOCK, "base": base, **changes})


async def first_turn(cluster: SimCluster, settings: SimConfig, name: str = "one") -> GenerationRequest:
    """The request of the second turn: what was said, and ``NEW`` tokens more."""
    outcome = await cluster.ask(request(name, PROMPT, ANSWER))
    assert_right(outcome, settings)
    await asyncio.sleep(REPORTED_S)
    return next_turn(outcome, NEW)


def next_turn(outcome: Outcome, num_new: int) -> GenerationRequest:
    more = request(f"{outcome.request.request_id}+", num_new, 30)
    return replace(more, prompt=(*outcome.request.prompt, *outcome.tokens, *more.prompt))


async def tokens_of(cluster: SimCluster, request_id: str) -> dict[str, Any]:
    """The record of a request once its workers have said their last words; its tokens add up (law 4)."""
    await cluster.settled()
    record = cluster.service.records.find(request_id)
    assert record is not None
    told: dict[str, Any] = record.to_json(0.0)
    tokens = told["tokens"]
    assert tokens["cached_prefill"] + tokens["pulled"] + tokens["computed_prefill"] == tokens["prompt"]
    assert tokens["cached_decode"] + tokens["received"] + tokens["computed_decode"] == tokens["prompt"]
    return told


def failed_pulls(cluster: SimCluster) -> float:
    return sum(worker.metrics.pulls_failed._value.get() for worker in cluster.workers.values())


def test_the_second_turn_computes_only_what_is_new() -> None:
    settings = config()

    async def story(cluster: SimCluster) -> None:
        turn = await first_turn(cluster, settings)
        outcome = await cluster.ask(turn)
        assert_right(outcome, settings)
        told = await tokens_of(cluster, turn.request_id)
        tokens = told["tokens"]
        assert (tokens["cached_prefill"], tokens["pulled"]) == (CACHED, HELD - CACHED)
        assert tokens["computed_prefill"] == PROMPT + ANSWER + NEW - HELD
        assert (tokens["cached_decode"], tokens["received"]) == (HELD, PROMPT + ANSWER + NEW - HELD)
        assert outcome.cached_tokens == CACHED
        assert cluster.service.metrics.pulled_tokens._value.get() == HELD - CACHED
        # 128 tokens at a tenth, and 64 for the pull itself.
        assert told["decision"]["prefill"]["pull"] == {"from": "decode-0", "tokens": 128, "cost_tokens": 77}
        layout = cluster.prefill_workers["prefill-0"].info.layout
        received = cluster.prefill_workers["prefill-0"].load().kv_bytes_received
        assert received == cluster.decode_workers["decode-0"].load().kv_bytes_sent == 8 * layout.block_bytes
        # What was pulled is cached there like what was computed.
        again = replace(turn, request_id="again")
        assert_right(await cluster.ask(again), settings)
        assert (await tokens_of(cluster, "again"))["tokens"]["cached_prefill"] == 256

    scenario(settings, story)


def test_without_pulls_it_is_computed() -> None:
    settings = config("router.pulls=false")

    async def story(cluster: SimCluster) -> None:
        turn = await first_turn(cluster, settings)
        assert_right(await cluster.ask(turn), settings)
        tokens = (await tokens_of(cluster, turn.request_id))["tokens"]
        assert (tokens["cached_prefill"], tokens["pulled"], tokens["computed_prefill"]) == (CACHED, 0, 164)

    scenario(settings, story)


@pytest.mark.parametrize("mode", ["split", "colocated"])
def test_any_worker_pulls_from_any_other(mode: Any) -> None:
    """The one that holds the prefix is busy; another one takes the request, and pulls."""
    roles = {"prefill": 2, "decode": 1} if mode == "split" else {"decode": 2}
    settings = config("router.pull_fixed_tokens=16", mode=mode, **roles)

    async def story(cluster: SimCluster) -> None:
        first = await cluster.ask(request("first", 200, 2))
        await asyncio.sleep(REPORTED_S)
        role = "prefill" if mode == "split" else "decode"
        busy = asyncio.ensure_future(cluster.ask(request("busy", 300, 2)))
        await asyncio.sleep(0.02)
        second = replace(first.request, request_id="second", prompt=(*first.request.prompt, 7, 8, 9))
        assert_right(await cluster.ask(second), settings)
        assert_right(await busy, settings)
        told = await tokens_of(cluster, "second")
        assert told["attempts"][-1][role] == f"{role}-1"
        assert told["decision"][role]["pull"]["from"] == f"{role}-0"
        assert told["tokens"]["pulled" if mode == "split" else "received"] == 192

    scenario(settings, story)


def slow(cluster: SimCluster) -> None:
    """The way back takes about a second for what there is to pull."""
    layout = cluster.prefill_workers["prefill-0"].info.layout
    cluster._link("decode-0", "prefill-0").bytes_per_s = 8 * layout.block_bytes


@pytest.mark.parametrize("moment_s", [0.0, 0.0005, 0.002, 0.3, 0.99])
@pytest.mark.parametrize("fault", ["holder killed", "puller killed", "link cut", "cancelled", "deadline"])
def test_a_pull_that_does_not_end_well_is_no_harm(fault: str, moment_s: float) -> None:
    settings = config(prefill=2, decode=2)

    async def story(cluster: SimCluster) -> None:
        turn = await first_turn(cluster, settings)
        slow(cluster)
        if fault == "deadline":
            turn = replace(turn, timeout_s=moment_s + 0.001)
        task = asyncio.ensure_future(cluster.ask(turn))
        await asyncio.sleep(moment_s)
        match fault:
            case "holder killed":
                await cluster.kill("decode-0")
            case "puller killed":
                await cluster.kill("prefill-0")
            case "link cut":
                cluster._link("decode-0", "prefill-0").up = False
            case "cancelled":
                task.cancel()
        await asyncio.wait([task])
        if fault == "deadline":
            assert isinstance(task.result().error, DeadlineError)
        elif fault != "cancelled":
            assert_right(task.result(), settings)
            told = await tokens_of(cluster, turn.request_id)
            assert len(told["attempts"]) == (1 if fault == "link cut" else 2) or moment_s == 0.0
        if fault == "link cut":
            assert told["tokens"]["pulled"] == 0
            assert failed_pulls(cluster) == 1
            # Before it was opened: at once. Else after transfer.pull_patience_s without a piece. Then it computes.
            assert told["phases_s"]["first_token"] < 3.5
            assert (told["phases_s"]["first_token"] > 2.0) == (moment_s >= 0.002)

    scenario(settings, story)


@pytest.mark.parametrize(("evicted", "pulled"), [(0, 128), (1, 112), (7, 16), (8, 0), (14, 0)])
def test_the_holder_corrects_a_wrong_belief(evicted: int, pulled: int) -> None:
    """Blocks go, the deepest first, before the router hears of it: what is left is pulled, the rest computed."""
    settings = config()

    async def story(cluster: SimCluster) -> None:
        turn = await first_turn(cluster, settings)
        for _ in range(evicted):
            cluster.decode_workers["decode-0"]._pool._evict()
        assert_right(await cluster.ask(turn), settings)
        tokens = (await tokens_of(cluster, turn.request_id))["tokens"]
        assert (tokens["cached_prefill"], tokens["pulled"]) == (CACHED, pulled)
        assert failed_pulls(cluster) == (pulled == 0)

    scenario(settings, story)


def test_what_is_read_cannot_be_evicted_and_has_a_holder() -> None:
    """The pool of D is wanted by others while a prefix of it leaves."""
    settings = config(decode=1, num_blocks=40)

    async def story(cluster: SimCluster) -> None:
        turn = await first_turn(cluster, settings)
        slow(cluster)
        task = asyncio.ensure_future(cluster.ask(turn))
        await asyncio.sleep(0.2)
        (ledger,) = [ledger for ledger in await cluster.ledgers() if ledger.worker_id == "decode-0"]
        (holder,) = [holder for holder in ledger.holders if holder.state == "in_transfer"]
        assert (ledger.in_transfer, holder.blocks) == (14, 14)
        assert holder.request.startswith(f"{turn.request_id}#0 to prefill-0.")
        assert 0.19 < holder.age_s <= 0.2
        others = [asyncio.ensure_future(cluster.ask(request(f"other{i}", 150, 60))) for i in range(4)]
        assert_right(await task, settings)
        for other in others:
            assert_right(await other, settings)
        assert (await tokens_of(cluster, turn.request_id))["tokens"]["pulled"] == HELD - CACHED

    scenario(settings, story)


def test_a_holder_that_is_late_pushes_into_nothing() -> None:
    settings = config(failpoints={"decode-0": {"pull": "delay:3"}})

    async def story(cluster: SimCluster) -> None:
        turn = await first_turn(cluster, settings)
        assert_right(await cluster.ask(turn), settings)
        assert (await tokens_of(cluster, turn.request_id))["tokens"]["pulled"] == 0
        assert failed_pulls(cluster) == 1

    scenario(settings, story)


def test_a_late_push_does_not_touch_blocks_that_are_in_use_again() -> None:
    """The pull is cancelled, and when the holder gets to it others have the blocks."""
    slow_device = CostModel(context_tokens_per_s=600)
    settings = config(num_blocks=64, cost=slow_device, failpoints={"decode-0": {"pull": "delay:3"}})

    async def story(cluster: SimCluster) -> None:
        turn = await first_turn(cluster, settings)
        loop = asyncio.get_running_loop()
        pushed_at = loop.time() + 3.0
        task = asyncio.ensure_future(cluster.ask(turn))
        await asyncio.sleep(0.5)
        task.cancel()
        # Each computes for 1.3 s. The first takes the blocks that were free before, the second those of the pull.
        assert_right(await cluster.ask(request("r0", 760, 1)), settings)
        assert_right(await cluster.ask(request("r1", 760, 1)), settings)
        assert pushed_at < loop.time() < pushed_at + 0.5
        assert len((await tokens_of(cluster, "r1"))["attempts"]) == 1

    scenario(settings, story)


@pytest.mark.parametrize("mode", ["split", "colocated"])
@pytest.mark.parametrize("deadline_s", [None, 0.2])
def test_a_cancel_and_a_deadline_end_a_pull_at_once(mode: Any, deadline_s: float | None) -> None:
    """Not when what is under way has arrived, which takes a second."""
    settings = config("router.pull_fixed_tokens=16", mode=mode, decode=2)

    async def story(cluster: SimCluster) -> None:
        puller = "prefill-0" if mode == "split" else "decode-1"
        cluster._link("decode-0", puller).bytes_per_s = 8 * cluster.workers[puller].info.layout.block_bytes
        turn = await first_turn(cluster, settings)
        others = []
        if mode == "colocated":  # keeps the holder busy, so that the other one takes the turn
            others = [asyncio.ensure_future(cluster.ask(request("busy", 2000, 1)))]
            await asyncio.sleep(0.02)
        task = asyncio.ensure_future(cluster.ask(replace(turn, timeout_s=deadline_s or 600.0)))
        await asyncio.sleep(0.19)
        ledgers = {ledger.worker_id: ledger for ledger in await cluster.ledgers()}
        assert [holder.request for holder in ledgers[puller].holders] == [f"{turn.request_id}#0"]
        assert ledgers[puller].reserved > 0
        if deadline_s is None:
            task.cancel()
        await asyncio.sleep(0.05)
        ledgers = {ledger.worker_id: ledger for ledger in await cluster.ledgers()}
        assert not ledgers[puller].holders
        await asyncio.wait([task, *others])

    scenario(settings, story)


@pytest.mark.parametrize("mode", ["split", "adaptive", "colocated"])
@pytest.mark.parametrize("seed", range(4))
def test_conversations_in_tiny_pools(mode: Any, seed: int) -> None:
    """Three turns each, more of them than the pools hold, some clients leave: the tokens are those of one process."""
    rng = random.Random(seed)
    sets = ["router.pull_fixed_tokens=0", "router.local_prefill_tokens=40", "router.pull_token_cost=0"]
    settings = config(*sets, mode=mode, prefill=2, decode=2, num_blocks=rng.randint(30, 60), seed=seed)
    pulled = 0

    async def talk(cluster: SimCluster, number: int) -> None:
        await asyncio.sleep(rng.random() * 3)
        turn = request(f"c{number}", rng.randint(1, 100), rng.randint(1, 60), shared=rng.choice([0, 48]))
        for _ in range(3):
            task = asyncio.ensure_future(cluster.ask(turn))
            if rng.random() < 0.1:
                await asyncio.sleep(rng.random() * 0.1)
                task.cancel()
                await asyncio.wait([task])
                return
            outcome = await task
            assert_right(outcome, settings)
            await asyncio.sleep(rng.random())
            turn = next_turn(outcome, rng.randint(1, 60))

    async def story(cluster: SimCluster) -> None:
        nonlocal pulled
        await asyncio.gather(*(talk(cluster, number) for number in range(20)))
        await cluster.settled()
        for number in range(20):
            for turns in ("", "+", "++"):
                record = cluster.service.records.find(f"c{number}{turns}")
                if record is not None and record.state == "finished":
                    await tokens_of(cluster, record.id)
        pulled = sum(int(w.metrics.pulled_tokens._value.get()) for w in cluster.workers.values())

    scenario(settings, story)
    assert pulled > 0


def test_adaptive_a_short_turn_stays_on_the_decode_worker() -> None:
    settings = config("router.local_prefill_tokens=36", mode="adaptive")

    async def story(cluster: SimCluster) -> None:
        turn = await first_turn(cluster, settings)
        outcome = await cluster.ask(turn)
        assert_right(outcome, settings)
        told = await tokens_of(cluster, turn.request_id)
        assert told["attempts"] == [{"prefill": None, "decode": "decode-0", "reason": "new", "outcome": "length"}]
        tokens = told["tokens"]
        assert (tokens["cached_decode"], tokens["received"], tokens["computed_decode"]) == (HELD, 0, 36)
        assert (tokens["cached_prefill"], tokens["computed_prefill"]) == (HELD, 36)  # one worker was both sides
        assert outcome.cached_tokens == HELD
        # One token beyond the threshold: the prefill worker computes, and only the rest moves.
        await asyncio.sleep(REPORTED_S)
        longer = replace(turn, request_id="longer", prompt=(*turn.prompt[:HELD], *range(2, 39)))
        assert_right(await cluster.ask(longer), settings)
        told = await tokens_of(cluster, "longer")
        assert told["attempts"][0]["prefill"] == "prefill-0"
        assert (told["tokens"]["cached_decode"], told["tokens"]["received"]) == (HELD, 37)

    scenario(settings, story)


def test_a_warm_decode_worker_gets_only_the_rest() -> None:
    """R24: D holds half of the prompt, and the block lists of the two sides do not line up."""
    settings = config("router.pulls=false", prefill=1, decode=1)

    async def story(cluster: SimCluster) -> None:
        half = request("half", 160, 1)
        assert_right(await cluster.ask(half), settings)
        await asyncio.sleep(REPORTED_S)
        before = cluster.decode_workers["decode-0"].load().kv_bytes_received
        whole = replace(request("whole", 160, 20), prompt=(*half.prompt, *request("rest", 165, 1).prompt))
        assert_right(await cluster.ask(whole), settings)
        tokens = (await tokens_of(cluster, "whole"))["tokens"]
        assert (tokens["cached_decode"], tokens["received"]) == (160, 165)
        received = cluster.decode_workers["decode-0"].load().kv_bytes_received - before
        assert received == 11 * cluster.decode_workers["decode-0"].info.layout.block_bytes

    scenario(settings, story)
