"""Computed prompts whose KV does not get away: what is computed then, and for whom."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import WorkerLostError
from common.workers import Role
from engine.blocks import BlockPool
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.undelivered import Undelivered
from tests.schedule_harness import MODEL, Device, sequence

BLOCK = 4


class Worker:
    """A scheduler whose plans are run at once; what is computed stays held until it is released."""

    def __init__(self, chunk_tokens: int, undelivered_tokens: int, max_sequences: int = 8) -> None:
        self.pool = BlockPool(400, BLOCK, PrefixCache(BLOCK))
        self.scheduler = PrefillScheduler(self.pool, MODEL, chunk_tokens, max_sequences, undelivered_tokens)
        self.held: dict[str, Sequence] = {}
        self.steps: list[list[tuple[str, int]]] = []
        self._device = Device(BLOCK, 400)

    def add(self, name: str, length: int, target: str = "d", num_there: int = 0) -> Sequence:
        added = sequence(name, [ord(name[0])] * length, 2)
        self.scheduler.add(added, target, num_there)
        return added

    def step(self) -> bool:
        plan = self.scheduler.schedule(0.0)
        if plan is None:
            return False
        self.steps.append([(step.sequence_id.split("#")[0], len(step.token_ids)) for step in plan.steps])
        for output in self.scheduler.update(plan, self._device.run(plan), 0.0):
            self.held[output.sequence.key.split("#")[0]] = output.sequence
        return True

    def run(self) -> list[list[tuple[str, int]]]:
        """Steps until there is nothing to compute; their (prompt, tokens)."""
        first = len(self.steps)
        while self.step():
            pass
        return self.steps[first:]

    def deliver(self, name: str) -> None:
        self.scheduler.release(self.held.pop(name))


def test_beyond_the_bound_nothing_is_computed_until_something_is_delivered() -> None:
    worker = Worker(chunk_tokens=8, undelivered_tokens=16)
    for name in "abcdef":
        worker.add(name, 8)
    # a, b and c are 24 tokens; c, the latest, does not count: 16 are not beyond 16. With d it is 24.
    assert worker.run() == [[(name, 8)] for name in "abcd"]
    assert (len(worker.scheduler.clogged), worker.scheduler.waiting_tokens) == (1, 0)  # no work that could be done
    worker.deliver("b")
    assert (len(worker.scheduler.clogged), worker.scheduler.waiting_tokens) == (0, 16)
    assert worker.run() == [[("e", 8)]]
    worker.deliver("a")
    worker.deliver("c")
    assert worker.run() == [[("f", 8)]]


def test_one_prompt_beyond_all_bounds_passes_and_the_next_is_computed_meanwhile() -> None:
    worker = Worker(chunk_tokens=8, undelivered_tokens=8)
    for name, length in (("a", 40), ("b", 40), ("c", 4)):
        worker.add(name, length)
    assert worker.run() == [[(name, 8)] for name in "a" * 5 + "b" * 5]
    worker.deliver("a")
    assert worker.run() == [[("c", 4)]]


def test_a_prompt_under_way_stops_and_goes_on_where_it_was() -> None:
    worker = Worker(chunk_tokens=8, undelivered_tokens=0)
    for name, length in (("a", 4), ("b", 8), ("c", 12)):
        worker.add(name, length)
    assert worker.run() == [[("a", 4), ("b", 4)], [("b", 4), ("c", 4)]]
    assert worker.pool.ledger("w", Role.PREFILL, 0.0).running == 3  # the blocks of c
    worker.deliver("b")
    assert worker.run() == [[("c", 8)]]


def test_what_the_target_has_already_does_not_count() -> None:
    worker = Worker(chunk_tokens=16, undelivered_tokens=8)
    for name in "abc":
        worker.add(name, 16, num_there=12)
    assert len(worker.run()) == 3  # 4 + 4 are not beyond 8
    worker.add("d", 16, num_there=0)
    assert len(worker.run()) == 1
    worker.add("e", 16)
    assert worker.run() == []  # 4 + 4 + 4 are


def test_targets_do_not_hold_each_other_up() -> None:
    """Not in the order of the queue, and not by the places in a step."""
    worker = Worker(chunk_tokens=8, undelivered_tokens=0, max_sequences=2)
    for name in "abcdef":
        worker.add(name, 8, "slow")
    for name in "xyz":
        worker.add(name, 8, "fast")
    while worker.step():
        for name in [name for name in worker.held if name in "xyz"]:
            worker.deliver(name)
    assert worker.steps == [[(name, 8)] for name in "abxyz"]
    for name in "ab":
        worker.deliver(name)
    assert worker.run() == [[(name, 8)] for name in "cd"]


def test_a_handoff_that_fails_makes_room() -> None:
    worker = Worker(chunk_tokens=8, undelivered_tokens=0)
    for name in "abcd":
        worker.add(name, 8)
    assert len(worker.run()) == 2
    assert worker.scheduler.abort(worker.held["a"], WorkerLostError("its decode worker is gone"))
    assert worker.run() == [[("c", 8)]]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), chunk=st.integers(4, 40), most=st.integers(0, 80), places=st.integers(1, 4))
def test_what_is_held_for_a_target_is_bounded_and_everything_ends(
    seed: int, chunk: int, most: int, places: int
) -> None:
    rng = random.Random(seed)
    worker = Worker(chunk, most, places)
    wanted = {f"{chr(97 + number)}": rng.randrange(1, 50) for number in range(16)}
    targets = {name: rng.choice(["d0", "d1", "d2"]) for name in wanted}
    added = {name: worker.add(name, length, targets[name]) for name, length in wanted.items()}
    left = dict(added)
    while left:
        moved = worker.step()
        for target in ("d0", "d1", "d2"):
            held = [s.num_context for name, s in worker.held.items() if targets[name] == target]
            # Before its last step it was within the bound; that step ended one prompt, and a chunk of others at most.
            assert sum(held) <= most + 2 * max(wanted.values()) + chunk
        if worker.held and (not moved or rng.random() < 0.3):
            name = rng.choice(list(worker.held))
            worker.deliver(name)
            del left[name]
            moved = True
        assert moved, "nothing is held, and nothing computed"
    assert worker.pool.num_available == worker.pool.num_blocks
    assert worker.scheduler.num_running == worker.scheduler.num_waiting == 0


def test_forgotten_ones_do_not_count() -> None:
    undelivered = Undelivered(10)
    for key, num_tokens in (("a", 8), ("b", 8), ("c", 1)):
        undelivered.expect(key, "d", num_tokens)
        undelivered.computed(key)
    assert undelivered.clogged() == {"d"}
    undelivered.forget("c")
    assert undelivered.clogged() == frozenset()
    undelivered.forget("never heard of")
