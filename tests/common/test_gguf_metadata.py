"""The metadata reader, with the `gguf` library as oracle."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType as Kind

from common.errors import ConfigError
from common.gguf_metadata import read_metadata

VALUES: dict[str, tuple[Any, Kind]] = {
    "a.uint8": (200, Kind.UINT8),
    "a.int8": (-3, Kind.INT8),
    "a.uint16": (60000, Kind.UINT16),
    "a.int16": (-300, Kind.INT16),
    "a.uint32": (4_000_000_000, Kind.UINT32),
    "a.int32": (-70000, Kind.INT32),
    "a.float32": (0.5, Kind.FLOAT32),
    "a.bool": (True, Kind.BOOL),
    "a.string": ("Grüße\n👍", Kind.STRING),
    "b.uint64": (1 << 60, Kind.UINT64),
    "b.int64": (-(1 << 60), Kind.INT64),
    "b.float64": (0.1, Kind.FLOAT64),
    "b.strings": (["", "a", "안녕"], Kind.ARRAY),
    "b.numbers": ([1, -2, 3], Kind.ARRAY),
    "b.floats": ([0.25, -1.5], Kind.ARRAY),
    "b.nested": ([[1, 2], [3]], Kind.ARRAY),
    "c.last": ("end", Kind.STRING),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, (value, kind) in VALUES.items():
        writer.add_key_value(key, value, kind)
    writer.add_tensor("weight", np.zeros((32, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_kind_of_value(path: Path) -> None:
    metadata = read_metadata(path)
    assert metadata == {"general.architecture": "llama", **{key: value for key, (value, _) in VALUES.items()}}
    assert list(metadata)[-1] == "c.last"


def test_only_what_is_asked_for(path: Path) -> None:
    assert list(read_metadata(path, ("a.str", "c."))) == ["a.string", "c.last"]


def test_a_file_that_ends_too_early_at_any_byte(path: Path, tmp_path: Path) -> None:
    whole = path.read_bytes()
    metadata_bytes = whole.index(b"weight")
    cut = tmp_path / "cut.gguf"
    for size in range(1, metadata_bytes - 8, 7):
        cut.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"ends at byte|not a GGUF"):
            read_metadata(cut)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 something else", "starts with b'PK"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "GGUF version 1; 2 and 3"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "unknown GGUF type 99"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "ends at byte"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 63), "ends at byte"),
    ],
)
def test_files_that_are_no_gguf(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        read_metadata(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        read_metadata(tmp_path / "none.gguf")
