"""A real cluster of real processes without Ray: workers and a router by hand, on free ports.

Starts faster than `baton serve` and shows each process's own log; what Ray adds is tested apart.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
SMALL_POOL = "engine.pool_bytes=800000000"


@dataclass
class Process:
    """One role's process. ``place`` is what follows ``ready`` on its standard output."""

    name: str
    popen: subprocess.Popen[str]
    log: Path
    place: str = ""

    def wait_ready(self) -> None:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line.startswith("ready "):
            self.popen.wait(STOP_TIMEOUT_S)
            raise RuntimeError(f"{self.name} did not start: {line!r}\n{self.log.read_text()[-3000:]}")
        self.place = line.split(" ", 1)[1].strip()

    def stop(self) -> int:
        """SIGTERM, then the exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            raise


@dataclass
class Fleet:
    prefill: list[Process] = field(default_factory=list)
    decode: list[Process] = field(default_factory=list)
    router: Process | None = None
    url: str = ""
    model: str = "smollm2-135m"

    @property
    def processes(self) -> list[Process]:
        return [*([self.router] if self.router else []), *self.prefill, *self.decode]

    def get(self, path: str) -> Any:
        response = httpx.get(self.url + path, timeout=30.0, trust_env=False)
        response.raise_for_status()
        return response.json()

    def loads(self) -> dict[str, Any]:
        """Worker id → its numbers, once they are of a moment when nothing runs."""
        self.settled()
        time.sleep(0.5)  # one report interval and the idle heartbeat's transport
        return {worker["id"]: worker["load"] for worker in self.get("/cluster")["workers"]}

    def settled(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """The ledger, once no request is open and nobody holds a block (law 3). Fails after a while."""
        deadline = time.monotonic() + timeout_s
        while True:
            ledger = self.get("/ledger")
            held = [w for w in ledger["workers"] if w["free"] + w["cached"] != w["total"] or w["holders"]]
            for worker in ledger["workers"]:
                parts = ("free", "cached", "reserved", "running", "in_transfer")
                assert sum(worker[part] for part in parts) == worker["total"], worker
            if not held and ledger["requests"]["open"] == 0:
                return ledger  # type: ignore[no-any-return]
            assert time.monotonic() < deadline, f"still held: {ledger}"
            time.sleep(0.1)


def _start(role: str, name: str, sets: Sequence[str], logs: Path) -> Process:
    log = logs / f"{name}.log"
    arguments = [
        sys.executable,
        "-m",
        role,
        *(part for item in (f"worker.id={name}", *sets) for part in ("--set", item)),
    ]
    with log.open("w") as stderr:
        popen = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ})
    return Process(name, popen, log)


@contextmanager
def fleet(
    prefill: int = 1, decode: int = 1, *, mode: str = "split", sets: Sequence[str] = (), threads: int = 1
) -> Iterator[Fleet]:
    """A running cluster; every process is ended by its id afterwards, and must end cleanly."""
    common = [SMALL_POOL, f"engine.threads={threads}", f"mode={mode}", *sets]
    running = Fleet()
    with tempfile.TemporaryDirectory(prefix="baton-e2e-") as folder:
        logs = Path(folder)
        try:
            if mode != "colocated":
                running.prefill = [_start("prefill_worker", f"prefill-{i}", common, logs) for i in range(prefill)]
            running.decode = [_start("decode_worker", f"decode-{i}", common, logs) for i in range(decode)]
            for process in running.processes:
                process.wait_ready()
            members = [
                f"prefill.addresses=[{','.join(p.place for p in running.prefill)}]",
                f"decode.addresses=[{','.join(p.place for p in running.decode)}]",
            ]
            running.router = _start("router", "router-0", [*common, "router.port=0", *members], logs)
            running.router.wait_ready()
            running.url = running.router.place.split(" ")[0]
            _wait_for_prompt(running.url)
            yield running
            for process in running.processes:
                if process.popen.poll() is None:
                    assert process.stop() == 0, process.log.read_text()[-3000:]
        except BaseException:
            for process in running.processes:
                print(f"── {process.name} ──\n{process.log.read_text()[-3000:]}")  # noqa: T201
            raise
        finally:
            for process in running.processes:
                if process.popen.poll() is None:
                    process.popen.kill()
                process.popen.wait()
                if process.popen.stdout is not None:
                    process.popen.stdout.close()


def _wait_for_prompt(url: str) -> None:
    """Until a prompt went through (``/ready``)."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while httpx.get(url + "/ready", timeout=30.0, trust_env=False).status_code != httpx.codes.OK:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} did not get ready within {START_TIMEOUT_S} s")
        time.sleep(0.1)
