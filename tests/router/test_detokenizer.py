"""The law of the stream: pieces, joined, are the decoded whole, for any ids in any portions."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from router.detokenizer import TAIL_TOKENS, UNFINISHED
from router.tokenizer import Tokenizer
from router.tokenizer_parts import TokenizerParts
from tests.router import tiny_tokenizers as tiny

BYTE_LEVEL = Tokenizer(TokenizerParts(tiny.byte_level(vocab_size=330), vocab_size=331))
BYTE_FALLBACK = Tokenizer(TokenizerParts(tiny.byte_fallback(), vocab_size=270))
UNSTRIPPED = Tokenizer(TokenizerParts(tiny.byte_fallback(strips=False), vocab_size=270))
METASPACE = Tokenizer(TokenizerParts(tiny.metaspace(), vocab_size=270))
TOKENIZERS = [
    pytest.param(BYTE_LEVEL, id="byte-level"),
    pytest.param(BYTE_FALLBACK, id="byte-fallback"),
    pytest.param(UNSTRIPPED, id="unstripped"),
]
ALL_TOKENIZERS = [*TOKENIZERS, pytest.param(METASPACE, id="metaspace")]

HARD_TEXTS = [
    "안녕하세요, 한국어 문장입니다.",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "ภาษาไทย ที่นี่",
    "中文字符，𠮷野家。",
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


def streamed(tokenizer: Tokenizer, parts: Iterable[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens)
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


@pytest.mark.parametrize("tokenizer", ALL_TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False], ids=["hidden", "shown"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids_in_any_portions(tokenizer: Tokenizer, skip: bool, data: st.DataObject) -> None:
    token_ids = st.integers(0, tokenizer.vocab_size + 3) | st.integers(0, 2)  # special tokens oftener
    ids = data.draw(st.lists(token_ids, max_size=30))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=30))
    assert "".join(streamed(tokenizer, portions(ids, sizes), skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=150, deadline=None)
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


def test_special_tokens_show_when_asked_for_also_inside_a_character() -> None:
    first, *rest = BYTE_LEVEL.encode("😀", add_special_tokens=False)
    assert streamed(BYTE_LEVEL, [[1], [first], [0], rest], skip_special_tokens=False) == [
        *("<|end|>", "", UNFINISHED + "<|begin|>", UNFINISHED),
        UNFINISHED,
    ]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("text", ["한국어", "ไทย", "中文", "👩‍👩‍👧 ok"])
def test_a_prompt_that_ends_inside_a_character(tokenizer: Tokenizer, text: str) -> None:
    """The answer is its own tokens: the rest of a character is no text, in the stream as in the whole."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    for start in range(len(ids)):
        answer = ids[start:]
        pieces = streamed(tokenizer, ([token_id] for token_id in answer))
        assert "".join(pieces) == tokenizer.decode(answer)
        if tokenizer is BYTE_LEVEL:
            whole = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
            rest = b"".join(tokenizer.token_bytes(token_id) for token_id in answer)
            assert whole.endswith(rest)
            assert "".join(pieces) == rest.decode("utf-8", errors="replace")


def test_the_context_stays_short() -> None:
    stream = BYTE_FALLBACK.stream()
    for token_id in BYTE_FALLBACK.encode("ab a b " * 200, add_special_tokens=False):
        stream.push([token_id])
    assert len(stream._context) <= 3


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=30, deadline=None)
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


# ── the real model ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    from common.model_store import resolve

    return Tokenizer.load(resolve("smollm2-135m"))


@pytest.mark.e2e
def test_real_tokens_of_hard_texts_and_at_random(smollm2: Tokenizer) -> None:
    rng = random.Random(5)
    hard = [smollm2.encode(text, add_special_tokens=False) for text in HARD_TEXTS]
    common = sorted({token_id for ids in hard for token_id in ids})  # mostly pieces of characters
    cases = hard + [ids[start:] for ids in hard for start in range(1, len(ids))]
    cases += [rng.choices(common, k=rng.randint(1, 40)) for _ in range(300)]
    cases += [[rng.randrange(smollm2.vocab_size + 5) for _ in range(rng.randint(1, 40))] for _ in range(300)]
    for ids in cases:
        parts = portions(ids, [rng.randint(0, 4) for _ in range(len(ids))])
        for skip in (True, False):
            pieces = streamed(smollm2, parts, skip)
            assert "".join(pieces) == smollm2.decode(ids, skip)
        raw = b"".join(smollm2.token_bytes(token_id) for token_id in ids)
        assert raw.decode("utf-8", errors="replace") == smollm2.decode(ids, skip_special_tokens=False)
    for ids, text in zip(hard, HARD_TEXTS, strict=True):
        given_out = ""
        for piece in streamed(smollm2, ([token_id] for token_id in ids)):
            given_out += piece
            assert text.startswith(given_out)
        assert given_out == text


# ── the library's own stream ──────────────────────────────────────────────────────────────────────


def library_stream(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    stream = DecodeStream(skip_special_tokens=True)
    return "".join(stream.step(tokenizer._backend, token_id) or "" for token_id in ids)


def test_what_the_librarys_stream_cannot_do() -> None:
    """If this fails with a newer `tokenizers`, its stream may be good enough to take the place of ours."""
    half = BYTE_LEVEL.encode("b😀", add_special_tokens=False)[:-1]
    assert library_stream(BYTE_LEVEL, half) == "b", "what it still holds is lost"
    assert BYTE_LEVEL.decode(half) == "b" + UNFINISHED

    token = BYTE_FALLBACK._backend.token_to_id
    taken_back = [token("a"), token("<0x41>"), token("<0xF0>"), token("b")]
    assert BYTE_FALLBACK.decode(taken_back) == "a" + 2 * UNFINISHED + "b"
    with pytest.raises(Exception, match="Invalid prefix encountered"):
        library_stream(BYTE_FALLBACK, taken_back)
    stray = [token("a"), token("<0x80>"), token("a"), token("b")]
    assert library_stream(BYTE_FALLBACK, stray) == BYTE_FALLBACK.decode(stray)
    assert "".join(streamed(BYTE_FALLBACK, [[token_id] for token_id in taken_back])) == BYTE_FALLBACK.decode(taken_back)
