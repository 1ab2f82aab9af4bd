"""Baton's Ray actors: each supervises what runs in its own event loop. Control only, plain values only.

    ControllerActor   the controller; makes the placement group and all other actors, so it may itself be
                      a detached actor on a node without a GPU
    RouterActor       one router (`cluster/router_process.py`)
    WorkerActor       one prefill or decode worker (`cluster/worker_process.py`)

All three live alike: `run` does the work and returns how it ended, `reports` tells what is new, `stop`
asks for the end. An actor never restarts by itself: the controller decides that.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable
from typing import Any

import ray

from cluster.controller import Controller
from cluster.placement import plan_placement
from cluster.ray_launcher import RayLauncher
from cluster.reports import Failure, Report, Reports, outcome
from common.config import Config, parse_config
from common.log import setup_logging
from common.workers import Role

READY_TIMEOUT_S = 15.0


class _Supervised(abc.ABC):
    """The common life of the three. Subclasses say what `_work` is."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self._name = name
        self._config: Config = parse_config(config)
        self._reports = Reports()
        self._stop = asyncio.Event()
        setup_logging(self._config.log, name)

    def __repr__(self) -> str:
        return self._name  # what Ray puts in front of log lines

    async def run(self) -> Failure | None:
        """Does the work until it ends or `stop` is called; (code, message, param) when it failed."""
        return await outcome(self._work())

    async def reports(self, seen: int) -> list[Report]:
        """Reports from number ``seen`` on; waits a while for the next one."""
        return await self._reports.after(seen)

    async def stop(self) -> None:
        self._stop.set()

    @abc.abstractmethod
    async def _work(self) -> None:
        """What it is for; ends when `_stop` is set."""


@ray.remote(num_cpus=0, max_restarts=0)
class WorkerActor(_Supervised):
    """One worker. Its process is this actor's: the event loop here, torch on its own thread."""

    def __init__(self, config: dict[str, Any], role: str, worker_id: str) -> None:
        super().__init__(worker_id, config)
        self._role = Role(role)

    async def _work(self) -> None:
        from engine.numerics import prepare_environment

        if (warning := prepare_environment()) is not None:
            self._reports.progress(warning)
        from cluster.worker_process import run_worker  # torch: after that, and in no other process

        await run_worker(
            self._config,
            self._role,
            self._name,
            lambda address: self._reports.add("serving", address=address),
            self._stop,
            self._reports.progress,
        )


@ray.remote(num_cpus=0, max_restarts=0)
class RouterActor(_Supervised):
    """One router. It starts without workers and is told of them by `set_members`."""

    def __init__(self, config: dict[str, Any], router_id: str) -> None:
        super().__init__(router_id, config)
        self._http_url = ""
        self._set_members: Callable[[list[str], list[str]], None] | None = None

    async def _work(self) -> None:
        from cluster.router_process import run_router

        await run_router(self._config, self._name, [], [], self._serving, self._stop, self._reports.progress)

    async def set_members(self, prefill: list[str], decode: list[str]) -> None:
        if self._set_members is not None:
            self._set_members(prefill, decode)

    async def unready(self) -> str:
        """Why `/ready` says no; empty when it says yes."""
        import httpx

        try:
            async with httpx.AsyncClient(timeout=READY_TIMEOUT_S, trust_env=False) as client:
                response = await client.get(f"{_reachable(self._http_url)}/ready")
        except httpx.HTTPError as error:
            return f"/ready does not answer ({type(error).__name__})"
        if response.status_code == httpx.codes.OK:
            return ""
        return "; ".join(response.json().get("reasons", [f"/ready answered {response.status_code}"]))

    def _serving(self, http_url: str, grpc_url: str, set_members: Callable[[list[str], list[str]], None]) -> None:
        self._http_url, self._set_members = http_url, set_members
        self._reports.add("serving", http_url=http_url, grpc_url=grpc_url)


@ray.remote(num_cpus=0, max_restarts=0)
class ControllerActor(_Supervised):
    """The controller. ``environment`` goes to every process that it starts."""

    def __init__(self, config: dict[str, Any], environment: dict[str, str]) -> None:
        super().__init__("controller", config)
        self._environment = environment

    async def _work(self) -> None:
        resources = ray.cluster_resources()
        placement = plan_placement(self._config, resources.get("CPU", 0.0), resources.get("GPU", 0.0))
        launcher = RayLauncher(self._config, placement, WorkerActor, RouterActor, self._environment)
        controller = Controller(
            self._config.cluster,
            placement,
            launcher,
            progress=self._reports.progress,
            ready=lambda routers: self._reports.add("ready", routers=[[r.http_url, r.grpc_url] for r in routers]),
            fixed=(self._config.prefill.addresses, self._config.decode.addresses),
        )
        try:
            if not await launcher.place(self._stop):
                return
            await controller.run(self._stop)
        finally:
            launcher.close()


def _reachable(url: str) -> str:
    """An address that a client on this host can connect to: a wildcard only listens."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
