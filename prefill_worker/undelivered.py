"""How much computed KV waits for its way to each decode worker, and for which of them no more is computed. Pure.

    expect ──▶ computed: it counts ──▶ forget

The latest prompt for a target is not counted: while it travels the next one is computed, however long they
are, so a link that keeps up never makes the engine wait. Targets do not hold each other up.
Knows nothing of links or handoffs.
"""

from __future__ import annotations


class Undelivered:
    """``most_tokens``: of all prompts for one target but the latest; beyond that the target is clogged."""

    def __init__(self, most_tokens: float) -> None:
        self._most_tokens = most_tokens
        self._expected: dict[str, tuple[str, int]] = {}
        self._computed: dict[str, tuple[str, int]] = {}

    def expect(self, key: str, target: str, num_tokens: int) -> None:
        """The KV of ``num_tokens`` tokens of the prompt ``key`` is to go to ``target``."""
        self._expected[key] = target, num_tokens

    def computed(self, key: str) -> None:
        """All of it is there, and from now on on its way at most."""
        self._computed[key] = self._expected[key]

    def forget(self, key: str) -> None:
        """It was delivered, or will never be. Unknown ones are ignored."""
        self._expected.pop(key, None)
        self._computed.pop(key, None)

    def target(self, key: str) -> str:
        return self._expected[key][0]

    def clogged(self) -> frozenset[str]:
        """The targets for which nothing is to be computed now."""
        latest: dict[str, int] = {}
        earlier: dict[str, int] = {}
        for target, num_tokens in self._computed.values():
            earlier[target] = earlier.get(target, 0) + latest.get(target, 0)
            latest[target] = num_tokens
        return frozenset(target for target, num_tokens in earlier.items() if num_tokens > self._most_tokens)
