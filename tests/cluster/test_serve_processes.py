"""`baton serve` with real Ray and processes that serve nothing (`stand_ins/`): start, deaths, ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

STAND_INS = Path(__file__).parent / "stand_ins"
BATON = Path(sys.executable).with_name("baton")
START_S = 90.0


class Served:
    """A `baton serve` under test. Its standard error is a file, so that nobody has to read along."""

    def __init__(self, folder: Path, *argv: str, **environment: str) -> None:
        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"")
        self.errors = folder / "stderr"
        self.process = subprocess.Popen(
            [str(BATON), "serve", "--model", str(model), "--port", "0", *argv],
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
            env={**os.environ, "PYTHONPATH": str(STAND_INS), **environment},
            start_new_session=True,  # a group of its own: a terminal's Ctrl-C reaches all of it
        )

    def ready(self) -> list[str]:
        """The two URLs of the first ready line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready http://"), self.errors.read_text()
        return line.split()[1:]

    def private_directory(self) -> str:
        """Where all of its Ray lives: the guardian's argument."""
        (words,) = [words for pid in _tree(self.process.pid) if "guardian.py" in (words := _command(pid))]
        return words.split("\0")[-2]

    def end(self, number: int) -> tuple[int, float]:
        """Exit status and seconds after ``number``; SIGINT goes to the whole group, as from a terminal."""
        started = time.monotonic()
        (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)
        return self.process.wait(60), time.monotonic() - started

    def rest_of_stdout(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _tree(root: int) -> list[int]:
    """``root`` and all that descend from it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(entry.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _alive(pids: list[int]) -> list[int]:
    """Those that run; a zombie only waits for its parent to look."""
    alive = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            alive.append(pid)
    return alive


def _until(condition: Callable[[], Any], within_s: float) -> Any:
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


def _get(url: str) -> dict[str, Any]:
    """What a stand-in router knows; {} while nothing answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as response:
            return dict(json.load(response))
    except OSError:
        return {}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*argv: str, **environment: str) -> Served:
        started.append(Served(tmp_path, *argv, **environment))
        return started[-1]

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait()


def test_deaths_are_repaired_and_a_signal_ends_everything(serve: Callable[..., Served]) -> None:
    served = serve("--prefill", "2", "--decode", "2")
    url, grpc_url = served.ready()
    assert grpc_url.startswith("grpc://127.0.0.1:")
    before = _get(url)
    assert (len(before["prefill"]), len(before["decode"])) == (2, 2)
    directory = served.private_directory()
    assert before["environment"] == {"OMP_NUM_THREADS": "1", "TMPDIR": directory}

    worker = next(pid for pid in _tree(served.process.pid) if _listens(pid, before["prefill"][0]))
    os.kill(worker, signal.SIGKILL)
    after = _until(lambda: (now := _get(url)) and now["prefill"] != before["prefill"] and now, 60)
    assert after["prefill"][1] == before["prefill"][1]
    assert after["decode"] == before["decode"]

    os.kill(before["pid"], signal.SIGKILL)
    again = _until(lambda: (now := _get(url)) and now["pid"] != before["pid"] and now, 60)
    assert again["decode"] == before["decode"]

    everything = _tree(served.process.pid)
    status, seconds = served.end(signal.SIGINT)
    assert (status, seconds < 15) == (0, True), served.errors.read_text()
    assert served.rest_of_stdout() == ""
    assert _alive(everything) == []
    assert not Path(directory).exists()
    assert "writes to standard output" in served.errors.read_text()


def test_nothing_outlives_a_killed_serve(serve: Callable[..., Served]) -> None:
    served = serve()
    served.ready()
    directory, everything = served.private_directory(), _tree(served.process.pid)
    served.process.kill()
    served.process.wait()
    _until(lambda: not _alive(everything) and not Path(directory).exists(), 60)


def test_a_process_that_cannot_start_ends_the_command_with_its_reason(serve: Callable[..., Served]) -> None:
    served = serve(STAND_IN_FAIL="decode-0")
    assert served.process.wait(START_S) == 1
    assert served.rest_of_stdout() == ""
    assert served.errors.read_text().splitlines()[-1] == "baton: error: decode-0 was told to fail"


@pytest.mark.parametrize("delay_s", [1.0, 5.0])
def test_a_signal_while_starting_ends_everything(serve: Callable[..., Served], delay_s: float) -> None:
    served = serve(STAND_IN_FAIL="nobody")
    time.sleep(delay_s)  # wherever the start has got to by then
    everything = _tree(served.process.pid)
    status, seconds = served.end(signal.SIGTERM)
    assert (status, seconds < 15) == (130, True), served.errors.read_text()
    _until(lambda: not _alive(everything), 5)


def test_a_second_signal_kills_at_once(serve: Callable[..., Served]) -> None:
    served = serve(STAND_IN_DEAF="1")
    served.ready()
    everything = _tree(served.process.pid)
    os.killpg(served.process.pid, signal.SIGINT)
    _until(lambda: "once more to kill" in served.errors.read_text(), 5)
    status, seconds = served.end(signal.SIGINT)
    assert (status, seconds < 8) == (130, True)
    _until(lambda: not _alive(everything), 5)


def _listens(pid: int, address: str) -> bool:
    port = int(address.rsplit(":", 1)[1])
    wanted = {
        line.split()[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    }
    try:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(f"socket:[{inode}]" in links for inode in wanted)
