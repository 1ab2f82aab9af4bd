"""A server that does nothing but keep time: `python -m bench.load.null_server` prints its port and serves.

Every request gets its tokens one by one at an even pace; the usage at the end tells when each was written, by
a clock that all processes of a machine share. That is what the load generator is measured against, so this
speaks as little HTTP as it can. Ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ROLE = '{"id":"0","object":"chat.completion.chunk","created":0,"model":"null","choices":[{"index":0,"delta":{'
TOKEN = f'{ROLE}"content":" word"}},"logprobs":null,"finish_reason":null}}],"usage":null}}'.encode()


def event(data: bytes) -> bytes:
    """One event as one chunk of the response's body."""
    body = b"data: " + data + b"\n\n"
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace_s: float) -> None:
    """Requests, one after another, until the client leaves."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
            )
            body = await reader.readexactly(length)
            if head.startswith(b"POST") and (asked := json.loads(body)).get("stream"):
                await _stream(writer, asked["max_tokens"], pace_s)
            else:
                answer = b'{"data":[{"id":"null"}],"count":1,"usage":{"prompt_tokens":1,"completion_tokens":1}}'
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n".encode() + answer)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _stream(writer: asyncio.StreamWriter, num_tokens: int, pace_s: float) -> None:
    writer.write(HEAD)
    start_s, sent_s, token = time.perf_counter(), [], event(TOKEN)
    for number in range(num_tokens):
        await asyncio.sleep(start_s + number * pace_s - time.perf_counter())
        sent_s.append(time.perf_counter())
        writer.write(token)
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": num_tokens, "sent_s": sent_s}}
    writer.write(event(json.dumps(usage).encode()) + event(b"[DONE]") + b"0\r\n\r\n")


async def _main(pace_s: float) -> None:
    server = await asyncio.start_server(lambda r, w: serve_connection(r, w, pace_s), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(_main(float(sys.argv[1])))
