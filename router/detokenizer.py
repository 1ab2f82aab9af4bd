"""Tokens into text while they arrive.

A token may hold half a character, and what a token adds to a text may depend on its left neighbours.
So the stream decodes its last few tokens together and gives out what can no longer change. The law:
all that `push` and `flush` return, joined, is exactly the decoded whole, for any ids in any portions.

The whole is the answer's own tokens. A prompt given as ids may end inside a character; the answer then
begins with the rest of it, which is no text by itself: U+FFFD, in the stream as in the whole. Whoever
needs the bytes has them token by token (`router/token_text.py`).

The incremental decoder of `tokenizers` (`DecodeStream`) does not hold that law. It cannot say at the end
what it still holds; and of byte-fallback tokens it gives out a character that a malformed neighbour then
takes back, so that its text differs from the whole, or it raises. A test keeps those examples: once it
fails, that decoder can stand here instead.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import tokenizers

from router.token_text import BYTE_TOKEN

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""How an incomplete UTF-8 sequence decodes: as one of these, at the very end of the text."""

TAIL_TOKENS = 32
"""What stays of a context that does not get complete; far more than the four tokens that a character can take."""


class DetokenizerStream:
    """The text of one answer, piece by piece. Belongs to one answer; not for use from two threads at once."""

    def __init__(self, backend: tokenizers.Tokenizer, hidden_ids: Container[int] | None, has_byte_tokens: bool) -> None:
        """``hidden_ids``: the special tokens, which are left out of the text; None: they show in it."""
        self._backend = backend
        self._hides_special = hidden_ids is not None
        self._hidden_ids: Container[int] = () if hidden_ids is None else hidden_ids
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
        text = self._decode(self._context)
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
        piece = self._decode(self._context)[self._given :]
        self._given += len(piece)
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=self._hides_special)

    def _is_visible(self, token_id: int) -> bool:
        return token_id not in self._hidden_ids and self._backend.id_to_token(token_id) is not None

    def _in_byte_run(self) -> bool:
        if not self._has_byte_tokens:
            return False
        return BYTE_TOKEN.fullmatch(self._backend.id_to_token(self._context[-1]) or "") is not None

    def _forget(self) -> None:
        """Drops the tokens before the newest complete stretch, which stays: decoders treat the first
        token of a text differently (they strip its space), so there must always be a left neighbour.
        """
        newest = self._context[self._settled :]
        text = self._decode(newest)
        if text:
            self._context = newest
            self._given = len(text)
            self._settled = len(newest)

    def _cut(self, text: str) -> None:
        """Drops all but the last tokens of a long context whose ``text`` is still not complete (a model
        that babbles U+FFFD), if it can be cut there without changing the text.
        """
        head = self._decode(self._context[:-TAIL_TOKENS])
        tail = self._decode(self._context[-TAIL_TOKENS:])
        if tail and head + tail == text:
            self._context = self._context[-TAIL_TOKENS:]
            self._given -= len(head)
            self._settled = 0
