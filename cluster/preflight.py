"""What can be known to fail before anything is started, said in one line.

Ports and memory are those of this machine, so they are asked only where Baton starts Ray itself.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path
from typing import get_args

from cluster.placement import pool_sizes
from common.config import Config, Transport
from common.errors import ConfigError, UnavailableError

WEIGHT_SUFFIXES = (".safetensors", ".gguf")
PLAIN_TRANSPORTS = ("shm", "tcp", "grpc")
"""Those that need nothing beside Baton."""
DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?")
HIGHEST_PORT = 65535
RAY_TIMEOUT_S = 5.0

HTTP2_SETTINGS = 4
HTTP2_HEADER_BYTES = 9
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, HTTP2_SETTINGS, 0, 0, 0, 0, 0))
"""A client's preface and its empty settings: length, type, flags, stream (RFC 9113, 3.4 and 4.1)."""


def check_available(config: Config) -> None:
    """Refuses what this version does not do. Raises ConfigError."""
    device = config.engine.device
    if not DEVICES.fullmatch(device):
        raise ConfigError(f"engine.device {device!r} is not a device: auto, cpu, cuda or cuda:N", param="engine.device")
    given = config.transfer.transports
    if config.mode != "colocated" and not any(map(_joins_processes, given)):
        known = [name for name in get_args(Transport) if _joins_processes(name)]
        raise ConfigError(
            f"transfer.transports needs one of {', '.join(known)}, it is [{', '.join(given)}]",
            param="transfer.transports",
        )


def _joins_processes(transport: Transport) -> bool:
    """Whether workers, each in a process of its own, can use it on a machine like this one."""
    if transport in PLAIN_TRANSPORTS:
        return True
    if transport == "nixl":
        from kv_transfer.transports.nixl import nixl_is_available

        return nixl_is_available()
    if transport in ("gloo", "nccl"):
        from kv_transfer.transports.group import is_available  # loads torch

        return is_available(transport)
    return False


def check_ports(config: Config) -> None:
    """Raises UnavailableError for the first port of a router that is taken, or when no port of its
    host can be had.
    """
    router = config.router
    if not router.host.strip():
        raise ConfigError("router.host must not be empty; 0.0.0.0 listens everywhere", param="router.host")
    if both := set(router_ports(config, "port")) & set(router_ports(config, "grpc_port")):
        raise ConfigError(
            f"port {min(both)} is in both ranges, of HTTP (from router.port {router.port}) and gRPC "
            f"(from router.grpc_port {router.grpc_port}), for {router.replicas} routers: move one, or set it to 0"
        )
    for index in range(router.replicas):
        for key, first in (("port", router.port), ("grpc_port", router.grpc_port)):
            check_port(router.host, first and first + index, f"router.{key}")


def router_ports(config: Config, key: str) -> list[int]:
    """The fixed ports that the routers take for ``key``, consecutive ones; none when they are picked."""
    first: int = getattr(config.router, key)
    return [first + index for index in range(config.router.replicas)] if first else []


def check_ray_address(address: str) -> None:
    """Raises ConfigError or UnavailableError when no Ray can be at ``address``: Ray itself would try for a
    long time, and for ever where something accepts and says nothing.
    """
    host, colon, port = address.rpartition(":")
    if address == "auto":
        return
    if not colon or not port.isdigit():
        raise ConfigError(f"cluster.address must be HOST:PORT or auto, it is {address!r}")
    if not 0 < int(port) <= HIGHEST_PORT:
        raise ConfigError(f"cluster.address must have a port from 1 to {HIGHEST_PORT}, it is {address!r}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), RAY_TIMEOUT_S) as connection:
            answers = "RAY_USE_TLS" in os.environ or _speaks_http2(connection)
    except (OSError, UnicodeError) as error:
        raise UnavailableError(
            f"no Ray answers at {address}: {error}; start one there (ray start --head), or leave out --address"
        ) from error
    if not answers:
        raise UnavailableError(f"no Ray answers at {address}: something else does; its head's port is usually 6379")


def _speaks_http2(connection: socket.socket) -> bool:
    """Whether a gRPC server is at the other end, as Ray's head is one: it greets with its settings."""
    connection.sendall(HTTP2_GREETING)
    greeting = b""
    while len(greeting) < HTTP2_HEADER_BYTES:
        if not (data := connection.recv(HTTP2_HEADER_BYTES - len(greeting))):
            return False
        greeting += data
    return greeting[3] == HTTP2_SETTINGS


def check_memory(
    config: Config, model: Path, available_bytes: int | None = None, weights_bytes: int | None = None
) -> None:
    """Raises UnavailableError when the weights and KV pools of all workers cannot fit.

    ``weights_bytes`` is what one worker needs for weights; None takes the size of their files.
    """
    num_workers = sum(pool_sizes(config).values())
    available = memory_available() if available_bytes is None else available_bytes
    weights, pool = weight_bytes(model) if weights_bytes is None else weights_bytes, config.engine.pool_bytes or 0
    needed = num_workers * (weights + pool)
    if config.engine.device in ("auto", "cpu") and available is not None and needed > available:
        raise UnavailableError(
            f"too little memory: {num_workers} workers need at least {_gib(needed)} "
            f"(weights {_gib(weights)}, KV pool {_gib(pool)} each), {_gib(available)} are available; "
            "lower engine.pool_bytes, start fewer workers or serve a smaller model"
        )


def weight_bytes(model: Path) -> int:
    """Size of the weight files of a model folder or of a single file."""
    files = [model] if model.is_file() else sorted(model.glob("*"))
    return sum(file.stat().st_size for file in files if file.suffix in WEIGHT_SUFFIXES)


def memory_available() -> int | None:
    """Bytes that processes can still take: the machine's, or its control group's if that is less."""
    limits = [_meminfo_available(), _cgroup_available()]
    return min((limit for limit in limits if limit is not None), default=None)


def check_port(host: str, port: int, key: str) -> None:
    """Raises UnavailableError when ``port`` of ``host`` (0: any) cannot be listened on; ``key`` named it."""
    if port > HIGHEST_PORT:
        raise ConfigError(f"{key}: the ports of all routers must be at most {HIGHEST_PORT}, the last is {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:  # a host name can be none that can even be looked up
            what = f"{host} port {port} ({key})" if port else f"{host} (router.host)"
            reason = getattr(error, "strerror", None) or error
            raise UnavailableError(f"cannot listen on {what}: {reason}{_advice(error, key)}") from error


def _advice(error: Exception, key: str) -> str:
    taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    return f"; stop what listens there, or choose another port ({key}=0: any free one)" if taken else ""


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
