"""`baton serve` under test: started, asked, sent signals; and the proof that nothing of it is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from tests.e2e.asking import Prompt
from tests.e2e.fleet import Fleet

BATON = Path(sys.executable).with_name("baton")
SMALL_POOL = "engine.pool_bytes=100000000"
START_TIMEOUT_S = 200.0
SHARED_MEMORY = Path("/dev/shm")
COMPLAINT = re.compile(r"^(\(.* pid=\d+\) )?\d\d:\d\d:\d\d [WE] |Traceback")
"""A log line at warning or above, from any process."""

T = TypeVar("T")


def until(condition: Callable[[], T], within_s: float) -> T:
    """The first true answer. Fails when there is none ``within_s``, with the last one."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {value!r}"
        time.sleep(0.05)
    return value


def baton(*argv: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Any other command, to its end."""
    return subprocess.run([str(BATON), *argv], capture_output=True, text=True, timeout=timeout_s, check=False)


class Served:
    """A `baton serve` with a session and a process group of its own, as in a terminal of its own.

    Its standard error is a file, so that nobody has to read along; its temporary files go to ``folder``.
    """

    def __init__(self, folder: Path, *argv: str, pool: str = SMALL_POOL) -> None:
        self.shared_memory_before = frozenset(SHARED_MEMORY.iterdir())
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._errors = folder / "stderr"
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [str(BATON), "serve", "--port", "0", "--set", pool, *argv],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "TMPDIR": str(self.temporary)},
                cwd=folder,
                start_new_session=True,
            )
        self.fleet = Fleet()
        self.grpc_address = ""

    def ready(self) -> Served:
        """Waits for the ready line, then the fleet can be asked."""
        assert self.process.stdout is not None
        timer = threading.Timer(START_TIMEOUT_S, self.process.kill)  # then there is no line
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        match = re.fullmatch(r"ready (http://127\.0\.0\.1:\d+) grpc://(127\.0\.0\.1:\d+)\n", line)
        assert match, f"{line!r}\n{self.stderr()}"
        self.fleet.url, self.grpc_address = match.groups()
        return self

    def wait_for_words(self, words: str, within_s: float = 60.0) -> None:
        """Until ``words`` are on standard error."""
        until(lambda: words in self.stderr() or self.process.poll() is not None, within_s)
        assert words in self.stderr(), self.stderr()

    def stderr(self) -> str:
        return self._errors.read_text()

    def complaints(self) -> list[str]:
        """What was logged at warning or above, by any process."""
        return [line for line in self.stderr().splitlines() if COMPLAINT.search(line)]

    def rest_of_stdout(self) -> str:
        """What came after the ready line. Only for one that has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.read()

    # ── its processes ─────────────────────────────────────────────────────────────────────────────

    def processes(self) -> list[psutil.Process]:
        """All that descend from it, and orphans of its session."""
        root = psutil.Process(self.process.pid)
        found = {root.pid: root} | {child.pid: child for child in root.children(recursive=True)}
        for process in psutil.process_iter():
            if process.pid not in found and _session(process.pid) == root.pid:
                found[process.pid] = process
        return list(found.values())

    def actors(self, name: str) -> list[psutil.Process]:
        """Its Ray actors whose class is ``name``."""
        return [process for process in self.processes() if any(f"ray::{name}" in word for word in _command(process))]

    def private_directory(self) -> Path:
        """Where all of its Ray lives: the guardian's argument."""
        commands = until(lambda: [words for words in map(_command, self.processes()) if _is_guardian(words)], 10)
        return Path(commands[0][-1])

    def kill_worker(self, worker_id: str) -> None:
        """kill -9 of a worker's process."""
        os.kill(self.fleet.worker(worker_id)["pids"][0], signal.SIGKILL)

    # ── its end ───────────────────────────────────────────────────────────────────────────────────

    def signal(self, number: int) -> None:
        """Ctrl-C goes to the whole group, as a terminal sends it; all else to the process alone."""
        (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)

    def signal_all(self, number: int) -> None:
        """To every process, as a service manager sends it."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def footprint(self) -> Footprint:
        processes = self.processes()
        listening = {port for process in processes for port in _listening(process)}
        directories = (self.private_directory(), self.temporary)
        return Footprint(
            self.process.pid, tuple(processes), frozenset(listening), directories, self.shared_memory_before
        )

    def kill(self) -> None:
        """The end of a test that did not get that far; the guardian does the rest."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@dataclass(frozen=True)
class Footprint:
    """What a running `baton serve` has, and must not leave behind."""

    session: int
    processes: tuple[psutil.Process, ...]
    ports: frozenset[int]
    directories: tuple[Path, ...]
    shared_memory_before: frozenset[Path]

    def left(self) -> list[str]:
        """What is still there; a zombie only waits for its parent to look."""
        late = [process for process in psutil.process_iter() if _session(process.pid) == self.session]
        left = [f"process {process.pid}" for process in (*self.processes, *late) if _alive(process)]
        left += [f"port {port}" for port in self.ports if _answers(port)]
        left += [f"file {path}" for path in self.directories if path.name != "tmp" and path.exists()]
        left += [f"file {path}" for path in self.directories if path.name == "tmp" for path in path.iterdir()]
        return left + [f"file {path}" for path in SHARED_MEMORY.iterdir() if path not in self.shared_memory_before]

    def gone(self, within_s: float) -> None:
        """Fails when something is left after ``within_s``."""
        deadline = time.monotonic() + within_s
        while left := self.left():
            assert time.monotonic() < deadline, f"left after {within_s:g} s: {left}"
            time.sleep(0.1)


class Reading(threading.Thread):
    """A client in a thread of its own that reads a streamed answer, to whatever end it comes."""

    def __init__(self, fleet: Fleet, prompt: Prompt) -> None:
        super().__init__(daemon=True)
        self._url = fleet.url + prompt.path
        self._body = {**prompt.body(fleet.model), "stream": True}
        self.request_id = ""
        self.token_ids: list[int] = []
        self.error: dict[str, Any] | None = None
        self.broken: httpx.HTTPError | None = None
        """The connection ended before the answer did."""
        self.done = False
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=120.0, trust_env=False) as response:
                assert response.status_code == httpx.codes.OK, response.read()
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self._take(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.broken = error

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self.request_id = chunk["id"]
        for choice in chunk["choices"]:
            self.token_ids += choice.get("token_ids") or ()

    def wait_for_tokens(self, count: int, within_s: float = 60.0) -> None:
        until(lambda: len(self.token_ids) >= count or not self.is_alive(), within_s)
        assert len(self.token_ids) >= count, (self.error, self.broken)

    def to_the_end(self, within_s: float = 120.0) -> Reading:
        self.join(within_s)
        assert not self.is_alive(), f"the stream goes on after {within_s:g} s with {len(self.token_ids)} tokens"
        return self


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _is_guardian(command: list[str]) -> bool:
    return any(word.endswith("guardian.py") for word in command)


def _listening(process: psutil.Process) -> list[int]:
    try:
        connections = process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN]


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
