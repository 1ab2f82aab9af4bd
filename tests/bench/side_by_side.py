"""The load generator beside an independent client, OpenAI's own, that times its streams itself.

Both measure the *same* streams: a relay between them and the server waits for a request from each, sends one of
the two on, and copies what comes back to both, byte for byte as it comes. So what the server and the rest of the
machine do hits both alike, and what differs is how they measure.
`python -m tests.bench.side_by_side URL REQUESTS` prints the figures of both.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

import httpx
from openai import AsyncOpenAI

from bench.load.figures import MS, Targets, load_figures
from bench.load.session import LoadOptions, load, look
from bench.load.stream import StreamRecord
from bench.load.workload import Planned, bounded, synthetic

PROMPT_TOKENS = 100
OUTPUT_TOKENS = 32
COMPARED = [(key, kind) for key in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms") for kind in ("mean", "p50")]


class Relay:
    """Two ports, one answer: each pair of requests, one on each port, becomes one request to ``upstream``.

    What goes on is the request on the first port. One request per connection.
    """

    def __init__(self, upstream: httpx.URL) -> None:
        self._upstream = upstream
        self._second: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        self._servers: list[asyncio.Server] = []
        self._passing: dict[asyncio.Task[None], None] = {}  # the loop itself does not keep them alive
        self.urls: list[str] = []

    async def __aenter__(self) -> Relay:
        for handle in (self._begin, self._wait):
            server = await asyncio.start_server(handle, "127.0.0.1", 0)
            self._servers.append(server)
            self.urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        await asyncio.gather(*self._passing)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._passing[asyncio.ensure_future(self._pass_on(reader, writer))] = None

    async def _wait(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _read_request(reader)
        await self._second.put(writer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):  # a client that only connects
            request = await _read_request(reader)
            both = (writer, await self._second.get())
            server_reader, server_writer = await asyncio.open_connection(self._upstream.host, self._upstream.port)
            server_writer.write(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            while data := await server_reader.read(65536):
                for client in both:
                    client.write(data)
            for end in (*both, server_writer):
                end.close()


async def _read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return head + await reader.readexactly(length)


@dataclass
class Timed:
    """What OpenAI's client saw: one entry per stream, but the gaps of all streams together."""

    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    e2e_ms: list[float] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True)
class Pair:
    """One figure by both."""

    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def side_by_side(url: str, num_requests: int) -> dict[str, Pair]:
    """The figures of both over ``num_requests`` requests, one after another."""
    return asyncio.run(_side_by_side(url, num_requests))


async def _side_by_side(url: str, num_requests: int) -> dict[str, Pair]:
    options = LoadOptions(url, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS, warmup=0)
    target, writer = await look(options)
    records: list[StreamRecord] = []
    timed = Timed()
    async with Relay(target.url) as relay:
        ours = replace(target, url=httpx.URL(relay.urls[0]))
        async with AsyncOpenAI(base_url=f"{relay.urls[1]}/v1", api_key="none", max_retries=0) as client:
            # The first pays for what both do only once.
            for number, plan in enumerate(_one_by_one(num_requests + 1)):
                seen = timed if number else Timed()
                result, _ = await asyncio.gather(load(options, plan, ours, writer), _ask(client, target.model, seen))
                records += result.records if number else []
    figures = load_figures(records, records[0].intended_s, Targets())
    assert figures["ok"] == num_requests, figures
    assert figures["output_tokens"]["total"] == timed.tokens
    means = {"mean": statistics.fmean, "p50": statistics.median}
    return {f"{key} {kind}": Pair(figures[key][kind], means[kind](getattr(timed, key))) for key, kind in COMPARED}


def _one_by_one(count: int) -> Iterator[Iterator[Planned]]:
    plan = bounded(synthetic(PROMPT_TOKENS, OUTPUT_TOKENS, time.time_ns()), count, None)
    return (iter([planned]) for planned in plan)


async def _ask(client: AsyncOpenAI, model: str, timed: Timed) -> None:
    """One streamed answer. What is asked does not matter: the other request goes on."""
    start, times, tokens = time.perf_counter(), list[float](), 0
    stream = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "the same"}], stream=True
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(time.perf_counter())
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
    timed.e2e_ms.append((time.perf_counter() - start) * MS)
    timed.ttft_ms.append((times[0] - start) * MS)
    timed.itl_ms += [(late - early) * MS for early, late in pairwise(times)]
    timed.tpot_ms.append((times[-1] - times[0]) / (tokens - 1) * MS)
    timed.tokens += tokens


if __name__ == "__main__":
    pairs = side_by_side(sys.argv[1], int(sys.argv[2]))
    lines = {key: {"ours": pair.ours, "openai": pair.theirs, "ratio": pair.ratio} for key, pair in pairs.items()}
    sys.stdout.write(json.dumps(lines, indent=1) + "\n")
