"""The decode scheduler under random arrivals, aborts and tiny pools: the right tokens, and nothing kept."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import NoCapacityError, RequestCancelledError
from common.messages import FinishReason
from common.workers import Role
from decode_worker.scheduler import DecodeScheduler
from engine.blocks import BlockPool
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence
from sim.device import expected_tokens
from tests.schedule_harness import MODEL, VOCAB, Device, sequence


def make(
    num_blocks: int, block_size: int, max_sequences: int = 64, chunk_tokens: int = 8
) -> tuple[BlockPool, DecodeScheduler, Device]:
    pool = BlockPool(num_blocks, block_size, PrefixCache(block_size))
    return pool, DecodeScheduler(pool, MODEL, max_sequences, chunk_tokens), Device(block_size, num_blocks)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 4, 16]), num_blocks=st.integers(4, 14))
def test_random_lives_end_with_the_right_tokens(seed: int, block_size: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    pool, scheduler, device = make(num_blocks, block_size, rng.randint(1, 6), rng.randint(1, 20))
    capacity = num_blocks * block_size
    waiting = []
    for number in range(rng.randint(1, 10)):
        length = rng.randint(1, max(1, capacity // 2 - 1))
        prompt = [7] * (length // 2) + [number] * (length - length // 2)
        limit = rng.randint(1, max(1, capacity - length - 1))
        waiting.append(sequence(f"r{number}", prompt, min(limit, 30), seed=number))
    requests = {s.key: s.request for s in waiting}
    alive: dict[str, Sequence] = {}
    done: dict[str, list[int]] = {}
    tokens: dict[str, list[int]] = {s.key: [] for s in waiting}
    for _ in range(3000):
        if not waiting and not alive:
            break
        if waiting and rng.random() < 0.5:
            try:
                scheduler.submit(waiting[0], 0.0)
            except NoCapacityError:
                pass
            else:
                joined = waiting.pop(0)
                alive[joined.key] = joined
        plan = scheduler.schedule(0.0)
        if plan is None:
            assert not alive, "sequences are alive and nothing runs"
            continue
        if rng.random() < 0.05:
            victim = rng.choice(list(alive.values()))
            in_step = any(step.sequence_id == victim.key for step in plan.steps)
            assert scheduler.abort(victim, RequestCancelledError("test")) is not in_step
            if not in_step:
                del alive[victim.key]
        ids = [step.sequence_id for step in plan.steps]
        assert len(set(ids)) == len(ids)
        assert all(len(s.block_ids) * block_size >= s.start + len(s.token_ids) for s in plan.steps)
        for output in scheduler.update(plan, device.run(plan), 0.0):
            key = output.sequence.key
            if output.error is not None:
                assert isinstance(output.error, RequestCancelledError), output.error
                del alive[key]
                continue
            assert output.index == len(tokens[key])
            tokens[key].append(output.token)
            if output.finish is not None:
                assert output.finish is FinishReason.LENGTH
                done[key] = tokens[key]
                del alive[key]
        assert pool.ledger("w", Role.BOTH, 0.0).balanced
    assert not waiting
    assert not alive
    for key, answer in done.items():
        request = requests[key]
        assert answer == expected_tokens(request.prompt, request.sampling, VOCAB)
    assert pool.num_available == num_blocks


def test_reserved_blocks_are_counted_and_join_the_batch() -> None:
    pool, scheduler, device = make(8, 4)
    prompt = list(range(10, 19))
    s = sequence("a", prompt, 5)
    scheduler.reserve(s, 0.0)
    ledger = pool.ledger("w", Role.DECODE, 1.0)
    assert (ledger.reserved, ledger.running) == (3, 0)
    assert ledger.holders[0].request == "a#0"
    assert scheduler.schedule(0.0) is None

    # The handoff, by hand: the KV appears in the blocks and the first token with it.
    source = sequence("a", prompt, 5)
    other_pool, other, _ = make(8, 4)
    other.submit(source, 0.0)
    source_device = Device(4, 8)
    token = None
    while token is None:
        plan = other.schedule(0.0)
        token = other.update(plan, source_device.run(plan), 0.0)[-1:]
        token = token[0].token if token else None
    device.memory.copy_from(source_device.memory, source.block_ids[:3], s.block_ids[:3])
    assert scheduler.join(s, token, 0.0).index == 0
    assert pool.ledger("w", Role.DECODE, 1.0).running == 3
    answer = [token]
    while (plan := scheduler.schedule(0.0)) is not None:
        answer += [output.token for output in scheduler.update(plan, device.run(plan), 0.0)]
    assert answer == expected_tokens(prompt, s.request.sampling, VOCAB)
    assert pool.num_available == 8
    del other_pool


def test_a_full_batch_and_a_full_pool_are_refused_with_numbers() -> None:
    _, scheduler, _ = make(8, 4, max_sequences=1)
    scheduler.reserve(sequence("a", [5] * 4, 2), 0.0)
    with pytest.raises(NoCapacityError, match="max_sequences is 1, 1 are held"):
        scheduler.reserve(sequence("b", [6] * 4, 2), 0.0)
    _, scheduler, _ = make(4, 4)
    scheduler.reserve(sequence("a", [5] * 4, 2), 0.0)
    with pytest.raises(NoCapacityError, match="2 of 4 are available"):
        scheduler.reserve(sequence("b", [6] * 4, 2), 0.0)


def test_the_last_to_join_is_preempted_and_comes_back_before_newcomers() -> None:
    pool, scheduler, device = make(6, 4)
    first, second = sequence("a", [5] * 7, 12), sequence("b", [6] * 7, 12)
    scheduler.submit(first, 0.0)
    scheduler.submit(second, 0.0)
    answers: dict[str, list[int]] = {"a#0": [], "b#0": []}
    refused = 0
    while (plan := scheduler.schedule(0.0)) is not None:
        if second.preemptions and not second.block_ids:
            with pytest.raises(NoCapacityError, match="come first"):
                scheduler.reserve(sequence("c", [1], 1), 0.0)
            refused += 1
        for output in scheduler.update(plan, device.run(plan), 0.0):
            answers[output.sequence.key].append(output.token)
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert refused > 0
    for s in (first, second):
        assert answers[s.key] == expected_tokens(s.request.prompt, s.request.sampling, VOCAB)
    assert pool.num_available == 6


def test_blocks_of_a_step_under_way_stay_until_it_ends() -> None:
    pool, scheduler, device = make(4, 4)
    s = sequence("a", [5] * 7, 4)
    scheduler.submit(s, 0.0)
    plan = scheduler.schedule(0.0)
    assert scheduler.abort(s, RequestCancelledError("gone")) is False
    assert pool.ledger("w", Role.BOTH, 0.0).running == 2
    outputs = scheduler.update(plan, device.run(plan), 0.0)
    assert isinstance(outputs[0].error, RequestCancelledError)
    assert pool.num_available == 4
