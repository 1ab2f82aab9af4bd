"""Every type that crosses processes survives the wire, field by field."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import handoff, messages, workers
from common.errors import BatonError, InvalidRequestError
from common.messages import (
    ContextTokens,
    Finish,
    FinishReason,
    FirstToken,
    GenerationRequest,
    SamplingParams,
    TokenBatch,
    TokenDelta,
)
from rpc import conversion
from rpc.conversion import Codec
from rpc.v1 import worker_pb2 as pb

CODECS = {codec._dataclass: codec for codec in vars(conversion).values() if isinstance(codec, Codec)}
TYPES = [
    value
    for module in (messages, handoff, workers)
    for value in vars(module).values()
    if dataclasses.is_dataclass(value) and value.__module__ == module.__name__
]

INT64 = st.integers(-(2**63), 2**63 - 1)
UINT32 = st.integers(0, 2**32 - 1)
SCALARS = {
    int: INT64,
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type; integers in tuples are token, block and process ids."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return st.one_of(*(st.none() if part is types.NoneType else values_of(part) for part in typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        element = typing.get_args(hint)[0]
        return st.lists(UINT32 if element is int else values_of(element), max_size=4).map(tuple)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{field.name: values_of(hints[field.name]) for field in dataclasses.fields(hint)})
    if issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    return SCALARS[hint]


@pytest.mark.parametrize("message_type", TYPES, ids=lambda kind: kind.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_type_survives_the_wire(message_type: type, data: st.DataObject) -> None:
    value = data.draw(values_of(message_type))
    codec = CODECS[message_type]
    wire = codec.encode(value).SerializeToString()
    restored = codec.decode(codec._message.FromString(wire))
    assert restored == value
    assert type(restored) is message_type


@settings(max_examples=25, deadline=None)
@given(event=values_of(messages.FirstToken) | values_of(messages.HandoffDone))
def test_prefill_events_survive_the_wire(event: messages.PrefillEvent) -> None:
    wire = conversion.encode_prefill_event(event).SerializeToString()
    assert conversion.decode_prefill_event(pb.PrefillEvent.FromString(wire)) == event


def test_names_on_the_wire_are_those_of_the_dataclass() -> None:
    """The round trips above would not notice two fields that are swapped both ways."""
    prefill = ContextTokens(9, 10, 11)
    finish = Finish(FinishReason.ERROR, ContextTokens(1, 2, 3), 4, "engine", "no", 0.5, 0.25, 0.125, prefill)
    batch = conversion.TOKEN_BATCH.encode(TokenBatch((TokenDelta("r", 5, 6, (7, 8), finish),)))
    assert batch == pb.TokenBatch(
        deltas=[
            pb.TokenDelta(
                request_id="r",
                attempt=5,
                first_index=6,
                tokens=[7, 8],
                finish=pb.Finish(
                    reason=pb.FINISH_REASON_ERROR,
                    context=pb.ContextTokens(cached=1, moved=2, computed=3),
                    preemptions=4,
                    error_code="engine",
                    error_message="no",
                    queue_s=0.5,
                    handoff_s=0.25,
                    decode_s=0.125,
                    prefill_context=pb.ContextTokens(cached=9, moved=10, computed=11),
                ),
            )
        ]
    )


def test_tokens_are_packed() -> None:
    delta = conversion.TOKEN_DELTA.encode(TokenDelta("", 0, 0, tuple(range(100))))
    assert len(delta.SerializeToString()) == 102


def test_a_missing_part_is_refused_by_name() -> None:
    with pytest.raises(BatonError, match=r"WorkerInfo\.role = 0"):
        conversion.WORKER_INFO.decode(pb.WorkerInfo(worker_id="w"))
    with pytest.raises(BatonError, match=r"GenerationRequest\.sampling"):
        conversion.GENERATION_REQUEST.decode(pb.GenerationRequest(request_id="r"))
    with pytest.raises(BatonError, match="PrefillEvent"):
        conversion.decode_prefill_event(pb.PrefillEvent())


def test_an_enum_value_of_a_newer_peer_is_refused() -> None:
    message = conversion.FIRST_TOKEN.encode(FirstToken("r", 0, 0, 1, ContextTokens()))
    message.finish = 77  # type: ignore[assignment]
    with pytest.raises(BatonError, match=r"FirstToken\.finish = 77; known are"):
        conversion.FIRST_TOKEN.decode(message)


@pytest.mark.parametrize(
    "request_",
    [GenerationRequest("r", (-1,), SamplingParams(1)), GenerationRequest("r", (1,), SamplingParams(1, seed=2**63))],
)
def test_numbers_beyond_the_wire_are_the_clients_fault(request_: GenerationRequest) -> None:
    with pytest.raises(InvalidRequestError, match="out of range"):
        conversion.encode_request(request_)


def test_a_field_that_only_one_side_has_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Holder:
        request: str
        colour: str

    with pytest.raises(TypeError, match="age_s, blocks, colour, state"):
        Codec(Holder, pb.Holder)
