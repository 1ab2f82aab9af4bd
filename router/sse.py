"""Server-sent events, and clients that go away.

A response is either a status that says what went wrong, or a stream that began well: headers are sent
with the first event, so nothing that fails before it looks like a 200. What fails later is an event of
its own, and the stream then ends without ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import BatonError, RequestCancelledError, openai_body
from router.http_errors import error_response

DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


def encode_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away (RequestCancelledError)."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    listener = loop.create_task(_gone(receive))
    try:
        await asyncio.wait([task, listener], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestCancelledError("the client went away")
    finally:
        listener.cancel()
        task.cancel()
        await asyncio.gather(task, listener, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response whose body is ``chunks``, each one or more whole events."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(scope, receive, send))
        except RequestCancelledError:
            pass  # nobody is left to be told; the record says it

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            try:
                chunk = await anext(chunks)
            except BatonError as error:
                await error_response(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except BatonError as error:
                event = f"data: {encode_json(openai_body(error))}\n\n".encode()
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
