"""What a flag's value must be, and what must hold before a long run begins.

The types raise ArgumentTypeError or ValueError, which argparse turns into a wrong call.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from common.errors import BatonError

T = TypeVar("T")

UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return value


def count_or_none(text: str) -> int:
    return 0 if text.strip() == "0" else count(text)


def num_bytes(text: str) -> int:
    """``64KiB``, ``1.5 GiB``, ``4096``: a whole number of bytes, 1 or more."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", text.strip())
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"must be bytes, such as 4096, 64KiB, 16MiB or 1GiB, got {text}")
    value = float(match[1]) * unit
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number of bytes, 1 or more, got {text}")
    return int(value)


def listed(of: Callable[[str], T]) -> Callable[[str], list[T]]:
    """The type of a list, separated by commas."""

    def parse(text: str) -> list[T]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise argparse.ArgumentTypeError(f"must be a list such as A,B, got {text!r}")
        return [of(part) for part in parts]

    parse.__name__ = f"list of {of.__name__}"  # argparse's word for it
    return parse


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def check_writable(*paths: Path | None) -> None:
    """Raises BatonError for a file that has no folder: before a long run, not after it."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise BatonError(f"{path} cannot be written: there is no folder {path.absolute().parent}")
