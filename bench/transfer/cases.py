"""What is measured: sizes, block counts, and the layout of a pool for each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import BatonError
from common.handoff import KVLayout, Ticket, TransportOffer

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
BLOCKS = (1, 16, 256, 10_000)
NUM_LAYERS = 4
LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 128, 4 * MIB
"""A piece is one block in one layer: the contiguous bytes that a transfer gathers."""

_BYTES_PER_UNIT = 4
"""One token of one bfloat16 number, keys and values."""
_FIXED_BYTES = 512 * MIB
"""Interpreters, libraries and staging of both processes."""


@dataclass(frozen=True, slots=True)
class Case:
    """``size``: bytes that were asked for; pieces are whole, so it may be a little more."""

    transport: str
    size: int
    blocks: int

    @property
    def piece_bytes(self) -> int:
        return -(-self.size // (self.blocks * NUM_LAYERS * _BYTES_PER_UNIT)) * _BYTES_PER_UNIT

    @property
    def num_bytes(self) -> int:
        return self.piece_bytes * NUM_LAYERS * self.blocks

    @property
    def layout(self) -> KVLayout:
        head_dim = self.piece_bytes // _BYTES_PER_UNIT
        return KVLayout(f"bench-{self.piece_bytes}", NUM_LAYERS, 1, head_dim, block_size=1, dtype="bfloat16")

    def block_ids(self, seed: int) -> np.ndarray:
        """All blocks of the pool, scattered."""
        return np.random.default_rng(seed).permutation(self.blocks)

    def ticket(self, number: int, offers: Sequence[TransportOffer]) -> Ticket:
        ids = tuple(self.block_ids(1).tolist())
        return Ticket(
            ticket_id=f"bench-{number}",
            request_id=f"r{number}",
            attempt=0,
            worker_id="peer",
            epoch=1,
            context_tokens=self.blocks,
            cached_tokens=0,
            block_ids=ids,
            layout=self.layout,
            offers=tuple(offers),
            secret=b"bench",
            lease_s=60.0,
        )


def cases(transport: str, sizes: Sequence[int] = SIZES, blocks: Sequence[int] = BLOCKS) -> list[Case]:
    """Those whose pieces have a size that a pool may have. Raises BatonError when none has."""
    made = [Case(transport, size, count) for size in sizes for count in blocks]
    possible = [case for case in made if LEAST_PIECE_BYTES <= case.piece_bytes <= MOST_PIECE_BYTES]
    if not possible:
        pieces = ", ".join(f"{case.size} in {case.blocks} blocks has {case.piece_bytes}" for case in made)
        raise BatonError(
            f"a piece (one block in one of {NUM_LAYERS} layers) must have {LEAST_PIECE_BYTES} to {MOST_PIECE_BYTES} "
            f"bytes; of bytes and blocks that were asked for none has: {pieces or 'none were'}"
        )
    return possible


def memory_bytes(chosen: Iterable[Case]) -> int:
    """What a run takes at most: the sender's source and pool, and pool and raw target of two receivers (the peer,
    and the one in this process), all of the largest case.
    """
    return _FIXED_BYTES + 6 * max(case.num_bytes for case in chosen)


def num_rounds(size: int) -> int:
    """More where a round is short and its time uncertain."""
    return 41 if size <= MIB else 21 if size <= 16 * MIB else 15 if size <= 64 * MIB else 9
