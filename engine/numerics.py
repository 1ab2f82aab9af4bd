"""What bitwise equal results need from the platform, set before torch loads and checked after.

Batch-invariant mode promises that a row's bits depend on that row alone. MKL's strict reproducible mode
keeps matrix products to that from a few rows up; fewer take other kernels, so they are padded.
Elementwise functions may differ between a vector's body and its tail (torch's sigmoid and silu do), so
only those that do not are used. None of this is taken on trust: `check_batch_invariance` tries it.

Importing this module imports no torch: a process calls `prepare_environment` first thing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import EngineError

if TYPE_CHECKING:
    import torch

MIN_ROWS = 8
"""Fewer rows than this are padded to it before a product with a weight, in batch-invariant mode."""

NARROW_OUTPUTS, NARROW_MIN_ROWS = 24, 24
"""The same for weights with fewer outputs than the first, which MKL multiplies in another way."""

MIN_ATTENTION_ROWS = 16
"""The same for attention's products; with heads as narrow as 16, MKL treats fewer rows differently."""

MAX_ROWS = 512
"""More rows than this are multiplied in parts in batch-invariant mode."""

_MKL_VARIABLE = "MKL_CBWR"


def prepare_environment() -> str | None:
    """Asks MKL for reproducible results, and OpenMP's threads to sleep while they wait for each other
    (they spin by default, which makes a step ten times slower when cores are shared). Call before
    anything imports torch; it costs nothing.

    Returns None when done, or a sentence saying why it can have no effect any more. Values that the
    user has set are kept.
    """
    wanted = {_MKL_VARIABLE: f"{_instruction_set()},STRICT", "OMP_WAIT_POLICY": "PASSIVE"}
    missing = [name for name in wanted if not os.environ.get(name)]
    if missing and "torch" in sys.modules:
        return f"torch was loaded before {' and '.join(missing)} could be set; batch-invariant mode may not work"
    for name in missing:
        os.environ[name] = wanted[name]
    return None


def min_rows(outputs: int) -> int:
    """Fewer rows than this are padded to it before a product with a weight [outputs, inputs]."""
    return MIN_ROWS if outputs >= NARROW_OUTPUTS else NARROW_MIN_ROWS


def is_prepared() -> bool:
    """Whether MKL was asked for strict reproducible results."""
    return os.environ.get(_MKL_VARIABLE, "").upper().endswith("STRICT")


def check_batch_invariance(weights: Iterable[torch.Tensor], head_dim: int) -> None:
    """Tries on this platform, with this model's own ``weights`` [out, in], what batch-invariant mode
    relies on. One weight of each shape is tried.

    Raises EngineError that says what differs.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    shapes: dict[tuple[int, ...], torch.Tensor] = {}
    for weight in weights:
        shapes.setdefault(tuple(weight.shape), weight)
    for shape, weight in shapes.items():
        x = torch.randn(MAX_ROWS, shape[1], generator=generator).to(weight)
        whole = torch.nn.functional.linear(x, weight)
        least = min_rows(shape[0])
        for rows in (least, least + 1, 33, 257):
            part = torch.nn.functional.linear(x[-rows:].clone(), weight)
            _expect_equal(part, whole[-rows:], f"a product of {rows} rows with a weight of {list(shape)}")
    device = next(iter(shapes.values())).device
    _check_attention_products(torch.randn(24, 64, head_dim, generator=generator).to(device), generator)
    _check_row_functions(torch.randn(600, 576, generator=generator).to(device))


def _check_attention_products(q: torch.Tensor, generator: torch.Generator) -> None:
    import torch

    keys = torch.randn(24, 256, q.shape[-1], generator=generator).to(q)
    scores = torch.bmm(q, keys.transpose(1, 2))
    mixed = torch.bmm(scores, keys)
    for products, rows in ((1, 64), (1, MIN_ATTENTION_ROWS), (5, 19), (24, MIN_ATTENTION_ROWS)):
        some = torch.bmm(q[-products:, -rows:].clone(), keys[-products:].clone().transpose(1, 2))
        _expect_equal(some, scores[-products:, -rows:], f"{products} attention products of {rows} rows")
        back = torch.bmm(some, keys[-products:].clone())
        _expect_equal(back, mixed[-products:, -rows:], f"{products} weighted sums of {rows} rows")


def _check_row_functions(x: torch.Tensor) -> None:
    import torch

    exponentials, sums = torch.exp(x), x.sum(-1)
    means = x.pow(2).mean(-1)
    roots = torch.rsqrt(means)
    for first, rows in ((0, 1), (3, 7), (100, 499)):
        part = slice(first, first + rows)
        _expect_equal(x[part].clone().sum(-1), sums[part], f"sums of {rows} rows")
        _expect_equal(x[part].clone().pow(2).mean(-1), means[part], f"means of {rows} rows")
        _expect_equal(torch.rsqrt(means[part].clone()), roots[part], f"inverse roots of {rows} numbers")
    for count in range(1, 70):
        _expect_equal(torch.exp(x[5, 3 : 3 + count].clone()), exponentials[5, 3 : 3 + count], f"exp of {count} numbers")


def _expect_equal(part: torch.Tensor, whole: torch.Tensor, what: str) -> None:
    if not part.equal(whole):
        largest = (part - whole).abs().max().item()
        hint = "" if is_prepared() else f" ({_MKL_VARIABLE} is not set to a STRICT mode)"
        raise EngineError(
            f"engine.batch_invariant does not hold on this platform: {what} differs from the same rows in a larger "
            f"batch by up to {largest:.1e}, the limit is 0{hint}"
        )


def _instruction_set() -> str:
    """The best one that MKL's strict mode knows and this machine has."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "AVX2"
    return "AVX512" if "avx512f" in flags else "AVX2"
