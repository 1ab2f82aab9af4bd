"""The `baton` command line: the result goes to standard output, everything else to standard error.

Knows how commands are found, configured and how they fail; what they do is in `cluster/commands/`.
Command modules import what is heavy (Ray, model files) when they run, so that `baton --help` answers at once.

Exit status: 0 when the command did what it says, 1 when it failed (one line on standard error),
2 when it was called wrongly, 130 when it was interrupted before it was done (`serve` is done when it is asked to end).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from cluster.commands import bench, chat, config, doctor, models, serve, status
from cluster.end_signals import INTERRUPTED
from common.errors import BatonError


class _Parser(argparse.ArgumentParser):
    """Says in one line how it was called wrongly; `--help` has the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets ``run(arguments) -> exit status``."""
    parser = _Parser(
        prog="baton", description="Serves large language models on a cluster split into prefill and decode."
    )
    parser.add_argument("--version", action="version", version=f"baton {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    configured = argparse.ArgumentParser(add_help=False)
    group = configured.add_argument_group("configuration")
    group.add_argument("--config", metavar="F", help="YAML file; `baton config schema` describes it")
    group.add_argument(
        "--set", metavar="PATH=VALUE", action="append", default=[], dest="overrides", help="one value; repeatable"
    )
    for command in (serve, status, chat, bench, doctor, models, config):
        command.add_parser(commands, configured)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except BatonError as error:
        print(f"baton: error: {' '.join(error.message.split())}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left (`baton models list | head -1`): nothing is wrong here.
        sys.stderr.close()
        return 0


def _version() -> str:
    try:
        return metadata.version("baton")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


if __name__ == "__main__":
    sys.exit(main())
