"""`baton config check F` validates a configuration; `baton config schema` prints its JSON schema."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cluster.commands.output import write_line
from common.config import Config, load_config


def add_parser(commands: Any, configured: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("config", help="validate the configuration, print its schema")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = actions.add_parser("check", parents=[configured], help="validate a file (and --set values on top)")
    check.add_argument("file", metavar="F", nargs="?", help="YAML file; without it --config, or the defaults")
    check.set_defaults(run=_check)
    schema = actions.add_parser("schema", parents=[configured], help="print the JSON schema of the configuration")
    schema.set_defaults(run=_schema)


def _check(arguments: argparse.Namespace) -> int:
    path = arguments.file or arguments.config
    load_config(path, arguments.overrides)
    write_line(f"ok: {path or 'defaults'}")
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    del arguments
    write_line(json.dumps(Config.model_json_schema(), indent=2))
    return 0
