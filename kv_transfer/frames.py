"""The binary form of what the two ends of a handoff say to each other.

A frame is one byte of kind, fixed little-endian fields, then variable ones with their length in
front, and four bytes of checksum over all that. A piece has its own checksum instead, over content and
address, so that a damaged one costs no more than itself. No pickle, nothing is evaluated: whatever bytes
arrive, `decode` gives a frame or raises HandoffError. Knows neither tickets nor channels.

``stream`` numbers one opening of one ticket on one channel (1, 2, …; 0 speaks of the channel itself),
so that what is left of an earlier opening can never be taken for the present one.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from common.errors import HandoffError
from common.handoff import KVLayout
from common.messages import Logprobs, TokenLogprob

TRANSFER_VERSION = 3
"""Version of this protocol; `Open` carries it."""

MAX_PAYLOAD_BYTES = 4 << 20
MAX_FRAME_BYTES = MAX_PAYLOAD_BYTES + (64 << 10)
MAX_TEXT_BYTES = 4096
INLINE = -1
"""`Piece.offset` of a payload that travels in the frame itself."""


@dataclass(frozen=True, slots=True)
class Open:
    """Sender: I will push the KV of this ticket from a pool of ``layout``, which names my rank and its
    heads, as ``num_blocks`` of your blocks, in the first of these wire formats (`wire.py`) that suits you."""

    stream: int
    version: int
    num_blocks: int
    secret: bytes
    ticket_id: str
    layout: KVLayout
    wires: tuple[str, ...] = ("native",)


@dataclass(frozen=True, slots=True)
class OpenAck:
    """Receiver: go on, in this wire format. ``verify``: checksums will be checked, so compute them."""

    stream: int
    verify: bool
    wire: str = "native"


@dataclass(frozen=True, slots=True)
class Piece:
    """Sender: blocks ``first .. first + count`` of the ticket in ``layer``.

    ``sequence`` numbers the pieces of the channel. The payload is in the frame (``offset`` INLINE)
    or at ``offset`` of the shared memory.
    """

    stream: int
    sequence: int
    layer: int
    first: int
    count: int
    checksum: int
    offset: int
    payload: memoryview | bytes = b""


@dataclass(frozen=True, slots=True)
class PieceAck:
    """Receiver: piece ``sequence`` is dealt with, whatever became of it; its room may be used again."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Sender: that was all. ``finish`` is empty unless the first token already ends the answer. Three numbers
    say where the sender had the tokens' KV from; ``logprobs`` are the first token's, where they are wanted."""

    stream: int
    token: int
    index: int
    num_pieces: int
    finish: str = ""
    cached: int = 0
    pulled: int = 0
    computed: int = 0
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """Receiver: not yet; of these ``runs`` (layer, first, count) nothing has arrived, or nothing intact.
    Push them again, then commit again."""

    stream: int
    runs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """Receiver: everything is there, verified, and accepted."""

    stream: int
    num_pieces: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Sender: I give up."""

    stream: int
    reason: str


@dataclass(frozen=True, slots=True)
class Error:
    """Receiver: this stream is over (stream 0: the channel is). Codes are those of `common.errors`."""

    stream: int
    code: str
    message: str


Frame = Open | OpenAck | Piece | PieceAck | Commit | Receipt | Abort | Error | Missing

_KINDS: dict[type[Frame], int] = {
    Open: 1,
    OpenAck: 2,
    PieceAck: 3,
    Commit: 4,
    Missing: 5,
    Receipt: 6,
    Abort: 7,
    Error: 8,
    # Alone in having no checksum of its own fields: no flipped bit makes another frame look like one.
    Piece: 0xF0,
}
_OPEN = struct.Struct("<BIHI")
_OPEN_ACK = struct.Struct("<BIB")
_PIECE = struct.Struct("<BIQIIIQq")
_PIECE_ACK = struct.Struct("<BQ")
_COMMIT = struct.Struct("<BIQQQIII")
_LOGPROB = struct.Struct("<d")
_TOKEN_LOGPROB = struct.Struct("<Id")
_RECEIPT = struct.Struct("<BIQQ")
_TEXTS = struct.Struct("<BI")
_LENGTH = struct.Struct("<H")

_LAYOUT_TEXTS = ("model", "dtype", "kind")
_LAYOUT_NUMBERS = tuple(f.name for f in dataclasses.fields(KVLayout) if f.name not in _LAYOUT_TEXTS)
_LAYOUT = struct.Struct(f"<{len(_LAYOUT_NUMBERS)}I")
_RUN = struct.Struct("<III")
_PLACE = struct.Struct("<III")
_SHARD = struct.Struct("<II")
_CHECK = struct.Struct("<I")

MAX_RUNS = 1024
"""A `Missing` frame names so many; what else is missing is named the next time."""


