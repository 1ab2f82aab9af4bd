"""The KV pool, as a transfer sees it, and a pool of plain numpy for tests.

`engine/kv_cache.py` is the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from common.handoff import KVLayout
from kv_transfer.channel import Bytes

BlockIds = Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]


class BlockPool(Protocol):
    """Blocks by number, as bytes in the order [keys, values][token][head][head_dim].

    ``columns``: only these bytes of every token's keys and values (some heads), None for all. Both methods
    are blocking copies that are called from a worker thread, one at a time for each end of a transfer; a
    pool that reads and writes at once sees different blocks, or heads, in the two.
    """

    @property
    def layout(self) -> KVLayout: ...

    def read_blocks(self, layer: int, block_ids: BlockIds, out: Bytes, columns: slice | None = None) -> None:
        """Copies ``layer`` of the blocks into ``out``, uint8 [len(block_ids), bytes of a block (or its columns)]."""
        ...

    def write_blocks(self, layer: int, block_ids: BlockIds, data: Bytes, columns: slice | None = None) -> None:
        """Copies ``data``, uint8 [len(block_ids), bytes of a block (or its columns)], into ``layer`` of the blocks."""
        ...

    def views(self, layer: int, block_ids: BlockIds) -> list[memoryview] | None:
        """``layer`` of the blocks where they lie, writable; None where they do not lie in host memory."""
        ...


class NumpyPool:
    """``num_blocks`` blocks in one array ``data``, uint8 [num_layers, num_blocks, block_layer_bytes]."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.data: Bytes = np.zeros((layout.num_layers, num_blocks, layout.block_layer_bytes), dtype=np.uint8)

    def read_blocks(self, layer: int, block_ids: BlockIds, out: Bytes, columns: slice | None = None) -> None:
        if columns is None:
            np.take(self.data[layer], block_ids, axis=0, out=out)
        else:
            rows = self._tokens(layer)[block_ids, :, columns]
            np.copyto(out, rows.reshape(out.shape))

    def write_blocks(self, layer: int, block_ids: BlockIds, data: Bytes, columns: slice | None = None) -> None:
        ids = np.asarray(block_ids, dtype=np.int64)
        if columns is None:
            self.data[layer][ids] = data
        else:
            tokens = self._tokens(layer)
            tokens[ids, :, columns] = data.reshape(len(ids), tokens.shape[1], -1)

    def views(self, layer: int, block_ids: BlockIds) -> list[memoryview] | None:
        return [self.data[layer, block].data for block in block_ids]

    def block(self, block_id: int) -> bytes:
        """All layers of one block."""
        return self.data[:, block_id].tobytes()

    def _tokens(self, layer: int) -> Bytes:
        """A view, uint8 [num_blocks, halves * block_size, token_bytes]."""
        return self.data[layer].reshape(self.data.shape[1], -1, self.layout.token_bytes)
