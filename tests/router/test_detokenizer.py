"""The law of the stream: pieces, joined, are the decoded whole, for any ids in any portions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.detokenizer import TAIL_TOKENS, UNFINISHED
from router.tokenizer import Tokenizer
from router.tokenizer_parts import TokenizerParts
from tests.router import tiny_tokenizers as tiny

BYTE_LEVEL = Tokenizer(TokenizerParts(tiny.byte_level(vocab_size=330), vocab_size=331))
BYTE_FALLBACK = Tokenizer(TokenizerParts(tiny.byte_fallback(), vocab_size=270))
TOKENIZERS = [pytest.param(BYTE_LEVEL, id="byte-level"), pytest.param(BYTE_FALLBACK, id="byte-fallback")]

HARD_TEXTS = [
    "안녕하세요, 한국어 문장입니다.",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "ภาษาไทย ที่นี่",
    "  leading spaces and \n\n new lines  ",
    "\ufffd a \ufffd\ufffd b \ufffd",
    "e\u0301 é \U0010ffff\x00\ufeff",
    "ab  a b ab",
]


def portions(ids: Sequence[int], sizes: Iterable[int]) -> list[Sequence[int]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(ids[start : start + size])
        start += size
    return [*parts, ids[start:]]


def streamed(tokenizer: Tokenizer, parts: Iterable[Sequence[int]]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(part) for part in parts), stream.flush()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts_cut_anywhere(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    for end in range(len(ids) + 1):
        whole = tokenizer.decode(ids[:end])
        assert "".join(streamed(tokenizer, ([token_id] for token_id in ids[:end]))) == whole
        assert "".join(streamed(tokenizer, [ids[: end // 2], ids[end // 2 : end]])) == whole
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_ids_in_any_portions(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=30))
    assert "".join(streamed(tokenizer, portions(ids, sizes))) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab 한👍é\u200d\ufffd\n", max_size=12), sizes=st.lists(st.integers(0, 4), max_size=20))
def test_no_half_character_is_ever_given_out(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    """What was given out so far is always a beginning of the text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    given_out = ""
    for piece in streamed(tokenizer, portions(ids, sizes)):
        given_out += piece
        assert text.startswith(given_out)
    assert given_out == text


def test_text_comes_as_soon_as_it_is_certain() -> None:
    stream = BYTE_LEVEL.stream()
    ids = BYTE_LEVEL.encode("b😀c", add_special_tokens=False)
    assert len(ids) == 5, "here an emoji is three tokens"
    assert [stream.push([token_id]) for token_id in ids] == ["b", "", "", "😀", "c"]
    assert stream.flush() == ""


def test_replacement_characters_of_the_model_do_not_stop_the_text() -> None:
    stream = BYTE_LEVEL.stream()
    stray = BYTE_LEVEL.encode("é", add_special_tokens=False)
    continuation = BYTE_LEVEL._backend.token_to_id("Ģ")  # the byte 0x80
    pieces = [stream.push([continuation]) for _ in range(50)]
    assert pieces == ["", *[UNFINISHED] * 49]
    assert stream.push(stray) == UNFINISHED + "é"


def test_half_a_character_at_the_end_is_given_by_flush() -> None:
    ids = BYTE_LEVEL.encode("b😀", add_special_tokens=False)[:-1]
    stream = BYTE_LEVEL.stream()
    assert stream.push(ids) == "b"
    assert stream.flush() == UNFINISHED
    assert stream.flush() == ""


def test_special_tokens_add_nothing_even_inside_a_character() -> None:
    first, *rest = BYTE_LEVEL.encode("😀", add_special_tokens=False)
    assert streamed(BYTE_LEVEL, [[1], [first], [1, 0], rest, [1]]) == ["", "", "", "😀", "", ""]


def test_the_context_stays_short() -> None:
    stream = BYTE_FALLBACK.stream()
    for token_id in BYTE_FALLBACK.encode("ab a b " * 200, add_special_tokens=False):
        stream.push([token_id])
    assert len(stream._context) <= 3


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_text_that_never_gets_complete_is_cut_where_nothing_changes(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    broken = tokenizer.encode("\ufffd", add_special_tokens=False)[-1:] * 3
    broken += tokenizer.encode("😀", add_special_tokens=False)
    ids = data.draw(st.lists(st.sampled_from(broken), min_size=150, max_size=300))
    stream, text = tokenizer.stream(), ""
    for token_id in [*ids, *tokenizer.encode("😀 a", add_special_tokens=False)]:
        text += stream.push([token_id])
        if tokenizer is BYTE_LEVEL:
            assert len(stream._context) <= 2 * TAIL_TOKENS
    assert text + stream.flush() == tokenizer.decode([*ids, *tokenizer.encode("😀 a", add_special_tokens=False)])
