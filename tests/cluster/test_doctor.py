"""`baton doctor`: each check against facts that it must complain about, and once the whole command."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster import cli
from cluster.health_checks import CONFIGURED_CHECKS, run_checks
from cluster.machine_checks import MACHINE_CHECKS, Check
from cluster.machine_facts import Facts, Folder, Model, Port, find_model, find_ports
from cluster.package_facts import Package, Torch, read_probe, required_packages
from common.config import Config, parse_config
from tests.cluster.terminal import BATON

GIB = 1 << 30
TORCH = Torch("2.9.0+cpu", None, (), "AVX512")
WELL = Facts(
    python="3.11.7",
    python_wanted=">=3.11",
    packages=(Package("ray", ">=2.40", "2.60.0"), Package("torch", ">=2.6", "2.9.0+cpu")),
    torch=TORCH,
    architecture="x86_64",
    cores=4,
    cpu_flags=frozenset({"avx2"}),
    memory_bytes=8 * GIB,
    shm_free_bytes=GIB,
    open_files=65536,
    processes=16384,
    clock_synchronised=True,
    temporary=Folder(Path("/tmp"), True, 10 * GIB, 0.5),
    cache=Folder(Path("/cache"), True, 10 * GIB, 0.5),
    model=Model("m", Path("/m"), weights_bytes=GIB),
    ports=(Port("router.port", 8000),),
)
SAFE = Config()
GPUS = dataclasses.replace(TORCH, cuda_build="12.8", cuda_devices=("H200",))
CUDA = {"engine": {"device": "cuda"}}


def judged(config: Config = SAFE, error: str = "", **changes: Any) -> dict[str, Check]:
    return {check.name: check for check in run_checks(dataclasses.replace(WELL, **changes), config, error)}


def test_a_machine_that_is_well_passes_every_check() -> None:
    checks = judged()
    assert {name: check.status for name, check in checks.items()} == dict.fromkeys(checks, "ok")
    assert len(checks) == len(MACHINE_CHECKS) + 1 + len(CONFIGURED_CHECKS)
    assert all(check.detail and not check.advice for check in checks.values())


def _bad(name: str, status: str, words: str, config: dict[str, Any] | None = None, **changes: Any) -> Any:
    return pytest.param(name, status, words, config or {}, changes, id=f"{name}: {words}")


@pytest.mark.parametrize(
    ("name", "status", "words", "config", "changes"),
    [
        _bad("python", "fail", "3.10.1, Baton needs >=3.11", python="3.10.1"),
        _bad("packages", "fail", "ray is missing", packages=(Package("ray", ">=2.40", None),)),
        _bad("packages", "fail", "ray is 2.9.0, Baton needs >=2.40", packages=(Package("ray", ">=2.40", "2.9.0"),)),
        _bad("packages", "fail", "(OSError: x)", packages=(Package("ray", ">=2.40", "2.60.0", "OSError: x"),)),
        _bad("packages", "warn", "not installed", packages=()),
        _bad("cpu", "warn", "no AVX2", cpu_flags=frozenset()),
        _bad("cpu", "warn", "1 cores (x86_64, torch uses AVX512) for 2 workers", cores=1),
        _bad("cpu", "warn", "0.5 cores", cpu_quota=0.5),
        _bad("threads", "warn", "engine.threads 3 for 2 workers on 4 cores", {"engine": {"threads": 3}}),
        _bad("threads", "warn", "OMP_WAIT_POLICY", environment={"OMP_WAIT_POLICY": "active"}),
        _bad("threads", "warn", "MKL_CBWR=AVX2", environment={"MKL_CBWR": "AVX2"}),
        _bad("batch-invariant", "warn", "torch cannot be imported", torch=None),
        _bad("batch-invariant", "warn", "differs", torch=dataclasses.replace(TORCH, invariance_error="differs")),
        _bad(
            "batch-invariant",
            "fail",
            "differs",
            {"engine": {"batch_invariant": True}},
            torch=dataclasses.replace(TORCH, invariance_error="differs"),
        ),
        _bad("shared-memory", "warn", "no anonymous memory files (EPERM)", memfd_error="EPERM"),
        _bad("shared-memory", "fail", "(EPERM)", {"transfer": {"transports": ["shm"]}}, memfd_error="EPERM"),
        _bad("shared-memory", "warn", "/dev/shm has 64 MiB free", shm_free_bytes=64 << 20),
        _bad("shared-memory", "warn", "/dev/shm does not exist", shm_free_bytes=None),
        _bad("temporary", "fail", "not writable", temporary=Folder(Path("/tmp"), False, GIB, 0.1)),
        _bad("temporary", "warn", "(96% used)", temporary=Folder(Path("/tmp"), True, GIB, 0.96)),
        _bad("open-files", "fail", "limit 256", open_files=256),
        _bad("open-files", "warn", "limit 1024", open_files=1024),
        _bad("processes", "warn", "limit 100", processes=100),
        _bad("clock", "fail", "3600 s behind", clock_behind_s=3600.0),
        _bad("clock", "warn", "not synchronised", {"cluster": {"address": "h:1"}}, clock_synchronised=False),
        _bad("config", "warn", "mode 644", {"cluster": {"secret": "s"}}, config_mode=0o644),
        _bad("devices", "fail", "torch is a build for CPUs", CUDA),
        _bad("devices", "fail", "2 workers need a GPU each, 1 are here", CUDA, torch=GPUS),
        _bad("devices", "warn", "8 GPUs, which torch 2.9.0+cpu does not see", nvidia_devices=8),
        _bad("ports", "fail", "taken (pid 7, sleep)", ports=(Port("router.port", 80, "taken; stop", "pid 7, sleep"),)),
        _bad("model", "fail", "broken", model=Model("m", Path("/m"), error="broken")),
        _bad("model", "fail", "m is not here: no network", model=Model("m", None, error="no network")),
        _bad("model", "warn", "can be fetched (98 MB)", model=Model("m", None, 98_000_000)),
        _bad(
            "model-cache",
            "fail",
            "needs 2,253 MiB",
            {"model": {"cache_dir": "/cache"}},
            model=Model("m", None, GIB),
            cache=Folder(Path("/cache"), True, GIB, 0.5),
        ),
        _bad(
            "model-cache",
            "fail",
            "cannot be written to",
            model=Model("smollm2-135m", None, GIB),
            cache=Folder(Path("/cache"), False, 10 * GIB, 0.5),
        ),
        _bad("memory", "fail", "2 workers need at least 10,240 MiB", {"engine": {"pool_bytes": 4 * GIB}}),
        _bad("memory", "warn", "need at least 8,192 MiB", {"engine": {"pool_bytes": 3 * GIB}}),
        _bad("memory", "warn", "not known", memory_bytes=None),
        _bad("ray", "fail", "no Ray answers", {"cluster": {"address": "h:1"}}, ray_error="no Ray answers; start it"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_what_to_do(
    name: str, status: str, words: str, config: dict[str, Any], changes: dict[str, Any]
) -> None:
    check = judged(parse_config(config), **changes)[name]
    assert check.status == status
    assert words in check.detail
    assert check.advice


def test_what_the_machine_lacks_is_no_fault_where_it_is_not_needed() -> None:
    assert judged(parse_config({"mode": "colocated"}), memfd_error="EPERM")["shared-memory"].status == "ok"
    assert (
        judged(parse_config(CUDA), torch=dataclasses.replace(GPUS, cuda_devices=("H200",) * 2))["devices"].status
        == "ok"
    )
    assert judged(clock_synchronised=False)["clock"].status == "ok"
    assert judged(parse_config({**CUDA, "engine": {"device": "cuda", "pool_bytes": 99 * GIB}}))["memory"].status == "ok"


def test_an_invalid_configuration_fails_and_what_needs_it_is_left_out() -> None:
    checks = judged(error="unknown config key 'x'")
    assert (checks["config"].status, checks["config"].detail) == ("fail", "unknown config key 'x'")
    assert len(checks) == len(MACHINE_CHECKS) + 1


# ── facts ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_package_that_ends_the_probe_is_the_first_that_it_did_not_tell_of() -> None:
    packages = tuple(Package(name, "", version) for name, version in [("a", "1"), ("b", "1"), ("c", None), ("d", "1")])
    output = '{"package": "a", "error": ""}\nnoise\n{"package": "b", "err'
    judged_packages, torch = read_probe(packages, output, "it crashed")
    assert [package.import_error for package in judged_packages] == ["", "it crashed", "", ""]
    assert torch is None
    told = {**dataclasses.asdict(GPUS), "cuda_devices": list(GPUS.cuda_devices)}
    lines = [{"package": name, "error": ""} for name in "abd"] + [{"torch": told}]
    judged_packages, torch = read_probe(packages, "\n".join(map(json.dumps, lines)), "")
    assert [package.import_error for package in judged_packages] == ["", "", "", ""]
    assert torch == GPUS


def test_the_packages_are_those_that_baton_was_installed_with() -> None:
    packages = {package.name: package for package in required_packages()}
    assert {"ray", "torch", "rich"} <= packages.keys()
    assert "pytest" not in packages
    assert packages["torch"].wanted.startswith(">=")


def test_a_taken_port_is_shown_with_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        (port,) = find_ports(parse_config({"router": {"port": number}}))
    assert port.number == number
    assert "Address already in use" in port.error
    assert port.owner.startswith(f"pid {os.getpid()}, ")
    assert find_ports(parse_config({"router": {"port": 0}})) == ()


def test_a_model_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    model = find_model(parse_config({"model": {"name": str(tmp_path)}}))
    assert model.path == tmp_path
    assert "model.safetensors missing" in model.error
    nowhere = find_model(parse_config({"model": {"name": str(tmp_path / "x.gguf")}}))
    assert (nowhere.path, "does not exist" in nowhere.error) == (None, True)


# ── the command ───────────────────────────────────────────────────────────────────────────────────


def test_the_exit_status_and_the_json_say_whether_something_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cluster.machine_facts.gather", lambda config, file: WELL)
    assert cli.main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert all(check.keys() == {"name", "status", "detail", "advice"} for check in told["checks"])
    monkeypatch.setattr("cluster.machine_facts.gather", lambda config, file: dataclasses.replace(WELL, open_files=1))
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(told["checks"]) + 1
    assert lines[-1] == f"{len(told['checks'])} checks, 1 failed, 0 warnings"
    assert cli.main(["doctor", "--set", "engine.device=abacus", "--json"]) == 1
    assert any("abacus" in check["detail"] for check in json.loads(capsys.readouterr().out)["checks"])


@pytest.mark.e2e
def test_doctor_finds_this_machine_fit_and_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [str(BATON), "doctor", "--json", "--set", f"router.port={port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert {name for name, check in checks.items() if check["status"] == "fail"} == {"ports"}
    assert f"(pid {os.getpid()}, " in checks["ports"]["detail"]
    assert checks["batch-invariant"]["status"] == "ok"
