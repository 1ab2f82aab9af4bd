"""Starts routers and workers as Ray actors, one in each bundle of a placement group.

The real `Launcher` behind the controller. Turns Ray's ways of saying that an actor is gone into
WorkerLostError, so that the controller needs no Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.controller import Endpoint, Process
from cluster.placement import Placement, Slot, worker_threads
from common.config import Config
from common.errors import DeadlineError, WorkerLostError, from_wire


class RayLauncher:
    """``worker_actor`` and ``router_actor`` are the actor classes; ``environment`` is for their processes."""

    def __init__(
        self, config: Config, placement: Placement, worker_actor: Any, router_actor: Any, environment: dict[str, str]
    ) -> None:
        self._config = config
        self._placement = placement
        self._worker_actor = worker_actor
        self._router_actor = router_actor
        self._environment = environment
        self._group: PlacementGroup | None = None
        self._threads: dict[str, int] = {}

    async def place(self, stop: asyncio.Event) -> bool:
        """Waits for the placement group; False when ``stop`` came first.

        Raises DeadlineError when the cluster's resources did not suffice within the start timeout.
        """
        bundles = list(self._placement.bundles)
        if not bundles:
            return True
        self._group = placement_group(bundles, strategy=self._config.cluster.placement_strategy)
        placed = asyncio.ensure_future(_value(self._group.ready()))
        stopped = asyncio.ensure_future(stop.wait())
        timeout_s = self._config.cluster.start_timeout_s
        await asyncio.wait((placed, stopped), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if placed.done():
            placed.result()
            self._threads = self._count_threads(self._group)
            return True
        placed.cancel()
        if stop.is_set():
            return False
        wanted = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in ("CPU", "GPU")}
        raise DeadlineError(
            f"no place for {len(bundles)} processes within {timeout_s:g} s: they need {wanted['CPU']:g} CPU and "
            f"{wanted['GPU']:g} GPU ({self._config.cluster.placement_strategy}), "
            f"free are {ray.available_resources().get('CPU', 0.0):g} and {ray.available_resources().get('GPU', 0.0):g}"
        )

    def start(self, slot: Slot, last: Endpoint | None, progress: Callable[[str], None]) -> Process:
        index = self._placement.slots.index(slot)
        bundle = self._placement.bundles[index]
        threads = self._threads.get(slot.id, 1)
        options: dict[str, Any] = {
            "num_cpus": bundle["CPU"],
            "num_gpus": slot.num_gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            # Before the process starts: OpenMP and MKL read their variables once, when torch loads.
            "runtime_env": {"env_vars": {**self._environment, "OMP_NUM_THREADS": str(threads)}},
        }
        if slot.kind == "router":
            tree = router_config(self._config, slot, last).model_dump(mode="json")
            return RayProcess(slot.id, self._router_actor.options(**options).remote(tree, slot.id), progress)
        assert slot.role is not None
        tree = worker_config(self._config, threads).model_dump(mode="json")
        actor = self._worker_actor.options(**options).remote(tree, slot.role.value, slot.id)
        return RayProcess(slot.id, actor, progress)

    def close(self) -> None:
        """Gives the bundles back."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _count_threads(self, group: PlacementGroup) -> dict[str, int]:
        node_of = placement_group_table(group)["bundles_to_node_id"]
        slots = self._placement.slots
        node_cpus = {node["NodeID"]: float(node["Resources"].get("CPU", 1.0)) for node in ray.nodes() if node["Alive"]}
        nodes = [node_of[index] for index in range(len(slots))]
        return worker_threads(slots, nodes, node_cpus, self._config.engine.threads)


class RayProcess:
    """One actor, as the controller sees a process."""

    def __init__(self, name: str, actor: Any, progress: Callable[[str], None]) -> None:
        self._name = name
        self._actor = actor
        self._progress = progress
        self._run = actor.run.remote()

    async def serving(self) -> Endpoint:
        seen = 0
        ended = asyncio.ensure_future(self.ended())
        asked: asyncio.Future[Any] | None = None
        try:
            while True:
                asked = asyncio.ensure_future(self._call(_value(self._actor.reports.remote(seen))))
                await asyncio.wait((asked, ended), return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    ended.result()
                    raise WorkerLostError(f"{self._name} ended before it served")
                for report in asked.result():
                    seen += 1
                    if report["kind"] == "progress":
                        self._progress(report["text"])
                    elif report["kind"] == "serving":
                        return Endpoint(**{key: text for key, text in report.items() if key != "kind"})
        finally:
            # Both fail when the actor dies; the one that nobody asked for its result is not news.
            waiting = [future for future in (asked, ended) if future is not None]
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def ended(self) -> None:
        failure = await self._call(_value(self._run))
        if failure is not None:
            raise from_wire(*failure)

    async def set_members(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        await self._call(_value(self._actor.set_members.remote(list(prefill), list(decode))))

    async def unready(self) -> str:
        return str(await self._call(_value(self._actor.unready.remote())))

    async def stop(self) -> None:
        await self._call(_value(self._actor.stop.remote()))

    def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)

    async def _call(self, answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except RayError as error:
            raise WorkerLostError(f"{self._name}: its process is gone ({first_line(error)})") from error


def router_config(config: Config, slot: Slot, last: Endpoint | None) -> Config:
    """One router's configuration: consecutive ports, and after a restart the ports it had before."""
    router = config.router
    ports = {
        "port": router.port and router.port + slot.index,
        "grpc_port": router.grpc_port and router.grpc_port + slot.index,
    }
    if last is not None:
        ports = {"port": _port(last.http_url), "grpc_port": _port(last.grpc_url)}
    return config.model_copy(update={"router": router.model_copy(update=ports)})


def worker_config(config: Config, threads: int) -> Config:
    """One worker's configuration: with the compute threads that are its share of the host."""
    return config.model_copy(update={"engine": config.engine.model_copy(update={"threads": threads})})


def first_line(error: BaseException) -> str:
    """What a Ray error says, without the page that follows."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")


def _port(url: str) -> int:
    return int(url.rsplit(":", 1)[1].strip("/"))


async def _value(ref: Any) -> Any:
    """A Ray reference as a coroutine: cancelling it leaves the actor's work alone."""
    return await asyncio.wrap_future(ref.future())
