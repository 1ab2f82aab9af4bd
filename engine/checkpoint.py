"""Finds a model's files on disk and says what they are. Knows nothing of torch, nor of downloads.

A checkpoint is a Hugging Face folder (``config.json`` and safetensors), a GGUF file, or a folder with
exactly one GGUF file. Pickled weights are never read.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import gguf

from common.errors import ConfigError
from engine.gguf_config import open_gguf, read_gguf_architecture
from engine.hf_config import read_hf_architecture
from engine.model_config import ModelArchitecture

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Checkpoint:
    """``config_files`` is empty for GGUF, whose one weight file holds everything."""

    path: Path
    kind: str
    weight_files: tuple[Path, ...]
    config_files: tuple[Path, ...] = ()

    @cached_property
    def gguf(self) -> gguf.GGUFReader:
        """The GGUF file, mapped; parsing its metadata (the vocabulary is there) takes about a second."""
        return open_gguf(self.weight_files[0])


def find_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at ``path``. Raises ConfigError that says what was looked for."""
    path = Path(path)
    if path.is_file():
        return Checkpoint(path, "gguf", (path,))
    if not path.is_dir():
        raise ConfigError(f"no model at {path}: there is no such file or folder")
    if (path / "config.json").is_file():
        configs = (path / "config.json", path / "generation_config.json")
        return Checkpoint(path, "hf", _safetensors(path), tuple(file for file in configs if file.is_file()))
    found = sorted(path.glob("*.gguf"))
    if len(found) != 1:
        raise ConfigError(f"no model at {path}: needs config.json or one .gguf file, has {len(found)} .gguf files")
    return Checkpoint(path, "gguf", (found[0],))


def read_architecture(checkpoint: Checkpoint) -> ModelArchitecture:
    """The model's numbers. Raises ConfigError, also for architectures that Baton does not run."""
    if checkpoint.kind == "gguf":
        return read_gguf_architecture(checkpoint.gguf)
    return read_hf_architecture(checkpoint.path)


def weights_fingerprint(path: str | Path, dtype: str) -> str:
    """A name (32 hex digits) for the weights at ``path`` computed in ``dtype``: equal for copies of
    them anywhere, different for others.

    Cheap on purpose: it covers config, file sizes, each file's header (which lists tensor names, shapes
    and offsets) and bytes sampled evenly from each file, not every byte. Raises ConfigError.
    """
    checkpoint = find_checkpoint(path)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{checkpoint.kind} {dtype}".encode())
    try:
        for file in checkpoint.config_files:
            digest.update(file.read_bytes())
        for file in checkpoint.weight_files:
            _hash_samples(file, digest)
    except OSError as error:
        raise ConfigError(f"cannot read the model at {path}: {error}") from error
    return digest.hexdigest()


def _hash_samples(file: Path, digest: hashlib.blake2b) -> None:
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    header_bytes = min(size, 1 << 16)
    with file.open("rb") as stream:
        start = stream.read(header_bytes)
        digest.update(start)
        if file.suffix == ".safetensors" and size >= 8:
            # The header's own length comes first: hash all of it, however long.
            digest.update(stream.read(max(0, int.from_bytes(start[:8], "little") + 8 - header_bytes)))
        last = max(0, size - _SAMPLE_BYTES)
        for index in range(_SAMPLES_PER_FILE + 1):
            stream.seek(last * index // _SAMPLES_PER_FILE)
            digest.update(stream.read(_SAMPLE_BYTES))


def _safetensors(folder: Path) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = json.loads(index.read_text())["weight_map"].values()
            files = tuple(folder / name for name in sorted(set(names)))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} is not an index of safetensors files: {error!r}") from error
    else:
        files = (folder / "model.safetensors",)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"no weights at {folder}: {', '.join(missing)} missing (only safetensors are read)")
    return files
