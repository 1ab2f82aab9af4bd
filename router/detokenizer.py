"""Tokens into text while they arrive.

A token may hold half a character, and what a token adds to a text may depend on its left neighbours.
So the stream decodes its last few tokens together and gives out what can no longer change. The law:
all that `push` and `flush` return, joined, is exactly the decoded whole, for any ids in any portions.

The incremental decoder of `tokenizers` does not hold that law: it raises on malformed byte tokens, and
cannot say at the end what it still holds.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

import tokenizers

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""How an incomplete UTF-8 sequence decodes: as one of these, at the very end of the text."""

TAIL_TOKENS = 32
"""What stays of a context that does not get complete; far more than the four tokens that a character can take."""

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
"""A byte-fallback token. A run of them decodes as a whole or, if it is malformed, not at all."""


class DetokenizerStream:
    """The text of one answer, piece by piece. Belongs to one answer; not for use from two threads at once."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: Container[int], has_byte_tokens: bool) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._has_byte_tokens = has_byte_tokens
        self._context: list[int] = []  # starts where the text was last complete
        self._settled = 0  # tokens of the context at whose end the text was last complete
        self._given = 0  # characters of the context's text that were given out

    def push(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` add, as far as no later token can change it."""
        # What decodes to nothing must not hide that the tokens left and right of it belong together.
        visible = [token_id for token_id in ids if self._is_visible(token_id)]
        self._context += visible
        if not visible or self._in_byte_run():
            return ""
        text = self._backend.decode(self._context)
        complete = not text.endswith(UNFINISHED)
        piece = text[self._given :] if complete else text[self._given : -1]
        self._given += len(piece)
        if complete:
            self._forget()
        elif len(self._context) >= 2 * TAIL_TOKENS:
            self._cut(text)
        return piece

    def flush(self) -> str:
        """What remains at the end of the answer: the part of a character that nobody completed."""
        piece = self._backend.decode(self._context)[self._given :]
        self._given += len(piece)
        return piece

    def _is_visible(self, token_id: int) -> bool:
        return token_id not in self._special_ids and self._backend.id_to_token(token_id) is not None

    def _in_byte_run(self) -> bool:
        if not self._has_byte_tokens:
            return False
        return BYTE_TOKEN.fullmatch(self._backend.id_to_token(self._context[-1]) or "") is not None

    def _forget(self) -> None:
        """Drops the tokens before the newest complete stretch, which stays: decoders treat the first
        token of a text differently (they strip its space), so there must always be a left neighbour.
        """
        newest = self._context[self._settled :]
        text = self._backend.decode(newest)
        if text:
            self._context = newest
            self._given = len(text)
            self._settled = len(newest)

    def _cut(self, text: str) -> None:
        """Drops all but the last tokens of a long context whose ``text`` is still not complete (a model
        that babbles U+FFFD), if it can be cut there without changing the text.
        """
        head = self._backend.decode(self._context[:-TAIL_TOKENS])
        tail = self._backend.decode(self._context[-TAIL_TOKENS:])
        if tail and head + tail == text:
            self._context = self._context[-TAIL_TOKENS:]
            self._given -= len(head)
            self._settled = 0
