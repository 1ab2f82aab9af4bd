"""Which cases are measured, and how many bytes each has: computed by hand."""

from __future__ import annotations

import pytest

from bench.transfer.cases import GIB, KIB, MIB, Case, cases, memory_bytes
from bench.transfer.session import TransferOptions, check_memory, plan_of
from common.errors import BatonError


@pytest.mark.parametrize(
    ("size", "blocks", "piece_bytes", "num_bytes"),
    [
        (64 * KIB, 1, 16_384, 65_536),
        (64 * KIB, 16, 1_024, 65_536),
        (MIB, 256, 1_024, 1_048_576),
        (16 * MIB, 1, 4_194_304, 16_777_216),
        # 16,777,216 over 40,000 pieces is 419.4…; a token of keys and values has 4 bytes.
        (16 * MIB, 10_000, 420, 16_800_000),
        (256 * MIB, 10_000, 6_712, 268_480_000),
    ],
)
def test_bytes_of_a_case(size: int, blocks: int, piece_bytes: int, num_bytes: int) -> None:
    case = Case("shm", size, blocks)
    assert (case.piece_bytes, case.num_bytes) == (piece_bytes, num_bytes)
    assert case.layout.block_layer_bytes == piece_bytes
    assert case.layout.num_layers * case.layout.block_layer_bytes * blocks == num_bytes
    assert sorted(case.block_ids(1).tolist()) == list(range(blocks))
    assert sorted(case.ticket(0, ()).block_ids) == list(range(blocks))


def test_the_cases_of_a_run_without_flags() -> None:
    made = {}
    for case in cases("tcp"):
        made.setdefault(case.size // KIB, []).append(case.blocks)
    assert made == {
        64: [1, 16],
        1_024: [1, 16, 256],
        16 * 1_024: [1, 16, 256, 10_000],
        64 * 1_024: [16, 256, 10_000],
        256 * 1_024: [16, 256, 10_000],
    }


def test_bytes_that_make_no_piece_are_refused_with_the_limits() -> None:
    with pytest.raises(BatonError, match=r"128 to 4194304 bytes.*65536 in 10000 blocks has 4"):
        cases("shm", [64 * KIB], [10_000])


def test_each_transport_and_case_is_planned_once() -> None:
    plan = plan_of(TransferOptions(("tcp", "local", "tcp"), sizes=[MIB, 64 * KIB, MIB], blocks=[16, 1]))
    assert [(case.transport, case.size // KIB, case.blocks) for case in plan] == [
        (name, size, blocks) for name in ("tcp", "local") for size in (64, 1_024) for blocks in (1, 16)
    ]


def test_what_does_not_fit_into_memory_is_known_before() -> None:
    plan = [Case("shm", 256 * MIB, 16), Case("shm", 64 * MIB, 16)]
    assert memory_bytes(plan) == 2 * GIB  # six times the largest, and 512 MiB
    check_memory(plan, 2 * GIB)
    check_memory(plan, None)
    with pytest.raises(BatonError, match=r"256 MiB at both ends take 2048 MiB, 2047 MiB are available"):
        check_memory(plan, 2 * GIB - 1)
