"""`baton models list | fetch NAME | path NAME`: the known models and where they are on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.commands.output import write_line, write_progress
from common import model_store
from common.config import load_config


def add_parser(commands: Any, configured: argparse.ArgumentParser) -> None:
    parser = commands.add_parser("models", help="list, fetch and find models")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", parents=[configured], help="known models, and whether they are here")
    listing.set_defaults(run=_list)
    fetch = actions.add_parser("fetch", parents=[configured], help="fetch a model into the cache")
    fetch.set_defaults(run=_fetch)
    path = actions.add_parser("path", parents=[configured], help="print what transformers can load: folder or .gguf")
    path.set_defaults(run=_path)
    for action in (fetch, path):
        action.add_argument("name", metavar="NAME", help="a known name, a local path, or a Hugging Face id")


def _list(arguments: argparse.Namespace) -> int:
    cache_dir = load_config(arguments.config, arguments.overrides).model.cache_dir
    for model in model_store.list_models():
        state = "fetched" if model_store.is_fetched(model.name, cache_dir) else "not fetched"
        write_line(f"{model.name}\t{state}\t{model.description}")
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    cache_dir = load_config(arguments.config, arguments.overrides).model.cache_dir
    path = model_store.resolve(arguments.name, cache_dir, fetch=True, progress=write_progress)
    write_line(str(path.absolute()))
    return 0


def _path(arguments: argparse.Namespace) -> int:
    cache_dir = load_config(arguments.config, arguments.overrides).model.cache_dir
    write_line(str(model_store.resolve(arguments.name, cache_dir, fetch=False).absolute()))
    return 0
