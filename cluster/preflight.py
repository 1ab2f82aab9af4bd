"""What can be known to fail before anything is started, said in one line.

Ports and memory are those of this machine, so they are asked only where Baton starts Ray itself.
"""

from __future__ import annotations

import socket
from pathlib import Path

from cluster.placement import pool_sizes
from common.config import Config
from common.errors import ConfigError, UnavailableError

WEIGHT_SUFFIXES = (".safetensors", ".gguf")
AVAILABLE_TRANSPORTS = ("shm", "grpc")
HIGHEST_PORT = 65535
RAY_TIMEOUT_S = 5.0


def check_available(config: Config) -> None:
    """Refuses what this version does not do. Raises ConfigError."""
    if config.mode == "adaptive":
        raise ConfigError("mode adaptive is not available yet; known modes: split, colocated", param="mode")
    given = config.transfer.transports
    if config.mode == "split" and not set(given) & set(AVAILABLE_TRANSPORTS):
        raise ConfigError(
            f"transfer.transports needs one of {', '.join(AVAILABLE_TRANSPORTS)}, it is [{', '.join(given)}]",
            param="transfer.transports",
        )


def check_ports(config: Config) -> None:
    """Raises UnavailableError for the first port of a router that is taken, or when no port of its
    host can be had.
    """
    router = config.router
    for index in range(router.replicas):
        for key, first in (("port", router.port), ("grpc_port", router.grpc_port)):
            _check_port(router.host, first and first + index, f"router.{key}")


def check_ray_address(address: str) -> None:
    """Raises ConfigError when nothing listens at ``address``: Ray itself would try for a long time."""
    host, colon, port = address.rpartition(":")
    if address == "auto":
        return
    if not colon or not port.isdigit():
        raise ConfigError(f"cluster.address must be HOST:PORT or auto, it is {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), RAY_TIMEOUT_S).close()
    except OSError as error:
        raise UnavailableError(f"no Ray answers at {address}: {error}") from error


def check_memory(config: Config, model: Path, available_bytes: int | None = None) -> None:
    """Raises UnavailableError when the weights and KV pools of all workers cannot fit.

    A lower bound: weights are counted at the size of their files.
    """
    num_workers = sum(pool_sizes(config).values())
    available = memory_available() if available_bytes is None else available_bytes
    weights, pool = weight_bytes(model), config.engine.pool_bytes or 0
    needed = num_workers * (weights + pool)
    if config.engine.device in ("auto", "cpu") and available is not None and needed > available:
        raise UnavailableError(
            f"too little memory: {num_workers} workers need at least {_gib(needed)} "
            f"(weights {_gib(weights)}, KV pool {_gib(pool)} each), {_gib(available)} are available"
        )


def weight_bytes(model: Path) -> int:
    """Size of the weight files of a model folder or of a single file."""
    files = [model] if model.is_file() else sorted(model.glob("*"))
    return sum(file.stat().st_size for file in files if file.suffix in WEIGHT_SUFFIXES)


def memory_available() -> int | None:
    """Bytes that processes can still take: the machine's, or its control group's if that is less."""
    limits = [_meminfo_available(), _cgroup_available()]
    return min((limit for limit in limits if limit is not None), default=None)


def _check_port(host: str, port: int, key: str) -> None:
    if port > HIGHEST_PORT:
        raise ConfigError(f"{key}: the ports of all routers must be at most {HIGHEST_PORT}, the last is {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            what = f"{host} port {port} ({key})" if port else f"{host} (router.host)"
            raise UnavailableError(f"cannot listen on {what}: {error.strerror}") from error


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) << 10 if "MemAvailable" in fields else None


def _cgroup_available() -> int | None:
    root = Path("/sys/fs/cgroup")
    try:
        limit, used = ((root / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
