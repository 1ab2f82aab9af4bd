"""Request traces as load sees them: when, how long, and which parts of a prompt others have too.

Two formats, plain or gzip: Mooncake's JSON lines (``timestamp`` in ms, ``input_length``, ``output_length``,
``hash_ids``: an id per block of prompt tokens together with all before it) and Azure's CSV (``TIMESTAMP``,
``ContextTokens``, ``GeneratedTokens``; nothing about prefixes).
"""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path

from common.errors import ConfigError

GZIP_MAGIC = b"\x1f\x8b"
MOONCAKE_TICK_S = 3.0
TICK_JITTER_S = 0.01
"""By how much the stamps of the conversation trace miss the tick that they stand for, and some more."""
BLOCK_SIZES = (512, 16)
"""Prompt tokens per id that traces in Mooncake's format use."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """The first ``limit`` requests by arrival. Raises ConfigError when the file is missing or of no known format."""
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == GZIP_MAGIC
        with gzip.open(path, "rt") if compressed else path.open() as lines:
            rows = _parse(lines, limit)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the trace {path} is neither Mooncake's JSON lines nor Azure's CSV: {error!r}") from error
    if not rows:
        raise ConfigError(f"the trace {path} holds no requests")
    return rows


def _parse(lines: Iterable[str], limit: int | None) -> list[TraceRow]:
    lines = iter(lines)
    first = next(lines, "")
    if first.lstrip().startswith("{"):
        parsed = [_mooncake(json.loads(line)) for line in islice(_again(first, lines), limit) if line.strip()]
        return _with_spread_ticks(_with_block_size(parsed))
    return list(islice(_azure(csv.DictReader(_again(first, lines))), limit))


def _again(first: str, lines: Iterator[str]) -> Iterator[str]:
    yield first
    yield from lines


def _mooncake(row: dict[str, object]) -> TraceRow:
    stamp, prompt, output, ids = (row[key] for key in ("timestamp", "input_length", "output_length", "hash_ids"))
    if not isinstance(stamp, int | float) or not isinstance(prompt, int) or not isinstance(output, int):
        raise TypeError(f"not numbers: {stamp!r}, {prompt!r}, {output!r}")
    if not isinstance(ids, list):
        raise TypeError(f"hash_ids is no list: {ids!r}")
    return TraceRow(stamp / 1000, prompt, output, tuple(map(int, ids)))


def _with_block_size(rows: list[TraceRow]) -> list[TraceRow]:
    """The block size is nowhere written down: the one that fits the number of ids."""
    for size in BLOCK_SIZES:
        if all(len(row.blocks) == -(-row.prompt_tokens // size) for row in rows):
            return [replace(row, block_tokens=size) for row in rows]
    raise ValueError(f"hash_ids fit no block size of {BLOCK_SIZES}")


def _with_spread_ticks(rows: list[TraceRow]) -> list[TraceRow]:
    """Stamps that are all whole ticks say only in which tick a request came: spread evenly over it."""
    ticks = [round(row.at_s / MOONCAKE_TICK_S) for row in rows]
    if any(abs(row.at_s - tick * MOONCAKE_TICK_S) > TICK_JITTER_S for row, tick in zip(rows, ticks, strict=True)):
        return rows
    in_tick, seen = Counter(ticks), Counter[int]()
    spread = []
    for row, tick in zip(rows, ticks, strict=True):
        spread.append(replace(row, at_s=MOONCAKE_TICK_S * (tick + seen[tick] / in_tick[tick])))
        seen[tick] += 1
    return spread


def _azure(rows: Iterable[dict[str, str]]) -> Iterator[TraceRow]:
    start = None
    for row in rows:
        # datetime knows microseconds; the stamps have a digit more.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        start = start or at
        yield TraceRow((at - start).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
