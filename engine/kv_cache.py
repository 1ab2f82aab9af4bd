"""The KV pool of one worker: keys and values of all layers, in blocks.

Knows bytes and block ids, not who owns a block. One tensor per layer, [num_blocks, 2, block_size,
num_kv_heads, head_dim]; keys are at index 0 of the second axis, values at 1. Of latents ("mla") there is one
half, which is keys and values at once. A block's bytes in one layer are contiguous, which is the unit that
`kv_transfer/` moves.

What lies in unwritten places is always finite: attention masks such places, and nothing masks a NaN
out of a matrix product. The pool starts as zeros, and a block that a step begins but does not fill
is cleared first, in case its last owner left something behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from common.errors import ConfigError, EngineError
from common.handoff import KVLayout
from engine.batch import StepBatch

_CPU_SHARE, _CPU_MOST_BYTES = 0.2, 4 << 30
_CUDA_SHARE = 0.85


class KVCache:
    """``layers[i]`` is layer i's tensor. `read_blocks` and `write_blocks` may be called from any thread
    for blocks that no step is touching; the rest belongs to the torch thread.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        if num_blocks < 1:
            raise ConfigError(f"the KV pool needs at least 1 block, it would have {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        self._bytes = [self._allocate() for _ in range(layout.num_layers)]
        shape = (num_blocks, layout.halves, layout.block_size, layout.num_kv_heads, layout.head_dim)
        dtype = getattr(torch, layout.dtype)
        self._host_rows: list[np.ndarray] = [rows.numpy() for rows in self._bytes] if self.on_host else []
        self.layers = [rows.view(dtype).view(shape) for rows in self._bytes]

    @property
    def on_host(self) -> bool:
        """Whether it lies in host memory, where copying is no more than that."""
        return self.device.type == "cpu"

    def _allocate(self) -> torch.Tensor:
        """Zeros [num_blocks, block_layer_bytes] of uint8."""
        shape = (self.num_blocks, self.layout.block_layer_bytes)
        if self.device.type == "cpu":
            # NumPy's zeros come from the system untouched: memory is used only as blocks are.
            return torch.from_numpy(np.zeros(shape, dtype=np.uint8))
        return torch.zeros(shape, dtype=torch.uint8, device=self.device)

    def places(self, batch: StepBatch) -> tuple[torch.Tensor, ...]:
        """Where the batch's rows go in what `begin` gives: their keys and their values, or their latents; [N] each."""
        if self.layout.halves == 1:
            return (batch.slots,)
        size = self.layout.block_size
        keys = batch.slots + (batch.slots // size) * size
        return keys, keys + size

    def begin(self, layer: int, batch: StepBatch) -> torch.Tensor:
        """The pool's rows [n, num_kv_heads, head_dim] of ``layer``, to be written at `places`."""
        pool = self.layers[layer]
        if batch.unfilled.numel():
            pool.index_fill_(0, batch.unfilled, 0)
        return pool.view(-1, *pool.shape[-2:])

    def write(self, layer: int, batch: StepBatch, *halves: torch.Tensor) -> None:
        """Stores keys and values, or latents, [N, num_kv_heads, head_dim] of the batch's rows."""
        tokens = self.begin(layer, batch)
        for half, places in zip(halves, self.places(batch), strict=True):
            tokens.index_copy_(0, places, half)

    def gather(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the blocks ``block_ids`` [S, n], each [S, n * block_size, num_kv_heads,
        head_dim], copied. Latents are both.
        """
        pool = self.layers[layer]
        halves = pool.view(-1, *pool.shape[2:])
        shape = (block_ids.shape[0], -1, *pool.shape[-2:])
        if self.layout.halves == 1:
            latents = halves.index_select(0, block_ids.reshape(-1)).view(shape)
            return latents, latents
        first = block_ids.reshape(-1) * 2
        return halves.index_select(0, first).view(shape), halves.index_select(0, first + 1).view(shape)

    def read_blocks(
        self, layer: int, block_ids: Sequence[int] | np.ndarray, out: np.ndarray, columns: slice | None = None
    ) -> None:
        """Copies the bytes of blocks of ``layer`` into ``out``, uint8 [n, layout.block_layer_bytes].

        ``columns``: only these bytes of each token's keys and values; ``out`` is then as much narrower.
        """
        ids = self._checked(layer, block_ids, out, columns)
        if not self.on_host:
            places = torch.from_numpy(ids).to(self.device)
            source = self._bytes[layer] if columns is None else self._tokens(layer)[..., columns]
            np.copyto(out, source.index_select(0, places).cpu().numpy().reshape(out.shape))
        elif columns is None:
            # "clip" lets NumPy write straight into ``out``; the ids were checked.
            np.take(self._host_rows[layer], ids, axis=0, out=out, mode="clip")
        else:
            np.copyto(
                out.reshape(len(ids), -1, columns.stop - columns.start), self._host_tokens(layer)[ids, :, columns]
            )

    def write_blocks(
        self, layer: int, block_ids: Sequence[int] | np.ndarray, data: np.ndarray, columns: slice | None = None
    ) -> None:
        """Overwrites blocks of ``layer`` with ``data``, uint8 [n, layout.block_layer_bytes]; ``columns`` as above."""
        ids = self._checked(layer, block_ids, data, columns)
        if not self.on_host:
            # torch wants memory that it could write; the source may be a read-only view of a message.
            source = torch.from_numpy(np.require(data, requirements=["C", "W"])).to(self.device)
            target = self._bytes[layer] if columns is None else self._tokens(layer)[..., columns]
            target.index_copy_(0, torch.from_numpy(ids).to(self.device), source.view(len(ids), *target.shape[1:]))
        elif columns is None:
            self._host_rows[layer][ids] = data
        else:
            self._host_tokens(layer)[ids, :, columns] = data.reshape(len(ids), -1, columns.stop - columns.start)

    def views(self, layer: int, block_ids: Sequence[int] | np.ndarray) -> list[memoryview] | None:
        """The bytes of blocks of ``layer`` where they lie, writable; None where they are not in host memory."""
        if not self.on_host:
            return None
        size, ids = self.layout.block_layer_bytes, self._checked_ids(layer, block_ids)
        memory = self._host_rows[layer].reshape(-1).data
        return [memory[block * size : (block + 1) * size] for block in ids.tolist()]

    def _tokens(self, layer: int) -> torch.Tensor:
        """A view of the layer's bytes, [num_blocks, halves * block_size, token_bytes]."""
        return self._bytes[layer].view(self.num_blocks, -1, self.layout.token_bytes)

    def _host_tokens(self, layer: int) -> np.ndarray:
        """As `_tokens`, of a pool in host memory."""
        return self._host_rows[layer].reshape(self.num_blocks, -1, self.layout.token_bytes)

    def _checked(
        self, layer: int, block_ids: Sequence[int] | np.ndarray, data: np.ndarray, columns: slice | None
    ) -> np.ndarray:
        ids = self._checked_ids(layer, block_ids)
        width = self.layout.token_bytes if columns is None else columns.stop - columns.start
        wanted = (len(ids), self.layout.halves * self.layout.block_size * width)
        if data.shape != wanted or data.dtype != np.uint8:
            raise EngineError(f"KV bytes must be uint8 {wanted}, they are {data.dtype} {data.shape}")
        return ids

    def _checked_ids(self, layer: int, block_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        ids = np.asarray(block_ids, dtype=np.int64)
        if not 0 <= layer < self.layout.num_layers:
            raise EngineError(f"KV layer {layer} is not one of the {self.layout.num_layers} layers")
        if ids.size and ids.view(np.uint64).max() >= self.num_blocks:  # below 0: huge
            raise EngineError(f"KV blocks {ids.min()}..{ids.max()} reach outside the pool of {self.num_blocks}")
        return ids


def host_cache(layout: KVLayout, num_blocks: int) -> KVCache:
    """A pool in host memory, for those who know no devices."""
    return KVCache(layout, num_blocks, torch.device("cpu"))


def pool_blocks(pool_bytes: int | None, layout: KVLayout, device: torch.device) -> int:
    """How many blocks fit into ``pool_bytes``; None takes a share of the memory that is free now.

    Raises ConfigError when not even one fits.
    """
    if pool_bytes is None:
        if device.type == "cuda":
            pool_bytes = int(torch.cuda.mem_get_info(device)[0] * _CUDA_SHARE)
        else:
            pool_bytes = min(int(_available_bytes() * _CPU_SHARE), _CPU_MOST_BYTES)
    count = pool_bytes // layout.block_bytes
    if count < 1:
        raise ConfigError(f"engine.pool_bytes {pool_bytes} holds no block; one takes {layout.block_bytes} bytes")
    return count


def _available_bytes() -> int:
    """Memory that can be had without swapping: free, or only caching files."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("engine.pool_bytes must be set: this system does not say how much memory is available")
