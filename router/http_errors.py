"""Errors as HTTP responses, in the form that OpenAI's clients parse, and the envelope around every
response: its id, the count by status, and the last resort when something was not foreseen.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import HTTP_STATUS, BatonError, InvalidRequestError, NotFoundError, openai_body
from common.metrics import RouterMetrics

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20


class BodyTooLargeError(InvalidRequestError):
    """Raised before the body is read to its end."""


def error_response(error: BatonError) -> JSONResponse:
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE if isinstance(error, BodyTooLargeError) else HTTP_STATUS[error.code][0]
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return JSONResponse(openai_body(error), int(status), headers)


async def read_body(request: Request) -> bytes:
    """The request's body. Raises BodyTooLargeError past MAX_BODY_BYTES."""
    chunks = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"a request body may have {MAX_BODY_BYTES} bytes, this one has more")
        chunks.append(chunk)
    return b"".join(chunks)


async def handle_baton_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BatonError)
    return error_response(error)


async def handle_http_error(request: Request, error: Exception) -> JSONResponse:
    """What the routing itself refuses: no such path, no such method on it."""
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        body = openai_body(NotFoundError(f"there is no {request.method} {request.url.path}"))
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        body = openai_body(InvalidRequestError(f"{request.url.path} wants {allowed}, got {request.method}"))
    else:
        body = openai_body(InvalidRequestError(str(error.detail)))
    return JSONResponse(body, error.status_code, error.headers)


class Envelope:
    """ASGI middleware: ``x-request-id`` on every response (an endpoint may set its own in
    ``request.state.request_id``), responses counted, and a 500 for whatever escapes.
    """

    def __init__(self, app: ASGIApp, draw_id: Callable[[str], str], metrics: RouterMetrics) -> None:
        self._app = app
        self._draw_id = draw_id
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = self._draw_id("req")
        started = False

        async def send_enveloped(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = [*message.get("headers", ()), (b"x-request-id", state["request_id"].encode("latin-1"))]
                message = {**message, "headers": headers}
                path = getattr(scope.get("route"), "path", "unmatched")
                self._metrics.http_responses.labels(path, str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, send_enveloped)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if started:
                raise
            await error_response(BatonError(f"internal error ({type(error).__name__})"))(scope, receive, send_enveloped)
