"""The router's gRPC port. It answers the standard health service; clients' services join it here."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]

from rpc.connection import SERVER_OPTIONS
from rpc.servers import bind_port


class GatewayServer:
    """One gRPC port of one router. Needs a running loop from the first moment."""

    def __init__(self) -> None:
        self._server = grpc.aio.server(options=list(SERVER_OPTIONS))
        self._health = health_aio.HealthServicer()

    def bind(self, host: str, port: int) -> str:
        """Takes ``port`` (0: a free one) and returns ``host:port``. Raises ConfigError when it is taken."""
        return bind_port(self._server, host, port)

    async def start(self) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def stop(self, grace_s: float = 1.0) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
