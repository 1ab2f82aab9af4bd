"""Which bytes of the source's blocks go where in the target's. Pure.

A block of one layer lies as [keys, values][token][head][head_dim]: the heads of a token are
contiguous, and so are the tokens of a block's keys. The plan of one layer serves for all of them.
Equal layouts collapse to whole blocks, which is how sessions move them.

Knows neither pools nor frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.errors import HandoffError
from common.messages import KVLayout
from kv_transfer.layout import check_compatible, common_heads


@dataclass(frozen=True, slots=True)
class Copy:
    """``rows`` runs of ``row_bytes`` from one block into another, within one layer: row ``i`` starts at
    byte ``source_offset + i * source_stride`` of the source's block, and likewise in the target's.
    """

    source_block: int
    source_offset: int
    source_stride: int
    target_block: int
    target_offset: int
    target_stride: int
    rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes


def plan_layer(
    source: KVLayout,
    target: KVLayout,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    num_tokens: int | None = None,
) -> list[Copy]:
    """The copies, for each layer, that bring the first ``num_tokens`` tokens of ``source_blocks`` into
    ``target_blocks`` (default: all that both have room for), for the heads that both ranks hold.

    Raises LayoutMismatchError, or HandoffError when the blocks do not hold ``num_tokens``.
    """
    check_compatible(source, target)
    num_tokens = _room(source, target, len(source_blocks), len(target_blocks), num_tokens)
    copies = []
    for start, count in _token_runs(source.block_size, target.block_size, num_tokens):
        from_block, from_token = divmod(start, source.block_size)
        to_block, to_token = divmod(start, target.block_size)
        blocks = source_blocks[from_block], target_blocks[to_block]
        copies += _copy_run(source, target, blocks, from_token, to_token, count)
    return copies


def planned_bytes(
    source: KVLayout,
    target: KVLayout,
    num_source_blocks: int,
    num_target_blocks: int,
    num_tokens: int | None = None,
) -> int:
    """Bytes that `plan_layer` moves, over all layers."""
    check_compatible(source, target)
    num_tokens = _room(source, target, num_source_blocks, num_target_blocks, num_tokens)
    head_bytes = source.head_dim * source.dtype_bytes
    return source.num_layers * 2 * num_tokens * len(common_heads(source, target)) * head_bytes


def num_pieces(layout: KVLayout, num_blocks: int) -> int:
    """(layer, block) pieces of ``num_blocks`` whole blocks: what a commit has to count up to."""
    return layout.num_layers * num_blocks


def _room(source: KVLayout, target: KVLayout, num_source: int, num_target: int, num_tokens: int | None) -> int:
    room = min(num_source * source.block_size, num_target * target.block_size)
    if num_tokens is None:
        return room
    if not 0 <= num_tokens <= room:
        raise HandoffError(f"{num_tokens} tokens do not fit: the blocks of both sides hold 0 to {room}")
    return num_tokens


def _token_runs(source_size: int, target_size: int, num_tokens: int) -> Iterator[tuple[int, int]]:
    """(start, count) of the runs of tokens that cross no block border on either side."""
    start = 0
    while start < num_tokens:
        stop = min(num_tokens, start - start % source_size + source_size, start - start % target_size + target_size)
        yield start, stop - start
        start = stop


def _copy_run(
    source: KVLayout, target: KVLayout, blocks: tuple[int, int], from_token: int, to_token: int, count: int
) -> list[Copy]:
    """Keys and values of ``count`` tokens that lie within one block on either side."""
    source_block, target_block = blocks
    heads = common_heads(source, target)
    head_bytes = source.head_dim * source.dtype_bytes
    width = len(heads) * head_bytes
    whole_tokens = width == source.token_bytes == target.token_bytes
    if whole_tokens and count == source.block_size == target.block_size:
        return [Copy(source_block, 0, 0, target_block, 0, 0, 1, source.block_layer_bytes)]
    rows, row_bytes = (1, count * width) if whole_tokens else (count, width)
    return [
        Copy(
            source_block=source_block,
            source_offset=(half * source.block_size + from_token) * source.token_bytes
            + (heads.start - source.head_start) * head_bytes,
            source_stride=source.token_bytes,
            target_block=target_block,
            target_offset=(half * target.block_size + to_token) * target.token_bytes
            + (heads.start - target.head_start) * head_bytes,
            target_stride=target.token_bytes,
            rows=rows,
            row_bytes=row_bytes,
        )
        for half in range(2)
    ]
