"""What the measurements say: shares, and targets with what they were met by. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.transfer.cases import MIB

Result = Mapping[str, Any]
"""One of the JSON's ``results``, or of its ``overlap``."""

FEW_BLOCKS, MANY_BLOCKS = 16, 10_000
"""Up to so many blocks are few large ones; from so many on they are small ones, with a target of their own."""
JUDGED_SIZE = 16 * MIB
"""From so many bytes on there are targets for the speed."""

OF_RAW = {"shm": 0.8, "grpc": 0.85, "gloo": 0.9}
"""Transport → least part of its own raw link's speed."""
CROSS_HOST = ("tcp", "gloo", "grpc")
"""Not nixl: within one machine it goes through memory, and says nothing of a network."""
BEST_OF_RAW_TCP = 0.8
SMALL_OF_FEW = 0.7
EXPOSED_OF_TRANSFER, EXPOSED_OF_PREFILL = 0.15, 0.01


def transfer_figures(
    results: Sequence[Result], checksum_shares: Mapping[str, float], overlap: Sequence[Result]
) -> dict[str, Any]:
    """All that goes to the JSON. ``checksum_share`` is the largest of ``checksum_shares``; None without any."""
    return {
        "results": results,
        "overlap": overlap,
        "checksum_share": max(checksum_shares.values(), default=None),
        "checksum_shares": checksum_shares,
        "small_blocks_shares": {
            name: share for name in transports(results) if (share := small_blocks_share(results, name)) is not None
        },
        "targets": [*_speed_targets(results), *_overlap_targets(overlap)],
    }


def transports(results: Iterable[Result]) -> list[str]:
    """In the order of their measurement."""
    return list(dict.fromkeys(result["transport"] for result in results))


def lowest_ratio(results: Iterable[Result], transport: str, size: int | None = None) -> float | None:
    """Over all block counts below `MANY_BLOCKS`, of ``size`` or of all from `JUDGED_SIZE` on."""
    ratios = [result["ratio"] for result in _judged(results, transport, size)]
    return min(ratios, default=None)


def small_blocks_share(results: Iterable[Result], transport: str) -> float | None:
    """The speed with `MANY_BLOCKS` or more over that with few, at the same bytes: the lowest of all sizes from
    `JUDGED_SIZE` on. Of few, the faster count is taken.
    """
    own = [result for result in results if result["transport"] == transport and result["size"] >= JUDGED_SIZE]
    few: dict[int, float] = {}
    for result in own:
        if result["blocks"] <= FEW_BLOCKS:
            few[result["size"]] = max(few.get(result["size"], 0.0), result["gib_s"])
    shares = [
        result["gib_s"] / few[result["size"]]
        for result in own
        if result["blocks"] >= MANY_BLOCKS and result["size"] in few
    ]
    return min(shares, default=None)


def best_of_raw_tcp(results: Sequence[Result]) -> tuple[str, float] | None:
    """Of the transports that go between hosts, the one whose lowest part of raw TCP's speed, in the same case, is the
    highest; and that part. None without raw TCP.
    """
    raw = {(result["size"], result["blocks"]): result["raw_gib_s"] for result in _judged(results, "tcp")}
    lowest: dict[str, float] = {}
    for name in CROSS_HOST:
        for result in _judged(results, name):
            if (case := (result["size"], result["blocks"])) in raw:
                lowest[name] = min(lowest.get(name, math.inf), result["gib_s"] / raw[case])
    return max(lowest.items(), key=lambda item: item[1], default=None)


def _judged(results: Iterable[Result], transport: str, size: int | None = None) -> list[Result]:
    return [
        result
        for result in results
        if result["transport"] == transport
        and result["blocks"] < MANY_BLOCKS
        and (result["size"] >= JUDGED_SIZE if size is None else result["size"] == size)
    ]


def _speed_targets(results: Sequence[Result]) -> Iterable[dict[str, Any]]:
    """Only for what was measured."""
    for name, least in OF_RAW.items():
        if (ratio := lowest_ratio(results, name)) is not None:
            yield _target(name, "of its raw link, ≥ 16 MiB", ratio, at_least=least)
    if (best := best_of_raw_tcp(results)) is not None:
        yield _target(best[0], "best between hosts, of raw TCP", best[1], at_least=BEST_OF_RAW_TCP)
    for name in transports(results):
        if (share := small_blocks_share(results, name)) is not None:
            yield _target(name, "10,000 small blocks, of few", share, at_least=SMALL_OF_FEW)


def _overlap_targets(overlap: Iterable[Result]) -> Iterable[dict[str, Any]]:
    for result in overlap:
        if result["shaped"]:
            name, most = "exposed, of a slow link's transfer", EXPOSED_OF_TRANSFER
        else:
            name, most = "exposed, of prefill", EXPOSED_OF_PREFILL
        yield _target(result["transport"], name, result["share"], at_most=most)


def _target(
    transport: str, name: str, value: float, *, at_least: float | None = None, at_most: float | None = None
) -> dict[str, Any]:
    met = value >= at_least if at_least is not None else at_most is not None and value <= at_most
    limit = {"at_least": at_least} if at_least is not None else {"at_most": at_most}
    return {"transport": transport, "name": name, **limit, "value": value, "met": met}
