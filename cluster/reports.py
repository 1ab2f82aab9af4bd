"""What a supervised process tells its supervisor, without the supervisor being called.

A Ray actor gets plain values only, so it cannot call back: its supervisor asks, and the answer waits
until there is something new (`Reports.after`). A report is a dict of plain values with a ``kind``:

    {"kind": "progress", "text": …}
    {"kind": "serving", "address": …}                          a worker
    {"kind": "serving", "http_url": …, "grpc_url": …}          a router
    {"kind": "ready", "routers": [[http_url, grpc_url], …]}    the controller

How a process ended crosses the same way: None, or an error's (code, message, param).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from common.errors import BatonError, to_wire

log = logging.getLogger(__name__)

Report = dict[str, Any]
Failure = tuple[str, str, str]

PATIENCE_S = 5.0


class Reports:
    """An append-only list of reports that can be waited on."""

    def __init__(self) -> None:
        self._reports: list[Report] = []
        self._added = asyncio.Event()

    def add(self, kind: str, **values: Any) -> None:
        self._reports.append({"kind": kind, **values})
        self._added.set()
        self._added = asyncio.Event()

    def progress(self, text: str) -> None:
        self.add("progress", text=text)

    async def after(self, seen: int, patience_s: float = PATIENCE_S) -> list[Report]:
        """Reports from number ``seen`` (counted from 0) on; empty after ``patience_s`` with none."""
        if len(self._reports) <= seen:
            try:
                async with asyncio.timeout(patience_s):
                    await self._added.wait()
            except TimeoutError:
                return []
        return self._reports[seen:]


async def outcome(work: Coroutine[Any, Any, None]) -> Failure | None:
    """Runs the work of a whole process and says how it ended, in plain values.

    The top of a process: what is not a BatonError is a bug, so its traceback goes to the log.
    """
    try:
        await work
    except BatonError as error:
        log.debug("ended with an error", exc_info=True)
        return to_wire(error)
    except OSError as error:
        log.exception("ended with an error")
        return BatonError.code, str(error), ""
    except (Exception, SystemExit) as error:
        log.exception("ended with an error")
        return BatonError.code, f"{type(error).__name__}: {error}", ""
    return None
