"""gRPC's health service for a server whose health has to be found out: asked, it looks.

`Watch` looks again from time to time while somebody watches; nothing happens while nobody asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

HealthStatus = health_pb2.HealthCheckResponse


class ReadinessHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """One answer for all ``services`` and for the server as a whole (``""``)."""

    def __init__(self, is_ready: Callable[[], Awaitable[bool]], services: Collection[str], interval_s: float) -> None:
        self._is_ready = is_ready
        self._services = {"", *services}
        self._interval_s = interval_s
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """Not serving from now on, whatever the server can still do. Whoever watches hears it at once."""
        self._leaving.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        return HealthStatus(status=await self._status())

    async def List(self, request: Any, context: Any) -> Any:
        answer = HealthStatus(status=await self._status())
        return health_pb2.HealthListResponse(statuses=dict.fromkeys(sorted(self._services), answer))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        known = request.service in self._services
        told: int | None = None
        while True:
            leaving = self._leaving.is_set()
            status = await self._status() if known else HealthStatus.SERVICE_UNKNOWN
            if status != told:
                await context.write(HealthStatus(status=status))
                told = status
            if leaving:
                return
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._leaving.wait()
            except TimeoutError:
                pass

    async def _status(self) -> Any:
        ready = not self._leaving.is_set() and await self._is_ready()
        return HealthStatus.SERVING if ready else HealthStatus.NOT_SERVING
