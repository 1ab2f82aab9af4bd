"""Reads the metadata of a GGUF file: the keys and values in front of its tensors.

Vocabulary and merges of a small model are 100,000 strings, which the `gguf` library's reader takes
seconds to list; here it is one pass over a memory map. Knows nothing of what the keys mean, and
reads no tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from common.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)

STRING, ARRAY = 8, 9
SCALARS: dict[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""GGUF type number → `struct` code. The file is little-endian."""


def read_metadata(path: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, Any]:
    """The metadata whose keys start with one of ``prefixes``, in the order of the file.

    Numbers, strings and booleans come as Python's own, arrays as lists. Raises ConfigError for a file
    that cannot be read, is no GGUF, or ends too early.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data, path).metadata(prefixes)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a GGUF file: {error}") from error


class _Cursor:
    """A place in the file. Every method reads what is there and moves behind it."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def metadata(self, prefixes: tuple[str, ...]) -> dict[str, Any]:
        if (magic := self._bytes(len(MAGIC))) != MAGIC:
            raise ConfigError(f"{self._path} is not a GGUF file: it starts with {magic!r}")
        if (version := self._scalar("I")) not in VERSIONS:
            raise ConfigError(f"{self._path} has GGUF version {version}; {' and '.join(map(str, VERSIONS))} are known")
        self._scalar("Q")  # how many tensors follow
        found: dict[str, Any] = {}
        for _ in range(self._scalar("Q")):
            key = self._string()
            kind = self._scalar("I")
            if key.startswith(prefixes):
                found[key] = self._value(kind)
            else:
                self._skip(kind)
        return found

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._scalar(self._code(kind))
        element, count = self._scalar("I"), self._scalar("Q")
        if element in (STRING, ARRAY):
            return [self._value(element) for _ in range(count)]
        code = self._code(element)
        piece = self._bytes(count * struct.calcsize(f"<{code}"))  # refuses an absurd count before it is used
        return list(struct.unpack(f"<{count}{code}", piece))

    def _skip(self, kind: int) -> None:
        if kind == STRING:
            self._bytes(self._scalar("Q"))
        elif kind == ARRAY:
            element, count = self._scalar("I"), self._scalar("Q")
            if element in (STRING, ARRAY):
                for _ in range(count):
                    self._skip(element)
            else:
                self._bytes(count * struct.calcsize(f"<{self._code(element)}"))
        else:
            self._scalar(self._code(kind))

    def _code(self, kind: int) -> str:
        try:
            return SCALARS[kind]
        except KeyError:
            raise ConfigError(f"{self._path} has a value of unknown GGUF type {kind} near byte {self._at}") from None

    def _scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def _string(self) -> str:
        return self._bytes(self._scalar("Q")).decode("utf-8", errors="replace")

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise ConfigError(f"{self._path} ends at byte {len(self._data)}, its metadata need byte {end}")
        piece = self._data[self._at : end]
        self._at = end
        return piece
