"""Prefix hashes: one per *hash unit* of a token sequence, chained, salted.

The whole fleet uses one unit, whatever the block sizes of its workers, so that a router can compare
what it computes from a prompt with what workers report. A hash covers its unit and everything before
it; the chain starts from the salt (tenant, adapter, model), each part with its length in front, so
that no two different salts can give the same start.

A hash only proposes: the prefix cache compares tokens before a hit counts.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Iterable, Sequence

HASH_UNIT_TOKENS = 16
"""Tokens per hash. A worker's block size must be a multiple or a divisor of it to take part."""

DIGEST_BYTES = 16


def root_hash(*salt: str) -> bytes:
    """Where the chain of a sequence under ``salt`` starts."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in salt:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def chain_hash(parent: bytes, tokens: Iterable[int]) -> bytes:
    """The hash of ``tokens`` after everything that ``parent`` covers."""
    return hashlib.blake2b(array.array("I", tokens).tobytes(), digest_size=DIGEST_BYTES, key=parent).digest()


def prefix_hashes(tokens: Sequence[int], root: bytes, unit: int = HASH_UNIT_TOKENS) -> list[bytes]:
    """One hash for each full unit of ``tokens``, in order."""
    hashes = []
    parent = root
    for start in range(0, len(tokens) - unit + 1, unit):
        parent = chain_hash(parent, tokens[start : start + unit])
        hashes.append(parent)
    return hashes
