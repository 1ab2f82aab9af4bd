"""Prompt texts of a wanted length, made of common words that are one token each in most vocabularies.

A piece's text is a function of its id alone, so pieces with equal ids are equal text and others differ within
the first words (equal only if the piece is too short to tell its id). Making a text is slicing, not drawing,
because prompts may be long and are made while the run goes on.

Does not know how a server counts; `Calibration` says what was learnt about that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.load.workload import Planned

HEAD = "Notes:"
"""How every prompt begins: a first word without a space before it is often another number of tokens."""

WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea body information
back parent face level office door health person art war history party result change morning reason research
girl guy moment air teacher force education foot boy age policy music market sense death effect class control
paper space ground form event official matter center field table need process product period heart model road
tree image letter horse bank river sea king town street order voice picture plan truth spring summer winter
island machine language stone light sound science rock fire earth
"""
VOCABULARY = tuple(WORDS.split())
RING_WORDS = 1 << 16


@dataclass(frozen=True, slots=True)
class Calibration:
    """A prompt of n words is ``overhead + per_word * n`` tokens. ``exact``: the server's own tokenizer said so."""

    overhead: float = 0.0
    per_word: float = 1.0
    exact: bool = False

    def num_words(self, tokens: int) -> int:
        return max(1, round((tokens - self.overhead) / self.per_word))


def listed(words: Sequence[str]) -> str:
    """A prompt of just these words, to see what they cost."""
    return HEAD + "".join(f" {word}" for word in words)


class PromptWriter:
    """``vocabulary``: the words to use."""

    def __init__(self, vocabulary: tuple[str, ...] = VOCABULARY, calibration: Calibration | None = None) -> None:
        self.vocabulary = vocabulary
        self.calibration = calibration or Calibration()
        ring = random.Random(0).choices(vocabulary, k=RING_WORDS)
        self._ends = [0]
        for word in ring:
            self._ends.append(self._ends[-1] + len(word) + 1)
        self._ring = "".join(f" {word}" for word in ring)

    def text(self, planned: Planned) -> str:
        """The request's prompt."""
        left = self.calibration.num_words(planned.prompt_tokens)
        per_piece = max(1, round(planned.piece_tokens / self.calibration.per_word))
        parts = [HEAD]
        for place, piece in enumerate(planned.pieces, 1):
            # What the calibration adds or takes away is the last one's: prefixes stay as they were.
            num_words = left if place == len(planned.pieces) else min(left, per_piece)
            if num_words <= 0:
                break
            parts.append(self._piece(piece, num_words))
            left -= num_words
        return "".join(parts)

    def _piece(self, piece: int, num_words: int) -> str:
        """The id in words, then a part of the ring that depends on it."""
        base, number = len(self.vocabulary), piece
        parts: list[str] = []
        while number and len(parts) < num_words:
            number, digit = divmod(number, base)
            parts.append(f" {self.vocabulary[digit]}")
        left = num_words - len(parts)
        start = piece * 2_654_435_761 % RING_WORDS
        while left > 0:
            end = min(start + left, RING_WORDS)
            parts.append(self._ring[self._ends[start] : self._ends[end]])
            left -= end - start
            start = 0
        return "".join(parts)
