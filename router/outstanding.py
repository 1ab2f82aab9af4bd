"""What this router gave to one worker, beyond what the worker's last report shows.

A load report is up to one interval old, and a burst is placed within a fraction of it. So each worker's
reported load is corrected by what was sent to it since (plus) and what ended there since (minus). The
next report starts the correction anew, but for work that had not been sent yet.

Knows nothing of workers or time.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.attempt import AttemptKey


@dataclass(slots=True)
class _Share:
    tokens: int
    blocks: int
    sent: bool = False


class Outstanding:
    """The correction: ``tokens``, ``blocks`` and ``requests`` to add to the last report (each may be
    negative).
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.blocks = 0
        self.requests = 0
        self._shares: dict[AttemptKey, _Share] = {}

    def __len__(self) -> int:
        return len(self._shares)

    @property
    def num_unsent(self) -> int:
        """Attempts that the worker has not answered for yet."""
        return sum(not share.sent for share in self._shares.values())

    def begin(self, key: AttemptKey, tokens: int, blocks: int = 0) -> None:
        """The attempt was placed on the worker."""
        self._shares[key] = _Share(tokens, blocks)
        self._count(tokens, blocks, 1)

    def sent(self, key: AttemptKey) -> None:
        """The worker has it: its next report shows it."""
        share = self._shares.get(key)
        if share is not None:
            share.sent = True

    def computed(self, key: AttemptKey) -> None:
        """Its tokens are computed; the blocks it still holds."""
        share = self._shares.get(key)
        if share is not None:
            self._count(-share.tokens, 0, 0)
            share.tokens = 0

    def end(self, key: AttemptKey) -> None:
        """The worker is done with it (again: nothing happens)."""
        share = self._shares.pop(key, None)
        if share is not None:
            self._count(-share.tokens, -share.blocks, -1)

    def reported(self) -> None:
        """The worker told its load."""
        self.tokens = self.blocks = self.requests = 0
        for share in self._shares.values():
            if not share.sent:
                self._count(share.tokens, share.blocks, 1)

    def _count(self, tokens: int, blocks: int, requests: int) -> None:
        self.tokens += tokens
        self.blocks += blocks
        self.requests += requests
