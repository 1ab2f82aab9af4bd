"""Frames of a KV channel against protobuf's own code, which says what `KVFrame` looks like."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from common.errors import InvalidRequestError
from rpc.kv_frame import FRAME_BYTES, pack_frames, unpack_frame
from rpc.v1 import worker_pb2 as pb

SIZES = (0, 1, 127, 128, 16383, 16384, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES, 4 << 20)


@pytest.mark.parametrize("size", SIZES)
def test_a_message_is_what_protobuf_says(size: int) -> None:
    """However the message is cut: same bytes, all frames but the last full and to be continued."""
    rng = random.Random(size)
    message = rng.randbytes(size)
    cuts = [0, *sorted(rng.randrange(size + 1) for _ in range(3)), size]
    parts = [memoryview(message)[start:stop] for start, stop in pairwise(cuts)]
    frames = pack_frames(parts)
    starts = range(0, max(size, 1), FRAME_BYTES)
    expected = [pb.KVFrame(data=message[at : at + FRAME_BYTES], more=at + FRAME_BYTES < size) for at in starts]
    assert frames == [frame.SerializeToString() for frame in expected]
    unpacked = [unpack_frame(frame) for frame in frames]
    assert [(bytes(data), more) for data, more in unpacked] == [(frame.data, frame.more) for frame in expected]


def test_a_payload_is_not_copied_when_it_comes() -> None:
    (frame,) = pack_frames([bytes(1000)])
    data, _ = unpack_frame(frame)
    assert data.obj is frame


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"\x10\x01\x0a\x03abc", id="fields in another order"),
        pytest.param(b"\x0a\x03abc\x1a\x01x\x10\x01", id="a field of a later version"),
        pytest.param(b"\x0a\x83\x00abc\x10\x01", id="a length longer than it need be"),
    ],
)
def test_other_forms_of_the_same(frame: bytes) -> None:
    data, more = unpack_frame(frame)
    assert (bytes(data), more) == (b"abc", True)


@pytest.mark.parametrize("frame", [b"\x0a", b"\x0a\x04abc", b"\x0a\xff\xff\xff\xff\xff\xff", b"noise"])
def test_what_is_no_frame(frame: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=f"{len(frame)} bytes on a KV channel are no KVFrame"):
        unpack_frame(frame)
