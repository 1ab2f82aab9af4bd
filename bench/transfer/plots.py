"""One picture of a run: speed and its part of the raw link's over bytes, and speed over block counts at fixed bytes.

Shows the JSON's ``results``; measures and judges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from bench.transfer.figures import MANY_BLOCKS, Result, transports
from bench.transfer.summary import size_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2a6fbb", "#e07b39", "#3a923a", "#c03d3e", "#8a63b3", "#7f6a4f")
GREY = "#888888"


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Writes the PNG. There must be at least one of ``results``."""
    figure = Figure(figsize=(16, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    speed, ratio, blocks = figure.subplots(1, 3)
    results: Sequence[Result] = figures["results"]
    sizes = sorted({result["size"] for result in results})
    counts_of = {size: sorted({result["blocks"] for result in results if result["size"] == size}) for size in sizes}
    fixed = max(sizes, key=lambda size: (len(counts_of[size]), size))  # where block counts differ most
    for name, colour in zip(transports(results), COLOURS, strict=False):
        own = [result for result in results if result["transport"] == name]
        few = _fewest_blocks(own)
        many = [result for result in own if result["blocks"] >= MANY_BLOCKS]
        _line(speed, few, "gib_s", colour, "-", name)
        _line(speed, few, "raw_gib_s", colour, "--")
        _line(ratio, few, "ratio", colour, "-", name)
        _line(ratio, many, "ratio", colour, ":")
        at_fixed = sorted((result for result in own if result["size"] == fixed), key=lambda each: each["blocks"])
        _line(blocks, at_fixed, "gib_s", colour, "-", name, over="blocks")
        _line(blocks, at_fixed, "raw_gib_s", colour, "--", over="blocks")
    ratio.axhline(1.0, color=GREY, linewidth=0.8)
    _label(speed, "In the fewest blocks; raw link dashed", "GiB/s")
    _label(ratio, f"Of the raw link's speed, in the fewest blocks; in {MANY_BLOCKS:,} or more dotted", "ratio")
    _label(blocks, f"{size_name(fixed)} in so many blocks; raw link dashed", "GiB/s")
    for axes in (speed, ratio):
        _measured_at(axes, "bytes", sizes, [size_name(size) for size in sizes])
    _measured_at(blocks, "blocks", counts_of[fixed], [f"{count:,}" for count in counts_of[fixed]])
    figure.suptitle(_title(figures), fontsize=10.5, x=0.01, ha="left")
    figure.savefig(path, dpi=110)


def _title(figures: Mapping[str, Any]) -> str:
    shares = ", ".join(f"{name} {share * 100:.1f} %" for name, share in figures["checksum_shares"].items())
    return f"KV handoff between two pools, verified, medians · of its time, checksums take {shares}"


def _fewest_blocks(own: Sequence[Result]) -> list[Result]:
    """One for each size."""
    chosen: dict[int, Result] = {}
    for result in sorted(own, key=lambda each: (each["size"], each["blocks"])):
        chosen.setdefault(result["size"], result)
    return list(chosen.values())


def _line(
    axes: Axes, results: Sequence[Result], key: str, colour: str, style: str, label: str = "", over: str = "size"
) -> None:
    x, y = [result[over] for result in results], [result[key] for result in results]
    width = 1.6 if style == "-" else 1.1
    axes.plot(x, y, style, color=colour, linewidth=width, marker=".", markersize=6, label=label or None)


def _label(axes: Axes, title: str, y: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    if y == "GiB/s":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.legend(loc="best", fontsize=8)


def _measured_at(axes: Axes, name: str, values: Sequence[int], names: Sequence[str]) -> None:
    """A logarithmic axis with a mark for each of ``values`` and for nothing else."""
    axes.set_xlabel(name)
    axes.set_xscale("log")
    axes.set_xticks(values, names)
    axes.minorticks_off()
