"""The pool's books against a naive model, under random operations (law 3)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.hashing import root_hash
from common.workers import Role
from engine.blocks import BlockPool, BlockState
from engine.prefix_cache import PrefixCache

ROOTS = [root_hash("model", salt) for salt in ("", "a", "b")]


@dataclass
class Owned:
    blocks: list[int]
    tokens: list[int]
    root: bytes
    computed: int
    state: BlockState


class PoolMachine(RuleBasedStateMachine):
    """The naive model: a dict of owners, and for every block the token prefix that was last written to it."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 2, 4, 16, 32]), collide=st.booleans())
    def start(self, num_blocks: int, block_size: int, collide: bool) -> None:
        # With `collide` hashes have 4 bits: only the comparison of tokens keeps foreign blocks apart.
        if collide:
            cache = PrefixCache(block_size, chain=lambda parent, tokens: bytes([(sum(parent) * 31 + sum(tokens)) % 16]))
        else:
            cache = PrefixCache(block_size)
        self.pool = BlockPool(num_blocks, block_size, cache)
        self.size = block_size
        self.owners: dict[str, Owned] = {}
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.serial = 0

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        # Few distinct tokens, so that prefixes repeat.
        length = data.draw(st.integers(1, self.size * 5))
        tokens = [data.draw(st.integers(0, 1))] * length
        cut = data.draw(st.integers(0, length))
        tokens[cut:] = [data.draw(st.integers(0, 1))] * (length - cut)
        root = data.draw(st.sampled_from(ROOTS))
        shared = self.pool.match(tokens, root, length)
        assert len(shared) * self.size <= length
        for index, block_id in enumerate(shared):
            assert self.content[block_id] == (root, tuple(tokens[: (index + 1) * self.size]))
        needed = self.pool.blocks_for(length) - len(shared)
        held = {block_id for owner in self.owners.values() for block_id in owner.blocks}
        room = self.pool.num_blocks - len(held | set(shared))
        self.serial += 1
        name = f"r{self.serial}"
        state = data.draw(st.sampled_from(list(BlockState)))
        holding = self.pool.allocate(name, needed, state, 0.0, shared)
        assert (holding is not None) == (needed <= room)
        if holding is None:
            return
        new = holding.block_ids[len(shared) :]
        assert not set(new) & (held | set(shared))
        assert len(set(holding.block_ids)) == len(holding.block_ids)
        for block_id in new:
            self.content.pop(block_id, None)
        self.owners[name] = Owned(holding.block_ids, tokens, root, len(shared) * self.size, state)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.owners)))
        owner = self.owners[name]
        owner.computed = data.draw(st.integers(owner.computed, len(owner.tokens)))
        for index in range(owner.computed // self.size):
            self.content[owner.blocks[index]] = (owner.root, tuple(owner.tokens[: (index + 1) * self.size]))
        self.pool.publish(name, owner.tokens, owner.root, owner.computed)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.owners)))
        owner = self.owners[name]
        if self.pool.blocks_for(len(owner.tokens) + 1) > len(owner.blocks) and not self.pool.extend(name):
            return
        owner.tokens.append(token)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), state=st.sampled_from(list(BlockState)))
    def change_state(self, data: st.DataObject, state: BlockState) -> None:
        name = data.draw(st.sampled_from(sorted(self.owners)))
        self.owners[name].state = state
        self.pool.set_state(name, state)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.owners)))
        del self.owners[name]
        self.pool.release(name)

    @rule()
    def drop_cached(self) -> None:
        self.pool.drop_cached()
        assert self.pool.num_cached == 0

    @invariant()
    def ledger_adds_up(self) -> None:
        ledger = self.pool.ledger("w", Role.DECODE, 1.0)
        assert ledger.balanced
        states: dict[int, BlockState] = {}
        order = [BlockState.RESERVED, BlockState.RUNNING, BlockState.IN_TRANSFER]
        for owner in self.owners.values():
            for block_id in owner.blocks:
                states[block_id] = max(states.get(block_id, owner.state), owner.state, key=order.index)
        assert [ledger.reserved, ledger.running, ledger.in_transfer] == [
            sum(1 for state in states.values() if state is wanted) for wanted in order
        ]
        assert {holder.request: holder.blocks for holder in ledger.holders} == {
            name: len(owner.blocks) for name, owner in self.owners.items()
        }

    @invariant()
    def events_tell_the_cache(self) -> None:
        cache = self.pool.prefix_cache
        assert cache is not None
        balance: dict[bytes, int] = {}
        for item in cache.stored:
            balance[item] = balance.get(item, 0) + 1
        for item in cache.removed:
            balance[item] = balance.get(item, 0) - 1
        assert sorted(item for item, count in balance.items() if count) == sorted(cache.unit_hashes())


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_salts_and_boundaries_keep_prefixes_apart() -> None:
    assert len({root_hash("ab", "c"), root_hash("a", "bc"), root_hash("abc"), root_hash("abc", "")}) == 4


def test_an_eviction_takes_the_longest_unused_tail_first() -> None:
    pool = BlockPool(4, 2, PrefixCache(2))
    root = ROOTS[0]
    for name, tokens in (("old", [1, 1, 2, 2]), ("new", [3, 3, 4, 4])):
        pool.allocate(name, 2, BlockState.RUNNING, 0.0)
        pool.publish(name, tokens, root, 4)
        pool.release(name)
    pool.allocate("one", 1, BlockState.RUNNING, 0.0)
    assert len(pool.match([1, 1, 2, 2], root, 4)) == 1
    assert len(pool.match([3, 3, 4, 4], root, 4)) == 2


def test_an_owner_cannot_allocate_twice() -> None:
    pool = BlockPool(4, 2)
    pool.allocate("a", 1, BlockState.RUNNING, 0.0)
    with pytest.raises(ValueError, match="holds blocks already"):
        pool.allocate("a", 1, BlockState.RUNNING, 0.0)
