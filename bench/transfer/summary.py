"""The figures as tables for people. Shows what `figures.py` says, judges nothing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.transfer.cases import GIB, KIB, MIB
from bench.transfer.figures import MANY_BLOCKS, Result, lowest_ratio, transports


def summary(figures: Mapping[str, Any]) -> Group:
    """All of a result: speed by transport and size, overlap, and targets with what they were met by."""
    parts: list[RenderableType] = []
    if figures["results"]:
        parts.append(_speed(figures))
    if figures["overlap"]:
        parts.append(_overlap(figures["overlap"]))
    if figures["targets"]:
        parts.append(_targets(figures["targets"]))
        missed = sum(not target["met"] for target in figures["targets"])
        parts.append(Text(f"{len(figures['targets'])} targets, {missed or 'none'} missed"))
    return Group(*parts)


def size_name(num_bytes: int) -> str:
    """As a size is written: 64 KiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:g} {name}"
    return f"{num_bytes} B"


def _speed(figures: Mapping[str, Any]) -> Table:
    results: Sequence[Result] = figures["results"]
    sizes = sorted({result["size"] for result in results})
    table = Table(
        "transport",
        title=f"Verified handoff over raw link: the lowest ratio below {MANY_BLOCKS:,} blocks",
        title_justify="left",
        caption=f"small: {MANY_BLOCKS:,} blocks over few; checksums: of the time (< 0: noise)",
        caption_justify="left",
    )
    for size in sizes:
        table.add_column(size_name(size), justify="right")
    table.add_column("small", justify="right")
    table.add_column("checksums", justify="right")
    for name in transports(results):
        ratios = [_number(lowest_ratio(results, name, size)) for size in sizes]
        small, checksums = figures["small_blocks_shares"].get(name), figures["checksum_shares"].get(name)
        table.add_row(name, *ratios, _number(small), _percent(checksums))
    return table


def _overlap(overlap: Sequence[Result]) -> Table:
    table = Table("transport", title="Handoff while the prompt is computed", title_justify="left")
    for column in ("link", "tokens", "prefill s", "transfer s", "exposed ms", "share"):
        table.add_column(column, justify="right")
    for result in overlap:
        table.add_row(
            result["transport"],
            "slow" if result["shaped"] else "as it is",
            f"{result['prompt_tokens']:,}",
            f"{result['prefill_s']:.2f}",
            f"{result['transfer_s']:.3f}",
            f"{result['exposed_s'] * 1e3:.1f}",
            _percent(result["share"]),
        )
    return table


def _targets(targets: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("target", "transport", title="Targets", title_justify="left")
    for column in ("wanted", "measured", ""):
        table.add_column(column, justify="right")
    for target in targets:
        wanted = f"≥ {target['at_least']:.2f}" if "at_least" in target else f"≤ {target['at_most']:.2f}"
        verdict = Text("met", "green") if target["met"] else Text("missed", "red")
        table.add_row(target["name"], target["transport"], wanted, f"{target['value']:.3f}", verdict)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"
