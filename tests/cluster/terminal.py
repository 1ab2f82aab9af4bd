"""A command on a terminal of its own, typed at and read from."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

BATON = Path(sys.executable).with_name("baton")
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """``seen`` is all that the command wrote so far."""

    def __init__(self, *argv: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [str(BATON), *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.seen = ""
        self._read = 0

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, words: str, within_s: float = 20.0) -> str:
        """Reads until ``words`` come, after those expected before; what was written up to there."""
        deadline = time.monotonic() + within_s
        while words not in self.seen[self._read :]:
            assert time.monotonic() < deadline, f"no {words!r} in {self.seen[self._read :]!r}"
            assert self._more(deadline), f"ended without {words!r}: {self.seen[self._read :]!r}"
        end = self.seen.index(words, self._read) + len(words)
        part, self._read = self.seen[self._read : end], end
        return part

    def exit_status(self, within_s: float = 20.0) -> int:
        deadline = time.monotonic() + within_s
        while self._more(deadline):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _more(self, deadline: float) -> bool:
        """False at the end: the command closed its terminal, or time is over."""
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self._master, 65536) if ready else b""
        except OSError:  # Linux says EIO when the last user of the terminal is gone
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
