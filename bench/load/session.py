"""One benchmark from its options to its figures: look at the server, warm it up, load it, count.

Owns the event loop, the clock and Ctrl-C; decides nothing about when a request is due or what a figure means.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from bench.load.connection import ConnectionPool
from bench.load.driver import LoadRun
from bench.load.figures import MS, Targets, distribution, load_figures
from bench.load.progress import Progress
from bench.load.prompts import PromptWriter
from bench.load.stream import StreamRecord
from bench.load.target import Target, base_url, calibrate, find_model, open_client, probe_fields
from bench.load.trace import read_trace
from bench.load.workload import Planned, bounded, from_trace, synthetic

LATE_MS = 20.0
"""A generator whose p99 of lateness or lag is more than this is the thing being measured."""
WARMUP_SEED = -1

clock = time.perf_counter


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What `baton bench load` can be told. With ``rate`` (or a trace and no ``concurrency``) the loop is open."""

    url: str
    rate: float | None = None
    concurrency: int | None = None
    duration_s: float | None = None
    num_requests: int | None = None
    prompt_tokens: int = 128
    output_tokens: int = 64
    trace: Path | None = None
    length_scale: float = 1.0
    targets: Targets = field(default_factory=Targets)
    seed: int = 0
    endpoint: str = "chat"
    model: str | None = None
    api_key: str | None = None
    temperature: float | None = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    warmup: int = 1
    request_timeout_s: float = 600.0

    @property
    def users(self) -> int | None:
        """How many, in closed loop; None in open loop."""
        if self.rate is not None or (self.trace is not None and self.concurrency is None):
            return None
        return self.concurrency or 1


@dataclass(frozen=True, slots=True)
class LoadResult:
    """``figures`` is what goes to --json; records and start are for plots."""

    figures: dict[str, Any]
    records: list[StreamRecord]
    start_s: float


def run_load(options: LoadOptions) -> LoadResult:
    """Runs the benchmark. Raises BatonError when it cannot begin; whatever goes wrong later is in the figures."""
    plan = plan_of(options)  # a trace that cannot be read is said first
    with asyncio.Runner() as runner:
        target, writer = runner.run(look(options))
        return runner.run(load(options, plan, target, writer))


def plan_of(options: LoadOptions) -> Iterator[Planned]:
    """The requests that the options ask for. Raises ConfigError when the trace is none."""
    if options.trace is not None:
        rows = read_trace(options.trace, options.num_requests)
        plan = from_trace(rows, options.seed, options.length_scale, options.rate)
    else:
        plan = synthetic(options.prompt_tokens, options.output_tokens, options.seed, options.rate)
    return bounded(plan, options.num_requests, options.duration_s if options.users is None else None)


async def look(options: LoadOptions) -> tuple[Target, PromptWriter]:
    """What the server is and how it counts. Raises BatonError when it does not answer as one should."""
    url = base_url(options.url)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    async with open_client(url, headers) as client:
        model = options.model or await find_model(client)
        target = Target(url, options.endpoint, model, headers, options.temperature, options.extra_body)
        target = await probe_fields(client, target)
        return target, await calibrate(client, target)


async def load(options: LoadOptions, plan: Iterator[Planned], target: Target, writer: PromptWriter) -> LoadResult:
    """Sends the plan to the target, from a warm-up to the figures."""
    pool = ConnectionPool(target.host, target.port, clock, target.tls)

    def ask(planned: Planned, record: StreamRecord) -> Awaitable[None]:
        record.needs_done = target.sends_done
        request = target.request(writer.text(planned), planned.output_tokens)
        return pool.ask(request, record, options.request_timeout_s)

    try:
        await _warm_up(options, ask)
        run = LoadRun(ask, clock)
        with suppress(NotImplementedError):  # not the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, run.stop)
        opened_before, cpu_before_s = pool.num_opened, time.process_time()
        with Progress(run, clock, sys.stderr):
            if options.users is None:
                await run.open_loop(plan)
            else:
                await run.closed_loop(plan, options.users, options.duration_s)
        cpu_s = time.process_time() - cpu_before_s
        with suppress(NotImplementedError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
    finally:
        pool.close()
    figures = load_figures(run.records, run.start_s, options.targets)
    figures["interrupted"] = run.stopped
    figures["client"] = client_figures(run, figures, cpu_s) | {"connections": pool.num_opened - opened_before}
    figures["setup"] = _setup(options, target, writer)
    return LoadResult(figures, run.records, run.start_s)


def client_figures(run: LoadRun, figures: Mapping[str, Any], cpu_s: float) -> dict[str, Any]:
    """What the generator itself cost, and how late it was: the part of the figures that is not the server's."""
    late = distribution([(record.sent_s - record.intended_s) * MS for record in run.records], largest=True)
    lag = distribution([max(0.0, lag_s) * MS for lag_s in run.lags_s], largest=True)
    events = figures["token_events"]
    return {
        "cpu_s": round(cpu_s, 4),
        "cpu_share": round(cpu_s / figures["duration_s"], 5) if figures["duration_s"] else None,
        "cpu_us_per_token": round(cpu_s / events * 1e6, 3) if events else None,
        "lag_ms": lag,
        "late_ms": late,
        "behind": any((part["p99"] or 0.0) > LATE_MS for part in (late, lag)),
    }


async def _warm_up(options: LoadOptions, ask: Any) -> None:
    """Requests that are not counted; as many at once as the load will have users."""
    if options.warmup:
        plan = synthetic(options.prompt_tokens, options.output_tokens, options.seed + WARMUP_SEED)
        await LoadRun(ask, clock).closed_loop(islice(plan, options.warmup), min(options.warmup, options.users or 1))


def _setup(options: LoadOptions, target: Target, writer: PromptWriter) -> dict[str, Any]:
    """What was asked of whom, so that a result file says what it is a result of."""
    return {
        "url": str(target.url),
        "endpoint": target.endpoint,
        "model": target.model,
        "loop": "open" if options.users is None else "closed",
        "rate": options.rate,
        "concurrency": options.users,
        "trace": None if options.trace is None else options.trace.name,
        "length_scale": options.length_scale,
        "prompt_tokens": None if options.trace else options.prompt_tokens,
        "output_tokens": None if options.trace else options.output_tokens,
        "seed": options.seed,
        "warmup": options.warmup,
        "exact_prompts": writer.calibration.exact,
        "ignore_eos": "ignore_eos" not in target.left_out,
        "notes": target.notes,
    }
