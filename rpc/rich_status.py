"""Errors for clients: the status of `rpc/status.py`, and google.rpc's details beside it.

    ErrorInfo     reason: the error's code in capitals; domain: baton; metadata: the field, if one is to blame
    BadRequest    the field and what is wrong with it
    RetryInfo     how long to wait

Clients in other languages read these with their own libraries. All of it travels in the trailing
metadata, of which a client takes 8 KiB unless told otherwise: texts are cut so that it fits.
"""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from common.errors import BatonError, InvalidRequestError
from rpc.status import Metadata, cut, status_code, to_metadata

DOMAIN = "baton"

MAX_TEXT_BYTES = 768
"""Of the message, wherever it is repeated. Beyond ASCII each byte takes three where gRPC shows it."""


async def abort_richly(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """Ends the call that ``context`` belongs to with ``error`` and its details."""
    status = rich_status(error)
    rich = tuple((key, value) for key, value in rpc_status.to_status(status).trailing_metadata)
    metadata: Metadata = (*to_metadata(error, MAX_TEXT_BYTES), *rich)
    await context.abort(status_code(error), status.message, metadata)


def rich_status(error: BatonError) -> Status:
    """``error`` as google.rpc.Status."""
    text = cut(error.message, MAX_TEXT_BYTES).decode("utf-8", "replace")
    param = None if error.param is None else cut(error.param, MAX_TEXT_BYTES // 4).decode("utf-8", "replace")
    info = error_details_pb2.ErrorInfo(
        reason=error.code.upper(), domain=DOMAIN, metadata={} if param is None else {"param": param}
    )
    details: list[Message] = [info]
    if isinstance(error, InvalidRequestError) and param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=param, description=text)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = Status(code=status_code(error).value[0], message=text)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status
