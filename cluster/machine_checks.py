"""What facts about the machine mean for Baton, whatever it is to serve. Pure, as all checks are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet

from cluster.machine_facts import Facts
from cluster.placement import pool_sizes
from cluster.ray_session import OBJECT_STORE_BYTES
from common.config import Config

Status = Literal["ok", "warn", "fail"]

TEMPORARY_BYTES = 256 << 20
FULL_SHARE = 0.95
"""Ray refuses work on a disk that is fuller."""
FEW_FILES = 512
FEW_PROCESSES = 2048
SPARE_FILES = 512


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Status
    detail: str
    advice: str = ""


CheckFunction = Callable[[Facts, Config], Check]


def mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def check_python(facts: Facts, config: Config) -> Check:
    if facts.python_wanted and not SpecifierSet(facts.python_wanted).contains(facts.python, prereleases=True):
        advice = f"make the environment anew with a Python {facts.python_wanted}"
        return Check("python", "fail", f"{facts.python}, Baton needs {facts.python_wanted}", advice)
    return Check("python", "ok", facts.python)


def check_packages(facts: Facts, config: Config) -> Check:
    bad = []
    for package in facts.packages:
        if package.installed is None:
            bad.append(f"{package.name} is missing")
        elif package.import_error:
            bad.append(f"{package.name} {package.installed} cannot be imported ({package.import_error[:120]})")
        elif not SpecifierSet(package.wanted).contains(package.installed, prereleases=True):
            bad.append(f"{package.name} is {package.installed}, Baton needs {package.wanted}")
    if bad:
        return Check("packages", "fail", "; ".join(bad), "pip install -c constraints.txt . in Baton's checkout")
    if not facts.packages:
        advice = "pip install -c constraints.txt . in Baton's checkout"
        return Check("packages", "warn", "Baton is not installed, so what it needs is not known", advice)
    return Check("packages", "ok", f"{len(facts.packages)} in range and importable")


def check_cpu(facts: Facts, config: Config) -> Check:
    workers = sum(pool_sizes(config).values())
    usable = facts.cores if facts.cpu_quota is None else min(facts.cores, facts.cpu_quota)
    capability = f", torch uses {facts.torch.cpu_capability}" if facts.torch is not None else ""
    detail = f"{usable:g} cores ({facts.architecture}{capability})"
    if facts.architecture == "x86_64" and "avx2" not in facts.cpu_flags:
        return Check("cpu", "warn", f"{detail}, no AVX2", "expect a small fraction of the speed; use a newer CPU")
    if usable < workers:
        advice = "workers will take turns: start fewer, or give them more cores"
        return Check("cpu", "warn", f"{detail} for {workers} workers", advice)
    return Check("cpu", "ok", detail)


def check_threads(facts: Facts, config: Config) -> Check:
    """Settings of OpenMP and MKL that the environment forces on workers."""
    workers, threads = sum(pool_sizes(config).values()), config.engine.threads
    if threads is not None and threads * workers > facts.cores:
        detail = f"engine.threads {threads} for {workers} workers on {facts.cores} cores"
        return Check("threads", "warn", detail, "leave engine.threads out: cores are then shared out evenly")
    if facts.environment.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        return Check("threads", "warn", "OMP_WAIT_POLICY=ACTIVE: waiting threads burn cores", "unset OMP_WAIT_POLICY")
    mode = facts.environment.get("MKL_CBWR", "")
    if mode and not mode.upper().endswith("STRICT"):
        advice = "unset MKL_CBWR: Baton sets what batch-invariant mode needs"
        return Check("threads", "fail" if config.engine.batch_invariant else "warn", f"MKL_CBWR={mode}", advice)
    return Check("threads", "ok", "nothing in the environment disturbs OpenMP or MKL")


def check_batch_invariance(facts: Facts, config: Config) -> Check:
    if facts.torch is None:
        return Check("batch-invariant", "warn", "not tried: torch cannot be imported", "mend the packages first")
    if error := facts.torch.invariance_error:
        wanted = config.engine.batch_invariant
        advice = "leave engine.batch_invariant off on this machine"
        return Check("batch-invariant", "fail" if wanted else "warn", error, advice)
    return Check("batch-invariant", "ok", "results do not depend on the batch (float32)")


def check_shared_memory(facts: Facts, config: Config) -> Check:
    name = "shared-memory"
    if facts.memfd_error and "shm" in config.transfer.transports and config.mode != "colocated":
        only = config.transfer.transports == ("shm",)
        detail = f"no anonymous memory files ({facts.memfd_error})"
        advice = "set transfer.transports=[grpc], or allow memfd_create"
        return Check(name, "fail" if only else "warn", detail, advice)
    free = facts.shm_free_bytes
    if config.cluster.address is None and (free is None or free < OBJECT_STORE_BYTES):
        detail = "/dev/shm does not exist" if free is None else f"/dev/shm has {mebibytes(free)} free"
        advice = f"Ray wants {mebibytes(OBJECT_STORE_BYTES)}: in a container, --shm-size=1g"
        return Check(name, "warn", detail, advice)
    return Check(name, "ok", "memfd works" + ("" if free is None else f", /dev/shm has {mebibytes(free)} free"))


def check_temporary(facts: Facts, config: Config) -> Check:
    folder = facts.temporary
    if folder is None:
        return Check("temporary", "warn", "not known")
    if not folder.writable:
        return Check("temporary", "fail", f"{folder.path} is not writable", "Ray's files go there: make it writable")
    if folder.free_bytes < TEMPORARY_BYTES or folder.used_share > FULL_SHARE:
        detail = f"{folder.path} has {mebibytes(folder.free_bytes)} free ({folder.used_share:.0%} used)"
        return Check("temporary", "warn", detail, "Ray's logs go there: make room")
    return Check("temporary", "ok", f"{folder.path} has {mebibytes(folder.free_bytes)} free")


def check_open_files(facts: Facts, config: Config) -> Check:
    wanted = config.router.max_queue + config.decode.max_sequences * config.decode.workers + SPARE_FILES
    advice = "raise it before starting: ulimit -n 65536"
    if facts.open_files < FEW_FILES:
        return Check("open-files", "fail", f"limit {facts.open_files}, Ray alone needs {FEW_FILES}", advice)
    if facts.open_files < wanted:
        detail = f"limit {facts.open_files}, a full router.max_queue needs about {wanted}"
        return Check("open-files", "warn", detail, advice)
    return Check("open-files", "ok", f"limit {facts.open_files}")


def check_processes(facts: Facts, config: Config) -> Check:
    if facts.processes < FEW_PROCESSES:
        detail = f"limit {facts.processes} processes and threads, Ray starts hundreds"
        return Check("processes", "warn", detail, "raise it before starting: ulimit -u 16384")
    return Check("processes", "ok", "enough are allowed")


def check_clock(facts: Facts, config: Config) -> Check:
    if facts.clock_behind_s > 60:
        detail = f"{facts.clock_behind_s:.0f} s behind the time at which Baton was installed"
        return Check("clock", "fail", detail, "set it: certificates and the order of workers' lives depend on it")
    if facts.clock_synchronised is False:
        several = config.cluster.address is not None or bool(config.prefill.addresses or config.decode.addresses)
        detail = "not synchronised" + ("" if several else " (one host: it does not matter)")
        return Check("clock", "warn" if several else "ok", detail, "run chrony or timesyncd" if several else "")
    return Check("clock", "ok", "synchronised" if facts.clock_synchronised else "plausible")


MACHINE_CHECKS: tuple[CheckFunction, ...] = (
    check_python,
    check_packages,
    check_cpu,
    check_threads,
    check_batch_invariance,
    check_shared_memory,
    check_temporary,
    check_open_files,
    check_processes,
    check_clock,
)
