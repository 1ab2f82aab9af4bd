"""A run of the benchmark from its options to its figures: every case, the cost of checksums, the overlap.

Owns the loop and the peer process; how one case is measured is in `measure.py`, what the numbers say in `figures.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeVar, cast

from bench.transfer.cases import BLOCKS, MIB, SIZES, Case, cases, memory_bytes, num_rounds
from bench.transfer.ends import HOST
from bench.transfer.figures import transfer_figures
from bench.transfer.measure import checksum_share, measure, random_bytes
from bench.transfer.overlap import measure_overlap
from bench.transfer.remote import Peer, Remote, peers
from common.config import TransferConfig
from common.errors import BatonError
from kv_transfer.host import host_id
from kv_transfer.transports.available import make_transports
from rpc import kv_channel

TRANSPORTS = ("local", "shm", "gloo", "nixl", "tcp", "grpc")
CHECKSUM_SIZE = 64 * MIB
"""What checksums cost is measured at this size, or the largest below it."""
ENDING_S = 1.0
"""Patience for a peer process to be seen dead when the connection to it has broken."""

Progress = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """``transports``: None: all that work on this machine. ``rounds``: of each case; None: as many as suit its size.
    ``only``: the one part to measure.
    """

    transports: Sequence[str] | None = None
    sizes: Sequence[int] = SIZES
    blocks: Sequence[int] = BLOCKS
    rounds: int | None = None
    only: Literal["speed", "overlap"] | None = None


def usable_transports(names: Sequence[str] = TRANSPORTS) -> list[str]:
    """Those of ``names`` that work on this machine."""

    async def nobody(address: str) -> kv_channel.KVChannel:
        raise BatonError(f"nobody at {address}")

    known = [name for name in names if name in TRANSPORTS]
    config = TransferConfig.model_construct(transports=cast(Any, tuple(known)))
    return [each.name for each in make_transports(config, host_id(), f"{HOST}:1", nobody)]


def plan_of(options: TransferOptions) -> list[Case]:
    """The cases, transport by transport. Raises BatonError when a transport cannot be used here, or no case is
    possible.
    """
    usable = usable_transports()
    for name in options.transports or ():
        if name not in usable:
            what = "cannot be used on this machine" if name in TRANSPORTS else "is none that this benchmark knows"
            raise BatonError(f"transport {name!r} {what}; usable here: {', '.join(usable)}")
    sizes, blocks = sorted(set(options.sizes)), sorted(set(options.blocks))
    names = dict.fromkeys(options.transports or usable)
    return [case for name in names for case in cases(name, sizes, blocks)]


def check_memory(plan: Sequence[Case], available_bytes: int | None) -> None:
    """Raises BatonError when the largest case does not fit; None: nobody knows."""
    needed = memory_bytes(plan)
    if available_bytes is not None and needed > available_bytes:
        raise BatonError(
            f"too little memory: {max(case.size for case in plan) // MIB} MiB at both ends take {needed // MIB} MiB, "
            f"{available_bytes // MIB} MiB are available; ask for smaller --sizes"
        )


def run_transfer(options: TransferOptions, progress: Progress) -> dict[str, Any]:
    """The figures, as in the JSON. Raises BatonError when bytes do not arrive as they were sent, or the peer dies."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(options, progress))


async def _run(options: TransferOptions, progress: Progress) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    shares: dict[str, float] = {}
    if options.only != "overlap":
        plan = plan_of(options)
        async with peers() as (remote, within):
            measuring = _measure_all(plan, options.rounds, remote, within, progress)
            results, shares = await _while_alive(remote, measuring)
    overlap = [] if options.only == "speed" else await measure_overlap(progress)
    return transfer_figures(results, shares, overlap)


async def _measure_all(
    plan: Sequence[Case], rounds: int | None, remote: Peer, within: Peer, progress: Progress
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """``results`` of all cases, and what checksums cost by transport."""
    results: list[dict[str, Any]] = []
    shares: dict[str, float] = {}
    source = random_bytes(max(case.num_bytes for case in plan))
    for transport, group in groupby(plan, key=lambda case: case.transport):
        peer, chosen = within if transport == "local" else remote, list(group)
        for case in chosen:
            figures = await measure(case, source[: case.num_bytes], peer, rounds or num_rounds(case.size))
            results.append(figures)
            progress(_line(figures))
        case = _checksum_case(chosen)
        share = await checksum_share(case, source[: case.num_bytes], peer, rounds or 3 * num_rounds(case.size))
        shares[transport] = share
        progress(f"{transport:>5} {case.num_bytes:>11,} bytes in {case.blocks:>6,} blocks: checksums take {share:.1%}")
    return results, shares


def _checksum_case(chosen: Sequence[Case]) -> Case:
    """The largest up to `CHECKSUM_SIZE`, or the smallest beyond it, in few blocks."""
    return min(chosen, key=lambda case: (case.size > CHECKSUM_SIZE, abs(case.size - CHECKSUM_SIZE), case.blocks))


def _line(figures: dict[str, Any]) -> str:
    return (
        f"{figures['transport']:>5} {figures['bytes']:>11,} bytes in {figures['blocks']:>6,} blocks: "
        f"{figures['gib_s']:6.2f} of {figures['raw_gib_s']:6.2f} GiB/s, ratio {figures['ratio']:.2f}"
    )


async def _while_alive(remote: Remote, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of ``work``; it ends with the peer process, and says so rather than what broke then."""
    working = asyncio.ensure_future(work)
    lost = asyncio.ensure_future(remote.lost())
    try:
        await asyncio.wait([working, lost], return_when=asyncio.FIRST_COMPLETED)
        if working.done() and working.exception() is not None:
            await asyncio.wait([lost], timeout=ENDING_S)
        if lost.done():
            raise lost.result()
        return working.result()
    finally:
        working.cancel()
        lost.cancel()
        await asyncio.gather(working, lost, return_exceptions=True)
