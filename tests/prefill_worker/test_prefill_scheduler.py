"""Chunked prefill: budget, order, block boundaries, prefix hits, and blocks held until released."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import RequestCancelledError
from common.messages import ContextTokens, PrefixSource
from common.workers import Role
from engine.blocks import BlockPool
from engine.prefix_cache import PrefixCache
from prefill_worker.scheduler import PrefillScheduler
from sim.device import expected_tokens
from tests.schedule_harness import MODEL, VOCAB, Device, sequence


def make(
    num_blocks: int, block_size: int, chunk_tokens: int, max_sequences: int = 8
) -> tuple[BlockPool, PrefillScheduler, Device]:
    pool = BlockPool(num_blocks, block_size, PrefixCache(block_size))
    return pool, PrefillScheduler(pool, MODEL, chunk_tokens, max_sequences), Device(block_size, num_blocks)


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 4, 16]),
    chunk=st.integers(1, 50),
    max_sequences=st.integers(1, 4),
)
def test_first_tokens_are_right_for_all_lengths_and_chunks(
    lengths: list[int], block_size: int, chunk: int, max_sequences: int
) -> None:
    pool, scheduler, device = make(80 // block_size + 2, block_size, chunk, max_sequences)
    sequences = [sequence(f"r{i}", [9] * (n // 2) + [i] * (n - n // 2), 4, seed=i) for i, n in enumerate(lengths)]
    for s in sequences:
        scheduler.add(s)
    finished = []
    computed = dict.fromkeys((s.key for s in sequences), 0)
    while (plan := scheduler.schedule(0.0)) is not None:
        assert plan.num_tokens <= chunk
        assert len(plan.steps) <= max_sequences
        for step in plan.steps:
            computed[step.sequence_id] += len(step.token_ids)
        for output in scheduler.update(plan, device.run(plan), 0.0):
            finished.append(output.sequence)
            expected = expected_tokens(output.sequence.request.prompt, output.sequence.request.sampling, VOCAB)
            assert (output.index, output.token) == (0, expected[0])
            scheduler.release(output.sequence)
        assert pool.ledger("w", Role.PREFILL, 0.0).balanced
    assert sorted(s.key for s in finished) == [s.key for s in sequences]
    for s in sequences:
        assert s.context == ContextTokens(cached=s.num_context - computed[s.key], computed=computed[s.key])
        assert s.context.computed >= 1
    assert pool.num_available == pool.num_blocks


def test_all_chunks_but_the_last_end_on_a_block_boundary() -> None:
    _, scheduler, device = make(20, 16, 40)
    scheduler.add(sequence("a", list(range(100)), 1))
    ends = []
    while (plan := scheduler.schedule(0.0)) is not None:
        ends += [step.start + len(step.token_ids) for step in plan.steps]
        scheduler.update(plan, device.run(plan), 0.0)
    assert ends == [32, 64, 100]


def test_held_blocks_are_in_transfer_until_released_and_then_cache() -> None:
    pool, scheduler, device = make(10, 4, 64)
    s = sequence("a", list(range(10)), 3)
    scheduler.add(s)
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, device.run(plan), 0.0)
    assert pool.ledger("w", Role.PREFILL, 0.0).in_transfer == 3
    scheduler.release(s)
    assert (pool.num_cached, pool.num_free) == (2, 8)
    again = sequence("b", list(range(10)), 3)
    scheduler.add(again)
    scheduler.schedule(0.0)
    assert again.context == ContextTokens(cached=8, computed=2)


def test_nobody_overtakes_a_prompt_that_waits_for_blocks() -> None:
    pool, scheduler, device = make(4, 4, 64)
    for name, length in (("a", 12), ("b", 12), ("c", 2)):
        scheduler.add(sequence(name, [ord(name)] * length, 1))
    order = []
    while (plan := scheduler.schedule(0.0)) is not None:
        for output in scheduler.update(plan, device.run(plan), 0.0):
            order.append(output.sequence.key)
            scheduler.release(output.sequence)
    assert order == ["a#0", "b#0", "c#0"]
    assert pool.num_available == 4


def test_smaller_priority_is_sooner() -> None:
    _, scheduler, device = make(20, 4, 8, max_sequences=1)
    for name, priority in (("late", 5), ("soon", -1), ("normal", 0), ("normal2", 0)):
        scheduler.add(sequence(name, [1] * 8, 1, priority=priority))
    order = []
    while (plan := scheduler.schedule(0.0)) is not None:
        order += [output.sequence.key for output in scheduler.update(plan, device.run(plan), 0.0)]
    assert [key.split("#")[0] for key in order] == ["soon", "normal", "normal2", "late"]


def test_a_pulled_prefix_counts_as_computed_and_becomes_cache() -> None:
    pool, scheduler, device = make(20, 4, 64)
    prompt = list(range(20))
    source = sequence("source", prompt, 1)
    scheduler.add(source)
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, device.run(plan), 0.0)
    source_blocks = list(source.block_ids)
    # The same tokens under another salt: nothing is shared, all that the source holds is to be pulled.
    s = sequence("a", prompt, 1)
    s.request = replace(s.request, prefix_source=PrefixSource("w", "w", 20))
    s.root = b"another"
    other = sequence("b", [7] * 6, 1)
    scheduler.add(s)
    scheduler.add(other)
    plan = scheduler.schedule(0.0)
    # Beside it the other one goes on; the last token, and with it the last block, is not pulled.
    assert [step.sequence_id for step in plan.steps] == ["b#0"]
    assert (scheduler.take_pulls(), s.num_pulling) == ([s], 16)
    assert (scheduler.take_pulls(), scheduler.take_admitted()) == ([], [source, other])
    assert pool.ledger("w", Role.PREFILL, 0.0).reserved == 5
    assert scheduler.waiting_tokens == 4 + 6
    scheduler.update(plan, device.run(plan), 0.0)
    device.memory.copy_from(device.memory, source_blocks[:4], s.block_ids[:4])
    scheduler.pulled(s, 16, 0.0)
    assert scheduler.take_admitted() == [s]
    assert s.context == ContextTokens(cached=0, moved=16, computed=4)
    plan = scheduler.schedule(0.0)
    assert [(step.start, len(step.token_ids)) for step in plan.steps] == [(16, 4)]
    (output,) = scheduler.update(plan, device.run(plan), 0.0)
    assert output.token == expected_tokens(prompt, s.request.sampling, VOCAB)[0]
    scheduler.release(s)
    assert pool.match(prompt, b"another", 20) == s.block_ids


@pytest.mark.parametrize("came", [0, 8])
def test_one_that_is_pulled_for_ends_when_the_pull_does(came: int) -> None:
    pool, scheduler, _ = make(10, 4, 8)
    s = sequence("a", list(range(20)), 2)
    s.request = replace(s.request, prefix_source=PrefixSource("w", "w", 8))
    scheduler.add(s)
    assert scheduler.schedule(0.0) is None
    assert scheduler.abort(s, RequestCancelledError("gone")) is False
    assert pool.num_available == 5
    scheduler.pulled(s, came, 0.0)
    assert scheduler.schedule(0.0) is None
    assert (pool.num_available, pool.num_cached) == (10, 0)


@pytest.mark.parametrize("stage", ["waiting", "in step", "between chunks", "held"])
def test_an_abort_gives_everything_back_at_every_stage(stage: str) -> None:
    pool, scheduler, device = make(10, 4, 8)
    s = sequence("a", list(range(20)), 2)
    scheduler.add(s)
    error = RequestCancelledError("gone")
    if stage == "waiting":
        assert scheduler.abort(s, error)
    elif stage == "held":
        while (plan := scheduler.schedule(0.0)) is not None:
            scheduler.update(plan, device.run(plan), 0.0)
        assert scheduler.abort(s, error)
    else:
        plan = scheduler.schedule(0.0)
        if stage == "in step":
            assert not scheduler.abort(s, error)
            (output,) = scheduler.update(plan, device.run(plan), 0.0)
            assert output.error is error
        else:
            scheduler.update(plan, device.run(plan), 0.0)
            assert scheduler.abort(s, error)
    assert scheduler.schedule(0.0) is None
    assert pool.num_available == 10
