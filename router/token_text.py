"""What a single token stands for: its bytes, and a text for people to read.

This is for logprobs, which list tokens one by one, also those that hold half a character. Joined, the
bytes of an answer's tokens are its decoded text, with two exceptions that are the decoders' own:

- decoders in SentencePiece's manner strip the space that the first token of a text begins with; here it
  stays, since a token does not know its place;
- bytes that are no UTF-8 are ``U+FFFD`` in a text and themselves here.

Which bytes: of a byte-level vocabulary the ones that GPT-2's table writes as printable characters; of a
byte-fallback token (``<0xE2>``) that byte; of any other what the decoder adds for it to a text.
"""

from __future__ import annotations

import re
from functools import lru_cache

import tokenizers

CACHED_TOKENS = 8192
"""The most common tokens of a language are far fewer; an entry takes some 200 bytes."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte-fallback token. A run of them decodes as a whole or, if it is malformed, not at all."""


class TokenTexts:
    """Bytes and text of every token of one vocabulary. Threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        decoder = b"" if backend.decoder is None else bytes(backend.decoder.__getstate__())
        self._is_byte_level = b'"type":"ByteLevel"' in decoder
        self._has_byte_tokens = b'"type":"ByteFallback"' in decoder
        self._left = self._plain_token()
        self._left_text = "" if self._left is None else backend.decode([self._left], skip_special_tokens=False)
        self._cached = lru_cache(CACHED_TOKENS)(self._bytes_and_text)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; none for an id that is no token."""
        return self._cached(token_id)[0]

    def text_of(self, token_id: int) -> str:
        """The same for people: what is no whole character is U+FFFD."""
        return self._cached(token_id)[1]

    def _bytes_and_text(self, token_id: int) -> tuple[bytes, str]:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        content = b"" if token is None else self._spelled_out(token_id, token)
        return content, content.decode("utf-8", errors="replace")

    def _spelled_out(self, token_id: int, token: str) -> bytes:
        if self._is_byte_level:
            # As the library's decoder: a token with a character that stands for no byte means itself.
            values = [BYTE_OF.get(character) for character in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode("utf-8")
        if self._has_byte_tokens and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        if self._left is None:
            return self._backend.decode([token_id], skip_special_tokens=False).encode("utf-8")
        text = self._backend.decode([self._left, token_id], skip_special_tokens=False)
        return text.removeprefix(self._left_text).encode("utf-8")

    def _plain_token(self) -> int | None:
        """A token that decodes to itself alone: a left neighbour behind which no decoder strips a space."""
        for letter in "abcdefghijklmnopqrstuvwxyz0123456789.":
            token_id = self._backend.token_to_id(letter)
            if token_id is not None and self._backend.decode([token_id]) == letter:
                return int(token_id)
        return None


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable characters of Latin-1 stand for their own byte, the other bytes in order
    for the characters from U+0100 on (`bytes_to_unicode` in its ``encoder.py``).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_of_character()
