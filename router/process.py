"""A router's process: the service, its HTTP server, other interfaces beside it, and an orderly end.

The composition root hands in the clients, the tokenizer and the interfaces; this module knows neither gRPC
nor Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import uvicorn

from common.config import Config
from common.errors import ConfigError
from common.lifecycle import Tasks, first_of
from common.log import content_log
from common.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from router.app import create_app
from router.gateway import Gateway
from router.readiness import Readiness
from router.service import RouterService
from router.text_answer import Tokenizer
from router.worker_link import ClientFactory

log = logging.getLogger(__name__)

GRACE_S = 3.0
"""On the way out, streams get this long to end by themselves."""

SHUTDOWN_TIMEOUT_S = 5
"""Connections that are still open then are closed: after the streams were told why they end."""


LAST_WORDS_S = 1.0
"""What has ended by then may still be telling its client so."""


class Interface(Protocol):
    """Another way in to the same gateway."""

    async def start(self, gateway: Gateway) -> None: ...

    async def stop(self, grace_s: float) -> None:
        """Takes nothing new; what is under way gets ``grace_s`` to end. Harmless when stopped."""
        ...


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """``url`` is where it is reached; ``set_members`` replaces the workers' addresses."""

    router_id: str
    url: str
    service: RouterService

    def set_members(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self.service.registry.set_members(prefill, decode)


async def run_router(
    config: Config,
    clients: ClientFactory,
    tokenizer: Tokenizer,
    *,
    stop: asyncio.Event,
    router_id: str = "router-0",
    rng: random.Random | None = None,
    sampling: SamplingDefaults = OPENAI_DEFAULTS,
    beside: Sequence[Interface] = (),
    grpc_url: str = "",
    on_ready: Callable[[RunningRouter], None] | None = None,
) -> None:
    """Serves until ``stop`` is set, then ends what is under way and returns.

    ``beside``: interfaces that come and go with HTTP. ``on_ready`` is called once connections are accepted
    (workers may still be on their way: ask ``/ready``). Members are ``prefill.addresses`` and
    ``decode.addresses`` until somebody sets others. Raises ConfigError when the port is taken.
    """
    listener = _listen(config.router.host, config.router.port)
    url = _url(config.router.host, listener.getsockname()[1])
    service = RouterService(
        config.router,
        clients,
        router_id=router_id,
        rng=rng if rng is not None else random.Random(random.SystemRandom().getrandbits(128)),
        mode=config.mode,
        chunk_tokens=config.prefill.chunk_tokens,
        suspect_after_s=config.worker.suspect_after_s,
    )
    readiness = Readiness(service, config.router.probe_timeout_s)
    name = config.model.served_name or config.model.name
    content = content_log(config.log)
    gateway = Gateway(
        service, tokenizer, readiness, config.router, name, url, grpc_url, sampling=sampling, content=content
    )

    server = _Server(
        uvicorn.Config(
            create_app(gateway),
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        )
    )
    service.registry.set_members(config.prefill.addresses, config.decode.addresses)
    tasks = Tasks()
    try:
        serving = tasks.spawn(server.serve(sockets=[listener]), "http server")
        stopping = tasks.spawn(stop.wait(), "stop signal")
        await first_of(server.up.wait(), asyncio.shield(serving))
        for interface in beside:
            await interface.start(gateway)
        if on_ready is not None:
            on_ready(RunningRouter(router_id, url, service))
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        log.info("%s stops", router_id)
        server.should_exit = True  # no new connections
        stops = [interface.stop(GRACE_S + LAST_WORDS_S) for interface in beside]
        await asyncio.gather(service.close(GRACE_S), *stops)
        await serving
    finally:
        server.should_exit = True
        for interface in beside:
            await interface.stop(0.0)
        await readiness.close()
        await service.close()
        await tasks.close()
        listener.close()


class _Server(uvicorn.Server):
    """Says when it serves; signals are the process's business."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on router.host {host}, router.port {port}: {error.strerror}") from error
    return listener


def _url(host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
