"""How much of a long prompt's transfer is left when its prefill ends: KV leaves layer by layer, while the rest of it is
computed.

A real model in a real prefill and a real decode worker; prompts are random, so nobody has a part of one. The link is
as it is, or, where it is a network's, so slow that the transfer by itself takes `SLOWNESS` of the prefill.

    prefill ├──────────────────────────────────────────┤ first token
    transfer     ├──────────────────────────────────────────┤ D has joined ├─ one step ─┤ second token
                                                        ├ exposed ┤

Exposed is the time from P's first token to D's second one, less one step of D, the median of those that follow.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from bench.transfer.cases import GIB
from bench.transfer.pair import HandoffTimes, WorkerPair, worker_pair
from bench.transfer.slow_link import SlowLink
from common.handoff import TransportOffer

PROMPT_TOKENS = 2048
TRANSPORTS = ("shm", "tcp", "grpc")
SHAPED = ("tcp", "grpc")
SLOWNESS = 0.7
"""Transfer over prefill, one after the other, on the slow link."""
WARM_UP_TOKENS = 256
"""What comes first pays for much that is made once."""
MAX_TOKEN_ID = 40_000
POOL_BYTES = 800_000_000
"""Holds several prompts; what is not in use any more gives way."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds; ``transfer_s``: of the same KV when nothing else is done."""

    prefill_s: float
    exposed_s: float
    step_s: float
    transfer_s: float
    num_bytes: int


async def measure_overlap(progress: Progress, rounds: int = 1) -> list[dict[str, Any]]:
    """``overlap`` of the JSON, of ``rounds`` prompts in each case. Raises BatonError when a worker does not start, or
    a handoff fails.
    """
    figures: list[dict[str, Any]] = []
    async with worker_pair(f"engine.pool_bytes={POOL_BYTES}") as pair:
        offers = await pair.offers()
        usable = [offers[name] for name in TRANSPORTS if name in offers]
        await _measure(pair, usable[0], 1, WARM_UP_TOKENS)
        measured: list[Round] = []
        for offer in usable:
            plain = await _measure(pair, offer, rounds)
            measured += plain
            figures.append(overlap_figures(offer.name, plain))
            progress(_line(figures[-1]))
        bytes_per_s = measured[0].num_bytes / (SLOWNESS * median(each.prefill_s for each in measured))
        for offer in (offer for offer in usable if offer.name in SHAPED):
            async with slow_way(offer, bytes_per_s) as (slow, _):
                figures.append(overlap_figures(offer.name, await _measure(pair, slow, rounds), bytes_per_s))
            progress(_line(figures[-1]))
    return figures


async def _measure(
    pair: WorkerPair, offer: TransportOffer, rounds: int, num_tokens: int = PROMPT_TOKENS
) -> list[Round]:
    measured: list[Round] = []
    for _ in range(rounds):
        prompt = random_prompt(num_tokens)
        times = await pair.hand_over(prompt, offer)
        measured.append(round_of(times, await pair.send_again(prompt, offer)))
    return measured


def random_prompt(num_tokens: int) -> tuple[int, ...]:
    """One that nobody has seen."""
    rng = random.SystemRandom()
    return tuple(rng.randrange(MAX_TOKEN_ID) for _ in range(num_tokens))


@asynccontextmanager
async def slow_way(
    offer: TransportOffer, bytes_per_s: float | None = None
) -> AsyncIterator[tuple[TransportOffer, SlowLink]]:
    """``offer`` (of one whose address is a host and a port) behind a relay that passes ``bytes_per_s``."""
    target, mark, token = offer.address.partition("#")
    async with SlowLink(target, bytes_per_s) as link:
        yield replace(offer, address=link.address + mark + token), link


def round_of(times: HandoffTimes, transfer_s: float) -> Round:
    """What the clocks say."""
    _, second, *others = times.token_times
    step_s = median(after - before for before, after in pairwise((second, *others)))
    exposed_s = second - times.first_token_at - step_s
    return Round(times.prefill_s, exposed_s, step_s, transfer_s, times.num_bytes)


def overlap_figures(transport: str, rounds: Sequence[Round], bytes_per_s: float | None = None) -> dict[str, Any]:
    """One of ``overlap``: medians. ``share``: exposed over the transfer on a slow link, else over the prefill."""
    names = ("prefill_s", "exposed_s", "step_s", "transfer_s")
    seconds = {name: median(getattr(each, name) for each in rounds) for name in names}
    shaped = bytes_per_s is not None
    return {
        "transport": transport,
        "shaped": shaped,
        "prompt_tokens": PROMPT_TOKENS,
        "bytes": rounds[0].num_bytes,
        "link_gib_s": bytes_per_s / GIB if bytes_per_s is not None else None,
        **seconds,
        "share": seconds["exposed_s"] / seconds["transfer_s" if shaped else "prefill_s"],
    }


def _line(figures: dict[str, Any]) -> str:
    link = f"{figures['link_gib_s']:.3f} GiB/s" if figures["shaped"] else "as it is"
    whole = "the transfer" if figures["shaped"] else "prefill"
    return (
        f"{figures['transport']:>5} {link:>11}: prefill {figures['prefill_s']:.2f} s, "
        f"transfer by itself {figures['transfer_s']:.3f} s, "
        f"exposed {figures['exposed_s'] * 1e3:.1f} ms, {figures['share']:.1%} of {whole}"
    )
