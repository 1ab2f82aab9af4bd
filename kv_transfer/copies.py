"""The copies at both ends of a transfer: `Gather` out of the sender's pool, `Scatter` into the receiver's.

A payload holds blocks of the receiver, [block][keys, values][token][moved heads][head_dim] in the wire's
format; tokens after the last one are zeros. Where both pools lie alike it is whole blocks, moved as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kv_transfer.channel import Bytes
from kv_transfer.plan import ShardPlan
from kv_transfer.pool import BlockPool
from kv_transfer.wire import Wire

HOT_BYTES = 256 << 10
"""What was copied is read again for its checksum, so both go part by part: so much stays in a core's own cache."""

DIRECT_BYTES = 16 << 10
"""Blocks of at least so much in a layer need not be copied together (`channel.DirectFrames`)."""

ALONE_BYTES = 64 << 10
"""Blocks of at least so much in a layer are copied one by one; smaller ones in one operation."""

Feed = Callable[[memoryview], object]
"""Takes the payload, part after part, in order: for a checksum."""


def nobody(part: memoryview) -> None:
    """A `Feed` for those who make no checksum."""


def make_wire(plan: ShardPlan, name: str) -> Wire:
    return Wire(name, plan.source.dtype, plan.target.dtype, len(plan.heads), plan.target.head_dim)


class Gather:
    """``block_ids``: the sender's blocks, from the one on that holds the ticket's first token."""

    def __init__(self, plan: ShardPlan, wire: Wire, block_ids: Sequence[int]) -> None:
        self._plan = plan
        self._wire = wire
        self._block_ids = np.asarray(block_ids, dtype=np.int64)
        self._columns = _part(plan.source_columns, plan.source.token_bytes)
        self._rows = plan.target.halves * plan.target.block_size
        self.block_bytes = self._rows * wire.row_bytes
        """Payload of one of the receiver's blocks."""

    def views(self, pool: BlockPool, layer: int, first: int, count: int) -> list[memoryview] | None:
        """Those blocks where they lie in the pool; None when they have to be copied."""
        if self._columns is not None or self._wire.encodes or not self._plan.same_blocks:
            return None
        return _views(pool, layer, self._block_ids[first : first + count], self.block_bytes)

    def read(self, pool: BlockPool, layer: int, first: int, count: int, out: Bytes, feed: Feed) -> None:
        """The receiver's blocks ``first .. first + count`` into ``out``, uint8 [count * block_bytes]."""
        views = self.views(pool, layer, first, count) if self.block_bytes >= ALONE_BYTES else None
        if views is not None:
            for number, view in enumerate(views):
                block = out.data[number * self.block_bytes : (number + 1) * self.block_bytes]
                for start in range(0, self.block_bytes, HOT_BYTES):
                    part = block[start : start + HOT_BYTES]
                    part[:] = view[start : start + HOT_BYTES]
                    feed(part)
            return
        for start, stop in _parts(count, self.block_bytes):
            some = out[start * self.block_bytes : stop * self.block_bytes]
            self._read(pool, layer, first + start, stop - start, some)
            feed(some.data)

    def _read(self, pool: BlockPool, layer: int, first: int, count: int, out: Bytes) -> None:
        plan = self._plan
        if plan.same_blocks:
            ids = self._block_ids[first : first + count]
            if not self._wire.encodes:
                pool.read_blocks(layer, ids, out.reshape(count, -1), self._columns)
                return
            rows: Bytes = np.empty((count, self._rows * self._wire.source_row_bytes), dtype=np.uint8)
            pool.read_blocks(layer, ids, rows, self._columns)
        else:
            rows = self._regroup(pool, layer, first, count)
        self._wire.encode(rows.reshape(count * self._rows, -1), out)

    def _regroup(self, pool: BlockPool, layer: int, first: int, count: int) -> Bytes:
        """uint8 [count, halves, receiver's block_size, row bytes], from blocks of another size."""
        plan, row_bytes = self._plan, self._wire.source_row_bytes
        halves, blocks, tokens = plan.source.halves, plan.source_blocks(first, count), plan.tokens(first, count)
        held = np.empty((len(blocks), halves * plan.source.block_size * row_bytes), dtype=np.uint8)
        pool.read_blocks(layer, self._block_ids[blocks.start : blocks.stop], held, self._columns)
        by_block = held.reshape(len(blocks), halves, plan.source.block_size, row_bytes)
        by_token = by_block.swapaxes(0, 1).reshape(halves, -1, row_bytes)
        skipped = plan.skipped_tokens + tokens.start - blocks.start * plan.source.block_size
        regrouped = np.zeros((count, halves, plan.target.block_size, row_bytes), dtype=np.uint8)
        whole = len(tokens) // plan.target.block_size
        rest = len(tokens) - whole * plan.target.block_size
        end = skipped + whole * plan.target.block_size
        if whole:
            parts = by_token[:, skipped:end].reshape(halves, whole, plan.target.block_size, row_bytes)
            regrouped[:whole] = parts.swapaxes(0, 1)
        if rest:
            regrouped[whole, :, :rest] = by_token[:, end : end + rest]
        return regrouped


