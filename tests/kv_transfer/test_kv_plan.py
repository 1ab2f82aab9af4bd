"""The plan, gathering and scattering against labels: every number of a context is told apart, and counted."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import HandoffError, LayoutMismatchError
from common.handoff import KVLayout, Ticket
from kv_transfer.channel import Bytes
from kv_transfer.copies import Gather, Scatter, make_wire, nobody
from kv_transfer.layout import check_compatible, rank_heads
from kv_transfer.pieces import PieceQueue, PieceSet
from kv_transfer.plan import ShardPlan, sending_heads, shard_plan
from kv_transfer.pool import NumpyPool
from kv_transfer.transports.staging import Ring

WHOLE = KVLayout(model="m", num_layers=2, num_kv_heads=6, head_dim=2, block_size=4, dtype="float32", total_kv_heads=6)
TP_SIZES = (1, 2, 4, 8)
HEADS = {"MHA": 8, "GQA": 2, "MQA": 1}


def rank_of(whole: KVLayout, tp_size: int, rank: int, **changes: object) -> KVLayout:
    """The layout of one rank of a group."""
    heads = rank_heads(whole.total_kv_heads, tp_size, rank)
    layout = dataclasses.replace(whole, tp_size=tp_size, tp_rank=rank, head_start=heads.start, num_kv_heads=len(heads))
    return dataclasses.replace(layout, **changes)  # type: ignore[arg-type]


def model(num_heads: int, kind: str = "gqa") -> KVLayout:
    return dataclasses.replace(WHOLE, num_kv_heads=num_heads, total_kv_heads=num_heads, kind=kind)


def make_ticket(layout: KVLayout, context: int, cached: int, block_ids: list[int]) -> Ticket:
    return Ticket("t", "r", 0, "d", 1, context, cached, tuple(block_ids), layout, (), b"s", 1.0)


# ── heads ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("whole", [*map(model, HEADS.values()), model(1, "mla")])
@pytest.mark.parametrize(("source_tp", "target_tp"), list(itertools.product(TP_SIZES, TP_SIZES)))
def test_each_head_comes_from_exactly_one_rank_that_holds_it(whole: KVLayout, source_tp: int, target_tp: int) -> None:
    sent = Counter[int]()
    for target_rank in range(target_tp):
        target = rank_of(whole, target_tp, target_rank)
        answers = [sending_heads(rank_of(whole, source_tp, rank), target) for rank in range(source_tp)]
        assert all(answer == answers[0] for answer in answers)  # the ranks need not ask each other
        for rank, heads in answers[0].items():
            source = rank_of(whole, source_tp, rank)
            assert set(heads) <= set(range(source.head_start, source.head_start + source.num_kv_heads))
            sent[rank] += len(heads)
        dealt = sorted(head for heads in answers[0].values() for head in heads)
        assert dealt == list(range(target.head_start, target.head_start + target.num_kv_heads))
    wanted = sum(sent.values())
    assert max(sent.values()) == -(-wanted // source_tp)  # where several hold a head they share the work


def test_the_heads_of_a_rank() -> None:
    assert [rank_heads(8, 4, rank) for rank in range(4)] == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert [rank_heads(2, 4, rank) for rank in range(4)] == [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]
    with pytest.raises(LayoutMismatchError, match="6 KV heads cannot be dealt to 4 ranks"):
        rank_heads(6, 4, 0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "n"}, "model is 'm' and 'n'"),
        ({"head_dim": 4, "num_layers": 3}, "num_layers is 2 and 3; head_dim is 2 and 4"),
        ({"total_kv_heads": 8}, "total_kv_heads is 6 and 8"),
        ({"kind": "mla", "version": 2}, "version is 1 and 2; kind is 'gqa' and 'mla'"),
        ({"head_start": 3}, "rank 0 of 1 holds KV heads 0 to 5 of 6, this layout says 3 to 8"),
        ({"tp_size": 4}, "6 KV heads cannot be dealt to 4 ranks"),
        ({"tp_rank": 1}, "tp_rank is below tp_size"),
        ({"block_size": 0}, "all sizes of a KV layout are 1 or more"),
        ({"dtype": "int3"}, "this layout is 'gqa', 'int3'"),
    ],
)
def test_layouts_that_do_not_go_together_are_named(changes: dict[str, object], text: str) -> None:
    other = dataclasses.replace(WHOLE, **changes)  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatchError, match=text):
        check_compatible(WHOLE, other)
    with pytest.raises(LayoutMismatchError, match=text):
        shard_plan(WHOLE, make_ticket(other, 8, 0, [0, 1]))


def test_tickets_that_contradict_themselves() -> None:
    with pytest.raises(HandoffError, match="has 3 blocks of 4 tokens for tokens 4 to 9, which take 2"):
        shard_plan(WHOLE, make_ticket(WHOLE, 9, 4, [0, 1, 2]))
    target = rank_of(model(1), 1, 0)
    with pytest.raises(HandoffError, match="rank 1 of 2 sends nothing to rank 0 of 1"):
        shard_plan(rank_of(model(1), 2, 1), make_ticket(target, 4, 0, [0]))


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────


class Labels:
    """A number for each (layer, half, token, head, place) of a context, all different, none zero."""

    def __init__(self, whole: KVLayout, num_tokens: int) -> None:
        shape = (whole.num_layers, whole.halves, num_tokens, whole.total_kv_heads, whole.head_dim)
        self.numbers = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)

    def blocks(self, layout: KVLayout, first_token: int, count: int) -> np.ndarray:
        """What ``count`` blocks of a pool hold, zeros behind the last token:
        [layers, count, halves, block_size, heads, head_dim]."""
        heads = slice(layout.head_start, layout.head_start + layout.num_kv_heads)
        tokens = self.numbers[:, :, first_token : first_token + count * layout.block_size, heads]
        padded = np.zeros((*tokens.shape[:2], count * layout.block_size, *tokens.shape[3:]), dtype=np.float32)
        padded[:, :, : tokens.shape[2]] = tokens
        shape = (*tokens.shape[:2], count, layout.block_size, *tokens.shape[3:])
        return padded.reshape(shape).swapaxes(1, 2)


class CountingPool(NumpyPool):
    """Counts how often each byte is written."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks)
        self.counts = NumpyPool(layout, num_blocks)

    def write_blocks(self, layer: int, block_ids: object, data: Bytes, columns: slice | None = None) -> None:
        super().write_blocks(layer, block_ids, data, columns)  # type: ignore[arg-type]
        before = np.empty_like(data)
        self.counts.read_blocks(layer, block_ids, before, columns)  # type: ignore[arg-type]
        self.counts.write_blocks(layer, block_ids, before + 1, columns)  # type: ignore[arg-type]


