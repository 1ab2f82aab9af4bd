"""The figures as a table for people. Shows what `figures.py` counted, counts nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

TIMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "end to end"}
COLUMNS = ("mean", "p50", "p90", "p99", "p999", "max")


def summary(figures: Mapping[str, Any]) -> Group:
    """All of a result: times, counts, errors, what the generator cost, and what there is to be wary of."""
    setup = figures["setup"]
    title = f"{setup['model']} at {setup['url']} · {load_of(setup)}"
    times = Table("ms")
    for column in COLUMNS:
        times.add_column(column, justify="right")
    for key, name in TIMES.items():
        times.add_row(name, *(_number(figures[key].get(column)) for column in COLUMNS))

    counts = Table.grid(padding=(0, 2))
    for name, value in _counts(figures):
        counts.add_row(name, value)
    parts: list[RenderableType] = [Text(title), times, counts]
    parts += [Text(f"{figures['errors'][kind]} x {kind}: {said}") for kind, said in figures["error_samples"].items()]
    parts += [Text(f"note: {note}") for note in warnings(figures)]
    return Group(*parts)


def load_of(setup: Mapping[str, Any]) -> str:
    """What the load was, in a few words."""
    users, rate = setup["concurrency"], setup["rate"]
    words = [f"closed loop, {users} user{'s'[: users > 1]}" if setup["loop"] == "closed" else "open loop"]
    words += [f"{rate:g} req/s"] if rate is not None else []
    words += [setup["trace"]] if setup["trace"] else []
    return ", ".join(words)


def warnings(figures: Mapping[str, Any]) -> list[str]:
    """What a reader of the numbers should know."""
    client, tokens, prompt = figures["client"], figures["output_tokens"], figures["prompt_tokens"]["mean"]
    setup = figures["setup"]
    notes = list(setup["notes"])
    if client["behind"]:
        late, lag = client["late_ms"]["p99"], client["lag_ms"]["p99"]
        notes.append(
            f"the generator itself was late: p99 {_number(late)} ms to send, {_number(lag)} ms to look at what came"
        )
    if figures["tokens_from"] != "usage":
        notes.append(f"tokens counted from {figures['tokens_from']}, not by the server's usage")
    if tokens["mean"] is not None and tokens["mean"] < tokens["asked_mean"]:
        notes.append(f"{tokens['asked_mean']:g} output tokens were asked for, {tokens['mean']:g} came (mean)")
    if prompt is not None and setup["prompt_tokens"] is not None and prompt != setup["prompt_tokens"]:
        notes.append(f"{setup['prompt_tokens']} prompt tokens were asked for, {prompt:g} were counted (mean)")
    if figures["interrupted"]:
        notes.append(f"interrupted; {figures['unfinished']} unfinished requests are not counted")
    return notes


def _counts(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    client, targets = figures["client"], figures["targets"]
    met = ", ".join(f"{name[:4].upper()} ≤ {value:g} s" for name, value in targets.items() if value is not None)
    failed = sum(figures["errors"].values())
    tokens = f"{figures['output_tok_s']:.1f} tok/s ({figures['output_tokens']['total']:,} by {figures['tokens_from']})"
    cost = f"{(client['cpu_share'] or 0) * 100:.1f} % of a core, {_number(client['cpu_us_per_token'])} µs per token"
    late = f"p99 {_number(client['late_ms']['p99'])} ms to send, {_number(client['lag_ms']['p99'])} ms to look"
    return [
        ("requests", f"{figures['requests']} in {figures['duration_s']:.2f} s: {figures['ok']} ok, {failed} failed"),
        ("output", tokens),
        ("goodput", f"{figures['goodput_rps']:.3f} req/s ({met or 'no targets given'})"),
        ("stalls", f"{figures['stall_share'] * 100:.2f} % of stream time in gaps over 200 ms"),
        ("generator", cost),
        ("its lateness", late),
        *([("added", _added(client["added_ms"]))] if "added_ms" in client else []),
    ]


def _added(added: Mapping[str, float | None]) -> str:
    """Of the self-test alone."""
    return f"p50 {_number(added['p50'])} ms, p99 {_number(added['p99'])} ms from the server's write to the time stamp"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
