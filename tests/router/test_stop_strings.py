"""Stop strings against a plain search in the whole text, for any stops and any way of cutting the text."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.stop_strings import StopStrings
from router.tokenizer import Tokenizer
from router.tokenizer_parts import TokenizerParts
from tests.router import tiny_tokenizers as tiny

LETTERS = st.text(alphabet="ab\n한👍\u200d\u0301", max_size=14)
STOPS = st.lists(st.text(alphabet="ab\n한👍\u200d\u0301", min_size=1, max_size=5), max_size=5)
SIZES = st.lists(st.integers(0, 4), max_size=20)


def naive(text: str, stops: Sequence[str], include: bool) -> tuple[str, bool]:
    """The law in its plainest form."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end if include else end - max(map(len, matches))], True
    return text, False


def undecided(text: str, stops: Sequence[str]) -> int:
    """How many last characters of ``text`` are the beginning of a stop string that is not complete."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def pieces(text: str, sizes: Sequence[int]) -> list[str]:
    parts, start = [], 0
    for size in sizes:
        parts.append(text[start : start + size])
        start += size
    return [*parts, text[start:]]


def shown(text: str, stops: Sequence[str], include: bool = False, sizes: Sequence[int] = ()) -> tuple[str, bool]:
    stream, visible, over = StopStrings(stops, include), "", False
    for piece in pieces(text, sizes):
        more, over = stream.push(piece)
        visible += more
    return visible + stream.flush(), over


@settings(max_examples=500, deadline=None)
@given(text=LETTERS, stops=STOPS, sizes=SIZES, include=st.booleans())
@example(text="abcd", stops=["abcd", "bc"], sizes=[1, 1, 1], include=False)
@example(text="aab", stops=["aab", "ab", "b"], sizes=[2], include=False)
@example(text="aaab", stops=["aab"], sizes=[1, 1, 1], include=True)
@example(text="abababac", stops=["ababac"], sizes=[5], include=False)
def test_text_is_that_of_a_search_in_the_whole(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    assert shown(text, stops, include, sizes) == naive(text, stops, include)


@settings(max_examples=500, deadline=None)
@given(text=LETTERS, stops=STOPS, sizes=SIZES)
def test_exactly_what_is_undecided_is_kept_back(text: str, stops: list[str], sizes: list[int]) -> None:
    stream, come, visible = StopStrings(stops), "", ""
    for piece in pieces(text, sizes):
        more, over = stream.push(piece)
        come, visible = come + piece, visible + more
        if over:
            break
        assert visible == come[: len(come) - undecided(come, stops)]


@settings(max_examples=200, deadline=None)
@given(text=LETTERS, stops=STOPS, sizes=SIZES)
def test_nothing_is_kept_back_when_the_stop_string_is_shown_anyway(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    stream, come, visible = StopStrings(stops, include=True), "", ""
    for piece in pieces(text, sizes):
        more, over = stream.push(piece)
        come, visible = come + piece, visible + more
        if over:
            break
        assert visible == come


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("one\ntwo\n", ["\n\n"], "one\ntwo\n"),
        ("xabcd", ["abcd", "bc"], "xa"),
        ("xabc", ["bc", "abc", "c"], "x"),
        ("STOP", ["STOP"], ""),
        ("aXbY", ["Y", "X"], "a"),
        ("a👩‍👩‍👧b", ["👩‍👩‍👧"], "a"),
        ("cafe\u0301", ["é"], "cafe\u0301"),
    ],
)
def test_which_stop_string_counts(text: str, stops: list[str], expected: str) -> None:
    for size in range(1, len(text) + 1):
        assert shown(text, stops, sizes=[size] * len(text)) == (expected, expected != text)


def test_a_false_start_is_released_as_soon_as_it_is_one() -> None:
    stream = StopStrings(["</end>"])
    assert stream.push("ok </e") == ("ok ", False)
    assert stream.push("m") == ("</em", False)
    assert stream.push("> <") == ("> ", False)
    assert stream.push("</en") == ("<", False)
    assert stream.flush() == "</en"
    assert stream.flush() == ""


def test_after_the_stop_string_everything_is_swallowed() -> None:
    stream = StopStrings(["."])
    assert stream.push("Yes. And") == ("Yes", True)
    assert stream.push(" more.") == ("", True)
    assert stream.flush() == ""


BYTE_LEVEL = Tokenizer(TokenizerParts(tiny.byte_level(vocab_size=330), vocab_size=331))


@settings(max_examples=200, deadline=None)
@given(text=LETTERS, stops=STOPS)
def test_stop_strings_in_the_text_of_tokens(text: str, stops: list[str]) -> None:
    """Token by token, as an answer comes: characters of several tokens, stop strings of several characters."""
    pieces_of_text, stream, visible = BYTE_LEVEL.stream(), StopStrings(stops), ""
    whole, _ = naive(text, stops, include=False)
    for token_id in BYTE_LEVEL.encode(text, add_special_tokens=False):
        visible += stream.push(pieces_of_text.push([token_id]))[0]
        assert whole.startswith(visible), "nothing of a stop string is ever shown"
    visible += stream.push(pieces_of_text.flush())[0]
    assert visible + stream.flush() == whole


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(["a", ""])


def test_a_long_false_start_costs_no_rescans() -> None:
    """Text that always almost matches: a search from every character anew would take ten thousand times as long."""
    stream = StopStrings(["a" * 10_000 + "b"])
    started, visible = time.process_time(), 0
    for _ in range(30_000):
        visible += len(stream.push("a")[0])
    assert visible == 20_000
    assert time.process_time() - started < 2.0
