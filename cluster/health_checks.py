"""What `baton doctor` says: one check per line, ``ok``, ``warn`` or ``fail``, and what to do.

Pure: all that is known comes in as `Facts` and `Config`. ``fail`` is what `baton serve` would fail by.
Here are the checks of what the configuration asks for; those of the machine are in `machine_checks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from cluster.machine_checks import MACHINE_CHECKS, Check, CheckFunction, mebibytes
from cluster.machine_facts import Facts
from cluster.placement import pool_sizes
from common.config import Config
from common.model_store import KNOWN_MODELS

FETCH_ROOM = 2.2
"""A model is there twice while it is unpacked."""
MOST_SHARE = 0.8
"""Of the memory that is available."""


def run_checks(facts: Facts, config: Config, config_error: str = "") -> Iterator[Check]:
    """All checks in the order in which they are read. Those that need the configuration are left out
    when it is not valid (``config_error``)."""
    for check in MACHINE_CHECKS:
        yield check(facts, config)
    yield check_config(facts, config, config_error)
    if not config_error:
        for check in CONFIGURED_CHECKS:
            yield check(facts, config)


def check_config(facts: Facts, config: Config, error: str) -> Check:
    where = str(facts.config_file) if facts.config_file is not None else "defaults"
    if error:
        return Check("config", "fail", error, "`baton config schema` describes every key")
    if config.cluster.secret is not None and facts.config_mode & 0o077:
        detail = f"{where} holds cluster.secret and others may read it (mode {facts.config_mode:o})"
        return Check("config", "warn", detail, f"chmod 600 {where}")
    return Check("config", "ok", where)


def check_devices(facts: Facts, config: Config) -> Check:
    wanted, torch = config.engine.device, facts.torch
    found = torch.cuda_devices if torch is not None else ()
    cpu_build = torch is not None and torch.cuda_build is None
    if wanted.startswith("cuda"):
        workers = sum(pool_sizes(config).values())
        if not found:
            why = "torch is a build for CPUs" if cpu_build else "torch finds none"
            return Check("devices", "fail", f"engine.device {wanted}: {why}", _cuda_advice(facts, cpu_build))
        if len(found) < workers and config.cluster.address is None:
            detail = f"{workers} workers need a GPU each, {len(found)} are here"
            return Check("devices", "fail", detail, "start fewer workers, or join more hosts with --address")
    if found:
        return Check("devices", "ok", f"{len(found)} × CUDA ({', '.join(dict.fromkeys(found))})")
    if facts.nvidia_devices:
        detail = f"{facts.nvidia_devices} GPUs, which torch {torch.version if torch else ''} does not see"
        return Check("devices", "warn", detail, _cuda_advice(facts, cpu_build))
    return Check("devices", "ok", "CPU")


def check_ports(facts: Facts, config: Config) -> Check:
    bad = [port for port in facts.ports if port.error]
    if not bad:
        numbers = ", ".join(str(port.number) for port in facts.ports)
        return Check("ports", "ok", f"free: {numbers}" if numbers else "picked when it starts")
    first = bad[0]
    owner = f" ({first.owner})" if first.owner else ""
    more = f"; and {len(bad) - 1} more" if len(bad) > 1 else ""
    reason = first.error.partition(";")[0]
    return Check("ports", "fail", f"{reason}{owner}{more}", f"stop it, or set another {first.key} (0: any free one)")


def check_model(facts: Facts, config: Config) -> Check:
    model = facts.model
    if model is None:
        return Check("model", "warn", "not known")
    if model.path is not None:
        if model.error:
            return Check("model", "fail", model.error, "fetch or convert it anew, or set another model.name")
        return Check("model", "ok", f"{model.name} at {model.path}")
    if model.error:
        return Check(
            "model", "fail", f"{model.name} is not here: {model.error}", "copy it here, set model.name to its path"
        )
    size = f" ({model.fetch_bytes / 1e6:.0f} MB)" if model.fetch_bytes else ""
    advice = f"the first start fetches it; before that: baton models fetch {model.name}"
    return Check("model", "warn", f"{model.name} is not here yet, and can be fetched{size}", advice)


def check_disk(facts: Facts, config: Config) -> Check:
    cache, model = facts.cache, facts.model
    if cache is None or model is None:
        return Check("model-cache", "warn", "not known")
    room = f"{cache.path} has {mebibytes(cache.free_bytes)} free"
    if model.path is not None or (model.name not in KNOWN_MODELS and config.model.cache_dir is None):
        return Check("model-cache", "ok", room)
    if not cache.writable:
        advice = "make it writable, or set model.cache_dir"
        return Check("model-cache", "fail", f"{cache.path} cannot be written to", advice)
    if cache.free_bytes < model.fetch_bytes * FETCH_ROOM:
        detail = f"{room}, {model.name} needs {mebibytes(int(model.fetch_bytes * FETCH_ROOM))}"
        return Check("model-cache", "fail", detail, "make room, or set model.cache_dir")
    return Check("model-cache", "ok", room)


def check_memory(facts: Facts, config: Config) -> Check:
    available, model = facts.memory_bytes, facts.model
    if available is None:
        return Check("memory", "warn", "not known how much is free", "set engine.pool_bytes")
    workers = sum(pool_sizes(config).values())
    weights = 0 if model is None else model.weights_bytes or model.fetch_bytes
    each = weights + (config.engine.pool_bytes or 0)
    detail = f"{mebibytes(available)} available, {workers} workers need at least {mebibytes(workers * each)}"
    if config.engine.device in ("auto", "cpu") and workers * each > available:
        advice = "lower engine.pool_bytes, start fewer workers or serve a smaller model"
        return Check("memory", "fail", detail, advice)
    if config.engine.device in ("auto", "cpu") and workers * each > MOST_SHARE * available:
        return Check("memory", "warn", detail, "little is left for anything else")
    return Check("memory", "ok", detail)


def check_ray(facts: Facts, config: Config) -> Check:
    package = next((package for package in facts.packages if package.name == "ray"), None)
    version = "" if package is None or package.installed is None else f"{package.installed}, "
    if facts.ray_error:
        return Check(
            "ray",
            "fail",
            facts.ray_error.partition(";")[0],
            "start Ray there (ray start --head), or unset cluster.address",
        )
    address = config.cluster.address
    return Check("ray", "ok", version + ("started by baton serve" if address is None else f"answers at {address}"))


CONFIGURED_CHECKS: tuple[CheckFunction, ...] = (
    check_devices,
    check_ports,
    check_model,
    check_disk,
    check_memory,
    check_ray,
)


def _cuda_advice(facts: Facts, cpu_build: bool) -> str:
    if cpu_build and facts.nvidia_devices:
        return "install a CUDA build of torch"
    return "set engine.device=cpu" if not facts.nvidia_devices else "check the driver with nvidia-smi"