def shard_seed(ticket_id: str, secret: bytes, stream: int, tp_rank: int) -> int:
    """What the checksums of one sending rank's pieces under one opening of one ticket start from."""
    return xxhash.xxh3_64_intdigest(ticket_id.encode() + secret + _SHARD.pack(stream, tp_rank))


def checksum(seed: int, layer: int, first: int, count: int) -> xxhash.xxh3_64:
    """xxh3-64 to feed a payload to, seeded with its place: right bytes for the wrong blocks do not verify."""
    return xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(_PLACE.pack(layer, first, count), seed))


def encode(frame: Frame) -> bytes:
    """The frame as one message. Raises HandoffError when a field does not fit."""
    if isinstance(frame, Piece):
        header = piece_header(frame)
        return b"".join((header, frame.payload)) if len(frame.payload) else header
    try:
        fields = _encode_fields(frame)
    except (struct.error, UnicodeEncodeError) as error:
        raise HandoffError(f"a {type(frame).__name__} frame cannot be encoded: {error}") from error
    return fields + _CHECK.pack(_check(fields))


def piece_header(piece: Piece) -> bytes:
    """A piece without its payload, which travels right behind it or elsewhere. Raises HandoffError."""
    try:
        place = (piece.stream, piece.sequence, piece.layer, piece.first, piece.count)
        return _PIECE.pack(_KINDS[Piece], *place, piece.checksum, piece.offset)
    except struct.error as error:
        raise HandoffError(f"a Piece frame cannot be encoded: {error}") from error


PIECE_HEADER_BYTES = _PIECE.size


def is_piece(data: bytes | memoryview) -> bool:
    """Whether ``data`` begins as a piece: with `PIECE_HEADER_BYTES` of header, then the payload if there is one."""
    return data[0] == _KINDS[Piece]


def _check(fields: bytes | memoryview) -> int:
    return xxhash.xxh32_intdigest(fields)


def _encode_fields(frame: Open | OpenAck | PieceAck | Commit | Receipt | Abort | Error | Missing) -> bytes:
    kind = _KINDS[type(frame)]
    match frame:
        case Open():
            layout = frame.layout
            return b"".join(
                (
                    _OPEN.pack(kind, frame.stream, frame.version, frame.num_blocks),
                    _pack_bytes(frame.secret),
                    _pack_text(frame.ticket_id),
                    *(_pack_text(getattr(layout, name)) for name in _LAYOUT_TEXTS),
                    _LAYOUT.pack(*(getattr(layout, name) for name in _LAYOUT_NUMBERS)),
                    _pack_text(",".join(frame.wires)),
                )
            )
        case OpenAck():
            return _OPEN_ACK.pack(kind, frame.stream, frame.verify) + _pack_text(frame.wire)
        case PieceAck():
            return _PIECE_ACK.pack(kind, frame.sequence)
        case Commit():
            context = (frame.cached, frame.pulled, frame.computed)
            header = _COMMIT.pack(kind, frame.stream, frame.token, frame.index, frame.num_pieces, *context)
            return header + _pack_text(frame.finish) + _pack_bytes(_pack_logprobs(frame.logprobs))
        case Receipt():
            return _RECEIPT.pack(kind, frame.stream, frame.num_pieces, frame.num_bytes)
        case Abort():
            return _TEXTS.pack(kind, frame.stream) + _pack_text(_shorten(frame.reason))
        case Error():
            head = _TEXTS.pack(kind, frame.stream) + _pack_text(frame.code)
            return head + _pack_text(_shorten(frame.message))
        case Missing():
            runs = (_RUN.pack(*run) for run in frame.runs[:MAX_RUNS])
            return b"".join((_TEXTS.pack(kind, frame.stream), *runs))


def decode(data: bytes | memoryview) -> Frame:
    """The frame in ``data``, of which a piece keeps its payload. Raises HandoffError for anything that `encode` does
    not produce.
    """
    if not 0 < len(data) <= MAX_FRAME_BYTES:
        raise HandoffError(f"a frame has 1 to {MAX_FRAME_BYTES} bytes, this one has {len(data)}")
    kind = data[0]
    try:
        if kind == _KINDS[Piece]:
            _, stream, sequence, layer, first, count, digest, offset = _PIECE.unpack_from(data)
            return Piece(stream, sequence, layer, first, count, digest, offset, memoryview(data)[_PIECE.size :])
        return _decode_control(kind, bytes(data))
    except (struct.error, UnicodeDecodeError) as error:
        raise HandoffError(f"a frame of kind {kind} and {len(data)} bytes is malformed: {error}") from error


