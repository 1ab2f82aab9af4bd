"""What runs in the cluster and what each process asks of Ray: slots, bundles, threads. Pure.

A *slot* is a place for one process: a router or a worker, with an id that outlives restarts. All slots
share one placement group, one bundle each, so that the cluster starts whole or not at all. CPU shares
shrink until all slots fit: two prefill and two decode workers run on a laptop with two cores, each with
less than a core to its name. Knows nothing of Ray's API (`cluster/actors.py` does).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from common.config import Config
from common.errors import ConfigError
from common.workers import Role

Kind = Literal["router", "worker"]

CPU_GRAIN = 100
"""Ray counts CPUs in ten-thousandths; shares are rounded down to hundredths, readable in `ray status`."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one process. ``role`` is a worker's; ``index`` counts within the kind and role."""

    id: str
    kind: Kind
    index: int
    role: Role | None = None
    num_gpus: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """All slots of a cluster with their bundles, in the same order."""

    slots: tuple[Slot, ...]
    bundles: tuple[dict[str, float], ...]

    @property
    def routers(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.kind == "router")

    @property
    def workers(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.kind == "worker")


def pool_sizes(config: Config) -> dict[Role, int]:
    """How many workers of each role Ray starts. A pool with ``addresses`` was started by hand."""
    prefill = 0 if config.prefill.addresses else config.prefill.workers
    decode = 0 if config.decode.addresses else config.decode.workers
    if config.mode == "colocated":
        return {Role.BOTH: prefill + decode}
    return {Role.PREFILL: prefill, Role.DECODE: decode}


def plan_placement(config: Config, num_cpus: float, num_gpus: float) -> Placement:
    """Slots and bundles for a Ray cluster of ``num_cpus`` and ``num_gpus``.

    Raises ConfigError when the configuration asks for more GPUs than there are.
    """
    sizes = pool_sizes(config)
    num_workers = sum(sizes.values())
    gpus_each = _gpus_per_worker(config, num_workers, num_gpus)
    slots = [Slot(f"router-{index}", "router", index) for index in range(config.router.replicas)]
    slots += [
        Slot(f"{role.value}-{index}", "worker", index, role, gpus_each)
        for role, size in sizes.items()
        for index in range(size)
    ]
    share = cpu_share(num_cpus, len(slots))
    bundles = tuple({"CPU": share, "GPU": float(slot.num_gpus)} if slot.num_gpus else {"CPU": share} for slot in slots)
    return Placement(tuple(slots), bundles)


def cpu_share(num_cpus: float, num_slots: int) -> float:
    """The CPUs that each of ``num_slots`` asks for: one, or less where that would not fit."""
    if num_slots == 0:
        return 0.0
    return max(min(1.0, math.floor(num_cpus / num_slots * CPU_GRAIN) / CPU_GRAIN), 1 / CPU_GRAIN)


def worker_threads(
    slots: Sequence[Slot], nodes: Sequence[str], node_cpus: Mapping[str, float], configured: int | None
) -> dict[str, int]:
    """Compute threads per worker: the cores of its node over the workers there, at least one.

    ``nodes[i]`` is the node of ``slots[i]``; ``configured`` (``engine.threads``) overrides.
    """
    workers_on = Counter(node for slot, node in zip(slots, nodes, strict=True) if slot.kind == "worker")
    return {
        slot.id: configured or max(1, int(node_cpus.get(node, 1.0) // workers_on[node]))
        for slot, node in zip(slots, nodes, strict=True)
        if slot.kind == "worker"
    }


def _gpus_per_worker(config: Config, num_workers: int, num_gpus: float) -> int:
    device = config.engine.device
    if device == "auto":
        return 1 if num_workers and num_gpus >= num_workers else 0
    if not device.startswith("cuda"):
        return 0
    if num_gpus < num_workers:
        raise ConfigError(f"engine.device {device}: {num_workers} workers need a GPU each, Ray has {num_gpus:g}")
    return 1
