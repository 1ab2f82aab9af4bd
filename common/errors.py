"""One tree of errors, one table to gRPC status names, one to HTTP.

    BatonError
    ├── ConfigError              a value in the configuration; start-up stops
    ├── InvalidRequestError      400  the client's fault; names field, limit and value
    │   ├── ContextLengthError   400
    │   └── NotFoundError        404
    ├── AuthenticationError      401
    ├── ForbiddenError           403
    ├── OverloadedError          429  try later, at another rate
    ├── UnavailableError         503  nobody can serve this now
    │   ├── NoCapacityError           blocks or slots are short on one worker; another may have them
    │   ├── DrainingError             the worker takes nothing new
    │   └── WorkerLostError           the worker died or cannot be reached
    ├── DeadlineError            504  the request's time ran out
    ├── RequestCancelledError    499  the client went away
    ├── HandoffError             500  KV could not be passed on
    │   ├── TicketError               unknown, expired or foreign ticket
    │   ├── LayoutMismatchError       the two KV layouts differ; both are in the text
    │   ├── IntegrityError            bytes arrived, but not the ones that were sent
    │   └── PeerLostError        503  one worker's word on the other: dead, or not to be reached from there
    └── EngineError              500  the model could not be run
        └── NonFiniteLogitsError      its output is not a number

An error crosses processes as (code, message, param): `to_wire` and `from_wire`. Its text says which
limit was broken by which value.
"""

from __future__ import annotations

from typing import ClassVar


class BatonError(Exception):
    """Root of all errors that Baton raises on purpose.

    ``retriable``: another worker, or the same one later, may well succeed.
    """

    code: ClassVar[str] = "internal"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class ConfigError(BatonError):
    code = "config"


class InvalidRequestError(BatonError):
    code = "invalid_request"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class NotFoundError(InvalidRequestError):
    code = "not_found"


class AuthenticationError(BatonError):
    code = "unauthenticated"


class ForbiddenError(BatonError):
    code = "forbidden"


class OverloadedError(BatonError):
    code = "overloaded"
    retriable = True


class UnavailableError(BatonError):
    code = "unavailable"
    retriable = True


class NoCapacityError(UnavailableError):
    code = "no_capacity"


class DrainingError(UnavailableError):
    code = "draining"


class WorkerLostError(UnavailableError):
    code = "worker_lost"


class DeadlineError(BatonError):
    code = "deadline_exceeded"


class RequestCancelledError(BatonError):
    code = "cancelled"


class HandoffError(BatonError):
    code = "handoff"
    retriable = True


class TicketError(HandoffError):
    code = "ticket"


class LayoutMismatchError(HandoffError):
    code = "layout_mismatch"
    retriable = False


class IntegrityError(HandoffError):
    code = "integrity"


class PeerLostError(HandoffError):
    """A worker lost the other end of a handoff. To its router a plain WorkerLostError would say that it
    is lost itself.
    """

    code = "peer_lost"


class EngineError(BatonError):
    code = "engine"


class NonFiniteLogitsError(EngineError):
    code = "nonfinite_logits"


def _tree(root: type[BatonError]) -> list[type[BatonError]]:
    return [root] + [leaf for child in root.__subclasses__() for leaf in _tree(child)]


BY_CODE: dict[str, type[BatonError]] = {cls.code: cls for cls in _tree(BatonError)}

GRPC_STATUS: dict[str, str] = {
    "internal": "INTERNAL",
    "config": "FAILED_PRECONDITION",
    "invalid_request": "INVALID_ARGUMENT",
    "context_length_exceeded": "INVALID_ARGUMENT",
    "not_found": "NOT_FOUND",
    "unauthenticated": "UNAUTHENTICATED",
    "forbidden": "PERMISSION_DENIED",
    "overloaded": "RESOURCE_EXHAUSTED",
    "unavailable": "UNAVAILABLE",
    "no_capacity": "RESOURCE_EXHAUSTED",
    "draining": "UNAVAILABLE",
    "worker_lost": "UNAVAILABLE",
    "deadline_exceeded": "DEADLINE_EXCEEDED",
    "cancelled": "CANCELLED",
    "handoff": "ABORTED",
    "ticket": "FAILED_PRECONDITION",
    "layout_mismatch": "FAILED_PRECONDITION",
    "integrity": "DATA_LOSS",
    "peer_lost": "UNAVAILABLE",
    "engine": "INTERNAL",
    "nonfinite_logits": "INTERNAL",
}
"""Error code → name of the gRPC status (`rpc/status.py` turns names into grpc's own values)."""

HTTP_STATUS: dict[str, tuple[int, str]] = {
    "internal": (500, "server_error"),
    "config": (500, "server_error"),
    "invalid_request": (400, "invalid_request_error"),
    "context_length_exceeded": (400, "invalid_request_error"),
    "not_found": (404, "invalid_request_error"),
    "unauthenticated": (401, "authentication_error"),
    "forbidden": (403, "permission_error"),
    "overloaded": (429, "rate_limit_error"),
    "unavailable": (503, "server_error"),
    "no_capacity": (503, "server_error"),
    "draining": (503, "server_error"),
    "worker_lost": (503, "server_error"),
    "deadline_exceeded": (504, "server_error"),
    "cancelled": (499, "server_error"),
    "handoff": (500, "server_error"),
    "ticket": (500, "server_error"),
    "layout_mismatch": (500, "server_error"),
    "integrity": (500, "server_error"),
    "peer_lost": (503, "server_error"),
    "engine": (500, "server_error"),
    "nonfinite_logits": (500, "server_error"),
}
"""Error code → HTTP status and the ``type`` of OpenAI's error body."""


def to_wire(error: BatonError) -> tuple[str, str, str]:
    """(code, message, param) of an error, for a status detail or a log line."""
    return error.code, error.message, error.param or ""


def from_wire(code: str, message: str, param: str = "") -> BatonError:
    """The error that `to_wire` described; an unknown code (a newer peer) gives the root class."""
    return BY_CODE.get(code, BatonError)(message, param=param or None)


def _encodable(text: str | None) -> str | None:
    """What a client sent may hold half of a surrogate pair, which no encoding has."""
    return text if text is None else text.encode("utf-8", "backslashreplace").decode()


def openai_body(error: BatonError) -> dict[str, dict[str, str | None]]:
    """The error in the form that OpenAI's clients parse."""
    _, kind = HTTP_STATUS[error.code]
    return {
        "error": {
            "message": _encodable(error.message),
            "type": kind,
            "param": _encodable(error.param),
            "code": error.code,
        }
    }
