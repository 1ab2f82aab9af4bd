"""The router's gRPC port for clients: `baton.v1.Generation`, gRPC's health service, and reflection.

Its limits are those of every connection (`rpc/connection.py`): messages of 64 MiB, both ways; gRPC itself
refuses larger ones with RESOURCE_EXHAUSTED, limit and size.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rpc.connection import SERVER_OPTIONS
from rpc.generation import GenerationServicer
from rpc.generation_service import GenerationService
from rpc.health import ReadinessHealth
from rpc.malformed import RefusesMalformed
from rpc.rich_status import abort_richly
from rpc.servers import bind_port
from rpc.v1 import generation_pb2 as pb
from rpc.v1 import generation_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name


class GatewayServer:
    """One gRPC port of one router. Needs a running loop from the first moment; nobody is answered before
    `start`. ``watch_interval_s``: how often health is looked at while somebody watches it.
    """

    def __init__(self, watch_interval_s: float = 2.0) -> None:
        self._watch_interval_s = watch_interval_s
        self._server = grpc.aio.server(interceptors=[RefusesMalformed(abort_richly)], options=list(SERVER_OPTIONS))
        self._health: ReadinessHealth | None = None

    def bind(self, host: str, port: int) -> str:
        """Takes ``port`` (0: a free one) and returns ``host:port``. Raises ConfigError when it is taken."""
        return bind_port(self._server, host, port)

    async def start(self, service: GenerationService) -> None:
        self._health = ReadinessHealth(service.is_ready, [SERVICE], self._watch_interval_s)
        pb_grpc.add_GenerationServicer_to_server(GenerationServicer(service), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection((SERVICE, health, reflection.SERVICE_NAME), self._server)
        await self._server.start()

    async def stop(self, grace_s: float = 1.0) -> None:
        """Takes no new calls, and cancels what has not ended within ``grace_s``. Harmless when stopped."""
        if self._health is not None:
            self._health.leave()
        await self._server.stop(grace_s)