def _decode_control(kind: int, data: bytes) -> Frame:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise HandoffError(f"frame kinds are {', '.join(map(str, _KINDS.values()))}, got {kind}")
    reader = _Reader(data[: -_CHECK.size])
    if data[-_CHECK.size :] != _CHECK.pack(_check(reader.data)):
        raise HandoffError(f"a frame of kind {kind} and {len(data)} bytes does not verify: it is damaged")
    frame = decoder(reader)
    if reader.position != len(reader.data):
        raise HandoffError(f"a frame of kind {kind} has {len(reader.data) - reader.position} bytes too many")
    return frame


def _pack_bytes(value: bytes) -> bytes:
    if len(value) > MAX_TEXT_BYTES:
        raise HandoffError(f"a field of a frame has at most {MAX_TEXT_BYTES} bytes, this one has {len(value)}")
    return _LENGTH.pack(len(value)) + value


def _pack_text(value: str) -> bytes:
    return _pack_bytes(value.encode())


def _pack_logprobs(logprobs: Logprobs | None) -> bytes:
    if logprobs is None:
        return b""
    top = (_TOKEN_LOGPROB.pack(entry.token, entry.logprob) for entry in logprobs.top)
    return b"".join((_LOGPROB.pack(logprobs.logprob), *top))


def _unpack_logprobs(data: bytes) -> Logprobs | None:
    if not data:
        return None
    (logprob,) = _LOGPROB.unpack_from(data)
    top = tuple(TokenLogprob(*entry) for entry in _TOKEN_LOGPROB.iter_unpack(data[_LOGPROB.size :]))
    return Logprobs(logprob, top)


def _shorten(text: str) -> str:
    return text.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore")


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def fields(self, form: struct.Struct) -> tuple[int, ...]:
        """The fields of ``form`` from here on. Raises struct.error when the data ends before."""
        values = form.unpack_from(self.data, self.position)
        self.position += form.size
        return values

    def bytes(self) -> bytes:
        (length,) = self.fields(_LENGTH)
        if length > min(MAX_TEXT_BYTES, len(self.data) - self.position):
            raise struct.error(f"a field of {length} bytes does not fit")
        self.position += length
        return self.data[self.position - length : self.position]

    def text(self) -> str:
        return self.bytes().decode()

    def rest(self) -> memoryview:
        start, self.position = self.position, len(self.data)
        return memoryview(self.data)[start:]


def _read_open(reader: _Reader) -> Open:
    _, stream, version, num_blocks = reader.fields(_OPEN)
    secret = reader.bytes()
    ticket_id = reader.text()
    texts = {name: reader.text() for name in _LAYOUT_TEXTS}
    numbers = dict(zip(_LAYOUT_NUMBERS, reader.fields(_LAYOUT), strict=True))
    layout = KVLayout(**texts, **numbers)  # type: ignore[arg-type]
    return Open(stream, version, num_blocks, secret, ticket_id, layout, tuple(reader.text().split(",")))


def _read_open_ack(reader: _Reader) -> OpenAck:
    _, stream, verify = reader.fields(_OPEN_ACK)
    if verify > 1:
        raise struct.error(f"a flag is 0 or 1, not {verify}")
    return OpenAck(stream, bool(verify), reader.text())


def _read_piece_ack(reader: _Reader) -> PieceAck:
    return PieceAck(reader.fields(_PIECE_ACK)[1])


def _read_commit(reader: _Reader) -> Commit:
    _, stream, token, index, num_pieces, cached, pulled, computed = reader.fields(_COMMIT)
    finish = reader.text()
    logprobs = _unpack_logprobs(reader.bytes())
    return Commit(stream, token, index, num_pieces, finish, cached, pulled, computed, logprobs)


def _read_missing(reader: _Reader) -> Missing:
    _, stream = reader.fields(_TEXTS)
    rest = reader.rest()
    if len(rest) > MAX_RUNS * _RUN.size:
        raise struct.error(f"at most {MAX_RUNS} runs")
    return Missing(stream, tuple(_RUN.iter_unpack(rest)))


def _read_receipt(reader: _Reader) -> Receipt:
    return Receipt(*reader.fields(_RECEIPT)[1:])


def _read_abort(reader: _Reader) -> Abort:
    return Abort(reader.fields(_TEXTS)[1], reader.text())


def _read_error(reader: _Reader) -> Error:
    return Error(reader.fields(_TEXTS)[1], reader.text(), reader.text())


_DECODERS: dict[int, Callable[[_Reader], Frame]] = {
    _KINDS[Open]: _read_open,
    _KINDS[OpenAck]: _read_open_ack,
    _KINDS[PieceAck]: _read_piece_ack,
    _KINDS[Commit]: _read_commit,
    _KINDS[Receipt]: _read_receipt,
    _KINDS[Abort]: _read_abort,
    _KINDS[Error]: _read_error,
    _KINDS[Missing]: _read_missing,
}
