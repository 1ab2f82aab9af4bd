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

REQUEST_ID_KEY = "x-request-id"
"""Initial metadata of every call that a client makes."""

MAX_MESSAGE_BYTES = 4096
"""Longer texts are cut: a header that is too long would replace the error by another one."""

MAX_DETAILS = 200

Metadata = tuple[tuple[str, str | bytes], ...]
T = TypeVar("T")
Handler = Callable[[Any, Any, Any], Awaitable[T]]


def status_code(error: BatonError) -> grpc.StatusCode:
    return grpc.StatusCode[GRPC_STATUS[error.code]]


def to_metadata(error: BatonError, max_bytes: int = MAX_MESSAGE_BYTES) -> Metadata:
    """The trailing metadata that `raised_by_peer` reads. ``-bin`` keys carry any text."""
    code, message, param = to_wire(error)
    metadata: Metadata = ((CODE_KEY, code), (MESSAGE_KEY, cut(message, max_bytes)))
    if param:
        metadata += ((PARAM_KEY, cut(param, max_bytes)),)
    if error.retry_after_s is not None:
        metadata += ((RETRY_AFTER_KEY, repr(float(error.retry_after_s))),)
    return metadata


def raised_by_peer(error: grpc.RpcError) -> BatonError | None:
    """The error that the other side raised; None when it did not: gRPC made the status, or a stranger."""
    trailing = _trailing(error)
    if CODE_KEY not in trailing:
        return None
    raised = from_wire(trailing[CODE_KEY], _text(trailing, MESSAGE_KEY), _text(trailing, PARAM_KEY))
    if RETRY_AFTER_KEY in trailing:
        raised.retry_after_s = float(trailing[RETRY_AFTER_KEY])
    return raised


def from_rpc_error(error: grpc.aio.AioRpcError, address: str) -> BatonError:
    """The error that the worker at ``address`` raised, or what gRPC's own status means for a caller."""
    if (raised := raised_by_peer(error)) is not None:
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
    details = cut(error.message).decode("utf-8", "replace")[:MAX_DETAILS]
    await context.abort(status_code(error), details, to_metadata(error))


def reports_errors(handler: Handler[T]) -> Handler[T]:
    """For servicer methods of workers: what the service raises becomes the status of the call."""
    return reporting(handler, abort, _unforeseen)


def reporting(
    handler: Handler[T],
    end: Callable[[Any, BatonError], Awaitable[NoReturn]],
    unforeseen: Callable[[str, BaseException], str],
) -> Handler[T]:
    """``handler``, whose errors go to ``end``.

    Anything that is not a BatonError is logged in full and reaches the peer as the text that ``unforeseen``
    makes of the call's name and the error: a stack trace is none of its business.
    """
    name = handler.__name__

    @functools.wraps(handler)
    async def reported(self: Any, request: Any, context: Any) -> T:
        try:
            return await handler(self, request, context)
        except BatonError as error:
            await end(context, error)
        except grpc.aio.BaseError:  # gRPC's own, such as a write to a client that is gone
            raise
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the client went away, or the server stops
            # Something inside was cancelled, the call was not: gRPC would leave the client without an answer.
            log.error("%s was cancelled from within", name)
            await end(context, BatonError(unforeseen(name, error)))
        except Exception as error:
            log.exception("%s failed", name)
            await end(context, BatonError(unforeseen(name, error)))

    return reported


def _unforeseen(name: str, error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return f"{name} was cancelled by the worker"
    return f"internal error in {name}; the worker's log has the details"


def _trailing(error: Any) -> dict[str, Any]:
    pairs = error.trailing_metadata() or ()
    return dict(pairs)


def cut(text: str, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """``text`` as UTF-8, of which ``max_bytes`` at most."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= max_bytes:
        return data
    return data[: max_bytes - 3].decode("utf-8", "ignore").encode() + b"..."


def _text(metadata: dict[str, Any], key: str) -> str:
    value = metadata.get(key, b"")
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
