"""`baton doctor`: checks machine, packages, devices, ports and configuration, and says what to do.

Changes nothing and needs no running cluster. Exit status 0 when nothing failed; warnings do not count.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from cluster.commands.output import write_line
from common.config import Config, load_config
from common.errors import ConfigError

if TYPE_CHECKING:
    from cluster.machine_checks import Check

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def add_parser(commands: Any, configured: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "doctor", parents=[configured], help="check machine, packages, devices, ports and config; say what to do"
    )
    parser.add_argument("--json", action="store_true", help='print {"ok", "checks": [{"name", "status", …}]}')
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from cluster.health_checks import run_checks
    from cluster.machine_facts import gather
    from cluster.preflight import check_available

    config, config_error = Config(), ""
    try:
        config = load_config(arguments.config, arguments.overrides)
        check_available(config)
    except ConfigError as error:
        config_error = " ".join(error.message.split())
        config = Config()
    checks = list(run_checks(gather(config, arguments.config), config, config_error))
    failed = sum(check.status == "fail" for check in checks)
    if arguments.json:
        write_line(json.dumps({"ok": not failed, "checks": [asdict(check) for check in checks]}))
    else:
        _print(checks, failed)
    return 1 if failed else 0


def _print(checks: Sequence[Check], failed: int) -> None:
    """One line each, however long: scripts and people cut it as they like."""
    console = Console(markup=False, highlight=False, emoji=False)
    width = max(len(check.name) for check in checks)
    for check in checks:
        line = Text(f"{check.status:5}", COLOURS[check.status])
        line.append(f"{check.name:{width}}  ", "bold").append(check.detail, "default")
        if check.advice:
            line.append(f" → {check.advice}", "dim")
        console.print(line, soft_wrap=True)
    warned = sum(check.status == "warn" for check in checks)
    console.print(f"{len(checks)} checks, {failed} failed, {warned} warnings", soft_wrap=True)
