"""Tokens one by one: their bytes, joined, are the text; a tokenizer's decoded text is the oracle."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from router.token_text import BYTE_OF, CACHED_TOKENS, TokenTexts
from router.tokenizer import Tokenizer
from router.tokenizer_parts import TokenizerParts
from tests.router import tiny_tokenizers as tiny

BYTE_LEVEL = Tokenizer(TokenizerParts(tiny.byte_level(), vocab_size=601))
STRIPPED = Tokenizer(TokenizerParts(tiny.byte_fallback(), vocab_size=270))
UNSTRIPPED = Tokenizer(TokenizerParts(tiny.byte_fallback(strips=False), vocab_size=270))
METASPACE = Tokenizer(TokenizerParts(tiny.metaspace(), vocab_size=270))

TEXTS = ["ab  a b", "한국어 ไทย 中文", "👩‍👩‍👧 🏳️‍🌈", "  a\n\n b ", "\ufffd é e\u0301 \x00\U0010ffff", ""]


def joined(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(token_id) for token_id in ids)


def test_the_table_of_bytes_is_gpt2s() -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert {byte: character for character, byte in BYTE_OF.items()} == bytes_to_unicode()


@pytest.mark.parametrize("text", TEXTS)
def test_joined_bytes_of_a_texts_tokens_are_the_text(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, UNSTRIPPED):
        assert joined(tokenizer, tokenizer.encode(text, add_special_tokens=False)) == text.encode()
    front = " " if text else ""  # which this tokenizer adds to a text, and takes away again
    assert joined(STRIPPED, STRIPPED.encode(text, add_special_tokens=False)) == (front + text).encode()


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 604), max_size=20))
def test_any_tokens_of_a_byte_level_vocabulary(ids: list[int]) -> None:
    text = joined(BYTE_LEVEL, ids).decode("utf-8", errors="replace")
    assert text == BYTE_LEVEL.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("tokenizer", [STRIPPED, UNSTRIPPED, METASPACE], ids=["stripped", "unstripped", "metaspace"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_whole_characters_of_other_vocabularies(tokenizer: Tokenizer, data: st.DataObject) -> None:
    others = st.sampled_from([0, 1, 2, *range(259, 273)]).map(lambda token_id: [token_id])
    characters = st.text(min_size=1, max_size=1).map(lambda text: UNSTRIPPED.encode(text, add_special_tokens=False))
    words = others if tokenizer is METASPACE else others | characters
    ids = [token_id for word in data.draw(st.lists(words, max_size=12)) for token_id in word]
    text, whole = joined(tokenizer, ids).decode(), tokenizer.decode(ids, skip_special_tokens=False)
    stripped = text.removesuffix(whole)
    assert text == stripped + whole
    assert stripped in {UNSTRIPPED: [""], STRIPPED: ["", " "], METASPACE: ["", " ", "  "]}[tokenizer]


def test_special_and_added_tokens_are_what_they_are_called() -> None:
    assert BYTE_LEVEL.token_bytes(0) == b"<|begin|>"
    assert BYTE_LEVEL.token_text(BYTE_LEVEL._backend.token_to_id(tiny.USER_TOKEN)) == tiny.USER_TOKEN
    assert STRIPPED.token_bytes(2) == b"</s>"


def test_half_a_character_is_bytes_and_for_people_a_sign_that_says_so() -> None:
    first, *rest = BYTE_LEVEL.encode("😀", add_special_tokens=False)
    assert BYTE_LEVEL.token_text(first) == "\ufffd"
    assert joined(BYTE_LEVEL, [first, *rest]) == "😀".encode()
    byte = STRIPPED._backend.token_to_id("<0xF0>")
    assert (STRIPPED.token_bytes(byte), STRIPPED.token_text(byte)) == (b"\xf0", "\ufffd")
    assert STRIPPED.token_text(STRIPPED._backend.token_to_id("<0x41>")) == "A"


def test_a_space_belongs_to_its_token() -> None:
    for tokenizer in (STRIPPED, UNSTRIPPED, METASPACE):
        assert tokenizer.token_text(tokenizer._backend.token_to_id("▁ab")) == " ab"
    (space_the,) = BYTE_LEVEL.encode(" the", add_special_tokens=False)
    assert BYTE_LEVEL.token_bytes(space_the) == b" the"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, STRIPPED, METASPACE], ids=["byte-level", "stripped", "metaspace"])
def test_ids_without_a_token_are_nothing(tokenizer: Tokenizer) -> None:
    for token_id in (-1, 605, 1 << 31):
        assert (tokenizer.token_bytes(token_id), tokenizer.token_text(token_id)) == (b"", "")


def test_an_added_token_with_characters_that_stand_for_no_byte() -> None:
    backend = tiny.byte_level()
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("<한 국>", "<ĠĠ>")])
    for token_id in (backend.get_vocab_size() - 2, backend.get_vocab_size() - 1):
        assert TokenTexts(backend).text_of(token_id) == backend.decode([token_id])


def test_a_vocabulary_of_words_and_one_without_a_plain_letter() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"Hello": 0, "world": 1}, unk_token="Hello"))
    assert [TokenTexts(words).text_of(token_id) for token_id in (0, 1)] == ["Hello", "world"]
    pieces = tokenizers.Tokenizer(models.WordPiece({"a": 0, "##b": 1, "c": 2}, unk_token="a"))
    pieces.decoder = decoders.WordPiece()
    assert [TokenTexts(pieces).text_of(token_id) for token_id in (1, 2)] == ["b", " c"]


def test_the_memory_of_it_is_bounded() -> None:
    texts = TokenTexts(tiny.byte_level())
    for token_id in range(CACHED_TOKENS + 100):
        texts.text_of(token_id)
    assert texts._cached.cache_info().currsize == CACHED_TOKENS
