"""Who pulls what from whom, and when a decode worker does it alone: by hand-computed numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import RouterConfig
from common.errors import NoCapacityError
from common.hashing import HASH_UNIT_TOKENS, prefix_hashes, root_hash
from common.messages import PrefixSource
from router.placement import Decision, Demand, Pull, PullCost, place_local, place_pair, place_single
from router.readiness import Readiness
from tests.router.fleet import a_request, collect, serving
from tests.router.outlook import Load

COST = PullCost(token_share=0.1, fixed_tokens=64)


def place(
    prefills: list[Load], decodes: list[Load], hits: dict[str, int], *, context: int = 1000, scored: bool = False
) -> Decision:
    demand = Demand(context, context + 50, scored)
    return place_pair(demand, prefills, decodes, hits, backlog_tokens=10_000, pulls=COST)


def test_a_conversation_is_pulled_back_from_the_decode_worker() -> None:
    decision = place([Load("p0")], [Load("d0")], {"p0": 96, "d0": 896})
    assert decision.prefill is not None
    # 800 tokens for the time of 64 + 80; 104 are computed.
    assert decision.prefill.pull == Pull("d0", "d0", 896, 800, 144)
    assert (decision.prefill.hit_tokens, decision.prefill.work) == (96, 104 + 144)
    assert decision.prefix_source == PrefixSource("d0", "d0", 896)
    assert decision.decode.pull is None


@pytest.mark.parametrize(("held", "pays"), [(64, False), (72, False), (73, True)])
def test_a_pull_has_to_pay(held: int, pays: bool) -> None:
    """72 tokens cost 64 + 7.2, rounded up: no gain; 73 tokens cost 64 + 7.3: one token's time is won."""
    decision = place([Load("p0")], [Load("d0")], {"d0": held})
    assert decision.prefill is not None
    assert (decision.prefill.pull is not None) is pays
    assert (decision.prefix_source is not None) is pays


def test_the_last_token_is_computed_and_not_pulled() -> None:
    decision = place([Load("p0")], [Load("d0")], {"d0": 1000})
    assert decision.prefill is not None
    assert decision.prefill.pull is not None
    assert decision.prefill.pull.num_tokens == 999


def test_a_pull_makes_an_idle_worker_as_good_as_the_busy_one_that_holds_the_prefix() -> None:
    # p0 would compute 200 after the 300 that wait there; p1 pulls 800 for 144 and computes 200.
    decision = place([Load("p0", 300), Load("p1")], [Load("d0")], {"p0": 800})
    assert decision.prefill is not None
    assert (decision.prefill.address, decision.prefill.work) == ("p1", 344)
    assert decision.prefill.scores == (("p0", 500), ("p1", 344))
    assert decision.prefix_source == PrefixSource("p0", "p0", 800)
    # With 100 waiting it is nearer to stay.
    decision = place([Load("p0", 100), Load("p1")], [Load("d0")], {"p0": 800})
    assert decision.prefill is not None
    assert (decision.prefill.address, decision.prefill.pull) == ("p0", None)


def test_of_equal_holders_the_least_busy_gives() -> None:
    decision = place([Load("p0")], [Load("d0", num_sequences=5), Load("d1", num_sequences=2)], {"d0": 800, "d1": 800})
    assert decision.prefix_source is not None
    assert decision.prefix_source.worker_id == "d1"


def test_what_is_scored_is_computed() -> None:
    decision = place([Load("p0")], [Load("d0")], {"p0": 96, "d0": 896}, scored=True)
    assert decision.prefill is not None
    assert (decision.prefill.pull, decision.prefill.work) == (None, 1000)


def test_a_worker_that_failed_the_request_gives_nothing() -> None:
    demand = Demand(1000, 1050)
    decision = place_pair(
        demand, [Load("p0")], [Load("d0"), Load("d1")], {"d0": 896}, backlog_tokens=10_000, avoid=("d0",), pulls=COST
    )
    assert decision.prefix_source is None


def test_without_pulls_and_colocated() -> None:
    demand = Demand(1000, 1050)
    hits = {"w0": 800}
    alone = place_single(demand, [Load("w0", 300), Load("w1")], hits)
    assert (alone.decode.address, alone.decode.work, alone.prefix_source) == ("w0", 500, None)
    pulling = place_single(demand, [Load("w0", 300), Load("w1")], hits, pulls=COST)
    assert (pulling.decode.address, pulling.decode.work) == ("w1", 344)
    assert pulling.prefix_source == PrefixSource("w0", "w0", 800)


