"""The server that offers a worker's services (`rpc/services.py`) on one port, with gRPC's health service.

The order of a worker's start: `WorkerServer()`, `bind` (now its address is known and can be put into
descriptions and tickets), `start`. At the end the worker ends its own streams first, then `stop`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]

from common.errors import ConfigError
from rpc.connection import SERVER_OPTIONS, SecretInterceptor
from rpc.kv_channel import KVService, KVServicer
from rpc.malformed import RefusesMalformed
from rpc.servicers import DecodeServicer, PrefillServicer, WorkerServicer
from rpc.services import DecodeService, PrefillService, WorkerService
from rpc.status import abort
from rpc.v1 import worker_pb2 as pb
from rpc.v1 import worker_pb2_grpc as pb_grpc

__all__ = ["DecodeService", "KVService", "PrefillService", "WorkerServer", "WorkerService", "bind_port"]


class WorkerServer:
    """One port of one worker. Needs a running loop from the first moment.

    ``secret``: calls without it are refused with UNAUTHENTICATED; None takes everybody.
    """

    def __init__(self, *, secret: str | None = None) -> None:
        self._interceptors = [*([] if secret is None else [SecretInterceptor(secret)]), RefusesMalformed(abort)]
        self._server: grpc.aio.Server | None = None
        self._health = health_aio.HealthServicer()
        self._served: list[str] = [""]
        self.address = ""

    def bind(self, host: str, port: int) -> str:
        """Takes ``port`` (0: a free one) and returns ``host:port``. Nobody is answered before `start`.

        Raises ConfigError when the port is taken or the host is none of this machine's.
        """
        check_port(host, port)  # before there is a server that would have to be stopped
        self._server = grpc.aio.server(interceptors=self._interceptors, options=list(SERVER_OPTIONS))
        self.address = bind_port(self._server, host, port)
        return self.address

    async def start(
        self,
        worker: WorkerService,
        *,
        prefill: PrefillService | None = None,
        decode: DecodeService | None = None,
        kv: KVService | None = None,
    ) -> None:
        """Serves; which of the optional services there are depends on the worker's role. After `bind`."""
        if self._server is None:
            raise RuntimeError("WorkerServer.start comes after bind")
        services = pb.DESCRIPTOR.services_by_name
        pb_grpc.add_WorkerServicer_to_server(WorkerServicer(worker), self._server)
        self._served.append(services["Worker"].full_name)
        if prefill is not None:
            pb_grpc.add_PrefillServicer_to_server(PrefillServicer(prefill), self._server)
            self._served.append(services["Prefill"].full_name)
        if decode is not None:
            pb_grpc.add_DecodeServicer_to_server(DecodeServicer(decode), self._server)
            self._served.append(services["Decode"].full_name)
        if kv is not None:
            KVServicer(kv).add_to(self._server)
            self._served.append(services["KV"].full_name)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self.set_serving(True)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers from now on; a worker that hangs or drains is not serving."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._served:
            await self._health.set(name, status)

    async def follow(self, is_ready: Callable[[], bool], every_s: float) -> NoReturn:
        """Keeps the health service's answer true; looks every ``every_s``."""
        serving = True
        while True:
            if is_ready() is not serving:
                serving = not serving
                await self.set_serving(serving)
            await asyncio.sleep(every_s)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Takes no new calls, and cancels what has not ended within ``grace_s``. Harmless when stopped."""
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(grace_s)


def bind_port(server: grpc.aio.Server, host: str, port: int) -> str:
    """Takes ``port`` (0: a free one) for ``server`` and returns ``host:port``.

    Raises ConfigError when the port is taken or the host is none of this machine's.
    """
    check_port(host, port)
    place = _join(host, port)
    try:
        bound = server.add_insecure_port(place)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {place}: {error}") from error
    return _join(host, bound)


def check_port(host: str, port: int) -> None:
    """Raises ConfigError when ``port`` cannot be had on every address of ``host``.

    gRPC alone is content with one of several (``localhost`` is two), gives no reason, and logs at length.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {_join(host, port)}: {error.strerror}") from error


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
