"""Kernels for CPUs with AVX-512 (`kernels.cpp`), compiled on the machine that runs them and kept in the cache folder.

A row's bits do not depend on its company, at the speed of the memory for few rows and of the cores for many. Where no
compiler or no AVX-512 is, `NativeError` says so, and torch's kernels serve.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.model_store import cache_folder
from engine.attention import Attention, AttentionShape
from engine.batch import StepBatch
from engine.kernels import Kernels
from engine.kv_cache import KVCache
from engine.quantised import GROUP, QuantisedWeight, rounded

VERSION = 3
"""What `baton_version` of the source that belongs to this module says."""

SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread", "-w")
COMPILE_TIMEOUT_S = 300.0

_BITS = {torch.float32: 32, torch.bfloat16: 16}
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class NativeError(Exception):
    """These kernels are not to be had here, and why."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """``data``: float32 or bfloat16 (as int16) in the order that `kernels.cpp` describes."""

    data: torch.Tensor
    outputs: int
    inputs: int
    bits: int


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A quantised weight: ``data`` (bytes) as `kernels.cpp` describes, of ``bits`` 8 or 4."""

    data: torch.Tensor
    outputs: int
    inputs: int
    bits: int


def native_kernels(threads: int, quantization: str = "none") -> Kernels:
    """The kernels, with so many compute threads of their own. ``quantization`` of the weights that they pack: as in the
    configuration. Raises NativeError.
    """
    library = _library()
    if quantization != "none" and not _can_quantise(library):
        raise NativeError("this CPU has no AVX-512 VNNI, which quantised weights need")
    native = _Native(library, threads)
    if quantization == "none":
        return native.kernels(native.pack, native.pack)
    # Logits feel what their weights lose most.
    small = partial(native.pack_quantised, bits=4 if quantization == "int4" else 8)
    return native.kernels(small, partial(native.pack_quantised, bits=8))


def check_suits(head_dim: int, dtype: str) -> None:
    """Raises NativeError where a model with such heads cannot be computed by these kernels."""
    if head_dim % 16 or dtype not in ("float32", "bfloat16"):
        raise NativeError(
            f"they take heads of a multiple of 16 components in float32 or bfloat16, these have {head_dim} in {dtype}"
        )


def _can_quantise(library: ctypes.CDLL) -> bool:
    return hasattr(library, "baton_product_quantised")


def _library() -> ctypes.CDLL:
    """The compiled source, from the cache folder or compiled now. Raises NativeError."""
    if platform.machine() not in ("x86_64", "AMD64") or "avx512f" not in _cpu_flags():
        raise NativeError("this CPU has no AVX-512")
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        raise NativeError(f"no C++ compiler was found ($CXX, {', '.join(COMPILERS)})")
    digest = hashlib.blake2b(digest_size=12)
    for part in (SOURCE.read_bytes(), _output_of([compiler, "--version"]), _cpu_flags().encode()):
        digest.update(part)
    path = cache_folder() / "native" / f"kernels-{digest.hexdigest()}.so"
    if not _is_whole(path):
        _compile(compiler, path)
    return _load(path)


def _is_whole(path: Path) -> bool:
    """Whether the library lies there as it was compiled: loading a damaged one would end the process."""
    try:
        return _checksum_file(path).read_text() == hashlib.blake2b(path.read_bytes()).hexdigest()
    except OSError:
        return False


def _checksum_file(path: Path) -> Path:
    return path.with_suffix(".blake2b")


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        found = int(library.baton_version())
    except (OSError, AttributeError) as error:
        raise NativeError(f"{path} cannot be loaded: {error}") from error
    if found != VERSION:
        raise NativeError(f"{path} is version {found}, this is for version {VERSION}")
    return library


def _compile(compiler: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            _output_of([compiler, *FLAGS, str(SOURCE), "-o", str(made)])
            checksum = made.with_suffix(".blake2b")
            checksum.write_text(hashlib.blake2b(made.read_bytes()).hexdigest())
            # Of several processes that compile at once the last one wins: what they made is the same.
            made.replace(path)
            checksum.replace(_checksum_file(path))
    except OSError as error:
        raise NativeError(f"{path.parent} cannot be written: {error.strerror}") from error


def _output_of(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines() or ["no message"]
        raise NativeError(f"{command[0]} ended with {done.returncode}: {lines[0]}")
    return done.stdout


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("flags")), "")


