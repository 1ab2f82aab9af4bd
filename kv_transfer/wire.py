"""The number formats in which KV travels, and the conversions at both ends.

    native     the narrower of the two pools' formats: nothing is lost that the receiver's pool could hold
    bfloat16   8 bits of mantissa: relative error at most 2^-8
    float8     E4M3 with one float32 scale for each token and head: relative error at most 2^-4 of a number,
               and 2^-10 of the largest of its head's (below E4M3's normal range)
    int8       one float32 scale likewise: absolute error at most 1/254 of the largest number of its head

(Bounds of rounding to nearest, before the receiver's own rounding.) A payload is the numbers of the rows, then, for
scaled formats, their scales. A *row* is one token's keys, or values, of the heads that are moved. Equal
formats at both ends are moved as bytes, unlooked at.

Knows rows of numbers, not whose they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from common.errors import HandoffError
from kv_transfer.channel import Bytes

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
_MOST: dict[str, float] = {"float8": 448.0, "int8": 127.0}
"""The largest number of a scaled format."""
_SCALE_BYTES = 4


class Wire:
    """Rows of ``num_heads * head_dim`` numbers, from ``source`` to ``target`` dtype by way of ``name``."""

    def __init__(self, name: str, source: str, target: str, num_heads: int, head_dim: int) -> None:
        self.name = name
        self._heads, self._dim = num_heads, head_dim
        self._source, self._target = _DTYPES[source], _DTYPES[target]
        match name:
            case "native":
                self._dtype = min(self._source, self._target, key=lambda dtype: dtype.itemsize)
            case "bfloat16":
                self._dtype = torch.bfloat16
            case "float8":
                self._dtype = torch.float8_e4m3fn
            case "int8":
                self._dtype = torch.int8
            case _:
                raise HandoffError(f"there is no wire format {name!r}")
        self._most = _MOST.get(name)
        numbers = num_heads * head_dim
        self.source_row_bytes = numbers * self._source.itemsize
        self.target_row_bytes = numbers * self._target.itemsize
        self.row_bytes = numbers * self._dtype.itemsize + (num_heads * _SCALE_BYTES if self._most else 0)

    @property
    def encodes(self) -> bool:
        """False: the payload is the sender's bytes."""
        return self._most is not None or self._dtype != self._source

    @property
    def decodes(self) -> bool:
        """False: the payload is the receiver's bytes."""
        return self._most is not None or self._dtype != self._target

    def encode(self, rows: Bytes, out: Bytes) -> None:
        """``rows``: uint8 [n, source_row_bytes], contiguous. ``out``: uint8 [n * row_bytes]."""
        if not self.encodes:
            np.copyto(out.reshape(rows.shape), rows)
            return
        numbers = torch.from_numpy(rows).view(self._source)
        if self._most is None:
            np.copyto(out.reshape(len(rows), -1), _bytes(_cast(numbers, self._dtype)))
            return
        heads = numbers.float().view(len(rows), self._heads, self._dim)
        scales = heads.abs().amax(dim=-1, keepdim=True) / self._most
        scaled = heads / torch.where(scales > 0, scales, 1.0)
        if self._dtype == torch.int8:
            scaled = scaled.round_()
        num_bytes = heads.numel() * self._dtype.itemsize
        np.copyto(out[:num_bytes].reshape(len(rows), -1), _bytes(_cast(scaled.flatten(1), self._dtype)))
        np.copyto(out[num_bytes:].reshape(len(rows), -1), _bytes(scales.flatten(1)))

    def decode(self, payload: Bytes) -> Bytes:
        """The rows of ``payload``: uint8 [n, target_row_bytes]. Raises HandoffError when it is cut short."""
        if len(payload) % self.row_bytes:
            raise HandoffError(f"a payload of {len(payload)} bytes is not whole rows of {self.row_bytes}")
        count = len(payload) // self.row_bytes
        if not self.decodes:
            return payload.reshape(count, -1)
        num_bytes = count * self._heads * self._dim * self._dtype.itemsize
        # torch wants memory that it could write; a payload may be a read-only view of a message.
        numbers = torch.from_numpy(np.array(payload[:num_bytes])).view(self._dtype).view(count, -1)
        if self._most is None:
            return _bytes(_cast(numbers, self._target))
        scales = torch.from_numpy(np.array(payload[num_bytes:])).view(torch.float32).view(count, self._heads, 1)
        heads = numbers.float().view(count, self._heads, self._dim) * scales
        return _bytes(_cast(heads.flatten(1), self._target))


def _cast(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float8_e4m3fn and numbers.dtype != dtype:
        # E4M3 has no infinity: torch would make a NaN of what is too large.
        numbers = numbers.float().clamp(-_MOST["float8"], _MOST["float8"])
    return numbers.to(dtype)


def _bytes(numbers: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 [n, bytes of a row]."""
    return numbers.contiguous().view(torch.uint8).view(len(numbers), -1).numpy()
