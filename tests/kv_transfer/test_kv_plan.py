"""The plan against an oracle that labels every byte; the sender's and receiver's books against lists."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import HandoffError, LayoutMismatchError
from common.messages import KVLayout
from kv_transfer.layout import check_compatible, check_equal, common_heads
from kv_transfer.pieces import PieceQueue, PieceSet
from kv_transfer.plan import Copy, plan_layer, planned_bytes
from kv_transfer.transports.staging import Ring

WHOLE = KVLayout(model="m", num_layers=2, num_kv_heads=6, head_dim=2, block_size=4, dtype="float16", total_kv_heads=6)


@st.composite
def sides(draw: st.DrawFn) -> tuple[KVLayout, KVLayout]:
    """Two ranks of one model, of any block size, with at least one head in common."""

    def rank(head: int) -> KVLayout:
        start = draw(st.integers(0, head))
        stop = draw(st.integers(head + 1, 6))
        size = draw(st.integers(1, 6))
        return dataclasses.replace(WHOLE, head_start=start, num_kv_heads=stop - start, block_size=size)

    head = draw(st.integers(0, 5))
    return rank(head), rank(head)


def labels(layout: KVLayout, num_blocks: int) -> dict[tuple[int, int, int, int], tuple[int, int]]:
    """(half, token, head, byte) → (index of block, offset), one entry for each byte of one layer."""
    places = {}
    for block in range(num_blocks):
        offset = 0
        for half in range(2):
            for token in range(layout.block_size):
                for head in range(layout.num_kv_heads):
                    for byte in range(layout.head_dim * layout.dtype_bytes):
                        position = block * layout.block_size + token
                        places[half, position, layout.head_start + head, byte] = block, offset
                        offset += 1
    return places


def expand(copy: Copy) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [
        (
            (copy.source_block, copy.source_offset + row * copy.source_stride + byte),
            (copy.target_block, copy.target_offset + row * copy.target_stride + byte),
        )
        for row in range(copy.rows)
        for byte in range(copy.row_bytes)
    ]


@settings(max_examples=60, deadline=None)
@given(sides(), st.integers(0, 4), st.integers(0, 4), st.data())
def test_each_byte_moves_exactly_once(
    both: tuple[KVLayout, KVLayout], num_source: int, num_target: int, data: st.DataObject
) -> None:
    source, target = both
    source_blocks = data.draw(st.permutations(range(num_source)))
    target_blocks = data.draw(st.permutations(range(num_target)))
    room = min(num_source * source.block_size, num_target * target.block_size)
    num_tokens = data.draw(st.none() | st.integers(0, room))

    copies = plan_layer(source, target, source_blocks, target_blocks, num_tokens)
    moved = Counter(pair for copy in copies for pair in expand(copy))

    limit = room if num_tokens is None else num_tokens
    from_places, to_places = labels(source, num_source), labels(target, num_target)
    expected = Counter(
        (
            (source_blocks[from_places[key][0]], from_places[key][1]),
            (target_blocks[to_places[key][0]], to_places[key][1]),
        )
        for key in from_places
        if key in to_places and key[1] < limit
    )
    assert moved == expected
    assert all(count == 1 for count in moved.values())
    total = sum(copy.num_bytes for copy in copies) * source.num_layers
    assert total == planned_bytes(source, target, num_source, num_target, num_tokens)


@given(st.lists(st.integers(0, 99), max_size=6, unique=True), st.data())
def test_equal_layouts_move_whole_blocks(blocks: list[int], data: st.DataObject) -> None:
    targets = data.draw(st.permutations(blocks))
    copies = plan_layer(WHOLE, WHOLE, blocks, targets)
    assert copies == [
        Copy(source, 0, 0, target, 0, 0, 1, WHOLE.block_layer_bytes)
        for source, target in zip(blocks, targets, strict=True)
    ]


def test_more_tokens_than_the_blocks_hold() -> None:
    with pytest.raises(HandoffError, match="9 tokens do not fit: the blocks of both sides hold 0 to 8"):
        plan_layer(WHOLE, WHOLE, [1, 2], [3, 4, 5], 9)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "n"}, "model is 'm' and 'n'"),
        ({"dtype": "float32", "num_layers": 3}, "dtype is 'float16' and 'float32'; num_layers is 2 and 3"),
        ({"total_kv_heads": 8}, "total_kv_heads is 6 and 8"),
        ({"kind": "mla", "version": 2}, "version is 1 and 2; kind is 'gqa' and 'mla'"),
    ],
)
def test_incompatible_layouts_are_named(changes: dict[str, object], text: str) -> None:
    other = dataclasses.replace(WHOLE, **changes)  # type: ignore[arg-type]
    with pytest.raises(LayoutMismatchError, match=text):
        check_compatible(WHOLE, other)
    with pytest.raises(LayoutMismatchError, match=text):
        plan_layer(WHOLE, other, [], [])


def test_ranks_without_a_common_head() -> None:
    left = dataclasses.replace(WHOLE, num_kv_heads=3)
    right = dataclasses.replace(WHOLE, num_kv_heads=3, head_start=3)
    assert not common_heads(left, right)
    with pytest.raises(LayoutMismatchError, match="head_start is 0 and 3; num_kv_heads is 3 and 3"):
        check_compatible(left, right)


def test_equality_counts_every_field() -> None:
    check_equal(WHOLE, WHOLE)
    wide = dataclasses.replace(WHOLE, block_size=8)
    check_compatible(WHOLE, wide)
    with pytest.raises(LayoutMismatchError, match="block_size is 4 and 8"):
        check_equal(WHOLE, wide)


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
