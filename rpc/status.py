"""Errors across a call: `common.errors` to a gRPC status and back.

A raised BatonError travels as its gRPC code with (code, message, param, retry_after_s) in the trailing
metadata, so that the other side raises the same class. A status without them was made by gRPC itself
(or by a stranger on the port) and is read by its code alone.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc

from common.errors import (
    GRPC_STATUS,
    AuthenticationError,
    BatonError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    WorkerLostError,
    from_wire,
    to_wire,
)

log = logging.getLogger(__name__)

CODE_KEY = "baton-code"
MESSAGE_KEY = "baton-message-bin"
PARAM_KEY = "baton-param-bin"
RETRY_AFTER_KEY = "baton-retry-after-s"

MAX_MESSAGE_BYTES = 4096
"""Longer texts are cut: a header that is too long would replace the error by another one."""

MAX_DETAILS = 200

Metadata = tuple[tuple[str, str | bytes], ...]
T = TypeVar("T")


def status_code(error: BatonError) -> grpc.StatusCode:
    return grpc.StatusCode[GRPC_STATUS[error.code]]


def to_metadata(error: BatonError) -> Metadata:
    """The trailing metadata that `from_rpc_error` reads. ``-bin`` keys carry any text."""
    code, message, param = to_wire(error)
    metadata: Metadata = ((CODE_KEY, code), (MESSAGE_KEY, _cut(message)))
    if param:
        metadata += ((PARAM_KEY, _cut(param)),)
    if error.retry_after_s is not None:
        metadata += ((RETRY_AFTER_KEY, repr(float(error.retry_after_s))),)
    return metadata


def from_rpc_error(error: grpc.aio.AioRpcError, address: str) -> BatonError:
    """The error that the worker at ``address`` raised, or what gRPC's own status means for a caller."""
    trailing = _trailing(error)
    if CODE_KEY in trailing:
        raised = from_wire(trailing[CODE_KEY], _text(trailing, MESSAGE_KEY), _text(trailing, PARAM_KEY))
        if RETRY_AFTER_KEY in trailing:
            raised.retry_after_s = float(trailing[RETRY_AFTER_KEY])
        return raised
    details = f"{error.code().name}: {error.details()}"
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(f"the call to {address} ran out of time")
        case grpc.StatusCode.UNAUTHENTICATED:
            return AuthenticationError(f"{address}: {details}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return ConfigError(f"{address} does not serve this call, has it another role or version? ({details})")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC's message size limit; the details name it and the size
            return InvalidRequestError(f"{address}: {details}")
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED | grpc.StatusCode.ABORTED:
            return WorkerLostError(f"lost {address} ({details})")
        case grpc.StatusCode.UNKNOWN | grpc.StatusCode.INTERNAL if "stream" in details.lower():
            return WorkerLostError(f"lost {address} ({details})")  # "Stream removed", "RST_STREAM with error code 2"
        case _:
            return BatonError(f"{address}: {details}")


def made_by_grpc(error: grpc.aio.AioRpcError) -> bool:
    """True for a status that no peer raised on purpose."""
    return CODE_KEY not in _trailing(error)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """Ends the call that ``context`` belongs to with ``error``."""
    details = _cut(error.message).decode("utf-8", "replace")[:MAX_DETAILS]
    await context.abort(status_code(error), details, to_metadata(error))


def reports_errors(
    handler: Callable[[Any, Any, Any], Awaitable[T]],
) -> Callable[[Any, Any, Any], Awaitable[T]]:
    """For servicer methods: what the service raises becomes the status of the call.

    Anything that is not a BatonError is logged in full and reaches the peer as a generic text: a stack
    trace is none of its business.
    """
    name = handler.__name__

    @functools.wraps(handler)
    async def reporting(self: Any, request: Any, context: Any) -> T:
        try:
            return await handler(self, request, context)
        except BatonError as error:
            await abort(context, error)
        except grpc.aio.BaseError:  # gRPC's own, such as a write to a client that is gone
            raise
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the client went away, or the server stops
            # Something inside was cancelled, the call was not: gRPC would leave the client without an answer.
            log.error("%s was cancelled from within", name)
            await abort(context, BatonError(f"{name} was cancelled by the worker"))
        except Exception:
            log.exception("%s failed", name)
            await abort(context, BatonError(f"internal error in {name}; the worker's log has the details"))

    return reporting


def _trailing(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    pairs: Any = error.trailing_metadata() or ()
    return dict(pairs)


def _cut(text: str) -> bytes:
    data = text.encode("utf-8", "backslashreplace")
    return data if len(data) <= MAX_MESSAGE_BYTES else data[: MAX_MESSAGE_BYTES - 3] + b"..."


def _text(metadata: dict[str, Any], key: str) -> str:
    value = metadata.get(key, b"")
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
