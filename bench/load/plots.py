"""One picture of a run: TTFT, gaps between tokens and throughput, each over time and as a distribution.

Shows what `figures.py` defines; only streams that ended well are drawn, failures are marked where they were due.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.load.figures import MS, STALL_S, gaps_s
from bench.load.session import LoadResult
from bench.load.stream import INTERRUPTED, StreamRecord
from bench.load.summary import load_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = NDArray[np.float64]

MARKED = (50, 90, 99)
BLUE, ORANGE, GREEN, RED, GREY = "#2a6fbb", "#e07b39", "#3a923a", "#c03d3e", "#888888"
NUM_BINS = 60
LOG_FROM = 20
"""An axis is logarithmic when its largest value is so many times a typical or the smallest one."""


def draw(result: LoadResult, path: Path) -> None:
    """Writes the PNG. The run must have at least one stream that ended well."""
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3)
    figure.suptitle(_title(result.figures), fontsize=10.5, x=0.01, ha="left")
    ok = [record for record in result.records if record.ok]
    failed = [record for record in result.records if record.error not in (None, INTERRUPTED)]
    edges = _edges(result.figures["duration_s"])

    ttft_ms = np.array([record.ttft_s * MS for record in ok])
    due_s = np.array([record.intended_s - result.start_s for record in ok])
    gaps_ms = gaps_s(ok) * MS
    _ttft_over_time(axes[0, 0], due_s, ttft_ms, [record.intended_s - result.start_s for record in failed])
    _cumulative(axes[1, 0], ttft_ms, "TTFT, ms", result.figures["targets"]["ttft_s"])
    _gaps_over_time(axes[0, 1], _gap_ends_s(ok) - result.start_s, gaps_ms, edges)
    _cumulative(axes[1, 1], gaps_ms, "Gap between tokens (ITL), ms", None, tails=(50, 99, 99.9))
    rates = _throughput_over_time(axes[0, 2], ok, result, edges)
    _throughput_distribution(axes[1, 2], rates)
    figure.savefig(path, dpi=110)


def _title(figures: dict[str, Any]) -> str:
    setup, failed = figures["setup"], sum(figures["errors"].values())
    return (
        f"{setup['model']} at {setup['url']} · {load_of(setup)} · {figures['ok']} ok, {failed} failed "
        f"in {figures['duration_s']:.1f} s · {figures['output_tok_s']:.0f} tok/s · "
        f"goodput {figures['goodput_rps']:.2f} req/s · {figures['stall_share'] * 100:.1f} % of stream time in stalls"
    )


def _edges(duration_s: float) -> Numbers:
    """Bins of a round width, at most `NUM_BINS` of them."""
    width_s = next((width for width in (0.1, 0.2, 0.5, 1, 2, 5, 10, 30) if duration_s / width <= NUM_BINS), 60)
    return (
        np.arange(int(duration_s / width_s) + 2, dtype=np.float64) * width_s
    )  # the last moment lies within the last bin


def _ttft_over_time(axes: Axes, due_s: Numbers, ttft_ms: Numbers, failed_s: list[float]) -> None:
    axes.scatter(due_s, ttft_ms, s=14, color=BLUE, alpha=0.6, linewidths=0, label="one request")
    if failed_s:
        axes.plot(failed_s, np.zeros(len(failed_s)), "x", color=RED, label="failed", clip_on=False)
    _label(axes, "Time to first token", "due at, s", "ms")
    axes.legend(loc="upper left", fontsize=8)


def _gaps_over_time(axes: Axes, ends_s: Numbers, gaps_ms: Numbers, edges: Numbers) -> None:
    """Percentiles per bin, since a run has many more gaps than a picture has room for."""
    bins = np.digitize(ends_s, edges) - 1
    middles = (edges[:-1] + edges[1:]) / 2
    filled = np.unique(bins)
    for tail, color in ((50, BLUE), (99, ORANGE), (100, RED)):
        shown = [np.percentile(gaps_ms[bins == place], tail) for place in filled]
        name = "longest" if tail == 100 else f"p{tail}"
        axes.plot(middles[filled], shown, color=color, linewidth=1.3, marker=".", markersize=4, label=name)
    if len(gaps_ms) and gaps_ms.max() > LOG_FROM * np.median(gaps_ms) > 0:
        axes.set_yscale("log")
    if len(gaps_ms) and gaps_ms.max() > STALL_S * MS:
        axes.axhline(STALL_S * MS, color=GREY, linewidth=0.8, linestyle=":", label="stall")
    _label(axes, f"Gaps between tokens, per {edges[1] - edges[0]:g} s", "s", "ms")
    axes.legend(loc="upper left", fontsize=8)


def _throughput_over_time(axes: Axes, ok: list[StreamRecord], result: LoadResult, edges: Numbers) -> Numbers:
    """Draws it, and returns tokens per second in each bin."""
    tokens = np.zeros(len(edges) - 1)
    for record in ok:
        # A server may send several tokens in one event.
        weight = record.num_tokens / len(record.times_s)
        tokens += np.histogram(np.asarray(record.times_s) - result.start_s, edges)[0] * weight
    rates = tokens / np.diff(edges)
    axes.stairs(rates, edges, color=GREEN, fill=True, alpha=0.45)
    _label(axes, f"Throughput, per {edges[1] - edges[0]:g} s", "s", "tokens/s")
    axes.yaxis.label.set_color(GREEN)
    running = axes.twinx()
    steps = [(record.intended_s - result.start_s, 1) for record in result.records]
    steps += [(record.end_s - result.start_s, -1) for record in result.records]
    at, change = zip(*sorted(steps), strict=True)
    running.step(at, np.cumsum(change), where="post", color=BLUE, linewidth=1)
    running.set_ylabel("requests under way", color=BLUE)
    running.set_ylim(bottom=0)
    return rates


def _throughput_distribution(axes: Axes, rates: Numbers) -> None:
    axes.hist(rates, bins=min(30, max(5, len(rates) // 2)), color=GREEN, alpha=0.6)
    median = float(np.median(rates))
    axes.axvline(median, color=GREY, linewidth=1, linestyle="--", label=f"median = {median:,.1f}")
    _label(axes, "Throughput, how often", "tokens/s", "bins of time")
    axes.legend(loc="upper left", fontsize=8)


def _cumulative(
    axes: Axes, values: Numbers, name: str, target_s: float | None, tails: tuple[float, ...] = MARKED
) -> None:
    """The share of values up to each value, on a logarithmic axis where they span much."""
    _label(axes, f"{name.split(',')[0]}, cumulative", name, "share")
    axes.set_ylim(0, 1.02)
    if not len(values):
        return
    ordered = np.sort(values)
    axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", color=BLUE)
    for tail, color in zip(tails, (GREY, ORANGE, RED), strict=True):
        value = float(np.percentile(values, tail))
        axes.axvline(value, color=color, linewidth=1, linestyle="--", label=f"p{tail:g} = {value:,.1f}")
    if target_s is not None:
        axes.axvline(target_s * MS, color=GREEN, linewidth=1.5, label=f"target {target_s * MS:,.0f}")
    if ordered[0] > 0 and ordered[-1] > LOG_FROM * ordered[0]:
        axes.set_xscale("log")
    axes.legend(loc="lower right", fontsize=8)


def _gap_ends_s(ok: list[StreamRecord]) -> Numbers:
    ends = [np.asarray(record.times_s)[1:] for record in ok]
    return np.concatenate(ends) if ends else np.empty(0)


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.get_yscale() == "linear":
        axes.set_ylim(0, axes.get_ylim()[1] * 1.15)  # room for the legend
    axes.grid(alpha=0.25)