@given(
    hits=st.dictionaries(st.sampled_from(["p0", "p1", "d0", "d1"]), st.integers(0, 1000)),
    waiting=st.lists(st.integers(0, 2000), min_size=2, max_size=2),
)
def test_a_pull_never_makes_the_estimate_worse(hits: dict[str, int], waiting: list[int]) -> None:
    prefills, decodes = [Load("p0", waiting[0]), Load("p1", waiting[1])], [Load("d0"), Load("d1")]
    demand = Demand(1000, 1050)
    without = place_pair(demand, prefills, decodes, hits, backlog_tokens=10_000)
    chosen = place_pair(demand, prefills, decodes, hits, backlog_tokens=10_000, pulls=COST)
    assert without.prefill is not None
    assert chosen.prefill is not None
    assert chosen.prefill.work <= without.prefill.work
    if chosen.prefill.pull is not None:
        pull = chosen.prefill.pull
        assert pull.address != chosen.prefill.address
        assert hits.get(chosen.prefill.address, 0) + pull.num_tokens <= min(999, pull.prefix_tokens)


# ── adaptive ──────────────────────────────────────────────────────────────────────────────────────


def local(decodes: list[Load], hits: dict[str, int], *, most: int = 100, scored: bool = False) -> Decision | None:
    return place_local(Demand(1000, 1050, scored), decodes, hits, most_tokens=most)


def test_a_decode_worker_that_lacks_little_does_it_alone() -> None:
    decision = local([Load("d0"), Load("d1")], {"d1": 900})
    assert decision is not None
    assert (decision.prefill, decision.decode.address) == (None, "d1")
    assert decision.reason == "local: d1 lacks 100 tokens, up to 100 it computes"
    assert local([Load("d0"), Load("d1")], {"d1": 899}) is None
    assert local([Load("d0")], {"d0": 900}, scored=True) is None
    # One that holds it all still computes a token.
    assert local([Load("d0")], {"d0": 1000}, most=0) is None
    assert local([Load("d0")], {"d0": 1000}, most=1) is not None


def test_a_busy_decode_worker_is_not_kept_busier_by_what_it_holds() -> None:
    """Another one is so much freer that the prompt had better be computed and moved."""
    assert local([Load("d0", running_tokens=5000), Load("d1")], {"d0": 960}) is None


def test_no_room_on_any_decode_worker_is_said() -> None:
    with pytest.raises(NoCapacityError, match="none of 1 decode workers has room"):
        local([Load("d0", available_blocks=0)], {"d0": 960})


async def test_adaptive_requests_take_the_short_way_only_when_little_is_missing() -> None:
    config = RouterConfig(local_prefill_tokens=20)
    async with serving(mode="adaptive", config=config) as (service, fleet):
        await collect(service, a_request("short", num_prompt=20))
        assert fleet.workers["p0"].seen == []
        await collect(service, a_request("long", num_prompt=21))
        assert [request.request_id for request in fleet.workers["p0"].seen] == ["long"]
        decision = service.records.find("short").to_json(0.0)["decision"]  # type: ignore[union-attr]
        assert decision["reason"] == "local: d0 lacks 20 tokens, up to 20 it computes"
        assert decision["prefill"] is None


async def test_adaptive_readiness_still_exercises_the_whole_way() -> None:
    """The probe is short enough for the decode worker alone, and so is all that was served before."""
    async with serving(mode="adaptive") as (service, fleet):
        await collect(service, a_request("short", num_prompt=4))
        readiness = Readiness(service, 2.0)
        assert (await readiness.check()).ready
        assert [request.prompt for request in fleet.workers["p0"].seen] == [(1, 2)]
        await readiness.close()


async def test_the_workers_are_told_where_to_pull_from() -> None:
    async with serving(config=RouterConfig(pull_fixed_tokens=0)) as (service, fleet):
        request = a_request("r", num_prompt=50)
        hashes = prefix_hashes(request.prompt, root_hash("fake-weights", ""))
        service.registry.index.update("d0", stored=hashes, removed=[])
        await collect(service, request)
        (seen,) = fleet.workers["p0"].seen
        assert seen.prefix_source == PrefixSource("d0", "d0", 50 // HASH_UNIT_TOKENS * HASH_UNIT_TOKENS)
        await collect(service, replace(request, request_id="another", prompt=(9, *request.prompt)))
        assert fleet.workers["p0"].seen[-1].prefix_source is None
