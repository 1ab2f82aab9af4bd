"""`baton bench …`: benchmarks, one module each beside this one."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.commands import bench_load, bench_transfer


def add_parser(commands: Any, configured: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("bench", help="benchmarks: load on a server, speed of the KV handoff")
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    bench_load.add_flags(benches.add_parser("load", parents=[configured], help="load on any OpenAI-compatible URL"))
    bench_transfer.add_flags(
        benches.add_parser(
            "transfer",
            parents=[configured],
            help="how fast KV moves between two workers, beside the raw links",
            description=bench_transfer.DESCRIPTION,
        )
    )
