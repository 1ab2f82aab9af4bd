"""Errors to a gRPC status and back, without a network. Over a network: test_rpc_calls."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import (
    BY_CODE,
    GRPC_STATUS,
    AuthenticationError,
    BatonError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    WorkerLostError,
)
from rpc.status import MAX_MESSAGE_BYTES, Metadata, from_rpc_error, status_code, to_metadata


def rpc_error(code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details, None)


@given(
    kind=st.sampled_from(list(BY_CODE.values())),
    message=st.text(max_size=200),
    param=st.none() | st.text(min_size=1, max_size=20),
    retry_after_s=st.none() | st.floats(0, 1e9),
)
def test_every_error_survives(
    kind: type[BatonError], message: str, param: str | None, retry_after_s: float | None
) -> None:
    error = kind(message, param=param, retry_after_s=retry_after_s)
    restored = from_rpc_error(rpc_error(status_code(error), "", to_metadata(error)), "w:1")
    assert type(restored) is kind
    assert (restored.message, restored.param, restored.retry_after_s) == (message, param, retry_after_s)


def test_every_code_has_a_status() -> None:
    assert set(BY_CODE) == set(GRPC_STATUS)
    assert all(status_code(kind("")) is not grpc.StatusCode.OK for kind in BY_CODE.values())


def test_long_and_broken_texts_do_not_break_the_error() -> None:
    metadata = dict(to_metadata(InvalidRequestError("ä" * 10_000)))
    assert len(metadata["baton-message-bin"]) <= MAX_MESSAGE_BYTES
    assert to_metadata(InvalidRequestError("\ud800"))


def test_a_code_of_a_newer_peer_is_an_error_all_the_same() -> None:
    metadata = (("baton-code", "from_the_future"), ("baton-message-bin", b"text"))
    restored = from_rpc_error(rpc_error(grpc.StatusCode.INTERNAL, "", metadata), "w:1")
    assert type(restored) is BatonError
    assert restored.message == "text"


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Connection reset by peer", WorkerLostError),
        (grpc.StatusCode.CANCELLED, "", WorkerLostError),
        (grpc.StatusCode.UNKNOWN, "Stream removed", WorkerLostError),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", WorkerLostError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", DeadlineError),
        (grpc.StatusCode.UNAUTHENTICATED, "", AuthenticationError),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", ConfigError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 8)", InvalidRequestError),
        (grpc.StatusCode.INTERNAL, "Exception deserializing response!", BatonError),
    ],
)
def test_what_grpcs_own_status_means(code: grpc.StatusCode, details: str, kind: type[BatonError]) -> None:
    restored = from_rpc_error(rpc_error(code, details), "w:1")
    assert type(restored) is kind
    assert "w:1" in restored.message