class Scatter:
    """``block_ids``: the ticket's."""

    def __init__(self, plan: ShardPlan, wire: Wire, block_ids: Sequence[int]) -> None:
        self._wire = wire
        self._block_ids = np.asarray(block_ids, dtype=np.int64)
        self._columns = _part(plan.target_columns, plan.target.token_bytes)
        self.block_bytes = plan.target.halves * plan.target.block_size * wire.row_bytes

    def views(self, pool: BlockPool, layer: int, first: int, count: int) -> list[memoryview] | None:
        """Where those blocks belong in the pool; None when they have to be copied there."""
        if self._columns is not None or self._wire.decodes:
            return None
        return _views(pool, layer, self._block_ids[first : first + count], self.block_bytes)

    def write(self, pool: BlockPool, layer: int, first: int, count: int, payload: Bytes, feed: Feed) -> None:
        """The ticket's blocks ``first .. first + count`` out of ``payload``."""
        views = self.views(pool, layer, first, count) if self.block_bytes >= ALONE_BYTES else None
        if views is not None:
            for number, view in enumerate(views):
                block = payload.data[number * self.block_bytes : (number + 1) * self.block_bytes]
                for start in range(0, self.block_bytes, HOT_BYTES):
                    place = view[start : start + HOT_BYTES]
                    place[:] = block[start : start + HOT_BYTES]
                    feed(place)  # what lies there now
            return
        for start, stop in _parts(count, self.block_bytes):
            some = payload[start * self.block_bytes : stop * self.block_bytes]
            self._write(pool, layer, self._block_ids[first + start : first + stop], self._rows(some, stop - start))
            feed(some.data)

    def write_some(
        self, pool: BlockPool, layer: int, first: int, count: int, payload: Bytes, which: NDArray[np.intp]
    ) -> None:
        """Of those blocks only the ones at ``which``."""
        ids = self._block_ids[first : first + count][which]
        self._write(pool, layer, ids, self._rows(payload, count)[which])

    def _rows(self, payload: Bytes, count: int) -> Bytes:
        return (self._wire.decode(payload) if self._wire.decodes else payload).reshape(count, -1)

    def _write(self, pool: BlockPool, layer: int, ids: NDArray[np.int64], rows: Bytes) -> None:
        pool.write_blocks(layer, ids, rows, self._columns)


def _parts(count: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """``count`` blocks as (start, stop), about `HOT_BYTES` each."""
    step = max(1, HOT_BYTES // block_bytes)
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _views(pool: BlockPool, layer: int, ids: NDArray[np.int64], block_bytes: int) -> list[memoryview] | None:
    """None for small blocks: one copy of all costs less than handling each."""
    return pool.views(layer, ids) if block_bytes >= DIRECT_BYTES else None


def _part(columns: slice, token_bytes: int) -> slice | None:
    """None for all of a token."""
    return None if (columns.start, columns.stop) == (0, token_bytes) else columns
