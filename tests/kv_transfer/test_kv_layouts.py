"""Handoffs between workers that lie differently: every pair of layouts, through the whole session.

R10, R22: unequal tensor parallel sizes, heads that are split or replicated, latents, block sizes, number formats.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import pytest
import torch

from common.errors import HandoffError, LayoutMismatchError
from common.handoff import HandoffCommit, KVLayout
from kv_transfer.plan import sending_heads
from tests.kv_transfer.groups import Group, fill, laid_out, numbers_of, rank_layout

TP_SIZES = (1, 2, 4)
BLOCK_SIZES = (8, 16, 32)
DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
KINDS = {"MHA": (8, "gqa"), "GQA": (2, "gqa"), "MQA": (1, "gqa"), "MLA": (1, "mla")}
ERROR = {"native": 0.0, "bfloat16": 2.0**-8, "float8": 2.0**-4, "int8": 1 / 254}
"""Of the largest number of a head; see kv_transfer/wire.py."""


def whole(kind: str) -> KVLayout:
    heads, layout_kind = KINDS[kind]
    return KVLayout(
        "m", num_layers=2, num_kv_heads=heads, head_dim=4, block_size=8, dtype="float32", total_kv_heads=heads,
        kind=layout_kind,
    )  # fmt: skip


def make(kind: str, tp: tuple[int, int], sizes: tuple[int, int], dtypes: tuple[str, str], **config: object) -> Group:
    layouts = [
        [rank_layout(whole(kind), tp[side], rank, sizes[side], dtypes[side]) for rank in range(tp[side])]
        for side in range(2)
    ]
    return Group(*layouts, num_blocks=16, **config)


async def hand_over(group: Group, context: int, cached: int, seed: int) -> torch.Tensor:
    """One handoff to all ranks of the receiver. Returns the numbers that were to be handed over."""
    await group.start()
    source, target = group.sources[0].layout, group.targets[0].layout
    generator = torch.Generator().manual_seed(seed)
    shape = (source.num_layers, source.halves, context, source.total_kv_heads, source.head_dim)
    numbers = torch.randn(shape, generator=generator)
    first = cached // source.block_size
    held = torch.randperm(16, generator=generator)[: -(-context // source.block_size) - first].tolist()
    for pool in group.sources:
        fill(pool, held, numbers, first * source.block_size)
    for rank, pool in enumerate(group.targets):
        block_ids = torch.randperm(16, generator=generator)[: -(-(context - cached) // target.block_size)].tolist()
        pool.data[:] = 0
        ticket, listener = group.expect(rank, block_ids, context, cached)
        await group.send(ticket, held, chunk=1 + seed % 3)
        assert [commit.token for commit in listener.commits] == [7]
        assert not listener.errors
        check(group, rank, block_ids, numbers, cached)
        untouched = sorted(set(range(16)) - set(block_ids))
        assert not pool.data[:, untouched].any()
    await group.close()
    return numbers


def check(group: Group, rank: int, block_ids: list[int], numbers: torch.Tensor, cached: int) -> None:
    """Bytes where formats agree, else the numbers within the wire's error."""
    source, pool = group.sources[0].layout, group.targets[rank]
    wire = group.config.wire_formats[0]
    stored = numbers.to(getattr(torch, source.dtype)).float()
    expected = laid_out(pool.layout, stored, cached, len(block_ids))
    if wire == "native":
        assert (pool.data[:, block_ids] == expected).all()
        return
    found = numbers_of(pool, block_ids)[:, :, : numbers.shape[2] - cached]
    heads = slice(pool.layout.head_start, pool.layout.head_start + pool.layout.num_kv_heads)
    exact = stored[:, :, cached:, heads]
    apart = (found - exact).abs() / exact.abs().amax(dim=-1, keepdim=True)
    rounding = {"float32": 0.0, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4}[pool.layout.dtype]
    assert apart.max() <= ERROR[wire] + rounding * (1 + ERROR[wire]) + 1e-6
    assert apart.max() > 0  # it did go through that format


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", list(itertools.product(TP_SIZES, TP_SIZES)), ids=str)
async def test_all_pairs_of_layouts(kind: str, tp: tuple[int, int]) -> None:
    """All pairs of block sizes and, for grouped heads, with each of them all pairs of formats; else one."""
    formats = list(itertools.product(DTYPES, DTYPES))
    pairs = list(itertools.product(BLOCK_SIZES, BLOCK_SIZES))
    chosen = itertools.product(range(9), range(9)) if kind == "GQA" else ((n, (n + sum(tp)) % 9) for n in range(9))
    for number, (size_pair, format_pair) in enumerate(chosen):
        sizes, dtypes = pairs[size_pair], formats[format_pair]
        context = 33 + 7 * size_pair
        cached = sizes[1] * (number % 3 if context > 2 * sizes[1] else 0)
        await hand_over(make(kind, tp, sizes, dtypes), context, cached, seed=number)


