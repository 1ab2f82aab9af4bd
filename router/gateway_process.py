"""A router with everything it needs: tokenizer, gRPC clients to the workers, HTTP and gRPC ports.

The composition root of the router: the one place of this package that makes clients and servers of `rpc`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from common.config import Config
from common.lifecycle import freeze_heap
from common.model_store import resolve
from common.sampling_defaults import sampling_defaults
from router.gateway import Gateway
from router.generation import GatewayGeneration
from router.process import RunningRouter, run_router
from router.tokenizer import Tokenizer
from rpc.clients import GrpcDecodeClient, GrpcPrefillClient
from rpc.gateway import GatewayServer


@dataclass(frozen=True, slots=True)
class GrpcClients:
    """Makes gRPC clients; ``secret`` is the cluster's."""

    secret: str | None

    def prefill(self, address: str) -> GrpcPrefillClient:
        return GrpcPrefillClient(address, secret=self.secret)

    def decode(self, address: str) -> GrpcDecodeClient:
        return GrpcDecodeClient(address, secret=self.secret)


@dataclass(frozen=True, slots=True)
class GrpcInterface:
    """The clients' gRPC port."""

    server: GatewayServer

    async def start(self, gateway: Gateway) -> None:
        await self.server.start(GatewayGeneration(gateway))

    async def stop(self, grace_s: float) -> None:
        await self.server.stop(grace_s)


async def run_gateway(
    config: Config,
    router_id: str,
    ready: Callable[[RunningRouter, str], None],
    stop: asyncio.Event,
    progress: Callable[[str], None],
) -> None:
    """Serves until ``stop``. ``ready`` gets the running router and its gRPC URL.

    Raises ConfigError when a port is taken or the model's tokenizer cannot be read.
    """
    loop = asyncio.get_running_loop()

    def tell(text: str) -> None:
        loop.call_soon_threadsafe(progress, text)

    def serves(running: RunningRouter) -> None:
        freeze_heap()
        ready(running, f"grpc://{address}")

    server = GatewayServer()
    address = server.bind(config.router.host, config.router.grpc_port)
    path = await asyncio.to_thread(resolve, config.model.name, config.model.cache_dir, True, tell)
    tokenizer = await asyncio.to_thread(Tokenizer.load, path)
    await run_router(
        config,
        GrpcClients(config.cluster.secret),
        tokenizer,
        stop=stop,
        router_id=router_id,
        sampling=sampling_defaults(config.model, path),
        beside=[GrpcInterface(server)],
        grpc_url=f"grpc://{address}",
        on_ready=serves,
    )
