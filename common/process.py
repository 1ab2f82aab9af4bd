"""A role started by hand: command line, log, signals, one line when it is ready, an exit status."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable

from common.config import Config, load_config
from common.errors import BatonError
from common.lifecycle import stop_on_signals
from common.log import setup_logging

Run = Callable[[Config, str, Callable[[str], None], asyncio.Event, Callable[[str], None]], Awaitable[None]]
"""A role's process: (config, name, ready, stop, progress). Serves until ``stop``; ``ready`` gets where."""


EXIT_TIMEOUT_S = 5.0
"""When all is done, threads get this long to end. One that hangs is not waited for."""


def main(program: str, role: str, run: Run) -> None:
    """Parses the arguments and runs the role until SIGINT or SIGTERM. Exits 0, or 1 with one line of error.

    The process is called ``worker.id``; by default after its role and port, since names must differ.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=f"Runs one {program} without Ray.")
    parser.add_argument("--config", metavar="F", help="YAML configuration file")
    parser.add_argument("--set", metavar="PATH=VALUE", action="append", default=[], help="overrides one key")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config, arguments.set)
        name = config.worker.id or f"{role}-{config.worker.port or os.getpid()}"
        setup_logging(config.log, name)
        _new_loop_runner(_run(run, config, name))
    except BatonError as error:
        _exit_in_time()
        print(f"{program}: error: {error.message}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
    _exit_in_time()


def _exit_in_time() -> None:
    """The interpreter waits for its threads; a step that hangs in one must not keep the process alive."""
    deadline = threading.Timer(EXIT_TIMEOUT_S, os._exit, (1,))
    deadline.daemon = True
    deadline.start()


async def _run(run: Run, config: Config, name: str) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)

    def ready(place: str) -> None:
        print(f"ready {place}", flush=True)  # noqa: T201

    def progress(text: str) -> None:
        print(f"{name}: {text}", file=sys.stderr, flush=True)  # noqa: T201

    await run(config, name, ready, stop, progress)


def _new_loop_runner(main: Awaitable[None]) -> None:
    import uvloop

    async def whole() -> None:
        await main

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(whole())
