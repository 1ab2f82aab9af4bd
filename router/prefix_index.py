"""Which worker holds which prefixes, as far as the workers' events say.

A belief, not a truth: a worker may have evicted a block whose event is still under way. Placement only
loses a little time by a wrong belief, and the worker's own answer says what it really held.

Knows hashes and worker addresses; neither tokens nor loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.hashing import HASH_UNIT_TOKENS


class PrefixIndex:
    """Prefix hash → the workers that hold it, in the order in which they said so."""

    def __init__(self, unit_tokens: int = HASH_UNIT_TOKENS) -> None:
        self.unit_tokens = unit_tokens
        self._holders: dict[bytes, dict[str, None]] = {}
        self._held: dict[str, dict[bytes, None]] = {}

    def replace(self, worker: str, hashes: Iterable[bytes]) -> None:
        """A snapshot: the worker holds exactly these."""
        self.drop(worker)
        self.update(worker, stored=hashes, removed=())

    def update(self, worker: str, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        held = self._held.setdefault(worker, {})
        for prefix in stored:
            held[prefix] = None
            self._holders.setdefault(prefix, {})[worker] = None
        for prefix in removed:
            held.pop(prefix, None)
            self._forget(prefix, worker)

    def drop(self, worker: str) -> None:
        """The worker is gone, and its cache with it."""
        for prefix in self._held.pop(worker, ()):
            self._forget(prefix, worker)

    def num_held(self, worker: str) -> int:
        return len(self._held.get(worker, ()))

    def hits(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Tokens of the longest known prefix per worker; workers that hold nothing are left out.

        A prefix counts only as far as it is unbroken from the start.
        """
        tokens: dict[str, int] = {}
        following: Iterable[str] | None = None
        for length, prefix in enumerate(hashes, start=1):
            holders = self._holders.get(prefix)
            if holders is None:
                break
            following = [worker for worker in (holders if following is None else following) if worker in holders]
            if not following:
                break
            for worker in following:
                tokens[worker] = length * self.unit_tokens
        return tokens

    def _forget(self, prefix: bytes, worker: str) -> None:
        holders = self._holders.get(prefix)
        if holders is not None:
            holders.pop(worker, None)
            if not holders:
                del self._holders[prefix]
