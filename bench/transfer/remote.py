"""The receiving end as the measuring process sees it: in a process of its own (`Remote`) or here (`Within`)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from bench.transfer import raw
from bench.transfer.cases import Case
from bench.transfer.ends import HOST, ReceivingEnd
from bench.transfer.raw_nixl import RawNixl
from common.errors import BatonError
from common.handoff import TransportOffer
from kv_transfer.raw_group import Meeting, RawGroup
from rpc.raw_stream import RawStream

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0


class Peer(Protocol):
    async def prepare(self, case: Case, *, verify: bool) -> tuple[TransportOffer, ...]: ...

    async def expect(self, number: int) -> None: ...

    async def forget(self, number: int) -> None: ...

    async def raw_ready(self, transport: str) -> None:
        """The next `send_raw` will be received."""
        ...

    async def send_raw(self, transport: str, source: raw.Bytes) -> None:
        """One round of the link without Baton; returns when all is there."""
        ...

    async def digests(self) -> tuple[str, str]:
        """What lies in the pool, and in the raw target."""
        ...


RAW_OF = {"shm": "shm", "tcp": "tcp", "gloo": "gloo", "nixl": "nixl", "grpc": "grpc", "local": "local"}
"""Transport → the link that it is compared with."""


class Remote:
    """A spawned process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ring: raw.SharedRing | None = None
        self._raw_socket: socket.socket | None = None
        self._raw_stream: RawStream | None = None
        self._raw_group: RawGroup | None = None
        self._raw_nixl: RawNixl | None = None

    async def begin(self, descriptor: int, sock: socket.socket, listener: socket.socket) -> None:
        self._ring = raw.SharedRing(descriptor, sock)
        async with asyncio.timeout(START_TIMEOUT_S):
            self._raw_socket, _ = await asyncio.get_running_loop().sock_accept(listener)
            self._raw_stream = RawStream((await self._answer())["raw_grpc"])
        self._raw_socket.setblocking(True)
        self._raw_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def prepare(self, case: Case, *, verify: bool) -> tuple[TransportOffer, ...]:
        answer = await self._order(do="prepare", case=dataclasses.astuple(case), verify=verify)
        return tuple(TransportOffer(*offer) for offer in answer["offers"])

    async def expect(self, number: int) -> None:
        await self._order(do="expect", number=number)

    async def forget(self, number: int) -> None:
        await self._order(do="forget", number=number)

    async def raw_ready(self, transport: str) -> None:
        kind = RAW_OF[transport]
        if kind == "gloo" and self._raw_group is None:
            meeting = Meeting(HOST)
            await self._order(do="join", kind=kind, port=meeting.port)
            self._raw_group = await asyncio.to_thread(RawGroup, meeting, 0)
        if kind == "nixl" and self._raw_nixl is None:
            assert self._raw_socket is not None
            await self._order(do="join", kind=kind, port=0)
            self._raw_nixl = RawNixl(self._raw_socket)
        await self._order(do="raw", kind=kind)

    async def send_raw(self, transport: str, source: raw.Bytes) -> None:
        match RAW_OF[transport]:
            case "gloo":
                assert self._raw_group is not None
                await asyncio.to_thread(self._raw_group.send, source)
            case "nixl":
                assert self._raw_nixl is not None
                await asyncio.to_thread(self._raw_nixl.send, source)
            case "shm":
                assert self._ring is not None
                await asyncio.to_thread(self._ring.send, source)
            case "tcp":
                assert self._raw_socket is not None
                await asyncio.to_thread(raw.send_tcp, self._raw_socket, source)
            case "grpc":
                assert self._raw_stream is not None
                await self._raw_stream.send(source.data)

    async def digests(self) -> tuple[str, str]:
        pool, target = (await self._order(do="digests"))["digests"]
        return pool, target

    async def close(self) -> None:
        if self._raw_stream is not None:
            await self._raw_stream.close()
        if self._raw_nixl is not None:
            self._raw_nixl.close()
        if self._raw_socket is not None:
            self._raw_socket.close()

    async def lost(self) -> BatonError:
        """Waits until the process has ended, and says so."""
        return BatonError(f"the benchmark's peer process ended (exit code {await self._process.wait()})")

    async def _order(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await self._answer()

    async def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise await self.lost()
        return json.loads(line)


class Within:
    """In this process, for transports that need it."""

    def __init__(self, end: ReceivingEnd) -> None:
        self._end = end

    async def prepare(self, case: Case, *, verify: bool) -> tuple[TransportOffer, ...]:
        return await self._end.prepare(case, verify=verify)

    async def expect(self, number: int) -> None:
        self._end.expect(number)

    async def forget(self, number: int) -> None:
        await self._end.forget(number)

    async def raw_ready(self, transport: str) -> None:
        pass

    async def send_raw(self, transport: str, source: raw.Bytes) -> None:
        np.copyto(self._end.target, source)

    async def digests(self) -> tuple[str, str]:
        return self._end.digests()


class Peers(NamedTuple):
    remote: Remote
    within: Within


@asynccontextmanager
async def peers() -> AsyncIterator[Peers]:
    """Both places where the receiving end can be."""
    ours, theirs = socket.socketpair()
    descriptor = os.memfd_create("baton-bench-ring", os.MFD_CLOEXEC)
    with socket.create_server(("127.0.0.1", 0)) as listener, ours, theirs:
        listener.setblocking(False)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bench.transfer.peer",
            *map(str, (descriptor, theirs.fileno(), listener.getsockname()[1])),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(descriptor, theirs.fileno()),
            cwd=Path(__file__).parents[2],
            start_new_session=True,  # Ctrl-C is for this process; the peer ends with its input
        )
        theirs.close()  # so that the ring ends when the peer does
        remote, stack = Remote(process), AsyncExitStack()
        try:
            await remote.begin(descriptor, ours, listener)
            within = ReceivingEnd()
            await within.start()
            stack.push_async_callback(within.stop)
            yield Peers(remote, Within(within))
        finally:
            await stack.aclose()
            await remote.close()
            os.close(descriptor)
            if process.stdin is not None:
                process.stdin.close()
            try:
                async with asyncio.timeout(5):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
