"""The receiving end of the benchmark: a pool, a receiver, raw targets. In the peer, or in this process for transports
that stay within it.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Any, cast

import numpy as np
import xxhash

from bench.transfer import raw
from bench.transfer.cases import Case
from bench.transfer.raw_nixl import RawNixl
from common.config import TransferConfig
from common.errors import BatonError
from common.handoff import HandoffCommit, TransportOffer
from common.lifecycle import freeze_heap
from engine.kv_cache import KVCache, host_cache
from kv_transfer.blocking import run_inline
from kv_transfer.host import host_id
from kv_transfer.raw_group import Meeting, RawGroup
from kv_transfer.receiver import Receiver
from kv_transfer.transports.available import make_transports
from rpc import kv_channel
from rpc.raw_stream import RawStreamServer
from rpc.servers import KVService, WorkerServer

HOST = "127.0.0.1"


class Quiet:
    """An ArrivalListener; the sender hears the outcome anyway."""

    def progressed(self, ticket_id: str, num_bytes: int) -> None: ...

    def committed(self, commit: HandoffCommit) -> None: ...

    def failed(self, ticket_id: str, error: BatonError) -> None: ...


class ReceivingEnd:
    """One pool and one receiver at a time; `prepare` replaces them."""

    def __init__(self) -> None:
        self._server = WorkerServer()
        self._address = ""
        self._raw_grpc = RawStreamServer()
        self._receiver: Receiver | None = None
        self._case: Case | None = None
        self._pool: KVCache | None = None
        self._raw_socket: socket.socket | None = None
        self._ring: raw.SharedRing | None = None
        self._raw_group: RawGroup | None = None
        self._raw_nixl: RawNixl | None = None
        self.target: raw.Bytes = np.empty(0, dtype=np.uint8)

    async def start(self) -> str:
        """Returns the address of the raw gRPC stream."""
        self._address = self._server.bind(HOST, 0)
        # Nobody asks the worker itself.
        await self._server.start(cast(Any, None), kv=cast(KVService, self))
        return await self._raw_grpc.start(HOST)

    async def serve(self, channel: kv_channel.KVChannel) -> None:
        """A KVService: for whatever receiver there is."""
        assert self._receiver is not None
        await self._receiver.serve(channel)

    def join_ring(self, descriptor: int, sock: socket.socket) -> None:
        self._ring = raw.SharedRing(descriptor, sock)

    async def connect_raw(self, port: int) -> None:
        self._raw_socket = await asyncio.to_thread(socket.create_connection, (HOST, port))
        self._raw_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def join(self, kind: str, port: int) -> None:
        """Meets the other end of a raw link that is made when it is first wanted."""
        if kind == "gloo":
            self._raw_group = await asyncio.to_thread(lambda: RawGroup(Meeting(HOST, port), 1))
        else:
            assert self._raw_socket is not None
            self._raw_nixl = RawNixl(self._raw_socket)

    async def prepare(self, case: Case, *, verify: bool) -> tuple[TransportOffer, ...]:
        """A pool and a receiver for ``case``; returns the ways in."""
        if self._receiver is not None:
            await self._receiver.close()
        if self._case != case:
            self._case = case
            self._pool = host_cache(case.layout, case.blocks)
            self.target = np.zeros(case.num_bytes, dtype=np.uint8)
            self._raw_grpc.target = self.target.data
        assert self._pool is not None
        config = TransferConfig(transports=cast(Any, (case.transport,)), verify=verify)
        connect = partial(kv_channel.connect, secret=None)
        transports = make_transports(config, host_id(), self._address, connect)
        self._receiver = Receiver(self._pool, config, host_id(), transports, run_inline)
        await self._receiver.start()
        freeze_heap()  # as workers do
        return self._receiver.offers

    def expect(self, number: int) -> None:
        assert self._receiver is not None
        assert self._case is not None
        self._receiver.expect(self._case.ticket(number, ()), Quiet())

    async def forget(self, number: int) -> None:
        assert self._receiver is not None
        await self._receiver.forget(f"bench-{number}")

    async def receive_raw(self, kind: str) -> None:
        """One round of the raw link of this ``kind``."""
        if kind == "shm":
            assert self._ring is not None
            await asyncio.to_thread(self._ring.receive, self.target)
        elif kind == "tcp":
            assert self._raw_socket is not None
            await asyncio.to_thread(raw.receive_tcp, self._raw_socket, self.target)
        elif kind == "gloo":
            assert self._raw_group is not None
            await asyncio.to_thread(self._raw_group.receive, self.target)
        elif kind == "nixl":
            assert self._raw_nixl is not None
            await asyncio.to_thread(self._raw_nixl.receive, self.target)

    def digests(self) -> tuple[str, str]:
        """Of the pool's blocks in the ticket's order, and of the raw target."""
        assert self._case is not None
        assert self._pool is not None
        return pool_digest(self._pool, self._case.block_ids(1)), xxhash.xxh3_64_hexdigest(self.target.data)

    async def stop(self) -> None:
        if self._receiver is not None:
            await self._receiver.close()
        if self._raw_nixl is not None:
            self._raw_nixl.close()
        await self._server.stop(0)
        await self._raw_grpc.stop()


def pool_digest(pool: KVCache, block_ids: np.ndarray) -> str:
    """xxh3-64 of the blocks, layer by layer."""
    digest = xxhash.xxh3_64()
    whole = np.empty((min(len(block_ids), 256), pool.layout.block_layer_bytes), dtype=np.uint8)
    for layer in range(pool.layout.num_layers):
        for start in range(0, len(block_ids), len(whole)):
            ids = block_ids[start : start + len(whole)]
            pool.read_blocks(layer, ids, whole[: len(ids)])
            digest.update(whole[: len(ids)].data)
    return digest.hexdigest()
