"""Requests that are no message of their method's kind: refused as the client's fault.

gRPC alone answers them UNKNOWN and logs a stack trace. Streams of requests are left to gRPC: a sender
whose stream turns to noise has lost its stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from common.errors import BatonError, InvalidRequestError


class RefusesMalformed(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """For servers whose methods are coroutines. ``end``: makes an error the status of a call."""

    def __init__(self, end: Callable[[Any, BatonError], Awaitable[NoReturn]]) -> None:
        self._end = end

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        answer = handler.unary_stream if handler.response_streaming else handler.unary_unary
        name = handler_call_details.method

        async def checked(request: Any, context: Any) -> Any:
            if isinstance(request, _Malformed):
                await self._end(context, InvalidRequestError(f"{name}: the request is malformed: {request.reason}"))
            return await answer(request, context)

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(checked, _parser(handler.request_deserializer), handler.response_serializer)


class _Malformed:
    """Stands for a request that could not be parsed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _parser(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return _Malformed(f"{len(data)} bytes are no such message ({error})")

    return parsed
