"""When a call is made again: only if it never started, after a growing and jittered wait, and at the next
address if there are several. A deadline covers all tries together. Pure: time comes in as a number.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from baton_client.failures import Failure
from common.errors import DeadlineError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``max_attempts`` 1: every failure is final. The wait before try k + 1 is drawn from the upper half
    of [0, ``first_wait_s`` · 2^(k-1)], and ``max_wait_s`` at most; it is never less than what the server asks for.
    """

    max_attempts: int = 4
    first_wait_s: float = 0.1
    max_wait_s: float = 5.0

    def wait_s(self, num_failed: int, rng: random.Random) -> float:
        """The wait after ``num_failed`` tries."""
        longest = min(self.max_wait_s, self.first_wait_s * 2.0 ** (num_failed - 1))
        return longest * (1.0 + rng.random()) / 2.0


class Attempts:
    """The tries of one call. ``place`` is the index of the address that is to be tried now; ``deadline``
    is a point in time, like ``now``.
    """

    def __init__(
        self, policy: RetryPolicy, num_places: int, place: int, deadline: float | None, rng: random.Random
    ) -> None:
        self.place = place
        self._policy = policy
        self._num_places = num_places
        self._deadline = deadline
        self._rng = rng
        self._num_failed = 0

    def left_s(self, now: float) -> float | None:
        """What remains for the next try. Raises DeadlineError when nothing does."""
        if self._deadline is None:
            return None
        if now >= self._deadline:
            raise DeadlineError("the call ran out of time before it was made")
        return self._deadline - now

    def after(self, failure: Failure, now: float) -> float:
        """How long to wait before the next try; raises the failure's error when there is to be none."""
        self._num_failed += 1
        if not failure.never_started or self._num_failed >= self._policy.max_attempts:
            raise failure.error
        self.place = (self.place + 1) % self._num_places
        wait_s = self._policy.wait_s(self._num_failed, self._rng)
        if self._num_failed < self._num_places:
            wait_s = 0.0  # somebody who was not asked yet
        elif failure.error.retry_after_s is not None:
            wait_s = max(wait_s, failure.error.retry_after_s)
        if self._deadline is not None and now + wait_s >= self._deadline:
            raise failure.error
        return wait_s
