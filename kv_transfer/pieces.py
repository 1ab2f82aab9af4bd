"""What is still to be sent, and what has arrived: the two ends' books of one handoff. Pure.

A *piece* is one block of one layer; a *run* is (layer, first, count) of neighbouring pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_transfer.frames import MAX_RUNS


@dataclass(slots=True)
class _Run:
    layer: int
    first: int
    count: int


class PieceQueue:
    """Runs in the order in which they were pushed; one that continues a waiting run of its layer is
    joined to it, so that a slow link sends few large frames.
    """

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}
        self._last: dict[int, int] = {}
        self._next_id = 0

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, layer: int, first: int, count: int) -> None:
        if count == 0:
            return
        last = self._runs.get(self._last.get(layer, -1))
        if last is not None and last.first + last.count == first:
            last.count += count
            return
        self._runs[self._next_id] = _Run(layer, first, count)
        self._last[layer] = self._next_id
        self._next_id += 1

    def peek(self, most: int) -> tuple[int, int, int]:
        """(layer, first, count) of the oldest run, at most ``most`` pieces of it."""
        run = next(iter(self._runs.values()))
        return run.layer, run.first, min(run.count, most)

    def drop(self, count: int) -> None:
        """Takes ``count`` pieces off the oldest run."""
        run_id, run = next(iter(self._runs.items()))
        run.first += count
        run.count -= count
        if run.count == 0:
            del self._runs[run_id]

    def clear(self) -> None:
        self._runs.clear()


class PieceSet:
    """Which pieces have arrived, each counted once however often it comes."""

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self._arrived = np.zeros((num_layers, num_blocks), dtype=np.bool_)
        self.count = 0
        self.expected = num_layers * num_blocks

    @property
    def num_missing(self) -> int:
        return self.expected - self.count

    def holds(self, layer: int, first: int, count: int) -> bool:
        """Whether the run lies within the handoff at all."""
        num_layers, num_blocks = self._arrived.shape
        return layer < num_layers and count > 0 and first + count <= num_blocks

    def num_missing_of(self, layer: int, first: int, count: int) -> int:
        """How many of the run's pieces have not arrived yet."""
        return count - int(np.count_nonzero(self._arrived[layer, first : first + count]))

    def missing(self, layer: int, first: int, count: int) -> NDArray[np.intp]:
        """Which of the run's pieces have not arrived yet, numbered from ``first``."""
        return np.flatnonzero(~self._arrived[layer, first : first + count])

    def missing_runs(self, most: int = MAX_RUNS) -> list[tuple[int, int, int]]:
        """(layer, first, count) of all that has not arrived; the first ``most`` of them."""
        runs: list[tuple[int, int, int]] = []
        for layer in np.flatnonzero(~self._arrived.all(axis=1)).tolist():
            edges = np.flatnonzero(np.diff(~self._arrived[layer], prepend=False, append=False)).tolist()
            runs += [(layer, start, stop - start) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
            if len(runs) >= most:
                break
        return runs[:most]

    def add(self, layer: int, first: int, count: int) -> int:
        """Marks the run as arrived; returns how many of its pieces are new."""
        fresh = self.num_missing_of(layer, first, count)
        self._arrived[layer, first : first + count] = True
        self.count += fresh
        return fresh
