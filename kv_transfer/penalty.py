"""A short memory of ways that did not work, so that not every handoff pays for finding out again. Pure.

A way is (transport, address). After one failure nothing is held against it: a peer that was restarted is
met again at once. Each further failure in a row doubles the time for which it is passed over, from
`FIRST_S` to `LONGEST_S`; whatever is the only way left is taken all the same, and a success clears it. What is
remembered is bounded by ``max_ways``, since addresses come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

Way = tuple[str, str]
"""Transport and address."""

T = TypeVar("T")

FIRST_S = 1.0
LONGEST_S = 60.0
LENIENT_FAILURES = 1
MAX_WAYS = 1024


@dataclass(slots=True)
class _Record:
    failures: int
    until: float


class PenaltyBox:
    """Times are those of the caller's clock, in seconds."""

    def __init__(self, max_ways: int = MAX_WAYS) -> None:
        self._max_ways = max_ways
        self._records: dict[Way, _Record] = {}

    def failed(self, way: Way, now: float) -> float:
        """Returns for how many seconds ``way`` is passed over from ``now`` on."""
        record = self._records.pop(way, None) or _Record(0, 0.0)
        record.failures += 1
        further = record.failures - LENIENT_FAILURES
        penalty_s = min(LONGEST_S, FIRST_S * 2.0 ** min(further - 1, 30)) if further > 0 else 0.0
        record.until = now + penalty_s
        self._records[way] = record  # behind all others: the latest to be forgotten
        if len(self._records) > self._max_ways:
            del self._records[next(iter(self._records))]
        return penalty_s

    def worked(self, way: Way) -> None:
        self._records.pop(way, None)

    def holds(self, way: Way, now: float) -> bool:
        """Whether ``way`` is passed over at ``now``."""
        record = self._records.get(way)
        return record is not None and now < record.until

    def preferred(self, choices: Iterable[T], way: Callable[[T], Way], now: float) -> list[T]:
        """``choices`` in their order, but those that are passed over behind all others, the soonest free first."""
        ordered = list(choices)
        free = [choice for choice in ordered if not self.holds(way(choice), now)]
        held = [choice for choice in ordered if self.holds(way(choice), now)]
        return free + sorted(held, key=lambda choice: self._records[way(choice)].until)
