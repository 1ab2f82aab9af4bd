"""`baton bench load`: load on any OpenAI-compatible URL, and what its streams were like.

Knows the flags and where results go; what is measured and how is in `bench/load/`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.commands.flags import check_writable, count, count_or_none, json_object, positive
from cluster.commands.output import write_line, write_progress
from common.config import load_config

if TYPE_CHECKING:
    from bench.load.session import LoadOptions, LoadResult

DEFAULT_DURATION_S = 30.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="U", help="the server; default: the configuration's router")
    parser.add_argument("--model", metavar="M", help="default: the first that /v1/models lists")
    parser.add_argument("--api-key", metavar="K", help="sent as a bearer token")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")

    load = parser.add_argument_group(
        "load", "--rate or --trace: open loop. --concurrency: closed loop (default: 1 user)"
    )
    loop = load.add_mutually_exclusive_group()
    loop.add_argument("--rate", metavar="R", type=positive, help="requests per second, Poisson; scales a trace to it")
    loop.add_argument("--concurrency", metavar="C", type=count, help="users, each with one request at a time")
    load.add_argument("--duration-s", metavar="T", type=positive, help="send for so long, then let all of them end")
    load.add_argument("--requests", metavar="N", type=count, help="send so many; with --duration-s: at most")
    load.add_argument(
        "--warmup", metavar="N", type=count_or_none, default=1, help="requests before, not counted; default: 1"
    )
    load.add_argument("--timeout-s", metavar="T", type=positive, default=600.0, help="per request; default: 600")
    load.add_argument("--seed", metavar="S", type=int, default=0, help="arrivals and prompts; a server that has seen "
                      "a seed's prompts before may answer them from its cache")  # fmt: skip

    work = parser.add_argument_group("requests")
    work.add_argument("--prompt-tokens", metavar="N", type=count, default=128, help="default: 128")
    work.add_argument("--output-tokens", metavar="N", type=count, default=64, help="default: 64")
    work.add_argument("--trace", metavar="F", type=Path, help="arrivals, lengths and shared prefixes of a Mooncake "
                      "(JSON lines) or Azure (CSV) trace, plain or gzip")  # fmt: skip
    work.add_argument("--length-scale", metavar="X", type=positive, default=1.0, help="times the trace's lengths")
    work.add_argument("--temperature", metavar="X", type=float, default=0.0, help="default: 0")
    work.add_argument("--extra-body", metavar="JSON", type=json_object, default={}, help="more request fields")

    result = parser.add_argument_group("result")
    result.add_argument("--ttft-s", metavar="X", type=positive, help="target for goodput: time to first token")
    result.add_argument("--tpot-s", metavar="Y", type=positive, help="target for goodput: time per output token")
    result.add_argument("--json", metavar="OUT", type=Path, help="write the figures there")
    result.add_argument("--plot", metavar="PNG", type=Path, help="draw them there")
    result.add_argument("--self-test", action="store_true", help="measure what the load generator itself costs and "
                        "adds, on a server that does nothing, at 1,000 tokens/s")  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    check_writable(arguments.json, arguments.plot)
    if arguments.self_test:
        from bench.load.self_test import run_self_test

        result = run_self_test()
    else:
        from bench.load.session import run_load

        result = run_load(_options(arguments))
    return _report(result, arguments)


def _options(arguments: argparse.Namespace) -> LoadOptions:
    from bench.load.figures import Targets
    from bench.load.session import LoadOptions

    duration_s = arguments.duration_s
    if duration_s is None and arguments.requests is None and arguments.trace is None:
        duration_s = DEFAULT_DURATION_S
    return LoadOptions(
        url=arguments.url or _configured_url(arguments),
        rate=arguments.rate,
        concurrency=arguments.concurrency,
        duration_s=duration_s,
        num_requests=arguments.requests,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        trace=arguments.trace,
        length_scale=arguments.length_scale,
        targets=Targets(arguments.ttft_s, arguments.tpot_s),
        seed=arguments.seed,
        endpoint=arguments.endpoint,
        model=arguments.model,
        api_key=arguments.api_key,
        temperature=arguments.temperature,
        extra_body=arguments.extra_body,
        warmup=arguments.warmup,
        request_timeout_s=arguments.timeout_s,
    )


def _report(result: LoadResult, arguments: argparse.Namespace) -> int:
    """Figures to where they were asked for, a table to standard output."""
    from rich.console import Console

    from bench.load.summary import summary

    Console(file=sys.stdout).print(summary(result.figures))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result.figures, indent=2) + "\n")
        write_line(f"figures: {arguments.json}")
    if arguments.plot is not None and result.figures["ok"]:
        from bench.load.plots import draw

        draw(result, arguments.plot)
        write_line(f"plot: {arguments.plot}")
    if not result.figures["ok"]:
        write_progress("error: no request succeeded")
        return 1
    return 0


def _configured_url(arguments: argparse.Namespace) -> str:
    router = load_config(arguments.config, arguments.overrides).router
    host = "127.0.0.1" if router.host in ("0.0.0.0", "::") else router.host
    return f"http://{host}:{router.port}"
