"""Dataclasses of `common.messages`, `handoff` and `workers` to protobuf and back.

The two sides have the same names by design, so one `Codec` a type does all: it is built from the
dataclass's field types when this module loads, and building it fails when `worker.proto` lacks a field
or has one more. Nothing is dropped on the way; a value that a peer has to send and did not (an enum
left unspecified, a message left out) is refused, never guessed.

It knows nothing of calls or channels.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from common import handoff, messages, workers
from common.errors import BatonError, InvalidRequestError
from common.messages import PrefillEvent
from rpc.v1 import worker_pb2 as pb

D = TypeVar("D")
P = TypeVar("P", bound=Message)

Convert = Callable[[Any], Any]


class Codec(Generic[D, P]):
    """Converts between the dataclass ``D`` and the protobuf message ``P`` of the same name."""

    def __init__(self, dataclass_type: type[D], message_type: type[P]) -> None:
        self._dataclass = dataclass_type
        self._message = message_type
        hints = get_type_hints(dataclass_type)
        names = [field.name for field in dataclasses.fields(dataclass_type)]  # type: ignore[arg-type]
        wire = {field.name: field for field in message_type.DESCRIPTOR.fields}
        if differing := sorted(set(names) ^ set(wire)):
            raise TypeError(
                f"{dataclass_type.__name__} and its message differ in {', '.join(differing)}: "
                "bring proto/rpc/v1/worker.proto up to date and run python -m rpc.generate"
            )
        self._fields = [(name, *_field_converters(dataclass_type, hints[name], wire[name])) for name in names]

    def encode(self, value: D) -> P:
        """The message for ``value``. Raises ValueError when a number is outside its field's range."""
        return self._message(**{name: encode(getattr(value, name)) for name, encode, _ in self._fields})

    def decode(self, message: P) -> D:
        """The value of ``message``. Raises BatonError when something that must be there is missing."""
        return self._dataclass(**{name: decode(message) for name, _, decode in self._fields})


_codecs: dict[Any, Codec[Any, Any]] = {}


def _codec(dataclass_type: type[D], message_type: type[P]) -> Codec[D, P]:
    codec = Codec(dataclass_type, message_type)
    _codecs[dataclass_type] = codec
    return codec


def _field_converters(owner: type, hint: Any, field: Any) -> tuple[Convert, Convert]:
    """(dataclass value → protobuf value, protobuf message → dataclass value) of one field.

    ``field`` is its protobuf descriptor.
    """
    name = field.name
    place = f"{owner.__name__}.{name}"
    hint, optional = _without_none(hint)
    if get_origin(hint) is tuple:
        element = get_args(hint)[0]
        if dataclasses.is_dataclass(element):
            codec = _codecs[element]
            return (
                lambda values: [codec.encode(value) for value in values],
                lambda message: tuple([codec.decode(value) for value in getattr(message, name)]),
            )
        return _as_it_is, lambda message: tuple(getattr(message, name))
    if dataclasses.is_dataclass(hint):
        codec = _codecs[hint]

        def decode_nested(message: Any) -> Any:
            if message.HasField(name):
                return codec.decode(getattr(message, name))
            if optional:
                return None
            raise BatonError(f"the peer sent no {place}")

        return (lambda value: None if value is None else codec.encode(value)), decode_nested
    if issubclass(hint, enum.Enum):
        numbers = _enum_numbers(hint, field.enum_type)
        values: dict[int, enum.Enum | None] = {number: value for value, number in numbers.items()}
        if optional:
            values[0] = None

        def decode_enum(message: Any) -> Any:
            number = getattr(message, name)
            if number not in values:
                known = ", ".join(map(str, values))
                raise BatonError(f"the peer sent {place} = {number}; known are {known}")
            return values[number]

        return (lambda value: 0 if value is None else numbers[value]), decode_enum
    if optional:
        return _as_it_is, lambda message: getattr(message, name) if message.HasField(name) else None
    return _as_it_is, lambda message: getattr(message, name)


def _as_it_is(value: Any) -> Any:
    return value


