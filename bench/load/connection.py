"""HTTP/1.1 with as little between the socket and the clock as can be.

A connection is a plain asyncio protocol: every read is stamped once, before it is parsed, and all events in it
have that time. No task is woken per token. Connections are kept alive and reused while they are fresh; one that
was idle for longer than some server's patience is not, because a request lost in that race could not be told
from one that the server dropped. Nothing is sent twice.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import httptools

from bench.load.events import EventSplitter
from bench.load.stream import INTERRUPTED, StreamRecord, message_of

IDLE_S = 1.0
"""A connection unused for longer is not used again."""
CLOSE_GRACE_S = 1.0
"""How long after [DONE] the end of the response may take before its connection is dropped."""
CONNECT_TIMEOUT_S = 10.0
MAX_ERROR_BYTES = 65_536
HTTP_OK = 200

Clock = Callable[[], float]


class Connection(asyncio.Protocol):
    """One exchange at a time. ``released(self)`` is called when the next may begin."""

    def __init__(self, clock: Clock, released: Callable[[Connection], None]) -> None:
        self._clock = clock
        self._released = released
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._record: StreamRecord | None = None
        self._ended: asyncio.Future[None] | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._events: EventSplitter | None = None
        self._body = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._now = 0.0
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        fresh = self._clock() - self.idle_since <= IDLE_S
        return fresh and self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, record: StreamRecord) -> None:
        """Sends the request and fills ``record``; returns when it is over and the response is through."""
        assert self._transport is not None
        self._record = record
        self._ended = asyncio.get_running_loop().create_future()
        record.sent_s = self._clock()
        self._transport.write(request)
        await self._ended

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ── asyncio ───────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        if self._record is None:
            self.close()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("protocol", f"not HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._now = self._clock()
        if exc is None:
            self._fail("closed", "the connection was closed in the middle of the response")
        else:
            self._fail("reset", f"the connection broke: {exc}")

    # ── httptools ─────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        self._headers.clear()
        self._body.clear()
        self._events = None

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        content_type = self._headers.get(b"content-type", b"").lower()
        if self._parser.get_status_code() == HTTP_OK and content_type.startswith(b"text/event-stream"):
            self._events = EventSplitter()

    def on_body(self, body: bytes) -> None:
        record = self._record
        if self._events is None or record is None:
            self._body += body[: MAX_ERROR_BYTES - len(self._body)]
            return
        for event in self._events.feed(body):
            record.take(event, self._now)
        if record.over and self._grace is None:
            self._grace = asyncio.get_running_loop().call_later(CLOSE_GRACE_S, self._drop)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < HTTP_OK:
            return  # the answer proper follows
        assert self._record is not None
        if status != HTTP_OK:
            with suppress(ValueError):
                self._record.retry_after_s = float(self._headers.get(b"retry-after", b"-"))
            self._fail(f"http_{status}", self._message())
        elif self._events is None:
            self._fail("not_a_stream", f"200 without an event stream: {self._message()}")
        else:
            self._record.close(self._now)
        keep_alive = self._parser.should_keep_alive()
        self.idle_since = self._now
        self._settle()
        if keep_alive:
            self._released(self)
        else:
            self.close()

    # ── inside ────────────────────────────────────────────────────────────────────────────────────

    def _message(self) -> str:
        text = bytes(self._body).decode("utf-8", "replace")
        with suppress(ValueError):
            return message_of(json.loads(text))
        return text

    def _fail(self, kind: str, text: str) -> None:
        """Nothing happens to a record that has ended well."""
        if self._record is not None:
            self._record.fail(kind, text, self._now)
        self._settle()

    def _drop(self) -> None:
        self.close()
        self._settle()

    def _settle(self) -> None:
        self._record = None  # here: the next exchange may begin before the one that waited wakes up
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class ConnectionPool:
    """As many connections to one place as there are exchanges at once. ``tls``: None for plain HTTP."""

    def __init__(self, host: str, port: int, clock: Clock, tls: ssl.SSLContext | None = None) -> None:
        self._host, self._port, self._clock, self._tls = host, port, clock, tls
        self._idle: list[Connection] = []
        self._all: dict[Connection, None] = {}
        self.num_opened = 0

    async def ask(self, request: bytes, record: StreamRecord, timeout_s: float) -> None:
        """One request, once. Whatever becomes of it is in ``record``; a cancel is passed on."""
        connection: Connection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = self._take_idle() or await self._open()
                await connection.exchange(request, record)
        except TimeoutError:
            record.fail("timeout", f"not over after {timeout_s:g} s", self._clock())
        except OSError as error:
            record.fail("connect", str(error), self._clock())
        except asyncio.CancelledError:
            record.fail(INTERRUPTED, "ended by this side", self._clock())
            raise
        finally:
            if connection is not None and not connection.usable:
                self._all.pop(connection, None)
            if connection is not None and (record.error in ("timeout", INTERRUPTED)):
                connection.close()
                self._all.pop(connection, None)

    def close(self) -> None:
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._idle.clear()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.close()
            self._all.pop(connection, None)
        return None

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._clock, self._idle.append), self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error
        self.num_opened += 1
        self._all[connection] = None
        return connection
