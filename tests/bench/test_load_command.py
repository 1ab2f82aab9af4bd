"""`baton bench load` from its flags to its files, against a scripted server on a real socket."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bench.load.self_test import run_self_test
from cluster.cli import main
from tests.bench.scripted_server import (
    ScriptedServer,
    answer,
    cut,
    half_closed,
    hang,
    no_done,
    refuse,
    reset,
)

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
MIXED = (answer, refuse, answer, cut, reset, no_done, half_closed, answer)
KEYS = {"requests", "ok", "errors", "duration_s", "ttft_ms", "itl_ms", "stall_share", "tpot_ms", "e2e_ms"}
KEYS |= {"output_tok_s", "goodput_rps"}


def bench(server: ScriptedServer, folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status and figures."""
    out = folder / "out.json"
    status = main(["bench", "load", "--url", server.url, "--warmup", "0", "--json", str(out), *flags])
    return status, json.loads(out.read_text())


def test_a_mixed_run_is_counted_to_the_last_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.png"
    with ScriptedServer(*MIXED) as server:
        flags = ("--requests", "8", "--concurrency", "1", "--ttft-s", "30", "--plot", str(plot), "--api-key", "secret")
        status, figures = bench(server, tmp_path, *flags)
        sent = len(server.bodies)
    assert status == 0
    assert figures.keys() >= KEYS
    assert (figures["requests"], figures["ok"]) == (8, 3)
    assert figures["errors"] == {"closed": 2, "http_429": 1, "reset": 1, "no_done": 1}
    assert sent == 8  # nothing was sent twice
    assert figures["output_tokens"]["total"] == 9
    assert figures["goodput_rps"] == pytest.approx(3 / figures["duration_s"], rel=1e-4)
    assert figures["setup"]["model"] == "scripted"
    assert figures["client"]["cpu_s"] > 0
    assert plot.read_bytes().startswith(PNG_MAGIC)
    assert all(b"Authorization: Bearer secret" in head for head in server.headers)
    output = capsys.readouterr().out
    assert "3 ok, 5 failed" in output
    assert "1 x http_429: full (Retry-After: 0 s)" in output


def test_open_loop_over_http(tmp_path: Path) -> None:
    with ScriptedServer(answer) as server:
        flags = ("--rate", "400", "--requests", "60", "--prompt-tokens", "7", "--output-tokens", "3")
        status, figures = bench(server, tmp_path, *flags, "--endpoint", "completions")
    assert (status, figures["ok"], figures["setup"]["loop"]) == (0, 60, "open")
    assert len({body["prompt"] for body in server.bodies}) == 60
    assert all(body["max_tokens"] == 3 and body["ignore_eos"] for body in server.bodies)
    assert figures["client"]["connections"] < 60  # they are used again


def test_a_trace_over_http(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.0000000,40,10\n2023-11-16 18:17:03.0100000,80,20\n2023-11-16 18:17:09.0000000,80,30\n"
    )
    with ScriptedServer(answer) as server:
        status, figures = bench(server, tmp_path, "--trace", str(trace), "--duration-s", "1", "--length-scale", "0.5")
    assert (status, figures["ok"]) == (0, 2)  # the third is due later
    assert [body["max_tokens"] for body in server.bodies] == [5, 10]


def test_a_request_has_its_time_and_no_more(tmp_path: Path) -> None:
    with ScriptedServer(hang, answer) as server:
        status, figures = bench(server, tmp_path, "--requests", "2", "--timeout-s", "0.2")
    assert (status, figures["ok"], figures["errors"]) == (0, 1, {"timeout": 1})


def test_when_nothing_succeeds_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(no_done) as server:
        status, figures = bench(server, tmp_path, "--requests", "2", "--plot", str(tmp_path / "none.png"))
    assert (status, figures["ok"], figures["errors"]) == (1, 0, {"no_done": 2})
    assert capsys.readouterr().err.splitlines()[-1] == "baton: error: no request succeeded"


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert main(["bench", "load", "--url", url]) == 1
    assert capsys.readouterr().err.startswith(f"baton: error: no answer from {url}")


@pytest.mark.parametrize(
    "flags",
    [
        ["--rate", "1", "--concurrency", "1"],
        ["--rate", "0"],
        ["--requests", "0"],
        ["--duration-s", "nan"],
        ["--extra-body", "[1]"],
        ["--extra-body", "{"],
    ],
)
def test_flags_that_make_no_sense(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "load", "--url", "http://127.0.0.1:1", *flags])
    assert end.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_results_that_could_not_be_written_are_known_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "load", "--url", "http://127.0.0.1:1", "--json", str(tmp_path / "no" / "out.json")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_ctrl_c_ends_it_with_what_was_measured(tmp_path: Path) -> None:
    third = threading.Event()

    async def hang_and_tell(writer: Any) -> None:
        await hang(writer)
        third.set()

    out = tmp_path / "out.json"
    with ScriptedServer(answer, answer, hang_and_tell) as server:
        command = [sys.executable, "-m", "cluster", "bench", "load", "--url", server.url, "--warmup", "0"]
        with subprocess.Popen(
            [*command, "--requests", "9", "--json", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert third.wait(30)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    figures = json.loads(out.read_text())
    assert (figures["requests"], figures["ok"], figures["unfinished"], figures["interrupted"]) == (2, 2, 1, True)
    assert "interrupted; 1 unfinished" in output


def test_the_self_test_sees_every_token_after_it_was_written() -> None:
    result = run_self_test(tokens_per_s=400, stream_s=0.5)
    client = result.figures["client"]
    assert (result.figures["ok"], result.figures["token_events"]) == (20, 20 * 10)
    assert 0 < client["added_ms"]["p50"] <= client["added_ms"]["max"]
