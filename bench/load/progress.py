"""One line on standard error that says how the run goes: rewritten on a terminal, now and then in a file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TextIO

from bench.load.driver import LoadRun

TERMINAL_INTERVAL_S = 0.5
FILE_INTERVAL_S = 5.0


class Progress:
    """Reports on ``run`` while the ``with`` block runs."""

    def __init__(self, run: LoadRun, clock: Callable[[], float], out: TextIO) -> None:
        self._run, self._clock, self._out = run, clock, out
        self._terminal = out.isatty()
        self._task: asyncio.Task[None] | None = None
        self._seen = self._ok = self._errors = self._tokens = 0

    def __enter__(self) -> Progress:
        self._task = asyncio.get_running_loop().create_task(self._report())
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._terminal:
            self._write("\r\x1b[K")

    def line(self) -> str:
        """How far it is. Looks at each ended record once: those before the first open one need no second look."""
        records, run = self._run.records, self._run
        while self._seen < len(records) and records[self._seen].over:
            record = records[self._seen]
            self._ok += record.ok
            self._errors += not record.ok
            self._tokens += len(record.times_s)
            self._seen += 1
        later = records[self._seen :]
        ok = self._ok + sum(record.ok for record in later)
        errors = self._errors + sum(record.error is not None for record in later)
        tokens = self._tokens + sum(len(record.times_s) for record in later)
        elapsed_s = max(1e-9, self._clock() - run.start_s)
        return (
            f"{elapsed_s:6.1f} s  sent {len(records)}  running {run.num_running}  ok {ok}  errors {errors}  "
            f"{tokens / elapsed_s:.0f} tok/s"
        )

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(TERMINAL_INTERVAL_S if self._terminal else FILE_INTERVAL_S)
            self._write(f"\r\x1b[K{self.line()}" if self._terminal else f"{self.line()}\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
