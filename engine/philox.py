"""Philox4x32-10, a counter-based random generator: numbers as a function of what they are for.

J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Nothing is drawn from a
generator's history, so a token's randomness is the same wherever and in whatever company it is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Four 32-bit random words for each row: ``counter`` [n, 4] and ``key`` [n, 2] → [n, 4].

    All are uint64 arrays that hold 32-bit words.
    """
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> _WORD) ^ c1 ^ k0, second & _LOW, (first >> _WORD) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(seeds: Sequence[int], children: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One float64 in [0, 1) for each (seed, child, position), with 53 random bits.

    Seeds count modulo 2^64, children modulo 2^32.
    """
    seed = _words(seeds, 64)
    position = _words(positions, 64)
    child = _words(children, 32)
    counter = np.stack((position & _LOW, position >> _WORD, child, np.zeros_like(child)), axis=1)
    key = np.stack((seed & _LOW, seed >> _WORD), axis=1)
    words = philox4x32(counter, key)
    bits = ((words[:, 0] >> np.uint64(5)) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53


def _words(values: Sequence[int], bits: int) -> np.ndarray:
    mask = (1 << bits) - 1
    return np.array([value & mask for value in values], dtype=np.uint64)