class _Native:
    """The library's functions on torch's tensors. All are called on the one thread that runs the model."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        integer, real, place = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
        signatures: dict[str, tuple[object, Iterable[object]]] = {
            "pool": (place, (integer,)),
            "pool_free": (None, (place,)),
            "packed_size": (integer, (integer, integer)),
            "pack": (None, (place, integer, integer, place, integer)),
            "product": (None, (place, place, *[integer] * 3, place, integer, place, place, integer)),
            "rms_norm": (None, (place, place, *[integer] * 3, place, real, place)),
            "gated": (None, (place, place, *[integer] * 3, place)),
            "rotate": (None, (place, place, *[integer] * 4, place, place, integer, place)),
            "write": (None, (place, place, *[integer] * 3, place, place, integer)),
            "attend": (None, (place, place, integer, place, place, *[integer] * 7, real, real, place, place)),
        }
        if _can_quantise(library):
            signatures["quantised_bytes"] = (integer, (integer, integer, integer))
            signatures["pack_codes"] = (None, (place, place, place, integer, integer, integer, place))
            signatures["product_quantised"] = (
                None, (place, place, *[integer] * 3, place, integer, place, place, integer, place, place, place)
            )  # fmt: skip
        for name, (result, arguments) in signatures.items():
            function = getattr(library, f"baton_{name}")
            function.restype, function.argtypes = result, list(arguments)
        self.library = library
        self.pool = library.baton_pool(threads)
        freed = weakref.finalize(self, library.baton_pool_free, self.pool)
        freed.atexit = False  # a step may be under way when the process ends

    def kernels(
        self,
        pack: Callable[[Any], PackedWeight | PackedCodes],
        pack_head: Callable[[Any], PackedWeight | PackedCodes],
    ) -> Kernels:
        return Kernels(
            name="native",
            pack=pack,
            pack_head=pack_head,
            pack_exactly=self.pack,
            product=self._product,
            widen=torch.Tensor.float,
            rms_norm=self._rms_norm,
            gated=self._gated,
            rotate=self._rotate,
            store=self._store,
            attention=self._attention,
        )

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        outputs, inputs = weight.shape
        bits = _BITS[weight.dtype]
        data = torch.empty(
            self.library.baton_packed_size(outputs, inputs), dtype=torch.float32 if bits == 32 else torch.int16
        )
        wide = weight.float().contiguous()
        self.library.baton_pack(wide.data_ptr(), outputs, inputs, data.data_ptr(), bits)
        return PackedWeight(data, outputs, inputs, bits)

    def pack_quantised(self, weight: torch.Tensor | QuantisedWeight, bits: int) -> PackedCodes:
        """As it is stored if it is quantised, else in so many bits."""
        if not isinstance(weight, QuantisedWeight):
            weight = rounded(weight, bits)
        outputs, groups = weight.scales.shape
        bits = weight.bits
        data = torch.empty(self.library.baton_quantised_bytes(outputs, groups * GROUP, bits), dtype=torch.uint8)
        codes, scales, minima = weight.codes.contiguous(), weight.scales.contiguous(), weight.minima
        if minima is not None:
            minima = minima.contiguous()
        self.library.baton_pack_codes(
            codes.data_ptr(),
            scales.data_ptr(),
            None if minima is None else minima.data_ptr(),
            outputs,
            groups,
            bits,
            data.data_ptr(),
        )
        return PackedCodes(data, outputs, weight.inputs, bits)

    def _quantised_product(self, x: torch.Tensor, weight: PackedCodes, bias: torch.Tensor | None) -> torch.Tensor:
        rows, groups = len(x), -(-weight.inputs // GROUP)
        out = torch.empty((rows, weight.outputs))
        codes = torch.empty((rows, groups * GROUP), dtype=torch.int8)
        scales, sums = torch.empty((rows, groups)), torch.empty((rows, groups), dtype=torch.int32)
        self.library.baton_product_quantised(
            self.pool,
            x.data_ptr(),
            x.stride(0),
            rows,
            weight.inputs,
            weight.data.data_ptr(),
            weight.bits,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            weight.outputs,
            codes.data_ptr(),
            scales.data_ptr(),
            sums.data_ptr(),
        )
        return out

    def _product(self, x: torch.Tensor, weight: PackedWeight | PackedCodes, bias: torch.Tensor | None) -> torch.Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        if isinstance(weight, PackedCodes):
            return self._quantised_product(x, weight, bias)
        out = torch.empty((len(x), weight.outputs))
        self.library.baton_product(
            self.pool,
            x.data_ptr(),
            x.stride(0),
            len(x),
            weight.inputs,
            weight.data.data_ptr(),
            weight.bits,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            weight.outputs,
        )
        return out

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, centred: bool) -> torch.Tensor:
        rows, step = _rows(x)
        out = torch.empty(x.shape)
        width = x.shape[-1]
        self.library.baton_rms_norm(
            self.pool, rows.data_ptr(), step, out.numel() // width, width, weight.data_ptr(), eps, out.data_ptr()
        )
        return out

    def _gated(self, both: torch.Tensor, activation: str) -> torch.Tensor:
        out = torch.empty((len(both), both.shape[1] // 2))
        kind = _ACTIVATIONS[activation]
        self.library.baton_gated(self.pool, both.data_ptr(), len(both), out.shape[1], kind, out.data_ptr())
        return out

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = _heads_together(x)
        num_rows, heads, dim = x.shape
        out = torch.empty(x.shape)
        self.library.baton_rotate(
            self.pool,
            x.data_ptr(),
            x.stride(0),
            num_rows,
            heads,
            dim,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[-1],
            out.data_ptr(),
        )
        return out

    def _store(self, rows: torch.Tensor, pool: torch.Tensor, places: torch.Tensor) -> None:
        rows = _heads_together(rows)
        width = rows.shape[1] * rows.shape[2]
        self.library.baton_write(
            self.pool,
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            width,
            places.data_ptr(),
            pool.data_ptr(),
            _BITS[pool.dtype],
        )

    def _attention(self, batch: StepBatch, shape: AttentionShape) -> Attention:
        return _PagedAttention(self, batch, shape)


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``x`` [..., E] as rows, and how far they lie apart."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    return x.contiguous(), x.shape[-1]


def _heads_together(x: torch.Tensor) -> torch.Tensor:
    """``x`` [N, H, D], where each row's heads lie side by side."""
    return x if x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2]) else x.contiguous()


