"""Which way is tried first after failures."""

from __future__ import annotations

from kv_transfer.penalty import LONGEST_S, PenaltyBox

GLOO, GRPC = ("gloo", "a:1"), ("grpc", "a:1")


def order(box: PenaltyBox, now: float) -> list[tuple[str, str]]:
    return box.preferred([GLOO, GRPC], lambda way: way, now)


def test_one_failure_is_forgiven() -> None:
    box = PenaltyBox()
    assert box.failed(GLOO, 100.0) == 0.0
    assert order(box, 100.0) == [GLOO, GRPC]


def test_failures_in_a_row_double_the_time() -> None:
    box = PenaltyBox()
    assert [box.failed(GLOO, 0.0) for _ in range(5)] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert order(box, 7.9) == [GRPC, GLOO]
    assert order(box, 8.0) == [GLOO, GRPC]
    assert max(box.failed(GLOO, 0.0) for _ in range(200)) == LONGEST_S


def test_success_clears() -> None:
    box = PenaltyBox()
    for _ in range(4):
        box.failed(GLOO, 0.0)
    box.worked(GLOO)
    assert order(box, 0.0) == [GLOO, GRPC]
    assert box.failed(GLOO, 0.0) == 0.0
    box.worked(("never", "heard of"))


def test_where_all_are_held_the_soonest_free_is_first() -> None:
    box = PenaltyBox()
    for _ in range(4):
        box.failed(GLOO, 0.0)
    for _ in range(3):
        box.failed(GRPC, 0.0)
    assert order(box, 0.5) == [GRPC, GLOO]
    assert box.holds(GRPC, 1.9)
    assert not box.holds(GRPC, 2.0)


def test_one_address_does_not_speak_for_another() -> None:
    box = PenaltyBox()
    for _ in range(3):
        box.failed(GLOO, 0.0)
    assert not box.holds(("gloo", "b:1"), 0.0)


def test_what_is_remembered_is_bounded() -> None:
    box = PenaltyBox(max_ways=3)
    for number in range(4):
        box.failed(("gloo", f"h:{number}"), 0.0)
        box.failed(("gloo", f"h:{number}"), 0.0)
    held = [box.holds(("gloo", f"h:{number}"), 0.5) for number in range(4)]
    assert held == [False, True, True, True]
