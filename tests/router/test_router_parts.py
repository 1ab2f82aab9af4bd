"""The router's pure parts: placement, queue, prefix index, answer, load corrections, records."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ContextLengthError, HandoffError, NoCapacityError
from common.hashing import HASH_UNIT_TOKENS, prefix_hashes, root_hash
from common.messages import ContextTokens, FinishReason, GenerationRequest, SamplingParams
from common.workers import ModelInfo
from router.answer import Answer, Finished, NewTokens, Usage
from router.ending import reason_to_end
from router.outstanding import Outstanding
from router.placement import Demand, place_pair, place_single
from router.prefix_index import PrefixIndex
from router.queue import AdmissionQueue
from router.records import Records, RequestRecord
from tests.router.outlook import Load


def place(prefills, decodes, hits=None, *, context=100, backlog=10_000, avoid=()):
    return place_pair(Demand(context, context + 50), prefills, decodes, hits or {}, backlog_tokens=backlog, avoid=avoid)


# ── placement ─────────────────────────────────────────────────────────────────────────────────────


def test_no_pair_is_made_over_a_way_that_is_clogged():
    """The least busy of each pool do not go together; the least busy prefill worker with a free way decides."""
    decodes = [Load("d0"), Load("d1", running_tokens=500)]
    decision = place([Load("p0", 10, clogged=("d0",)), Load("p1", 20)], decodes)
    assert decision.prefill is not None
    assert (decision.prefill.address, decision.decode.address) == ("p0", "d1")
    decision = place([Load("p0", 10, clogged=("d0", "d1")), Load("p1", 20, clogged=("d0",))], decodes)
    assert decision.prefill is not None
    assert (decision.prefill.address, decision.decode.address) == ("p1", "d1")
    # The way that is left leads to a worker without room.
    decodes[1].accepting = False
    with pytest.raises(NoCapacityError, match="has yet to arrive"):
        place([Load("p0", clogged=("d0",))], decodes)


def test_least_work_wins_and_ties_go_to_the_first():
    decision = place([Load("p0", 50), Load("p1", 20), Load("p2", 20)], [Load("d0", running_tokens=9), Load("d1")])
    assert decision.prefill is not None
    assert (decision.prefill.address, decision.prefill.work) == ("p1", 120)
    assert decision.decode.address == "d1"
    assert decision.prefill.scores == (("p0", 150), ("p1", 120), ("p2", 120))


def test_affinity_competes_with_load():
    hits = {"p1": 64}
    near = place([Load("p0", 0), Load("p1", 60)], [Load("d0")], hits)
    far = place([Load("p0", 0), Load("p1", 70)], [Load("d0")], hits)
    assert near.prefill is not None
    assert far.prefill is not None
    assert (near.prefill.address, far.prefill.address) == ("p1", "p0")


def test_a_hot_prefix_spreads():
    """R39: every request shares a long prefix that one worker holds; the flood still spreads."""
    loads = [Load(f"p{i}") for i in range(4)]
    hits = {"p0": 512}
    for _ in range(400):
        decision = place(loads, [Load("d0")], hits, context=600, backlog=10**9)
        assert decision.prefill is not None
        chosen = next(load for load in loads if load.address == decision.prefill.address)
        chosen.waiting_tokens += 600 - hits.get(chosen.address, 0)
        hits[chosen.address] = 512
    waiting = [load.waiting_tokens for load in loads]
    assert max(waiting) < 1.2 * sum(waiting) / len(waiting)


def test_failed_workers_are_the_last_resort():
    workers = [Load("p0"), Load("p1", 500)]
    assert place(workers, [Load("d0")], avoid=("p0",)).prefill.address == "p1"
    assert place(workers, [Load("d0")], avoid=("p0", "p1", "d0")).prefill.address == "p0"


def test_full_workers_are_waited_for():
    with pytest.raises(NoCapacityError, match="prefill"):
        place([Load("p0", 20)], [Load("d0")], backlog=20)
    with pytest.raises(NoCapacityError, match="decode"):
        place([Load("p0")], [Load("d0", available_blocks=6)])
    assert place([Load("p0")], [Load("d0", available_blocks=6)], {"d0": 16}).decode.address == "d0"
    with pytest.raises(NoCapacityError):
        place_single(Demand(100, 150), [Load("w0", accepting=False)], {})


def test_too_large_is_no_waiting_matter():
    with pytest.raises(ContextLengthError, match="150 tokens do not fit any decode worker; the largest holds 149"):
        place([Load("p0")], [Load("d0", max_sequence_tokens=149)])


def test_single_prefers_what_holds_the_prefix():
    decision = place_single(Demand(100, 150), [Load("w0", 10), Load("w1", 40)], {"w1": 64})
    assert decision.prefill is None
    assert decision.decode.address == "w1"


# ── prefix index ──────────────────────────────────────────────────────────────────────────────────


def test_hits_are_unbroken_prefixes():
    hashes = prefix_hashes(list(range(64)), root_hash("m", ""))
    index = PrefixIndex()
    index.replace("a", hashes)
    index.replace("b", hashes[:2])
    index.update("c", stored=[hashes[0], hashes[2]], removed=[])
    assert index.hits(hashes) == {"a": 64, "b": 32, "c": 16}
    index.update("a", stored=[], removed=[hashes[0]])
    assert index.hits(hashes) == {"b": 32, "c": 16}
    index.drop("b")
    index.replace("c", [])
    assert index.hits(hashes) == {}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["store", "remove", "replace", "drop"]), st.integers(0, 5)),
        max_size=30,
    )
)
def test_prefix_index_against_sets(steps):
    hashes = [bytes([i]) * 16 for i in range(6)]
    index, model = PrefixIndex(), {}
    for worker, what, number in steps:
        held = model.setdefault(worker, set())
        if what == "store":
            index.update(worker, hashes[: number + 1], ())
            held.update(hashes[: number + 1])
        elif what == "remove":
            index.update(worker, (), hashes[number:])
            held.difference_update(hashes[number:])
        elif what == "replace":
            index.replace(worker, hashes[:number])
            model[worker] = set(hashes[:number])
        else:
            index.drop(worker)
            model[worker] = set()
    expected = {}
    for worker, held in model.items():
        length = next((i for i, prefix in enumerate(hashes) if prefix not in held), len(hashes))
        if length:
            expected[worker] = length * HASH_UNIT_TOKENS
    assert index.hits(hashes) == expected


# ── answer ────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=30))
def test_every_token_once(frames):
    answer = Answer()
    num_known = num_repeats = 0
    for first, count in frames:
        if first > num_known:
            with pytest.raises(HandoffError, match=f"token {num_known} is missing"):
                answer.accept(first, [*range(first, first + count)])
            continue
        answer.accept(first, [*range(first, first + count)])
        num_repeats += min(count, num_known - first)
        num_known = max(num_known, first + count)
    assert answer.tokens == [*range(num_known)]
    assert answer.duplicates == num_repeats


async def test_answer_joins_what_waits():
    answer = Answer()
    answer.accept(0, [5])
    events = answer.events()
    assert await anext(events) == NewTokens(0, (5,))
    answer.accept(1, [6])
    answer.accept(2, [7])
    answer.finish(FinishReason.STOP, Usage(1, 0, 3))
    assert answer.accept(3, [8]) == 0
    assert [event async for event in events] == [NewTokens(1, (6, 7)), Finished(FinishReason.STOP, Usage(1, 0, 3))]


def test_a_repeat_that_differs_is_an_error():
    answer = Answer()
    answer.accept(0, [1, 2])
    with pytest.raises(HandoffError, match="differ"):
        answer.accept(1, [3, 4])
    assert answer.tokens == [1, 2]


def test_reason_to_end():
    model = ModelInfo("m", "f", 100, 20, (99,))

    def reason(tokens, **sampling):
        request = GenerationRequest("r", (1,) * 10, SamplingParams(**{"max_tokens": 50, **sampling}))
        return reason_to_end(tokens, request, model)

    assert reason([]) is None
    assert reason([1, 2]) is None
    assert reason([1, 99]) is FinishReason.STOP
    assert reason([1, 99], ignore_eos=True) is None
    assert reason([1, 7], stop_token_ids=(7,), ignore_eos=True) is FinishReason.STOP
    assert reason([1, 2], max_tokens=2) is FinishReason.LENGTH
    assert reason([1] * 10) is FinishReason.LENGTH


# ── queue ─────────────────────────────────────────────────────────────────────────────────────────


async def test_queue_order_and_wake_ups():
    queue = AdmissionQueue()
    served = []

    async def wait(name, priority, arrival, open_gate):
        with queue.turn(priority, arrival) as turn:
            while not (turn.is_head and open_gate.is_set()):
                await turn.woken(10.0)
            served.append(name)

    gate = asyncio.Event()
    jobs = [
        asyncio.ensure_future(wait(name, priority, arrival, gate))
        for name, priority, arrival in [("late", 0, 2), ("early", 0, 1), ("slow", 5, 0), ("urgent", -1, 3)]
    ]
    gone = asyncio.ensure_future(wait("gone", -9, 4, gate))
    await asyncio.sleep(0)
    assert len(queue) == 5
    gone.cancel()
    await asyncio.sleep(0)
    gate.set()
    queue.news()
    await asyncio.wait_for(asyncio.gather(*jobs), 1.0)
    assert served == ["urgent", "early", "late", "slow"]
    assert len(queue) == 0


async def test_head_looks_again_without_news():
    queue = AdmissionQueue()
    with queue.turn(0, 0) as turn:
        await asyncio.wait_for(turn.woken(0.01), 1.0)


# ── load corrections and records ──────────────────────────────────────────────────────────────────


def test_outstanding_corrects_the_last_report():
    work = Outstanding()
    work.begin(("a", 0), 100, 7)
    work.begin(("b", 0), 50, 4)
    assert (work.tokens, work.blocks, work.requests, work.num_unsent) == (150, 11, 2, 2)
    work.sent(("a", 0))
    work.reported()  # the report shows a; b is not there yet
    assert (work.tokens, work.blocks, work.requests, work.num_unsent) == (50, 4, 1, 1)
    work.end(("a", 0))
    work.end(("a", 0))
    assert (work.tokens, work.blocks, work.requests) == (-50, -3, 0)
    work.end(("b", 0))
    work.reported()
    assert (work.tokens, work.blocks, work.requests, len(work)) == (0, 0, 0, 0)


def test_resumed_attempts_add_up_to_the_prompt():
    record = RequestRecord("r", 20, 0.0)
    record.prefill_context = ContextTokens(cached=16, computed=9)
    record.decode_context = ContextTokens(moved=25)
    tokens = record.to_json(1.0)["tokens"]
    assert (tokens["cached_prefill"], tokens["pulled"], tokens["computed_prefill"]) == (16, 0, 4)
    assert (tokens["cached_decode"], tokens["received"], tokens["computed_decode"]) == (0, 20, 0)
    record.prefill_context = ContextTokens(cached=24, computed=1)
    assert record.usage.cached_tokens == 20


def test_records_keep_the_last_ones():
    records = Records(2)
    made = [RequestRecord(f"r{i}", 1, 0.0) for i in range(4)]
    for record in made:
        records.open(record)
    assert records.num_live == 4
    for record in made:
        records.close(record)
    assert records.num_live == 0
    assert records.find("r1") is None
    assert records.find("r3") is made[3]


async def test_tokens_beyond_a_cut_are_dropped_and_are_no_duplicates() -> None:
    answer = Answer()
    answer.accept(0, [5, 6, 7, 8])
    answer.cut(2, Usage(1, 0, 2))
    assert answer.accept(4, [9, 10]) == 0
    assert answer.accept(6, [11]) == 0
    assert (answer.tokens, answer.duplicates) == ([5, 6], 0)
    events = [event async for event in answer.events()]
    assert events == [NewTokens(0, (5, 6)), Finished(FinishReason.STOP, Usage(1, 0, 2))]
