"""Request traces as requests: arrival, prompt, number of tokens to generate.

A Mooncake trace names each block of 512 prompt tokens by an id that is equal only for equal blocks after
equal prefixes; so a prompt is made of its blocks' tokens, and shares with others what the trace says.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TICK_S = 3.0
"""Mooncake's time stamps are rounded to this; arrivals of one tick are spread over it."""

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. ``at_s`` from the start of the trace."""

    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int


def read_mooncake(path: Path, *, limit: int, scale: int, vocab_size: int, speedup: float = 1.0) -> list[Arrival]:
    """The first ``limit`` requests, prompts and outputs shortened by ``scale`` (a divisor of 512), arriving
    ``speedup`` times as fast.

    Raises ValueError when ``scale`` does not divide a block.
    """
    if BLOCK_TOKENS % scale:
        raise ValueError(f"scale must divide {BLOCK_TOKENS}, got {scale}")
    rows = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            rows.append(json.loads(line))
            if len(rows) == limit:
                break
    blocks: dict[int, tuple[int, ...]] = {}
    arrivals = []
    for at_s, row in zip(_spread([row["timestamp"] / 1000 for row in rows]), rows, strict=True):
        length = max(1, row["input_length"] // scale)
        prompt: list[int] = []
        for block in row["hash_ids"]:
            if block not in blocks:
                blocks[block] = _block_tokens(block, BLOCK_TOKENS // scale, vocab_size)
            prompt.extend(blocks[block])
        arrivals.append(Arrival(at_s / speedup, tuple(prompt[:length]), max(1, row["output_length"] // scale)))
    return arrivals


def _spread(stamps: list[float]) -> Iterator[float]:
    """Spreads the arrivals of one tick evenly over it."""
    count: dict[float, int] = {}
    for stamp in stamps:
        count[stamp] = count.get(stamp, 0) + 1
    seen: dict[float, int] = {}
    for stamp in stamps:
        place = seen.get(stamp, 0)
        seen[stamp] = place + 1
        yield stamp + TICK_S * place / count[stamp]


def _block_tokens(block: int, length: int, vocab_size: int) -> tuple[int, ...]:
    """Tokens that only this block has (a multiplicative congruence: cheap, and well mixed)."""
    state = (block * 2_654_435_761 + 97) & 0xFFFFFFFF
    tokens = []
    for _ in range(length):
        state = (state * 1_664_525 + 1_013_904_223) & 0xFFFFFFFF
        tokens.append(2 + (state >> 8) % (vocab_size - 2))
    return tuple(tokens)
