"""Failed calls: which error they mean, and whether the server had begun.

The server raises its own errors; what gRPC says on its own (nobody there, a broken connection, a deadline)
is read here by its code alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc

from common.errors import (
    AuthenticationError,
    BatonError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    RequestCancelledError,
    UnavailableError,
)
from rpc.status import REQUEST_ID_KEY, raised_by_peer

NOT_BEGUN = frozenset({"unavailable", "draining", "overloaded", "no_capacity"})
"""What a server raises for a request that it could not begin with."""


@dataclass(frozen=True, slots=True)
class Failure:
    """``never_started``: the server was not reached, or said that it could not begin, and no output had come."""

    error: BatonError
    never_started: bool


def failure(error: Any, address: str, *, got_message: bool = False) -> Failure:
    """What ``error`` (a grpc.RpcError of either kind of channel) means. ``got_message``: output had come."""
    request_id = dict(error.initial_metadata() or ()).get(REQUEST_ID_KEY)
    raised = raised_by_peer(error)
    if raised is not None:
        never_started = raised.code in NOT_BEGUN
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and raised.retry_after_s is None:
            never_started = False  # there is no knowing when it would help
    else:
        raised = _from_status(error.code(), error.details() or "", address)
        # The server says who it is before it does anything.
        never_started = isinstance(raised, UnavailableError) and request_id is None
    if request_id is not None:
        raised.add_note(f"{REQUEST_ID_KEY}: {request_id}")
    return Failure(raised, never_started and not got_message)


def _from_status(code: grpc.StatusCode, text: str, address: str) -> BatonError:
    details = f"{code.name}: {text}"
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(f"{address} did not answer in time")
        case grpc.StatusCode.CANCELLED:
            return RequestCancelledError(f"the call to {address} was cancelled")
        case grpc.StatusCode.UNAUTHENTICATED:
            return AuthenticationError(f"{address}: {details}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return ConfigError(f"{address} does not serve this call; is it a Baton router's gRPC port? ({details})")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC's message size limit; the details name it and the size
            return InvalidRequestError(f"{address}: {details}")
        case grpc.StatusCode.UNAVAILABLE:
            return UnavailableError(f"{address} cannot be reached ({details})")
        case grpc.StatusCode.UNKNOWN | grpc.StatusCode.INTERNAL if "stream" in text.lower():
            return UnavailableError(f"the connection to {address} broke ({details})")
        case _:
            return BatonError(f"{address}: {details}")
