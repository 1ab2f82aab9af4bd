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
import psutil
from prometheus_client.parser import text_string_to_metric_families

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
    role: str = ""
    sets: tuple[str, ...] = ()
    paused: bool = False

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        """kill -9: it cannot say goodbye."""
        self.popen.kill()
        self.popen.wait()

    def pause(self) -> None:
        """SIGSTOP: its connections stay open, and nobody answers."""
        self.popen.send_signal(signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        self.popen.send_signal(signal.SIGCONT)
        self.paused = False

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
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30.0, trust_env=False))

    @property
    def processes(self) -> list[Process]:
        return [*([self.router] if self.router else []), *self.prefill, *self.decode]

    def get(self, path: str) -> Any:
        response = self.client.get(self.url + path)
        response.raise_for_status()
        return response.json()

    def loads(self) -> dict[str, Any]:
        """Worker id → its numbers, once they are of a moment when nothing runs."""
        self.settled()
        time.sleep(0.5)  # one report interval and the idle heartbeat's transport
        return {worker["id"]: worker["load"] for worker in self.get("/cluster")["workers"]}

    def quiet(self, timeout_s: float = 10.0) -> None:
        """Returns once nothing is held and every gauge of work is 0 (laws 3 and 5). Fails after a while."""
        deadline = time.monotonic() + timeout_s
        self.settled(timeout_s)
        while busy := self._busy():
            assert time.monotonic() < deadline, f"still not 0: {busy}"
            time.sleep(0.1)

    def _busy(self) -> dict[str, float]:
        """The gauges of work that are not 0: the router's, and those of the workers' reports."""
        gauges = ("num_running", "num_waiting", "running_tokens", "waiting_tokens")
        busy = {
            f"{worker['id']} {gauge}": worker["load"][gauge]
            for worker in self.get("/cluster")["workers"]
            if worker["state"] != "dead"
            for gauge in gauges
        }
        busy |= {name: self.metric(name) for name in ("baton_requests_running", "baton_requests_queued")}
        return {name: value for name, value in busy.items() if value}

    def metric(self, name: str, **labels: str) -> float:
        """The router's metric ``name``, summed over its series that have ``labels``."""
        text = self.client.get(self.url + "/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def record(self, request_id: str, timeout_s: float = 10.0) -> Any:
        """/requests/{id}, once the request is over: the workers' last words may come after the client's answer."""
        deadline = time.monotonic() + timeout_s
        while (record := self.get(f"/requests/{request_id}"))["state"] in ("queued", "prefill", "decode"):
            assert time.monotonic() < deadline, f"not over: {record}"
            time.sleep(0.01)
        return record

    def worker(self, worker_id: str) -> Any:
        """What /cluster says of a worker."""
        return next(worker for worker in self.get("/cluster")["workers"] if worker["id"] == worker_id)

    def wait_for_state(self, worker_id: str, state: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while (worker := self.worker(worker_id))["state"] != state:
            assert time.monotonic() < deadline, f"not {state} within {timeout_s:g} s: {worker}"
            time.sleep(0.05)

    def process(self, name: str) -> Process:
        return next(process for process in self.processes if process.name == name)

    def readiness(self) -> tuple[int, Any]:
        """Status and body of /ready."""
        response = self.client.get(self.url + "/ready")
        return response.status_code, response.json()

    def wait_ready(self, status: int = httpx.codes.OK, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until /ready says ``status``: 200 as soon as a prompt goes through."""
        deadline = time.monotonic() + timeout_s
        while (answer := self.readiness())[0] != status:
            assert time.monotonic() < deadline, f"/ready is not {status} within {timeout_s:g} s: {answer}"
            time.sleep(0.1)

    def open_files(self) -> dict[str, int]:
        """Process → how many descriptors it has open."""
        return {process.name: psutil.Process(process.popen.pid).num_fds() for process in self.processes}

    def restart(self, *processes: Process, awaited: bool = True) -> None:
        """Processes that died start again, workers on their old ports; returns when all serve again.

        ``awaited`` False: the router may refuse these workers, or lose them at once, so nobody waits for it."""
        for process in processes:
            port = process.place.rsplit(":", 1)[1]
            sets = [*process.sets] if process is self.router else [*process.sets, f"worker.port={port}"]
            fresh = _start(process.role, process.name, sets, process.log.parent)
            process.popen.stdout.close()  # type: ignore[union-attr]
            process.popen = fresh.popen
        for process in processes:
            process.wait_ready()
            if process is self.router:
                self.url = process.place.split(" ")[0]
                self.wait_ready()
            elif awaited:
                self.wait_for_state(process.name, "ready")

    def settled(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """The ledger of all living workers, once no request is open and nobody holds a block (law 3).
        Fails after a while."""
        deadline = time.monotonic() + timeout_s
        expected = {p.name for p in (*self.prefill, *self.decode) if p.alive and not p.paused}
        while True:
            ledger = self.get("/ledger")
            held = [w for w in ledger["workers"] if w["free"] + w["cached"] != w["total"] or w["holders"]]
            held += [{"unanswered": name} for name in expected - {worker["id"] for worker in ledger["workers"]}]
            check_balance(ledger)
            if not held and ledger["requests"]["open"] == 0:
                return ledger  # type: ignore[no-any-return]
            assert time.monotonic() < deadline, f"still held: {ledger}"
            time.sleep(0.1)


def check_balance(ledger: Any) -> None:
    """Law 3: every block of every worker is in one state."""
    for worker in ledger["workers"]:
        parts = ("free", "cached", "reserved", "running", "in_transfer")
        assert sum(worker[part] for part in parts) == worker["total"], worker


def _start(role: str, name: str, sets: Sequence[str], logs: Path) -> Process:
    log = logs / f"{name}.log"
    arguments = [
        sys.executable,
        "-m",
        role,
        *(part for item in (f"worker.id={name}", *sets) for part in ("--set", item)),
    ]
    with log.open("a") as stderr:
        popen = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ})
    return Process(name, popen, log, role=role, sets=tuple(sets))


@contextmanager
def fleet(
    prefill: int = 1,
    decode: int = 1,
    *,
    mode: str = "split",
    sets: Sequence[str] = (),
    decode_sets: Sequence[str] = (),
    threads: int = 1,
) -> Iterator[Fleet]:
    """A running cluster; every process is ended by its id afterwards, and must end cleanly.

    ``sets`` are for all processes, ``decode_sets`` for the decode workers alone.
    """
    common = [SMALL_POOL, f"engine.threads={threads}", f"mode={mode}", *sets]
    running = Fleet()
    with tempfile.TemporaryDirectory(prefix="baton-e2e-") as folder:
        logs = Path(folder)
        try:
            if mode != "colocated":
                running.prefill = [_start("prefill_worker", f"prefill-{i}", common, logs) for i in range(prefill)]
            running.decode = [
                _start("decode_worker", f"decode-{i}", [*common, *decode_sets], logs) for i in range(decode)
            ]
            for process in running.processes:
                process.wait_ready()
            members = [
                f"prefill.addresses=[{','.join(p.place for p in running.prefill)}]",
                f"decode.addresses=[{','.join(p.place for p in running.decode)}]",
            ]
            running.router = _start("router", "router-0", [*common, "router.port=0", *members], logs)
            running.router.wait_ready()
            running.url = running.router.place.split(" ")[0]
            running.wait_ready()
            yield running
            for process in running.processes:
                if process.popen.poll() is None:
                    assert process.stop() == 0, process.log.read_text()[-3000:]
        except BaseException:
            for process in running.processes:
                print(f"── {process.name}, exit status {process.popen.poll()} ──\n{process.log.read_text()[-3000:]}")  # noqa: T201
            raise
        finally:
            running.client.close()
            for process in running.processes:
                if process.popen.poll() is None:
                    process.popen.kill()
                process.popen.wait()
                if process.popen.stdout is not None:
                    process.popen.stdout.close()
