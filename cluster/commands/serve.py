"""`baton serve`: brings a cluster up, says where it listens, serves until a signal, takes all of it down.

Life of the command:

1. The configuration is read and what can be known to fail is refused, before anything is started.
2. Ray is started (or joined) and the controller actor brings the processes up; its progress goes to
   standard error, as do all logs.
3. One line per router goes to standard output, `ready http://HOST:PORT grpc://HOST:PORT`, and nothing else.
4. SIGINT or SIGTERM, at whatever moment: routers end, then workers, then Ray, and the exit status is 0, for that is
   what was asked for. A second signal kills all of it at once. When this process itself is killed, the guardian
   does what is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cluster.commands.output import write_progress
from cluster.end_signals import EndSignals
from common.config import Config, load_config
from common.errors import DeadlineError, WorkerLostError, from_wire

if TYPE_CHECKING:
    from cluster.ray_session import RaySession

STOP_SLACK_S = 1.0

FLAGS = {
    "model": "model.name",
    "prefill": "prefill.workers",
    "decode": "decode.workers",
    "routers": "router.replicas",
    "mode": "mode",
    "host": "router.host",
    "port": "router.port",
    "address": "cluster.address",
}
"""Flag → the configuration key that it sets."""


def add_parser(commands: Any, configured: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("serve", parents=[configured], help="bring a cluster up and serve until Ctrl-C")
    parser.add_argument("--model", metavar="M", help="a known name, a local path, or a Hugging Face id")
    parser.add_argument("--prefill", metavar="N", type=int, help="prefill workers")
    parser.add_argument("--decode", metavar="N", type=int, help="decode workers")
    parser.add_argument("--routers", metavar="N", type=int, help="routers; each has its own port, from --port on")
    parser.add_argument("--mode", choices=("split", "adaptive", "colocated"), help="default: split")
    parser.add_argument("--host", metavar="H", help="where routers listen; default: 127.0.0.1")
    parser.add_argument("--port", metavar="P", type=int, help="HTTP port; 0 picks a free one; default: 8000")
    parser.add_argument("--address", metavar="RAY", help="join this Ray cluster instead of starting one")
    parser.set_defaults(run=run)


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """The flags as ``path=value``, after what ``--set`` says: the flag is the more specific word."""
    given = ((path, getattr(arguments, flag)) for flag, path in FLAGS.items())
    return [*arguments.overrides, *(f"{path}={json.dumps(value)}" for path, value in given if value is not None)]


def run(arguments: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        served = _run(arguments)
    except KeyboardInterrupt:  # nothing was started yet
        served = False
    write_progress("ended" if served else "interrupted before the cluster was up")
    return 0


def _run(arguments: argparse.Namespace) -> bool:
    """Until a signal; True when the cluster was up by then."""
    from cluster import preflight
    from cluster.ray_session import open_ray
    from common.log import setup_logging

    config = load_config(arguments.config, overrides_of(arguments))
    preflight.check_available(config)
    result = _take_stdout()
    setup_logging(config.log, "serve")
    config = _with_secret(_with_absolute_paths(config))
    if config.cluster.address is None:
        from cluster.model_check import check_model

        preflight.check_ports(config)
        model = _fetch_model(config)
        preflight.check_memory(config, model)
        preflight.check_memory(config, model, weights_bytes=check_model(config, model))
    else:
        preflight.check_ray_address(config.cluster.address)
    signals = EndSignals()
    write_progress("starting Ray" if config.cluster.address is None else f"joining Ray at {config.cluster.address}")
    session = open_ray(config.cluster.address)
    signals.kill = session.abandon
    try:
        served = asyncio.run(_serve(config, session, result, signals))
    finally:
        clean = session.close()
    if not clean:
        raise DeadlineError("Ray's processes did not end in time")
    return served


async def _serve(config: Config, session: RaySession, result: TextIO, signals: EndSignals) -> bool:
    """Until a signal; True when the cluster was up by then. Raises what the cluster failed with."""
    from ray.exceptions import RayError

    from cluster.actors import ControllerActor
    from cluster.ray_launcher import first_line

    stop, up = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    signals.asked = lambda: loop.call_soon_threadsafe(stop.set)
    if signals.received:
        return False
    try:
        actor_class: Any = ControllerActor
        controller = actor_class.remote(config.model_dump(mode="json"), session.environment)
        work = asyncio.ensure_future(_value(controller.run.remote()))
        follow = asyncio.ensure_future(_follow(controller, result, up))
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait((work, follow, stopped), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            stopping = asyncio.ensure_future(_value(controller.stop.remote()))
            await asyncio.wait((work,), timeout=config.cluster.stop_timeout_s + STOP_SLACK_S)
            stopping.cancel()
        elif follow.done() and not work.done():
            follow.result()
        follow.cancel()
        if not work.done():
            write_progress("the controller did not end in time; killing what is left")
        elif failure := work.result():
            raise from_wire(*failure)
        elif not stop.is_set():
            raise WorkerLostError("the cluster ended by itself")
    except RayError as error:
        if not stop.is_set():
            raise WorkerLostError(f"the controller is gone: {first_line(error)}") from error
        # It died on the way out: what it did not end, the guardian does.
    finally:
        signals.asked = lambda: None  # the loop that it spoke to ends now
    return up.is_set()


async def _follow(controller: Any, result: TextIO, up: asyncio.Event) -> None:
    """Prints what the controller reports, for as long as it does."""
    seen = 0
    while True:
        for report in await _value(controller.reports.remote(seen)):
            seen += 1
            if report["kind"] == "progress":
                write_progress(report["text"])
            elif report["kind"] == "ready":
                for http_url, grpc_url in report["routers"]:
                    result.write(f"ready {http_url} {grpc_url}\n")
                result.flush()
                up.set()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _take_stdout() -> TextIO:
    """Standard output for this command alone: whatever else writes to it writes to standard error."""
    sys.stdout.flush()
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return result


def _with_secret(config: Config) -> Config:
    """A secret of this cluster's own, so that only its processes can call each other. Workers that were
    started by hand know none but the configured one."""
    if config.cluster.secret is not None or config.prefill.addresses or config.decode.addresses:
        return config
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"secret": secrets.token_hex(32)})})


def _with_absolute_paths(config: Config) -> Config:
    """Ray's processes may run in other directories."""
    from common.model_store import KNOWN_MODELS, find_local

    model = config.model
    changes: dict[str, Any] = {}
    if model.name not in KNOWN_MODELS and (path := find_local(model.name)) is not None:
        changes["name"] = str(path)
        changes["served_name"] = model.served_name or model.name
    if model.cache_dir is not None:
        changes["cache_dir"] = str(Path(model.cache_dir).expanduser().absolute())
    return config.model_copy(update={"model": model.model_copy(update=changes)})


def _fetch_model(config: Config) -> Path:
    from common import model_store

    return model_store.resolve(config.model.name, config.model.cache_dir, fetch=True, progress=write_progress)


async def _value(ref: Any) -> Any:
    return await asyncio.wrap_future(ref.future())
