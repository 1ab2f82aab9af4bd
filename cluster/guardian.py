"""The guardian: a small process that clears up after `baton serve`, however that ends.

Ray's own processes share the fate of the process that started them, but not all of them do, and none
removes its files. So `baton serve` keeps all of Ray under one private directory and starts a guardian
that waits on a pipe: when the other end closes (a clean end, a crash, kill -9), it ends every process
that still has a file open under that directory and then removes it. Every process of Ray writes its log
there, so an open file is what tells them apart from everything else on the machine.

Runs as `python guardian.py DIRECTORY` with the pipe as standard input; imports nothing but the standard
library, so that it starts at once and stays small.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

CLEAR_S = 30.0
GRACE_S = 2.0
POLL_S = 0.1


class Guardian:
    """The side of `baton serve`: a private ``directory`` and the promise that it will be cleared."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="baton-", dir="/tmp"))  # short: socket paths
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill(self) -> bool:
        """`close`, without grace: what runs is killed now."""
        for pid in processes_under(str(self.directory)):
            _kill(pid)
        return self.close()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Has the directory and its processes cleared; True when that was done within ``timeout_s``."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            return self._process.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            return False


def processes_under(directory: str, spared: Collection[int] = ()) -> list[int]:
    """Process ids that have a file open under ``directory``, other than this process and ``spared``."""
    prefix = os.path.realpath(directory) + "/"
    pids = (name for name in os.listdir("/proc") if name.isdigit())
    return [int(pid) for pid in pids if int(pid) not in (os.getpid(), *spared) and _uses(pid, prefix)]


def clear(directory: str, spared: Collection[int] = (), deadline_s: float = CLEAR_S) -> bool:
    """Ends every process under ``directory`` and removes it; True when nothing is left.

    Processes get ``GRACE_S`` to see for themselves that they are orphans; SIGTERM would only race
    with that. Two looks in a row must find nothing: a dying raylet may just have started a child.
    """
    started = time.monotonic()
    quiet = 0
    while quiet < 2:
        elapsed_s = time.monotonic() - started
        if elapsed_s > deadline_s:
            return False
        remaining = processes_under(directory, spared)
        quiet = 0 if remaining else quiet + 1
        if elapsed_s > GRACE_S:
            for pid in remaining:
                _kill(pid)
        time.sleep(POLL_S)
    shutil.rmtree(directory, ignore_errors=True)
    return not os.path.exists(directory)


def _uses(pid: str, prefix: str) -> bool:
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # gone meanwhile, or another user's
        return False
    for descriptor in descriptors:
        try:
            if os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(prefix):
                return True
        except OSError:
            continue
    return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    served_by = os.getppid()
    while sys.stdin.buffer.read(4096):
        pass
    alive = os.getppid() == served_by  # it ends well, and has its own logs of Ray open
    return 0 if clear(sys.argv[1], (served_by,) if alive else ()) else 1


if __name__ == "__main__":
    sys.exit(main())
