"""Which requests are sent, and when they are due. Pure; the same seed gives the same workload.

Knows lengths and who shares what, not the words (`prompts.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

from bench.load.trace import TraceRow

PIECE_ID_BITS = 60


@dataclass(frozen=True, slots=True)
class Planned:
    """One request. ``at_s`` from the start of the run; in closed loop it says nothing.

    The prompt is made of pieces of ``piece_tokens`` each, the last one perhaps cut: equal ids are equal text.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    pieces: tuple[int, ...]
    piece_tokens: int


def synthetic(prompt_tokens: int, output_tokens: int, seed: int, rate: float | None = None) -> Iterator[Planned]:
    """Requests without end, no two alike; with a rate they arrive as a Poisson process, without one all at 0."""
    arrivals, ids = random.Random(f"arrivals {seed}"), random.Random(f"prompts {seed}")
    at_s = 0.0
    while True:
        if rate is not None:
            at_s += arrivals.expovariate(rate)
        yield Planned(at_s, prompt_tokens, output_tokens, (ids.getrandbits(PIECE_ID_BITS),), prompt_tokens)


def from_trace(
    rows: list[TraceRow], seed: int, length_scale: float = 1.0, rate: float | None = None
) -> Iterator[Planned]:
    """A trace's requests. ``length_scale`` multiplies lengths and blocks alike, so that what was shared stays
    shared; ``rate`` squeezes or stretches the arrivals to so many per second on average.
    """
    ids = random.Random(f"prompts {seed}")
    span_s = rows[-1].at_s - rows[0].at_s if rows else 0.0
    stretch = (len(rows) - 1) / span_s / rate if rate is not None and span_s > 0 else 1.0
    for row in rows:
        prompt_tokens = max(1, round(row.prompt_tokens * length_scale))
        pieces, piece_tokens = row.blocks, max(1, round(row.block_tokens * length_scale))
        if not pieces:
            pieces, piece_tokens = (ids.getrandbits(PIECE_ID_BITS),), prompt_tokens
        # Rounding must not leave a prompt longer than its blocks.
        prompt_tokens = min(prompt_tokens, len(pieces) * piece_tokens)
        yield Planned(
            (row.at_s - rows[0].at_s) * stretch,
            prompt_tokens,
            max(1, round(row.output_tokens * length_scale)),
            pieces,
            piece_tokens,
        )


def bounded(plan: Iterator[Planned], num_requests: int | None, duration_s: float | None) -> Iterator[Planned]:
    """The first ``num_requests``, and of them those that are due within ``duration_s``."""
    if num_requests is not None:
        plan = islice(plan, num_requests)
    if duration_s is not None:
        plan = takewhile(lambda planned: planned.at_s < duration_s, plan)
    return plan
