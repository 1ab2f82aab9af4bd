"""The codec: what goes in comes out, and whatever else comes in is refused in words."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import HandoffError
from common.handoff import KVLayout
from common.messages import Logprobs, TokenLogprob
from kv_transfer.frames import (
    MAX_FRAME_BYTES,
    MAX_TEXT_BYTES,
    Abort,
    Commit,
    Error,
    Frame,
    Missing,
    Open,
    OpenAck,
    Piece,
    PieceAck,
    Receipt,
    checksum,
    decode,
    encode,
)

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
text = st.text(max_size=40)
layouts = st.builds(
    KVLayout, text, u32, u32, u32, u32, text, u32, u32, u32, u32, text, u32
)  # in the order of its fields
numbers = st.floats(allow_nan=False)
logprobs = st.builds(Logprobs, numbers, st.lists(st.builds(TokenLogprob, u32, numbers), max_size=20).map(tuple))
wires = st.lists(st.text("abcdefg0123456789", max_size=9), min_size=1, max_size=5).map(tuple)
frames: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Open, u32, u16, u32, st.binary(max_size=40), text, layouts, wires),
    st.builds(OpenAck, u32, st.booleans(), text),
    st.builds(Piece, u32, u64, u32, u32, u32, u64, st.integers(-1, 2**63 - 1), st.binary(max_size=99)),
    st.builds(PieceAck, u64),
    st.builds(Commit, u32, u64, u64, u64, text, u32, u32, u32, st.none() | logprobs),
    st.builds(Receipt, u32, u64, u64),
    st.builds(Abort, u32, text),
    st.builds(Error, u32, text, text),
    st.builds(Missing, u32, st.lists(st.tuples(u32, u32, u32), max_size=9).map(tuple)),
)


@given(frames)
def test_round_trip(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x02\0\0\0\0")
def test_any_bytes_give_a_frame_or_a_handoff_error(data: bytes) -> None:
    try:
        frame = decode(data)
    except HandoffError:
        return
    assert encode(frame) == data


@given(frames, st.data())
def test_cut_or_prolonged_frames(frame: Frame, data: st.DataObject) -> None:
    encoded = encode(frame)
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    if isinstance(frame, Piece):  # its payload ends where the message does, and its length is checked later
        cut = cut[: len(encoded) - len(frame.payload) - 1]
    else:
        with pytest.raises(HandoffError, match="does not verify"):
            decode(encoded + b"\0")
    with pytest.raises(HandoffError):
        decode(cut)


@given(frames.filter(lambda frame: not isinstance(frame, Piece)), st.data())
def test_a_flipped_bit_in_a_control_frame_is_noticed(frame: Frame, data: st.DataObject) -> None:
    """A first token, a ticket or a secret that was damaged on its way is never believed."""
    damaged = bytearray(encode(frame))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(HandoffError):
        decode(bytes(damaged))


def test_size_limits() -> None:
    with pytest.raises(HandoffError, match=f"1 to {MAX_FRAME_BYTES} bytes, this one has {MAX_FRAME_BYTES + 1}"):
        decode(bytes(MAX_FRAME_BYTES + 1))
    long_reason = decode(encode(Abort(1, "ü" * MAX_TEXT_BYTES)))
    assert long_reason == Abort(1, "ü" * (MAX_TEXT_BYTES // 2))
    layout = KVLayout("m", 1, 1, 1, 1, "float32")
    with pytest.raises(HandoffError, match=f"at most {MAX_TEXT_BYTES} bytes, this one has 5000"):
        encode(Open(1, 1, 1, b"s", "t" * 5000, layout))
    with pytest.raises(HandoffError, match="a Commit frame cannot be encoded"):
        encode(Commit(1, -1, 0, 0))


@given(st.binary(min_size=1, max_size=64), st.tuples(u64, u32, u32, u32), st.data())
def test_checksum_covers_bytes_and_place(payload: bytes, place: tuple[int, int, int, int], data: st.DataObject) -> None:
    def digest(payload: bytes, place: Sequence[int]) -> int:
        made = checksum(*place)
        made.update(payload)
        return made.intdigest()

    whole = digest(payload, place)
    assert whole == digest(payload, place)
    in_parts = checksum(*place)
    for start in range(0, len(payload), 7):
        in_parts.update(payload[start : start + 7])
    assert in_parts.intdigest() == whole
    at = data.draw(st.integers(0, len(payload) - 1))
    flipped = bytearray(payload)
    flipped[at] ^= 1
    assert digest(bytes(flipped), place) != whole
    which = data.draw(st.integers(0, 3))
    moved = [number ^ 1 if index == which else number for index, number in enumerate(place)]
    assert digest(payload, moved) != whole
