"""One connection of the load generator without a network: the test says which bytes come, and when it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from bench.load.connection import Connection
from bench.load.stream import StreamRecord

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


def event(data: Any) -> bytes:
    """One event's bytes, in no HTTP chunk yet. Text that is not ASCII stays as it is."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def delta(text: str | None, **fields: Any) -> bytes:
    """An event of a chat answer."""
    return event({"choices": [{"index": 0, "delta": {} if text is None else {"content": text}, **fields}]})


def usage(tokens: int, prompt: int = 5) -> bytes:
    return event({"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens": prompt}})


DONE = event("[DONE]")


class Wire(asyncio.Transport):
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


class Exchange:
    """A request under way on a connection of its own. Must be made while an event loop runs."""

    def __init__(self, *, intended_s: float = 0.0, num_asked: int = 4, needs_done: bool = True) -> None:
        self.now = 0.0
        self.wire = Wire()
        self.released: list[Connection] = []
        self.connection = Connection(lambda: self.now, self.released.append)
        self.connection.connection_made(self.wire)
        self.record = StreamRecord(intended_s, num_asked)
        self.record.needs_done = needs_done
        self.task = asyncio.ensure_future(self.connection.exchange(b"request", self.record))

    async def begun(self) -> Exchange:
        await asyncio.sleep(0)
        assert self.wire.written == b"request"
        return self

    def receive(self, data: bytes, at_s: float) -> None:
        self.now = at_s
        self.connection.data_received(data)

    def lose(self, error: Exception | None, at_s: float) -> None:
        self.now = at_s
        self.connection.connection_lost(error)

    async def ended(self) -> StreamRecord:
        """The record, once the exchange is over; fails when it is not."""
        for _ in range(3):
            await asyncio.sleep(0)
        assert self.task.done()
        self.task.result()
        return self.record
