"""`baton bench transfer`: how fast KV moves between two workers, beside the raw links.

Knows the flags and where results go; what is measured and how is in `bench/transfer/`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from cluster.commands.flags import check_writable, count, listed, num_bytes
from cluster.commands.output import write_line, write_progress
from cluster.preflight import memory_available
from common.config import load_config

DESCRIPTION = (
    "Moves KV between the pools of two processes of this machine, over each transport, with checksums on, and the same "
    "bytes over the raw link in turn; then a long prompt's KV while the prompt is computed. Without flags it takes "
    "less than 5 minutes; nothing else should run meanwhile. Settings are Baton's defaults: a configuration is "
    "checked, not used. Missed targets are said and do not fail it."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    speed = parser.add_argument_group("speed")
    speed.add_argument(
        "--transports", metavar="T,…", type=listed(str), help="default: all that can be used on this machine"
    )
    speed.add_argument(
        "--sizes", metavar="N,…", type=listed(num_bytes), help="such as 64KiB,16MiB; default: 64 KiB to 256 MiB"
    )
    speed.add_argument(
        "--blocks", metavar="N,…", type=listed(count), help="how many blocks the bytes lie in, with each size that "
        "makes pieces (a block in one of 4 layers) of 128 bytes to 4 MiB of it; default: 1, 16, 256 and 10,000"
    )  # fmt: skip
    speed.add_argument("--rounds", metavar="N", type=count, help="of each case; default: more for fewer bytes")
    speed.add_argument(
        "--peers", choices=("on", "off"), default="on", help="as in other benchmarks; this one has no peers to run"
    )
    parts = parser.add_argument_group("parts").add_mutually_exclusive_group()
    parts.add_argument("--only", choices=("speed", "overlap"), help="one of both parts")
    parts.add_argument("--no-overlap", dest="only", action="store_const", const="speed", help="as --only speed")
    result = parser.add_argument_group("result")
    result.add_argument("--json", metavar="OUT", type=Path, help="write the figures there")
    result.add_argument("--plot", metavar="PNG", type=Path, help="draw the speeds there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # not a line for each connection that ends; before grpc loads
    from bench.transfer.cases import BLOCKS, SIZES
    from bench.transfer.session import TransferOptions, check_memory, plan_of, run_transfer

    check_writable(arguments.json, arguments.plot)
    load_config(arguments.config, arguments.overrides)
    options = TransferOptions(
        transports=arguments.transports,
        sizes=arguments.sizes or SIZES,
        blocks=arguments.blocks or BLOCKS,
        rounds=arguments.rounds,
        only=arguments.only,
    )
    if options.only != "overlap":
        check_memory(plan_of(options), memory_available())
    return _report(run_transfer(options, write_progress), arguments)


def _report(figures: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Figures to where they were asked for, tables to standard output."""
    from rich.console import Console

    from bench.transfer.summary import summary

    Console(file=sys.stdout).print(summary(figures))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
        write_line(f"figures: {arguments.json}")
    if arguments.plot is not None and figures["results"]:
        from bench.transfer.plots import draw

        draw(figures, arguments.plot)
        write_line(f"plot: {arguments.plot}")
    return 0
