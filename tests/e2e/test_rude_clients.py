"""300 streams whose clients read as they like: slowly, not at all, half-closed, gone with a reset. Those who
read as they should do not notice, the router's memory stays bounded, and nothing remains.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil
import pytest

from tests.e2e.asking import random_text_ids
from tests.e2e.fleet import Fleet

NUM_STREAMS = 300
CONCURRENCY = 48
MAX_TOKENS = 10
POLITE_SHARE = 0.3
MEMORY_BYTES = 64 << 20
MARGIN_S = 2.0
"""What a busy machine may add to a gap between two tokens."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def running(shared_fleet: Fleet) -> Fleet:
    return shared_fleet


@dataclass
class Told:
    """What a client read, and the longest it waited between two reads (the first one waits its turn)."""

    data: bytes = b""
    longest_gap_s: float = 0.0
    last_at: float = float("inf")

    def read(self, data: bytes) -> None:
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self.last_at)
        self.last_at = now
        self.data += data

    @property
    def num_tokens(self) -> int:
        events = [line[6:] for line in self.data.split(b"\n") if line.startswith(b"data: {")]
        return sum(len(choice["token_ids"]) for event in events for choice in json.loads(event)["choices"])

    @property
    def complete(self) -> bool:
        return b"data: [DONE]" in self.data


class Client:
    """One connection with a receive buffer so small that what is not read stays with the router."""

    def __init__(self, url: str, model: str, number: int) -> None:
        self._address = urlsplit(url)
        body = json.dumps(
            {
                "model": model,
                "prompt": list(random_text_ids(number, 8 + number % 40)),
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": True,
            }
        )
        self._request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: baton\r\nConnection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        ).encode()
        self._socket = socket.socket()
        self.told = Told()

    async def __aenter__(self) -> Client:
        loop = asyncio.get_running_loop()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self._socket.setblocking(False)
        await loop.sock_connect(self._socket, (self._address.hostname, self._address.port))
        await loop.sock_sendall(self._socket, self._request)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()

    async def read(self, size: int = 65536) -> bool:
        """Reads once; False at the end of the stream."""
        data = await asyncio.get_running_loop().sock_recv(self._socket, size)
        self.told.read(data)
        return bool(data)

    async def read_all(self) -> None:
        while await self.read():
            pass

    def half_close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


async def behave(client: Client, manner: str, rng: random.Random) -> None:
    match manner:
        case "polite":
            await client.read_all()
        case "slow":
            while await client.read(rng.randint(20, 200)):  # noqa: ASYNC110 - it is slow
                await asyncio.sleep(0.02)
        case "deaf":  # keeps the connection, reads nothing, goes
            await asyncio.sleep(rng.uniform(0.5, 3.0))
        case "half-closed":
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            client.half_close()
            await client.read_all()
        case "reset":
            for _ in range(rng.randint(0, 6)):
                await client.read(200)
            client.reset()
        case "leaves":
            await asyncio.sleep(rng.uniform(0.0, 0.6))


async def visit_all(running: Fleet, num_streams: int, polite_share: float) -> dict[str, list[Told]]:
    """Manner → what those clients read."""
    rng = random.Random(num_streams)
    rude = ("slow", "deaf", "half-closed", "reset", "leaves")
    gate = asyncio.Semaphore(CONCURRENCY)
    told: dict[str, list[Told]] = {manner: [] for manner in ("polite", *rude)}

    async def one(number: int, manner: str) -> None:
        async with gate, Client(running.url, running.model, number) as client:
            await behave(client, manner, random.Random(number))
            told[manner].append(client.told)

    manners = ["polite" if rng.random() < polite_share else rng.choice(rude) for _ in range(num_streams)]
    await asyncio.gather(*(one(number, manner) for number, manner in enumerate(manners)))
    return told


def test_rude_clients_harm_nobody(running: Fleet) -> None:
    assert running.router is not None
    router = psutil.Process(running.router.popen.pid)
    before_fds, before_bytes = router.num_fds(), router.memory_info().rss
    among_polite = asyncio.run(visit_all(running, 2 * CONCURRENCY, 1.0))
    told = asyncio.run(visit_all(running, NUM_STREAMS, POLITE_SHARE))
    assert all(len(clients) > 20 for clients in told.values())
    for client in told["polite"] + told["slow"]:
        assert client.complete
        assert client.num_tokens == MAX_TOKENS
    usual_s = max(client.longest_gap_s for client in among_polite["polite"])
    for client in told["polite"]:
        assert client.longest_gap_s < 2 * usual_s + MARGIN_S
    for client in told["half-closed"]:
        # A client that has said all may be taken for one that is gone, but never get half an answer for a whole.
        assert not client.complete or client.num_tokens == MAX_TOKENS
    running.quiet()
    assert router.memory_info().rss - before_bytes < MEMORY_BYTES
    deadline = time.monotonic() + 10
    while router.num_fds() > before_fds + 2:
        assert time.monotonic() < deadline, "connections are left"
        time.sleep(0.1)
