"""Where an answer's text ends because a stop string is in it.

Text comes in pieces that know nothing of the client's stop strings: one may begin in one piece and end
three pieces later, or turn out to be something else. The law, for any way of cutting the text into
pieces: what `push` and `flush` return, joined, is the text before the first stop string, and no
character that may yet belong to one is given out earlier, nor any other kept back.

Of several stop strings the one that is complete first counts; of those complete at the same character
the longest, which starts first. So of ``abcd`` and ``bc``, ``abcd`` in the text ends it before ``bc``.

Each character costs one step in an Aho-Corasick automaton, whose state says all that matters of the
text so far: how many of its last characters are the beginning of a stop string.

Knows characters only, no tokens. Characters are compared as they are: ``é`` in one code point is
another text than ``e`` with a combining accent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False, repr=False)
class _State:
    """The text so far ends with the first ``depth`` characters of a stop string, and with no longer
    such beginning. ``match``: the length of the longest stop string that it ends with, or 0.
    """

    depth: int
    match: int = 0
    next: dict[str, _State] = field(default_factory=dict)
    shorter: _State | None = None  # the next best: the same, for the longest shorter beginning


class StopStrings:
    """The stop strings of one answer, and how far its text got in them. Belongs to one answer."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """``include``: the stop string is shown as the end of the text (so nothing is ever kept back).

        Raises ValueError for an empty stop string, which would end every answer before it begins.
        """
        if "" in stops:
            raise ValueError("a stop string must have at least one character")
        self._include = include
        self._start = self._state = _automaton(stops)
        self._kept = ""
        self._over = False

    def push(self, text: str) -> tuple[str, bool]:
        """What may be shown now that ``text`` has come, and whether a stop string is complete.

        From then on the text is over: whatever comes is swallowed.
        """
        if self._over:
            return "", True
        if not self._start.next:  # the most common case: no stop strings
            return text, False
        for index, character in enumerate(text):
            self._state = self._after(character)
            if self._state.match:
                return self._end(self._kept + text[: index + 1]), True
        text = self._kept + text
        num_kept = 0 if self._include else self._state.depth
        shown, self._kept = text[: len(text) - num_kept], text[len(text) - num_kept :]
        return shown, False

    def flush(self) -> str:
        """At the end of the answer: what was kept back and became no stop string."""
        kept, self._kept = self._kept, ""
        self._state = self._start
        return kept

    def _after(self, character: str) -> _State:
        state: _State | None = self._state
        while state is not None:
            if character in state.next:
                return state.next[character]
            state = state.shorter
        return self._start

    def _end(self, text: str) -> str:
        self._over = True
        self._kept = ""
        return text if self._include else text[: len(text) - self._state.match]


def _automaton(stops: Sequence[str]) -> _State:
    start = _State(depth=0)
    for stop in stops:
        state = start
        for character in stop:
            state = state.next.setdefault(character, _State(state.depth + 1))
        state.match = len(stop)
    # By depth: what a state falls back to is shorter, hence already complete.
    waiting = deque([start])
    while waiting:
        parent = waiting.popleft()
        for character, state in parent.next.items():
            shorter = parent.shorter
            while shorter is not None and character not in shorter.next:
                shorter = shorter.shorter
            state.shorter = start if shorter is None else shorter.next[character]
            state.match = state.match or state.shorter.match
            waiting.append(state)
    return start
