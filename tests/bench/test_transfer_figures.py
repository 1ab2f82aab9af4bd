"""What the figures of `bench transfer` say of measurements that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from bench.transfer.cases import KIB, MIB
from bench.transfer.figures import best_of_raw_tcp, lowest_ratio, small_blocks_share, transfer_figures


def result(transport: str, size: int, blocks: int, gib_s: float, raw_gib_s: float) -> dict[str, Any]:
    return {
        "transport": transport,
        "size": size,
        "bytes": size,
        "blocks": blocks,
        "gib_s": gib_s,
        "raw_gib_s": raw_gib_s,
        "ratio": gib_s / raw_gib_s,
    }


RESULTS = [
    result("shm", 64 * KIB, 1, 1.0, 10.0),
    result("shm", 16 * MIB, 1, 9.0, 10.0),
    result("shm", 16 * MIB, 16, 8.5, 10.0),
    result("shm", 16 * MIB, 10_000, 7.2, 10.0),
    result("shm", 64 * MIB, 16, 10.0, 10.0),
    result("shm", 64 * MIB, 10_000, 6.0, 10.0),
    result("tcp", 16 * MIB, 1, 1.0, 2.0),
    result("tcp", 16 * MIB, 10_000, 0.1, 2.0),
    result("tcp", 64 * MIB, 16, 1.5, 2.0),
    result("gloo", 16 * MIB, 1, 1.8, 1.9),
    result("gloo", 64 * MIB, 16, 1.7, 2.1),
    result("grpc", 16 * MIB, 1, 0.5, 0.5),
    result("nixl", 16 * MIB, 1, 9.0, 10.0),
]
SHAPED = {"transport": "tcp", "prompt_tokens": 2048, "prefill_s": 5.0, "exposed_s": 0.7, "share": 0.2, "shaped": True}
UNSHAPED = {
    "transport": "tcp",
    "prompt_tokens": 2048,
    "prefill_s": 5.0,
    "exposed_s": 0.05,
    "share": 0.01,
    "shaped": False,
}


def test_ratios_are_the_lowest_below_many_blocks() -> None:
    assert lowest_ratio(RESULTS, "shm", 64 * KIB) == 0.1
    assert lowest_ratio(RESULTS, "shm", 16 * MIB) == 0.85
    assert lowest_ratio(RESULTS, "shm") == 0.85  # from 16 MiB on
    assert lowest_ratio(RESULTS, "local") is None


def test_small_blocks_are_held_against_the_faster_few_at_the_same_bytes() -> None:
    assert small_blocks_share(RESULTS, "shm") == 0.6  # 16 MiB: 7.2 of 9; 64 MiB: 6 of 10
    assert small_blocks_share(RESULTS, "tcp") == 0.1
    assert small_blocks_share(RESULTS, "gloo") is None


def test_the_best_between_hosts_is_one_transport_against_raw_tcp() -> None:
    # tcp: 0.5 and 0.75; gloo: 0.9 and 0.85; grpc: 0.25. On one machine shm and nixl go through memory.
    assert best_of_raw_tcp(RESULTS) == ("gloo", 0.85)
    assert best_of_raw_tcp([each for each in RESULTS if each["transport"] != "tcp"]) is None


def test_targets_stand_beside_the_figures() -> None:
    figures = transfer_figures(RESULTS, {"shm": 0.04, "tcp": 0.02}, [SHAPED, UNSHAPED])
    assert (figures["results"], figures["overlap"]) == (RESULTS, [SHAPED, UNSHAPED])
    assert figures["checksum_share"] == 0.04
    said = [
        (each["transport"], each.get("at_least", each.get("at_most")), each["value"], each["met"])
        for each in figures["targets"]
    ]
    assert said == [
        ("shm", 0.8, 0.85, True),
        ("grpc", 0.85, 1.0, True),
        ("gloo", 0.9, pytest.approx(1.7 / 2.1), False),
        ("gloo", 0.8, 0.85, True),
        ("shm", 0.7, 0.6, False),
        ("tcp", 0.7, 0.1, False),
        ("tcp", 0.15, 0.2, False),
        ("tcp", 0.01, 0.01, True),
    ]


def test_what_was_not_measured_has_no_target() -> None:
    figures = transfer_figures([], {}, [])
    assert figures["checksum_share"] is None
    assert figures["targets"] == []
