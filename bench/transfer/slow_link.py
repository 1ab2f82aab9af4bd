"""A link that is as slow as one wants: a relay in front of a worker's address, with a token bucket.

    sender ──▶ this relay (reads no faster than it may pass on) ──▶ the worker
           ◀── answers, as fast as they come ─────────────────────

The sender finds its own socket full, as with a slow network. Knows bytes only: neither frames nor what they are for.
"""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Self

from common.lifecycle import Tasks

HOST = "127.0.0.1"
CHUNK_BYTES = 32 << 10
BUFFER_BYTES = 64 << 10
"""The kernel's and our own on either side: what they hold is on neither end of the link."""
BURST_S = 0.005
"""A late wake-up is made up for, up to so much."""


class SlowLink:
    """To ``target`` (host:port), as an async context. ``bytes_per_s``: None: as fast as it goes."""

    def __init__(self, target: str, bytes_per_s: float | None = None) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._tasks = Tasks()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._server: asyncio.Server | None = None
        self.num_bytes = 0
        """What has passed towards the target."""

    @property
    def address(self) -> str:
        """host:port, in place of the target's."""
        return f"{HOST}:{self._socket.getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._socket.bind((HOST, 0))
        self._server = await asyncio.start_server(self._join, sock=self._socket, limit=BUFFER_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cuts every connection."""
        assert self._server is not None
        self._server.close()
        await self._tasks.close()

    def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.spawn(self._relay(reader, writer), "slow link")

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either end closes it."""
        try:
            onward_reader, onward = await asyncio.open_connection(self._host, self._port, limit=BUFFER_BYTES)
        except OSError:  # the sender sees a connection that ends
            writer.close()
            return
        onward.transport.set_write_buffer_limits(high=BUFFER_BYTES)
        there = asyncio.ensure_future(self._pass_slowly(reader, onward))
        back = asyncio.ensure_future(_pass(onward_reader, writer))
        try:
            await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
        finally:
            there.cancel()
            back.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
            onward.close()
            writer.close()

    async def _pass_slowly(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._take_tokens(len(data))
            writer.write(data)
            self.num_bytes += len(data)
            await writer.drain()

    async def _take_tokens(self, num_bytes: int) -> None:
        """Returns when the link, which all connections share, has carried so many bytes."""
        if self._bytes_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - BURST_S) + num_bytes / self._bytes_per_s
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