class _PagedAttention:
    """Keys and values are read where they lie in the pool."""

    def __init__(self, native: _Native, batch: StepBatch, shape: AttentionShape) -> None:
        self._native = native
        self._shape = shape
        self._block_size = batch.block_size
        counts = [len(span.block_ids) for span in batch.spans]
        offsets = np.cumsum([0, *counts[:-1]])
        self._blocks = np.concatenate([span.block_ids for span in batch.spans])
        self._spans = np.array(
            [[span.first, span.count, span.start, offset] for span, offset in zip(batch.spans, offsets, strict=True)],
            dtype=np.int64,
        )
        self._places = self._spans.ctypes.data, len(self._spans), self._blocks.ctypes.data

    def attend(self, q: torch.Tensor, cache: KVCache, layer: int) -> torch.Tensor:
        num_rows, num_heads, head_dim = q.shape
        pool, shape = cache.layers[layer], self._shape
        out = torch.empty((num_rows, num_heads * head_dim))
        self._native.library.baton_attend(
            self._native.pool,
            *self._places,
            pool.data_ptr(),
            _BITS[pool.dtype],
            pool.shape[1],
            self._block_size,
            num_heads,
            shape.num_kv_heads,
            head_dim,
            shape.windows[layer],
            shape.scale,
            shape.softcap,
            q.contiguous().data_ptr(),
            out.data_ptr(),
        )
        return out
