"""The KV pool, as a transfer sees it, and a pool of plain numpy for tests.

`engine/kv_cache.py` is the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from common.messages import KVLayout
from kv_transfer.channel import Bytes


class BlockPool(Protocol):
    """Blocks by number, as bytes in the order [keys, values][token][head][head_dim].

    Both methods are blocking copies that are called from a worker thread, one at a time for each end
    of a transfer; a pool that reads and writes at once sees different blocks in the two.
    """

    @property
    def layout(self) -> KVLayout: ...

    def read_blocks(self, layer: int, block_ids: Sequence[int], out: Bytes) -> None:
        """Copies ``layer`` of the blocks into ``out``, uint8 [len(block_ids), layout.block_layer_bytes]."""
        ...

    def write_blocks(self, layer: int, block_ids: Sequence[int], data: Bytes) -> None:
        """Copies ``data``, uint8 [len(block_ids), layout.block_layer_bytes], into ``layer`` of the blocks."""
        ...


class NumpyPool:
    """``num_blocks`` blocks in one array ``data``, uint8 [num_layers, num_blocks, block_layer_bytes]."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.data: Bytes = np.zeros((layout.num_layers, num_blocks, layout.block_layer_bytes), dtype=np.uint8)

    def read_blocks(self, layer: int, block_ids: Sequence[int], out: Bytes) -> None:
        np.take(self.data[layer], block_ids, axis=0, out=out)

    def write_blocks(self, layer: int, block_ids: Sequence[int], data: Bytes) -> None:
        self.data[layer][list(block_ids)] = data

    def block(self, block_id: int) -> bytes:
        """All layers of one block."""
        return self.data[:, block_id].tobytes()