@pytest.mark.parametrize("wire", ["bfloat16", "float8", "int8"])
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES[:2], DTYPES[:2])), ids=str)
async def test_wire_formats_are_within_their_error(wire: str, dtypes: tuple[str, str]) -> None:
    if wire == "bfloat16" and "bfloat16" in dtypes:
        pytest.skip("that is what the pools hold: nothing to measure")
    for kind, tp in itertools.product(KINDS, [(1, 1), (2, 1), (1, 2)]):
        await hand_over(make(kind, tp, (8, 16), dtypes, wire_formats=(wire,)), 40, 0, seed=3)


def prefer(group: Group, *wire_formats: str) -> None:
    """The sender's configuration is another than the receiver's."""
    group.senders[0]._config = group.config.model_copy(update={"wire_formats": wire_formats})


async def test_the_first_common_wire_format_is_used() -> None:
    group = make("GQA", (1, 1), (8, 8), ("float32", "float32"))
    group.senders[0]._config = (
        dataclasses.replace
        if False
        else group.config.model_copy(  # type: ignore[assignment]
            update={"wire_formats": ("int8", "native")}
        )
    )
    await hand_over(group, 16, 0, seed=1)  # the receiver has native only
    other = make("GQA", (1, 1), (8, 8), ("float32", "float32"))
    prefer(other, "int8", "float8")
    await other.start()
    ticket, listener = other.expect(0, [1], 8, 0)
    with pytest.raises(LayoutMismatchError, match="the sender has int8, float8, the receiver native"):
        await other.senders[0].open(ticket, [0])
    assert isinstance(listener.errors[0], LayoutMismatchError)
    await other.close()


async def test_pairs_that_cannot_be_dealt_are_refused_at_once() -> None:
    """R10: a hang at the transfer elsewhere; here an error with both numbers before a byte moves."""
    group = make("GQA", (1, 1), (8, 8), ("float32", "float32"))
    await group.start()
    three = dataclasses.replace(group.sources[0].layout, tp_size=3)
    group.sources[0].layout = three
    ticket, listener = group.expect(0, [1], 8, 0)
    with pytest.raises(LayoutMismatchError, match="2 KV heads cannot be dealt to 3 ranks"):
        await group.senders[0].open(ticket, [0])
    assert not listener.num_bytes
    await group.close()


async def test_ranks_of_a_sender_that_disagree_are_not_believed() -> None:
    group = make("MHA", (2, 1), (8, 8), ("float32", "float32"))
    await group.start()
    ticket, listener = group.expect(0, [1], 8, 0)
    pushes = [await sender.open(ticket, [0]) for sender in group.senders]
    for push, layer in itertools.product(pushes, range(2)):
        push.push(layer, 0, 1)
    await pushes[0].commit(HandoffCommit("t0", 7, 0, 0))
    assert not listener.commits  # the other rank's share is not there
    with pytest.raises(HandoffError, match="rank 0 commits token 7 at index 0, another 8 at 0"):
        await pushes[1].commit(HandoffCommit("t0", 8, 0, 0))
    assert not listener.commits
    assert len(listener.errors) == 1
    await group.close()


async def test_a_rank_that_dies_fails_the_ticket_and_may_come_again() -> None:
    group = make("MHA", (2, 1), (8, 8), ("float32", "float32"))
    await group.start()
    ticket, listener = group.expect(0, [1, 2], 16, 0)
    pushes = [await sender.open(ticket, [0, 1]) for sender in group.senders]
    for push, layer in itertools.product(pushes, range(2)):
        push.push(layer, 0, 2)
    await pushes[0].commit(HandoffCommit("t0", 7, 0, 0))
    await pushes[1].abort("its rank is gone")
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(listener.errors) == 1
    again = await group.senders[1].open(ticket, [0, 1])
    for layer in range(2):
        again.push(layer, 0, 2)
    await again.commit(HandoffCommit("t0", 7, 0, 0))
    assert len(listener.commits) == 1
    await group.close()


async def test_groups_of_other_sizes_cannot_mix() -> None:
    """A worker restarted with another size may still have ranks of before."""
    group = make("MHA", (2, 1), (8, 8), ("float32", "float32"))
    other = make("MHA", (4, 1), (8, 8), ("float32", "float32"))
    await group.start()
    ticket, _ = group.expect(0, [1], 8, 0)
    await group.senders[0].open(ticket, [0])
    stranger = group.senders[1]
    stranger._pool = other.sources[0]
    with pytest.raises(LayoutMismatchError, match="filled by a group of 2 ranks, this sender's group has 4"):
        await stranger.open(ticket, [0])
    assert sending_heads(group.sources[0].layout, ticket.layout).keys() == {0, 1}
    await group.close()