def _without_none(hint: Any) -> tuple[Any, bool]:
    """``X | None`` → (X, True); any other type → (it, False)."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (part for part in get_args(hint) if part is not types.NoneType)
        return inner, True
    return hint, False


def _enum_numbers(enum_type: type[enum.Enum], descriptor: Any) -> dict[enum.Enum, int]:
    """``FinishReason.STOP`` → the number of ``FINISH_REASON_STOP``, for every member."""
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {member: descriptor.values_by_name[prefix + member.name].number for member in enum_type}


# A type comes after those it is made of.
LOGIT_BIAS = _codec(messages.LogitBias, pb.LogitBias)
SAMPLING_PARAMS = _codec(messages.SamplingParams, pb.SamplingParams)
PREFIX_SOURCE = _codec(messages.PrefixSource, pb.PrefixSource)
GENERATION_REQUEST = _codec(messages.GenerationRequest, pb.GenerationRequest)
CONTEXT_TOKENS = _codec(messages.ContextTokens, pb.ContextTokens)
FINISH = _codec(messages.Finish, pb.Finish)
TOKEN_LOGPROB = _codec(messages.TokenLogprob, pb.TokenLogprob)
LOGPROBS = _codec(messages.Logprobs, pb.Logprobs)
TOKEN_DELTA = _codec(messages.TokenDelta, pb.TokenDelta)
TOKEN_BATCH = _codec(messages.TokenBatch, pb.TokenBatch)
KV_LAYOUT = _codec(handoff.KVLayout, pb.KVLayout)
TRANSPORT_OFFER = _codec(handoff.TransportOffer, pb.TransportOffer)
TICKET = _codec(handoff.Ticket, pb.Ticket)
HANDOFF_COMMIT = _codec(handoff.HandoffCommit, pb.HandoffCommit)
HANDOFF_RECEIPT = _codec(handoff.HandoffReceipt, pb.HandoffReceipt)
PREFIX_REQUEST = _codec(handoff.PrefixRequest, pb.PrefixRequest)
PREFIX_REPLY = _codec(handoff.PrefixReply, pb.PrefixReply)
FIRST_TOKEN = _codec(messages.FirstToken, pb.FirstToken)
HANDOFF_DONE = _codec(messages.HandoffDone, pb.HandoffDone)
MODEL_INFO = _codec(workers.ModelInfo, pb.ModelInfo)
TRANSFER_COUNTERS = _codec(handoff.TransferCounters, pb.TransferCounters)
WORKER_LOAD = _codec(workers.WorkerLoad, pb.WorkerLoad)
WORKER_INFO = _codec(workers.WorkerInfo, pb.WorkerInfo)
WORKER_EVENT = _codec(workers.WorkerEvent, pb.WorkerEvent)
HOLDER = _codec(workers.Holder, pb.Holder)
WORKER_LEDGER = _codec(workers.WorkerLedger, pb.WorkerLedger)


def encode_request(request: messages.GenerationRequest) -> pb.GenerationRequest:
    """A request that came from a client: numbers outside the wire's range are the client's fault.

    Raises InvalidRequestError. Token ids fit 32 bits unsigned, all else (``seed``) 64 bits signed.
    """
    try:
        return GENERATION_REQUEST.encode(request)
    except ValueError as error:
        raise InvalidRequestError(f"request {request.request_id}: a number is out of range: {error}") from error


def encode_prefill_event(event: PrefillEvent) -> pb.PrefillEvent:
    if isinstance(event, messages.FirstToken):
        return pb.PrefillEvent(first_token=FIRST_TOKEN.encode(event))
    return pb.PrefillEvent(handoff_done=HANDOFF_DONE.encode(event))


def decode_prefill_event(message: pb.PrefillEvent) -> PrefillEvent:
    """Raises BatonError when the event is none that this version knows."""
    match message.WhichOneof("event"):
        case "first_token":
            return FIRST_TOKEN.decode(message.first_token)
        case "handoff_done":
            return HANDOFF_DONE.decode(message.handoff_done)
        case _:
            raise BatonError("the peer sent a PrefillEvent that is neither first_token nor handoff_done")
