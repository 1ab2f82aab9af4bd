"""`baton status --watch`: in place on a terminal, one after the other elsewhere, and over a router's restart."""

from __future__ import annotations

import http.server
import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cluster import cli
from tests.cluster.terminal import BATON, CTRL_C, Terminal

ANSWERS: dict[str, dict[str, Any]] = {
    "/cluster": {
        "model": "[red]m",
        "mode": "split",
        "routers": [{"id": "router-0", "url": "http://[::1]:1", "pid": 1, "state": "ready"}],
        "workers": [{"id": "decode-0", "role": "decode", "state": "ready", "host": "h", "pids": [2], "load": None}],
    },
    "/ledger": {"workers": [], "requests": {"open": 7}},
}


@contextmanager
def router(port: int = 0) -> Iterator[int]:
    """Answers as a router does, on a port that it tells."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = json.dumps(ANSWERS[self.path]).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_terminal_is_shown_the_restart_of_a_router() -> None:
    with router() as port:
        terminal = Terminal("status", "--url", f"http://127.0.0.1:{port}", "--watch", "--interval", "0.1")
        terminal.expect("open requests: 7")
        terminal.expect("Ctrl-C ends")
    terminal.expect(f"no answer from http://127.0.0.1:{port}/cluster")
    with router(port):
        terminal.expect("open requests: 7")
        terminal.type(CTRL_C)
        assert terminal.exit_status() == 0
    assert "Traceback" not in terminal.seen
    terminal.close()


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["tables", "json"])
def test_a_pipe_gets_one_status_after_the_other(flags: list[str]) -> None:
    with router() as port:
        command = [str(BATON), "status", "--url", f"http://127.0.0.1:{port}", "--watch", "--interval", "0.1", *flags]
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert watching.stdout is not None
        first = _line_with(watching, "open requests: 7" if not flags else '"open": 7')
    told = _line_with(watching, "no answer from")
    with router(port):
        _line_with(watching, "open requests: 7" if not flags else '"open": 7')
    watching.send_signal(signal.SIGINT)
    _, errors = watching.communicate(timeout=20)
    assert (watching.returncode, errors) == (0, "")
    if flags:
        assert json.loads(first) == {"cluster": ANSWERS["/cluster"], "ledger": ANSWERS["/ledger"]}
        assert json.loads(told)["error"].startswith(f"no answer from http://127.0.0.1:{port}/cluster")


def test_brackets_in_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with router() as port:
        assert cli.main(["status", "--url", f"127.0.0.1:{port}"]) == 0
    shown = capsys.readouterr().out
    assert "[red]m" in shown
    assert "http://[::1]:1" in shown


def test_another_server_is_told_apart_from_a_router(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ANSWERS, "/cluster", {"hello": "world"})
    with router() as port:
        assert cli.main(["status", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "not as a router of Baton does" in capsys.readouterr().err


def _line_with(process: subprocess.Popen[str], words: str) -> str:
    """Reads up to the next line with ``words``. A test that waits for what never comes times out."""
    assert process.stdout is not None
    return next(line for line in process.stdout if words in line)
