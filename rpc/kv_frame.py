"""A message of a KV channel as frames on the wire, written and read by hand: exactly protobuf's `KVFrame`.

    KVFrame   0A, length of the data (varint), data   then, if the message goes on in the next frame: 10 01

Protobuf's own code would copy the data once more at either end. What it would accept beside this form is left
to it. Knows neither gRPC nor what the bytes are.
"""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from common.errors import InvalidRequestError
from rpc.v1 import worker_pb2 as pb

FRAME_BYTES = (1 << 20) + (4 << 10)
"""Data of one frame. gRPC copies each several times, which is quickest while it fits into a core's own cache; 1 MiB
and a header on top of it shall not need two.
"""

_DATA, _MORE = b"\x0a", b"\x10\x01"


def pack_frames(parts: Sequence[bytes | memoryview]) -> list[bytes]:
    """The message that ``parts`` make, in as many frames as it takes; one copy of every byte."""
    frames: list[bytes] = []
    inside: list[bytes | memoryview] = []
    room = FRAME_BYTES
    for part in parts:
        if len(part) > room:
            part = memoryview(part)
        while len(part) > room:
            inside.append(part[:room])
            frames.append(b"".join((_DATA, _varint(FRAME_BYTES), *inside, _MORE)))
            part, inside, room = part[room:], [], FRAME_BYTES
        inside.append(part)
        room -= len(part)
    size = FRAME_BYTES - room
    return [*frames, b"".join((_DATA, _varint(size), *inside)) if size else b""]


def unpack_frame(frame: bytes) -> tuple[memoryview, bool]:
    """The data, where it lies in ``frame``, and whether the message goes on. Raises InvalidRequestError."""
    size = start = 0
    if frame[:1] == _DATA:
        for start, byte in enumerate(frame[1:6], 2):
            size |= (byte & 0x7F) << 7 * (start - 2)
            if byte < 0x80:
                break
        rest = frame[start + size :]
        if start + size + len(rest) == len(frame) and rest in (b"", _MORE):
            return memoryview(frame)[start : start + size], bool(rest)
    try:
        parsed = pb.KVFrame.FromString(frame)
    except DecodeError as error:
        raise InvalidRequestError(f"{len(frame)} bytes on a KV channel are no KVFrame ({error})") from error
    return memoryview(parsed.data), parsed.more


def _varint(number: int) -> bytes:
    """As protobuf writes lengths: 7 bits a byte, the lowest first, the highest bit says that more follow."""
    groups = bytearray()
    while number >= 0x80:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)
