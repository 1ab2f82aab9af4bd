from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from cluster import cli, preflight
from cluster.commands import serve, status
from common.config import Config, load_config, parse_config
from common.errors import BatonError, UnavailableError


def _serve_config(*argv: str) -> Config:
    arguments = cli.build_parser().parse_args(["serve", *argv])
    return load_config(arguments.config, serve.overrides_of(arguments))


def test_flags_become_configuration() -> None:
    sizes = ("--prefill", "3", "--decode", "2", "--routers", "2")
    config = _serve_config("--model", "org/m:x", *sizes, "--mode", "colocated", "--host", "0.0.0.0", "--port", "0")
    assert config.model.name == "org/m:x"
    assert (config.prefill.workers, config.decode.workers, config.router.replicas) == (3, 2, 2)
    assert (config.mode, config.router.host, config.router.port) == ("colocated", "0.0.0.0", 0)


def test_precedence_is_default_file_set_flag(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("prefill: {workers: 2}\ndecode: {workers: 2}\nrouter: {port: 1}\n")
    config = _serve_config("--config", str(file), "--set", "decode.workers=3", "--set", "router.port=2", "--port", "4")
    assert (config.prefill.workers, config.decode.workers, config.router.port) == (2, 3, 4)


def test_model_names_are_text_even_if_yaml_would_read_them_otherwise() -> None:
    assert _serve_config("--model", "1e3").model.name == "1e3"
    assert _serve_config("--model", "a: b").model.name == "a: b"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--mode", "adaptive", "--prefill", "0"], "mode adaptive needs prefill.workers >= 1, it is 0"),
        (["serve", "--set", "prefil.workers=1"], "nearest known: 'prefill'"),
        (["serve", "--decode", "0"], "decode.workers >= 1, it is 0"),
        (["serve", "--port", "70000"], "router.port"),
        (["serve", "--set", "transfer.transports=[nccl]"], "grpc, it is [nccl]"),
        (["config", "check", "/nonexistent.yaml"], "cannot read config file /nonexistent.yaml"),
        (["models", "path", "/nonexistent/model"], "/nonexistent/model does not exist"),
        (["status", "--url", "http://127.0.0.1:1"], "no answer from http://127.0.0.1:1/cluster"),
    ],
)
def test_a_failure_is_one_line_on_standard_error_and_status_1(
    argv: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("baton: error: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["serve", "--mode", "x"], ["serve", "--prefill", "many"]])
def test_wrong_usage_is_status_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2


@pytest.mark.parametrize("argv", [[], ["serve"], ["status"], ["models"], ["models", "fetch"], ["config", "check"]])
def test_every_command_has_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([*argv, "--help"])
    assert exit_.value.code == 0
    assert "usage: baton" in capsys.readouterr().out


def test_config_check_and_schema(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("mode: split\n")
    assert cli.main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"ok: {file}\n"
    assert cli.main(["config", "schema"]) == 0
    assert "prefill" in json.loads(capsys.readouterr().out)["properties"]


def test_models_list_names_the_default_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["models", "list", "--set", f"model.cache_dir={tmp_path}"]) == 0
    name, state, _ = capsys.readouterr().out.splitlines()[0].split("\t")
    assert (name, state) == (parse_config({}).model.name, "not fetched")


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UnavailableError, match=rf"127.0.0.1 port {port} \(router.port\)"):
            preflight.check_ports(parse_config({"router": {"port": port}}))
    preflight.check_ports(parse_config({"router": {"port": 0}}))


def test_a_host_of_another_machine_is_refused_whatever_the_port() -> None:
    config = parse_config({"router": {"host": "192.0.2.77", "port": 0}})
    with pytest.raises(UnavailableError, match=r"cannot listen on 192\.0\.2\.77 \(router\.host\)"):
        preflight.check_ports(config)


def test_a_transport_that_works_is_enough() -> None:
    preflight.check_available(parse_config({"transfer": {"transports": ["nccl", "grpc"]}}))
    for name in ("shm", "tcp", "gloo", "grpc"):
        preflight.check_available(parse_config({"transfer": {"transports": [name]}}))
    preflight.check_available(parse_config({"mode": "colocated", "transfer": {"transports": ["nccl"]}}))


def test_standard_output_is_for_the_result_alone() -> None:
    words = (
        "import os; from cluster.commands import serve; result = serve._take_stdout()",
        "print('from here', flush=True); os.system('echo from a child'); result.write('the result\\n')",
    )
    done = subprocess.run([sys.executable, "-c", "; ".join(words)], capture_output=True, text=True, check=True)
    assert done.stdout == "the result\n"
    assert done.stderr.split("\n") == ["from here", "from a child", ""]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "here", "127.0.0.1:port"])
def test_a_ray_that_is_not_there_is_refused_at_once(address: str) -> None:
    with pytest.raises(BatonError, match=address):
        preflight.check_ray_address(address)


def test_too_little_memory_is_said_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    config = parse_config({"engine": {"pool_bytes": 1 << 20}})
    with pytest.raises(UnavailableError, match=r"2 workers need at least 0.00 GiB .* 0.00 GiB are available"):
        preflight.check_memory(config, tmp_path, available_bytes=(4 << 20) - 1)
    preflight.check_memory(config, tmp_path, available_bytes=4 << 20)


CLUSTER: dict[str, Any] = {
    "model": "m",
    "mode": "split",
    "routers": [{"id": "router-0", "url": "http://h:1", "pid": 11, "state": "ready"}],
    "workers": [
        {
            "id": "decode-0",
            "role": "decode",
            "state": "ready",
            "epoch": 1,
            "host": "h",
            "pids": [12, 13],
            "address": "h:2",
            "load": {"num_waiting": 0, "num_running": 3, "kv_bytes_received": 3 << 20},
        },
        {"id": "prefill-0", "role": "prefill", "state": "dead", "epoch": 1, "host": "h", "pids": [9], "address": ""},
    ],
}
LEDGER: dict[str, Any] = {
    "workers": [
        {
            "id": "decode-0",
            "role": "decode",
            "total": 1234,
            "free": 1000,
            "cached": 200,
            "reserved": 0,
            "running": 34,
            "in_transfer": 0,
            "holders": [{"request": "cmpl-1#0", "state": "running", "blocks": 34, "age_s": 1.25}],
        }
    ],
    "requests": {"open": 7},
}


def _client(answers: dict[str, httpx.Response]) -> httpx.Client:
    transport = httpx.MockTransport(lambda request: answers[request.url.path])
    return httpx.Client(base_url="http://router", transport=transport)


def test_status_shows_workers_blocks_and_holders() -> None:
    client = _client({"/cluster": httpx.Response(200, json=CLUSTER), "/ledger": httpx.Response(200, json=LEDGER)})
    console = Console(width=200)
    with console.capture() as capture:
        console.print(status.tables(status.read_status(client)))
    text = capture.get()
    for words in ("decode-0", "12 13", "1,234", "3.0 MiB", "cmpl-1#0", "open requests: 7", "dead", "m · split"):
        assert words in text


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (httpx.Response(503, json={"error": {"message": "starting"}}), "answered 503: starting"),
        (httpx.Response(200, text="<html>"), "not JSON"),
        (httpx.Response(404, json=[]), "answered 404: no reason given"),
    ],
)
def test_status_repeats_what_the_router_says(response: httpx.Response, words: str) -> None:
    with pytest.raises(BatonError, match=words):
        status.read_status(_client({"/cluster": response}))
