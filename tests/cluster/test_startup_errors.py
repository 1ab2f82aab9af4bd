"""A `baton serve` that cannot work says so in one line, at once, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster import cli, model_check, preflight
from common.config import load_config, parse_config
from common.errors import BatonError, ConfigError, UnavailableError
from tests.cluster.terminal import BATON
from tests.tiny_model import write_tiny_tokenizer

QUICK_S = 30.0
"""Ray alone takes longer on a busy machine than these refusals, but not much: what tells is its absence."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def write_model(folder: Path, num_weights: int, whole: bool = True) -> Path:
    """A model folder with ``num_weights`` in bfloat16 that take no room on the disk."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    write_tiny_tokenizer(folder)
    size = num_weights * 2
    header = json.dumps({"w": {"dtype": "BF16", "shape": [num_weights], "data_offsets": [0, size]}}).encode()
    weights = folder / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(weights, 8 + len(header) + (size if whole else size // 2))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files that are wrong, each in its way, named by what is wrong with them."""
    texts = {
        "unknown.yaml": "prefil: {workers: 2}\n",
        "type.yaml": "prefill: {workers: many}\n",
        "broken.yaml": "a: [b\nc: d\n",
        "date.yaml": "model: {name: 2026-13-45}\n",
        "list.yaml": "- prefill\n",
        "text.safetensors": "text",
        "text.gguf": "this is text",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep.yaml").write_text("[" * 3000)
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    (tmp_path / "empty").mkdir()
    write_model(tmp_path / "cut", 1000, whole=False)
    write_model(tmp_path / "json", 1000)
    (tmp_path / "json" / "config.json").write_text("{")
    write_model(tmp_path / "foreign", 1000)
    (tmp_path / "foreign" / "config.json").write_text('{"architectures": ["OtherModel"]}')
    write_model(tmp_path / "mute", 1000)
    (tmp_path / "mute" / "tokenizer.json").unlink()
    return tmp_path


@pytest.fixture
def taken() -> Iterator[int]:
    """A port where something listens and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


WRONG_CONFIGS = [
    (["--config", "{folder}/unknown.yaml"], "unknown config key 'prefil'; nearest known: 'prefill'"),
    (["--config", "{folder}/type.yaml"], "config prefill.workers: Input should be a valid integer"),
    (["--config", "{folder}/broken.yaml"], "broken.yaml is not YAML: while parsing"),
    (["--config", "{folder}/bytes.yaml"], "bytes.yaml is not YAML: 'utf-8' codec"),
    (["--config", "{folder}/date.yaml"], "date.yaml is not YAML: month must be in 1..12"),
    (["--config", "{folder}/deep.yaml"], "deep.yaml is not YAML"),
    (["--config", "{folder}/list.yaml"], "must hold a mapping, it holds a list"),
    (["--config", "{folder}/none.yaml"], "none.yaml: No such file or directory"),
    (["--config", "{folder}"], "Is a directory"),
    (["--set", "nonsense"], "--set wants path=value, got 'nonsense'"),
    (["--set", "model.name=2026-13-45"], "'2026-13-45' is not a YAML value"),
    (["--set", "model.name=[[["], "is not a YAML value"),
    (["--set", "decode.wrkers=2"], "nearest known: 'decode.workers'"),
    (["--set", "engine.device=tpu"], "engine.device 'tpu' is not a device: auto, cpu, cuda or cuda:N"),
    (["--prefill", "-1"], "config prefill.workers: Input should be greater than or equal to 0, got -1"),
    (["--routers", "0"], "config router.replicas"),
    (["--port", "65536"], "config router.port: Input should be less than or equal to 65535, got 65536"),
]


@pytest.mark.parametrize(("argv", "words"), WRONG_CONFIGS)
def test_a_wrong_configuration_is_one_line(
    argv: list[str], words: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *(word.format(folder=folder) for word in argv)]) == 1
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("baton: error: ")
    assert words in err


@pytest.mark.parametrize("argv", [["--port", "x"], ["--mode", "fast"], ["--decode", "1.5"], ["--nonsense"]])
def test_wrong_usage_is_one_line_and_status_2(argv: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["serve", *argv])
    out, err = capfd.readouterr()
    assert (exit_.value.code, out, err.count("\n")) == (2, "", 1)
    assert argv[0] in err
    assert err.endswith("--help\n")


WRONG_MODELS = [
    ("empty", "must hold config.json or one .gguf file, it holds 0"),
    ("text.safetensors", "must be a .gguf file"),
    ("text.gguf", "text.gguf is not a GGUF file"),
    ("cut.gguf", "cut.gguf is not a GGUF file"),
    ("cut", "model.safetensors is not a safetensors file that can be read"),
    ("json", "config.json"),
    ("foreign", "model architecture 'OtherModel' is not supported, only LlamaForCausalLM"),
    ("mute", "has no tokenizer.json"),
    ("nowhere.gguf", "nowhere.gguf does not exist"),
]


@pytest.mark.parametrize(("name", "words"), WRONG_MODELS)
def test_a_broken_model_is_known_before_anything_starts(name: str, words: str, folder: Path) -> None:
    from common.model_store import resolve

    with pytest.raises(BatonError) as refused:
        model_check.check_model(parse_config({}), resolve(str(folder / name)))
    assert words in refused.value.message


def test_weights_are_counted_as_they_are_computed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", 1000)
    assert model_check.check_model(parse_config({}), model) == 4000
    assert model_check.check_model(parse_config({"model": {"dtype": "bfloat16"}}), model) == 2000
    with pytest.raises(ConfigError, match="max_model_len 513 exceeds the model's limit of 512"):
        model_check.check_model(parse_config({"model": {"max_model_len": 513}}), model)


@pytest.mark.parametrize("name", ["", "~nobody-has-this-name/m", "m" * 5000])
def test_names_that_are_no_paths_are_refused(name: str) -> None:
    from common.model_store import resolve

    with pytest.raises(ConfigError):
        resolve(name)


def test_a_port_for_both_protocols_is_refused() -> None:
    config = load_config(None, ["router.replicas=3", "router.port=9000", "router.grpc_port=9002"])
    with pytest.raises(ConfigError, match="port 9002 is in both ranges"):
        preflight.check_ports(config)
    with pytest.raises(ConfigError, match=r"router\.host must not be empty"):
        preflight.check_ports(parse_config({"router": {"host": ""}}))


def test_what_answers_at_the_address_must_be_able_to_be_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "RAY_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"no Ray answers at {address}: timed out"):
            preflight.check_ray_address(address)


# ── the whole command ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        WRONG_CONFIGS[0],
        WRONG_CONFIGS[3],
        (["--model", "nosuch"], "unknown model 'nosuch'"),
        (["--model", "{folder}/cut"], "model.safetensors is not a safetensors file"),
        (["--model", "{folder}/text.gguf"], "is not a GGUF file"),
        (["--model", "{folder}/mute"], "has no tokenizer.json"),
        (["--port", "{taken}"], "(router.port): Address already in use; stop what listens there"),
        (["--set", "router.grpc_port={taken}"], "(router.grpc_port): Address already in use; stop what listens there"),
        (["--set", "engine.pool_bytes=1000000000000"], "2 workers need at least"),
        (["--model", "{folder}/large"], "too little memory: 2 workers need at least"),
        (["--address", "127.0.0.1:1"], "no Ray answers at 127.0.0.1:1: "),
        (["--address", "127.0.0.1:{taken}"], "timed out; start one there"),
    ],
)
def test_serve_says_it_in_one_line_and_leaves_nothing(folder: Path, taken: int, argv: list[str], words: str) -> None:
    available = preflight.memory_available()
    assert available is not None
    write_model(folder / "large", int(available * 0.4) // 2)  # both fit as they are stored, not as float32
    temporary = folder / "tmp"
    temporary.mkdir()
    given = [word.format(folder=folder, taken=taken) for word in argv]
    port = [] if "--port" in given else ["--port", "0"]
    started = time.monotonic()
    process = subprocess.Popen(
        [str(BATON), "serve", *port, *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert time.monotonic() - started < QUICK_S
    assert (process.returncode, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith("baton: error: ")
    assert words in line
    assert list(temporary.iterdir()) == []
    assert [other.pid for other in psutil.process_iter() if _session(other.pid) == process.pid] == []


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1
