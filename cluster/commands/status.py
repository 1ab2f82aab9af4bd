"""`baton status`: pools, workers, queues, KV and transfers, as a router tells them over HTTP.

Reads `/cluster` and `/ledger` of one router; knows nothing of Ray and needs no access to it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from cluster.commands.output import write_line
from common.config import load_config
from common.errors import BatonError, UnavailableError

REFRESH_S = 1.0
TIMEOUT_S = 10.0


def add_parser(commands: Any, configured: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("status", parents=[configured], help="show pools, workers, queues, KV, transfers")
    parser.add_argument("--url", metavar="U", help="a router; default: the configuration's host and port")
    parser.add_argument("--json", action="store_true", help="print /cluster and /ledger as one JSON object")
    parser.add_argument("--watch", action="store_true", help=f"again every {REFRESH_S:g} s until Ctrl-C")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    url = arguments.url
    if url is None:
        router = load_config(arguments.config, arguments.overrides).router
        host = "127.0.0.1" if router.host in ("0.0.0.0", "::") else router.host
        url = f"http://{host}:{router.port}"
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        show = _print_json if arguments.json else _print_tables
        try:
            show(client, arguments.watch)
        except KeyboardInterrupt:
            if not arguments.watch:
                raise
    return 0


def read_status(client: httpx.Client) -> dict[str, Any]:
    """``{"cluster": …, "ledger": …}``. Raises UnavailableError, or BatonError with the router's words."""
    return {name: _get(client, f"/{name}") for name in ("cluster", "ledger")}


def tables(status: Mapping[str, Any]) -> Group:
    """The status for people: routers, workers, their KV blocks, and who holds blocks."""
    cluster, ledger = status["cluster"], status["ledger"]
    blocks = {worker["id"]: worker for worker in ledger["workers"]}

    title = f"{cluster['model']} · {cluster['mode']}"
    routers = Table("router", "state", "url", "pid", title=title, title_justify="left")
    for router in cluster["routers"]:
        routers.add_row(router["id"], router["state"], router["url"], str(router["pid"]))

    workers = Table("worker", "role", "state", "host", "pid", "waiting", "running")
    kv_states = ("free", "cached", "reserved", "running", "in_transfer")
    blocks_of = Table("KV blocks of")
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
    holders = Table("held by", "on", "state", "blocks", "age", title=title, title_justify="left")
    for worker in ledger["workers"]:
        for holder in worker.get("holders", ()):
            age = f"{holder['age_s']:.1f} s"
            holders.add_row(holder["request"], worker["id"], holder["state"], str(holder["blocks"]), age)
    return Group(routers, workers, blocks_of, holders)


def _print_json(client: httpx.Client, watch: bool) -> None:
    write_line(json.dumps(read_status(client)))
    while watch:
        time.sleep(REFRESH_S)
        write_line(json.dumps(read_status(client)))


def _print_tables(client: httpx.Client, watch: bool) -> None:
    console = Console()
    view = tables(read_status(client))
    if not watch:
        console.print(view)
        return
    with Live(view, console=console, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(tables(read_status(client)), refresh=True)


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


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _mebibytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.1f} MiB"
