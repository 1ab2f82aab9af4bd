"""The packages that Baton needs: which versions are here, and whether they can be imported.

Only gathers; what that means is said in `cluster/health_checks.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

PROBE_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Package:
    """A requirement of Baton's. ``installed`` is its version; ``import_error`` says why it cannot be used."""

    name: str
    wanted: str
    installed: str | None
    import_error: str = ""


@dataclass(frozen=True, slots=True)
class Torch:
    version: str
    cuda_build: str | None
    cuda_devices: tuple[str, ...]
    cpu_capability: str
    invariance_error: str = ""


def required_packages() -> tuple[Package, ...]:
    """What the installed Baton says that it needs; nothing when it is not installed."""
    try:
        texts = metadata.requires("baton") or []
    except metadata.PackageNotFoundError:
        texts = []
    packages = []
    for text in texts:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            try:
                installed: str | None = metadata.version(requirement.name)
            except metadata.PackageNotFoundError:
                installed = None
            packages.append(Package(requirement.name, str(requirement.specifier), installed))
    return tuple(packages)


def probe_imports(packages: tuple[Package, ...]) -> tuple[tuple[Package, ...], Torch | None]:
    """The packages with their import errors, and what torch says of itself; in another process."""
    names = [package.name for package in packages if package.installed is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "cluster.import_probe", *names]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=PROBE_TIMEOUT_S, check=False
        )
        output, end = done.stdout, f"the import ended its process (exit status {done.returncode})"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else ""
        end = f"the import took longer than {PROBE_TIMEOUT_S:g} s"
    return read_probe(packages, output, end)


def read_probe(packages: tuple[Package, ...], output: str, end: str) -> tuple[tuple[Package, ...], Torch | None]:
    """Reads the probe's lines. One that is missing is the package that ended it: ``end`` says how."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
    errors = {line["package"]: str(line["error"]) for line in lines if "package" in line}
    told = next((line["torch"] for line in lines if "torch" in line), None)
    torch = None if told is None else Torch(**{**told, "cuda_devices": tuple(told["cuda_devices"])})
    judged = []
    blamed = False
    for package in packages:
        error = errors.get(package.name, "")
        if package.installed is not None and package.name not in errors and not blamed:
            error, blamed = end, True
        judged.append(Package(package.name, package.wanted, package.installed, " ".join(error.split())))
    return tuple(judged), torch


def wanted_python() -> str:
    """The versions of Python that the installed Baton says it runs on."""
    try:
        return str(metadata.metadata("baton")["Requires-Python"] or "")
    except (metadata.PackageNotFoundError, KeyError):
        return ""