@st.composite
def handoffs(draw: st.DrawFn) -> tuple[KVLayout, int, int, int, int, int, int]:
    """(model, TP of either side, block size of either side, context, cached)."""
    whole = draw(st.sampled_from([*map(model, HEADS.values()), model(1, "mla")]))
    tps = draw(st.sampled_from(TP_SIZES)), draw(st.sampled_from(TP_SIZES))
    sizes = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    context = draw(st.integers(1, 40))
    cached = draw(st.integers(0, (context - 1) // sizes[1])) * sizes[1]
    return whole, *tps, *sizes, context, cached


@settings(max_examples=150, deadline=None)
@given(handoffs(), st.data())
def test_each_byte_moves_exactly_once_and_to_its_place(
    handoff: tuple[KVLayout, int, int, int, int, int, int], data: st.DataObject
) -> None:
    whole, source_tp, target_tp, source_size, target_size, context, cached = handoff
    labels = Labels(whole, context)
    for target_rank in range(target_tp):
        target = rank_of(whole, target_tp, target_rank, block_size=target_size)
        num_blocks = -(-context // target_size) - cached // target_size
        block_ids = data.draw(st.permutations(range(num_blocks + 2)))[:num_blocks]
        ticket = make_ticket(target, context, cached, block_ids)
        pool = CountingPool(target, num_blocks + 2)
        for rank in sending_heads(rank_of(whole, source_tp, 0), target):
            source = rank_of(whole, source_tp, rank, block_size=source_size)
            move(shard_plan(source, ticket), labels, ticket, pool, data)
        expected = labels.blocks(target, cached, num_blocks)
        found = pool.data[:, block_ids].view(np.float32).reshape(expected.shape)
        assert np.array_equal(found, expected)
        written = np.zeros(pool.data.shape[1], dtype=np.bool_)
        written[block_ids] = True
        assert (pool.counts.data == written[:, None]).all()


def move(plan: ShardPlan, labels: Labels, ticket: Ticket, pool: NumpyPool, data: st.DataObject) -> None:
    """All blocks of one rank's share, in runs of drawn lengths."""
    first_block = (plan.first_token - plan.skipped_tokens) // plan.source.block_size
    held = labels.blocks(plan.source, first_block * plan.source.block_size, plan.num_source_blocks)
    source = NumpyPool(plan.source, plan.num_source_blocks + 1)
    block_ids = data.draw(st.permutations(range(plan.num_source_blocks)))
    source.data[:, block_ids] = np.ascontiguousarray(held).view(np.uint8).reshape(len(held), len(block_ids), -1)
    wire = make_wire(plan, "native")
    gather, scatter = Gather(plan, wire, block_ids), Scatter(plan, wire, ticket.block_ids)
    assert gather.block_bytes == scatter.block_bytes
    for layer in range(plan.source.num_layers):
        first = 0
        while first < plan.num_blocks:
            count = data.draw(st.integers(1, plan.num_blocks - first))
            payload = np.full(count * gather.block_bytes, 255, dtype=np.uint8)
            gather.read(source, layer, first, count, payload, nobody)
            scatter.write(pool, layer, first, count, payload, nobody)
            first += count


@given(handoffs())
def test_blocks_of_the_two_sides_name_each_other(handoff: tuple[KVLayout, int, int, int, int, int, int]) -> None:
    """A naive model: which tokens lie in which block, by counting."""
    whole, _, _, source_size, target_size, context, cached = handoff
    source = rank_of(whole, 1, 0, block_size=source_size)
    target = rank_of(whole, 1, 0, block_size=target_size)
    plan = shard_plan(source, make_ticket(target, context, cached, list(range(-(-(context - cached) // target_size)))))
    first_block = cached // source_size
    homes = {
        token: ((token - cached) // target_size, token // source_size - first_block) for token in range(cached, context)
    }
    for block in range(plan.num_blocks):
        assert set(plan.source_blocks(block, 1)) == {theirs for ours, theirs in homes.values() if ours == block}
    for block in range(plan.num_source_blocks):
        assert set(plan.touched_blocks(block, 1)) == {ours for ours, theirs in homes.values() if theirs == block}
    assert plan.num_source_blocks == len({theirs for _, theirs in homes.values()})


# ── the books of a handoff ────────────────────────────────────────────────────────────────────────

runs = st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 5)).map(
    lambda run: (run[0], run[1], min(run[2], 10 - run[1]))
)


@given(st.lists(runs | st.integers(1, 4)))
def test_queue_gives_out_each_pushed_piece_once(steps: list[tuple[int, int, int] | int]) -> None:
    queue, waiting = PieceQueue(), Counter[tuple[int, int]]()
    for step in steps:
        if isinstance(step, tuple):
            layer, first, count = step
            queue.add(layer, first, count)
            waiting.update((layer, piece) for piece in range(first, first + count))
        elif queue:
            layer, first, count = queue.peek(step)
            assert 1 <= count <= step
            queue.drop(count)
            waiting.subtract((layer, piece) for piece in range(first, first + count))
            assert min(waiting.values()) >= 0
        assert bool(queue) == any(waiting.values())


def test_queue_joins_neighbours_and_keeps_the_order_of_layers() -> None:
    queue = PieceQueue()
    for first in (0, 4, 8):
        for layer in range(2):
            queue.add(layer, first, 4)
    queue.add(0, 0, 0)
    taken = []
    while queue:
        taken.append(queue.peek(10))
        queue.drop(taken[-1][2])
    assert taken == [(0, 0, 10), (0, 10, 2), (1, 0, 10), (1, 10, 2)]


@given(st.lists(runs))
def test_pieces_count_once(steps: list[tuple[int, int, int]]) -> None:
    pieces, arrived = PieceSet(3, 10), set[tuple[int, int]]()
    for layer, first, count in steps:
        new = [index for index in range(count) if (layer, first + index) not in arrived]
        assert pieces.holds(layer, first, count)
        assert pieces.missing(layer, first, count).tolist() == new
        assert pieces.add(layer, first, count) == len(new)
        arrived.update((layer, first + index) for index in new)
        missing = {(layer, first + index) for layer, first, count in pieces.missing_runs() for index in range(count)}
        assert missing == set(itertools.product(range(3), range(10))) - arrived
        assert (pieces.count, pieces.num_missing) == (len(arrived), 30 - len(arrived))


def test_pieces_know_their_bounds() -> None:
    pieces = PieceSet(3, 10)
    assert not any(pieces.holds(*run) for run in [(3, 0, 1), (0, 10, 1), (0, 5, 6), (0, 0, 0)])


@given(st.lists(st.integers(1, 40) | st.integers(-5, -1), max_size=60))
def test_ring_never_gives_the_same_byte_twice(steps: list[int]) -> None:
    """Positive steps allocate, negative ones release one of the oldest."""
    ring, held = Ring(64), list[tuple[int, int]]()
    for step in steps:
        if step > 0:
            offset = ring.allocate(step)
            if offset is None:
                assert held, "an empty ring has room for anything up to its capacity"
                continue
            assert 0 <= offset <= 64 - step
            assert all(offset + step <= other or other + size <= offset for other, size in held)
            held.append((offset, step))
        elif held:
            offset, _ = held.pop(min(-step - 1, len(held) - 1))
            ring.release(offset)
    for offset, _ in held:
        ring.release(offset)
    assert ring.allocate(64) == 0
