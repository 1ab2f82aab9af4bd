"""An OpenAI-compatible server that answers by script: the last message of a request names its answer."""

from __future__ import annotations

import json
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HELLO = ["Hel", "lo ", "there.\n"]
ESCAPES = ["a\x1b[2Jb\x07", "c\x9b31m\rd\tü\U0001f5fc"]
"""Clears the screen, rings, changes the colour and overwrites the line, wherever it is obeyed."""
USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
RECORD = {"attempts": [{"prefill": "prefill-0", "decode": "decode-1", "reason": "new"}]}


class ScriptedServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.cancelled = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def questions(self) -> list[list[str]]:
        """The contents of each request's messages."""
        return [[message["content"] for message in body["messages"]] for body in self.bodies]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, {"data": [{"id": "scripted"}]})
        elif self.path == "/requests/chat-1":
            self._json(200, RECORD)
        else:
            self._json(404, {"error": {"message": "not here"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        name = body["messages"][-1]["content"]
        if name == "refuse":
            self._json(400, {"error": {"message": "temperature must be at most 2,\nit is 3"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        if name == "fail":
            self._pieces(["half"])
            self._event({"error": {"message": "the worker died", "type": "server_error"}})
        elif name == "break":
            self._pieces(["half"])
        elif name == "wait":
            self._pieces(["to be "])
            # Readable without data: the client has gone.
            select.select([self.connection], [], [], 30)
            if self.connection.recv(1) == b"":
                self.server.cancelled.set()
        elif name == "silence":
            select.select([self.connection], [], [], 30)
            self.server.cancelled.set()
        else:
            self._pieces(ESCAPES if name == "escapes" else HELLO)
            self._event(
                {"id": "chat-1", "choices": [{"delta": {}, "finish_reason": "length" if name == "cut" else "stop"}]}
            )
            self._event({"id": "chat-1", "choices": [], "usage": USAGE})
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args: object) -> None:
        pass

    def _pieces(self, pieces: list[str]) -> None:
        for piece in pieces:
            self._event({"id": "chat-1", "choices": [{"delta": {"content": piece}, "finish_reason": None}]})

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def _json(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
