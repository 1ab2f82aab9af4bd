"""`baton status`: pools, workers, queues, KV and transfers, as a router tells them over HTTP.

Reads `/cluster` and `/ledger` of one router; knows nothing of Ray and needs no access to it. With
``--watch`` a router that does not answer is no end: it may just be starting again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from cluster.commands.output import write_line
from cluster.router_address import router_url
from common.errors import BatonError, UnavailableError

REFRESH_S = 1.0
MOST_S = 3600.0
TIMEOUT_S = 10.0


def add_parser(commands: Any, configured: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("status", parents=[configured], help="show pools, workers, queues, KV, transfers")
    parser.add_argument("--url", metavar="U", help="a router; default: the configuration's host and port")
    parser.add_argument("--json", action="store_true", help="print /cluster and /ledger as one JSON object")
    parser.add_argument("--watch", action="store_true", help="again and again until Ctrl-C")
    parser.add_argument(
        "--interval", metavar="S", type=_seconds, default=REFRESH_S, help="between two; default: %(default)g"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        with httpx.Client(base_url=router_url(arguments), timeout=TIMEOUT_S, trust_env=False) as client:
            if arguments.watch:
                _watch(client, arguments.json, arguments.interval)
            elif arguments.json:
                write_line(json.dumps(read_status(client)))
            else:
                _console().print(tables(read_status(client)))
    except KeyboardInterrupt:
        if not arguments.watch:
            raise
    return 0


def read_status(client: httpx.Client) -> dict[str, Any]:
    """``{"cluster": …, "ledger": …}``. Raises UnavailableError, or BatonError with the router's words."""
    status = {name: _get(client, f"/{name}") for name in ("cluster", "ledger")}
    if not all(isinstance(part.get("workers"), list) for part in status.values()):
        raise BatonError(f"{client.base_url} answers, but not as a router of Baton does")
    return status


def tables(status: Mapping[str, Any]) -> Group:
    """The status for people: routers, workers, their KV blocks, and who holds blocks."""
    cluster, ledger = status["cluster"], status["ledger"]
    blocks = {worker["id"]: worker for worker in ledger["workers"]}

    title = f"{cluster['model']} · {cluster['mode']}"
    routers = Table("router", "state", "url", "grpc", "pid", title=title, title_justify="left")
    for router in cluster["routers"]:
        grpc = router.get("grpc", "").removeprefix("grpc://")
        routers.add_row(router["id"], router["state"], router["url"], grpc, str(router["pid"]))

    workers = Table("worker", "role", "state", "host", "pid", "waiting", "running")
    kv_states = ("free", "cached", "reserved", "running", "in_transfer")
    blocks_of = Table(Column("KV blocks of", no_wrap=True))
    for heading in ("all", "free", "cached", "reserved", "running", "moving", "sent", "received"):
        blocks_of.add_column(heading, justify="right")
    for worker in cluster["workers"]:
        load, kv = worker.get("load") or {}, blocks.get(worker["id"], {})
        workers.add_row(
            worker["id"],
            worker["role"],
            worker["state"],
            worker["host"],
            " ".join(str(pid) for pid in worker["pids"]),
            _count(load.get("num_waiting")),
            _count(load.get("num_running")),
        )
        blocks_of.add_row(
            worker["id"],
            _count(kv.get("total")),
            *(_count(kv.get(state)) for state in kv_states),
            _mebibytes(load.get("kv_bytes_sent")),
            _mebibytes(load.get("kv_bytes_received")),
        )

    title = f"open requests: {ledger['requests']['open']}"
    # Folded, not cut: a request's id is wanted whole.
    held_by = Column("held by", overflow="fold")
    holders = Table(held_by, "on", "state", "blocks", "age", title=title, title_justify="left")
    for worker in ledger["workers"]:
        for holder in worker.get("holders", ()):
            age = f"{holder['age_s']:.1f} s"
            holders.add_row(holder["request"], worker["id"], holder["state"], str(holder["blocks"]), age)
    return Group(routers, workers, blocks_of, holders if holders.row_count else title)


def _watch(client: httpx.Client, as_json: bool, interval_s: float) -> None:
    """Until a KeyboardInterrupt. On a terminal in place; elsewhere one status after the other."""
    console = _console()
    if as_json:
        _repeat(
            client,
            interval_s,
            lambda status: write_line(json.dumps(status)),
            lambda error: write_line(json.dumps(error)),
        )
    elif not console.is_terminal:
        _repeat(
            client,
            interval_s,
            lambda status: console.print(tables(status)),
            lambda error: console.print(error["error"]),
        )
    else:
        with Live(console=console, auto_refresh=False) as live:

            def show(view: RenderableType) -> None:
                live.update(Group(view, Text(f"{time.strftime('%X')}, Ctrl-C ends", "dim")), refresh=True)

            _repeat(
                client, interval_s, lambda status: show(tables(status)), lambda error: show(Text(error["error"], "red"))
            )


def _repeat(
    client: httpx.Client,
    interval_s: float,
    show: Callable[[dict[str, Any]], None],
    show_error: Callable[[dict[str, str]], None],
) -> None:
    while True:
        try:
            status = read_status(client)
        except BatonError as error:
            show_error({"error": " ".join(error.message.split())})
        else:
            show(status)
        time.sleep(interval_s)


def _console() -> Console:
    """Names and URLs are shown as they are, brackets included."""
    return Console(markup=False, highlight=False, emoji=False)


def _get(client: httpx.Client, path: str) -> dict[str, Any]:
    url = f"{client.base_url}".rstrip("/") + path
    try:
        response = client.get(path)
        body = response.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnavailableError(f"no answer from {url}: {error or type(error).__name__}") from error
    except ValueError as error:
        raise BatonError(f"{url} answered {response.status_code} with something that is not JSON") from error
    if response.status_code != httpx.codes.OK or not isinstance(body, dict):
        detail = body.get("error", {}).get("message") if isinstance(body, dict) else None
        raise BatonError(f"{url} answered {response.status_code}: {detail or 'no reason given'}")
    return body


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= MOST_S:
        raise argparse.ArgumentTypeError(f"must be seconds, more than 0 and at most {MOST_S:g}, got {text!r}")
    return value


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _mebibytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.1f} MiB"
