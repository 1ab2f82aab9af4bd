"""An OpenAI-compatible server in a thread whose every answer is scripted: real sockets, no model.

Answers `/v1/models` and what the load generator asks before it begins; after that, the n-th streamed request
gets the n-th script.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from tests.bench.scripted_stream import DONE, END, HEAD, chunk, delta, usage

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


async def answer(writer: asyncio.StreamWriter) -> None:
    """Three tokens, by usage too."""
    writer.write(HEAD + b"".join(map(chunk, (delta("a"), delta("b"), delta("c"), usage(3), DONE))) + END)


async def refuse(writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 429 X\r\nRetry-After: 0\r\nContent-Length: 28\r\n\r\n{"error":{"message":"full"}}')


async def cut(writer: asyncio.StreamWriter) -> None:
    """Half a stream, then an orderly end of the connection."""
    writer.write(HEAD + chunk(delta("a")))
    writer.close()


async def reset(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(delta("a")))
    await writer.drain()
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    writer.close()


async def no_done(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(delta("a", finish_reason="stop")) + END)


async def half_closed(writer: asyncio.StreamWriter) -> None:
    """This side sends no more, but reads on: the connection is half open for as long as the client likes."""
    writer.write(HEAD + chunk(delta("a")))
    writer.write_eof()


async def hang(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(delta("a")))


class ScriptedServer:
    """Serves until the ``with`` block ends. Requests beyond the last script get the last one again."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = scripts
        self.bodies: list[dict[str, Any]] = []
        """Of the scripted requests."""
        self.headers: list[bytes] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._probed = False

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            lengths = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            body = json.loads(await reader.readexactly(lengths[0])) if lengths else {}
            if head.startswith(b"POST") and body.get("stream"):
                await self._script(head, body)(writer)
            else:
                found = {"data": [{"id": "scripted"}], "usage": {"prompt_tokens": 1}}
                writer.write(_json_response(200 if b"/v1/" in head.split(b"\r\n")[0] else 404, found))
        writer.close()

    def _script(self, head: bytes, body: dict[str, Any]) -> Script:
        if not self._probed:
            self._probed = True
            return answer
        self.bodies.append(body)
        self.headers.append(head)
        return self.scripts[min(len(self.bodies), len(self.scripts)) - 1]


def _json_response(status: int, value: Any) -> bytes:
    body = json.dumps(value).encode()
    return (
        f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
