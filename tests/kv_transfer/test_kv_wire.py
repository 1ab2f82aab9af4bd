"""Number formats on the wire: exact where formats agree, within the stated error where they do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import HandoffError
from kv_transfer.wire import Wire

HEADS, DIM = 2, 4
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
FP8_MAX = 448.0

sizes = st.floats(1e-20, 1e20) | st.sampled_from([0.0])
heads = st.lists(st.floats(-1.0, 1.0), min_size=HEADS * DIM, max_size=HEADS * DIM)
rows = st.lists(st.tuples(heads, sizes), min_size=1, max_size=5).map(
    lambda drawn: np.array([np.array(numbers) * size for numbers, size in drawn], dtype=np.float32)
)


def through(name: str, numbers: torch.Tensor, target: str) -> torch.Tensor:
    """``numbers`` [n, HEADS * DIM] as they arrive in a pool of dtype ``target``."""
    wire = Wire(name, str(numbers.dtype).removeprefix("torch."), target, HEADS, DIM)
    data = numbers.contiguous().view(torch.uint8).view(len(numbers), -1).numpy()
    assert data.shape[1] == wire.source_row_bytes
    payload = np.full(len(numbers) * wire.row_bytes, 255, dtype=np.uint8)
    wire.encode(data, payload)
    payload.flags.writeable = False  # as a message is
    found = wire.decode(payload)
    assert found.shape == (len(numbers), wire.target_row_bytes)
    return torch.from_numpy(np.array(found)).view(getattr(torch, target))


@given(rows)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_formats_move_as_bytes(dtype: str, numbers: np.ndarray) -> None:
    wire = Wire("native", dtype, dtype, HEADS, DIM)
    assert not wire.encodes
    assert not wire.decodes
    stored = torch.from_numpy(numbers).clamp(-FP8_MAX, FP8_MAX).to(getattr(torch, dtype))
    assert torch.equal(through("native", stored, dtype).view(torch.uint8), stored.view(torch.uint8))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_native_is_what_the_receiver_would_round_to_itself(source: str, target: str) -> None:
    """Wider to narrower: one rounding, on either side the same. Narrower to wider: exact."""
    numbers = torch.from_numpy(np.random.default_rng(3).normal(0, 20, (50, HEADS * DIM)).astype(np.float32))
    stored = numbers.to(getattr(torch, source))
    found = through("native", stored, target)
    assert torch.equal(found.float(), stored.float().to(getattr(torch, target)).float())
    sizes = [getattr(torch, name).itemsize for name in (source, target)]
    assert Wire("native", source, target, HEADS, DIM).row_bytes == HEADS * DIM * min(sizes)


def test_too_large_for_float8_is_its_largest_number_and_not_nan() -> None:
    stored = torch.tensor([[1e9, -1e9, 448.0, 460.0] * 2])
    assert through("native", stored, "float8_e4m3fn").float().tolist() == [[448, -448, 448, 448] * 2]


@given(rows)
@example(np.zeros((1, HEADS * DIM), dtype=np.float32))
@pytest.mark.parametrize("name", ["bfloat16", "float8", "int8"])
def test_the_error_is_as_stated(name: str, numbers: np.ndarray) -> None:
    found = through(name, torch.from_numpy(numbers), "float32").numpy().astype(np.float64)
    exact = numbers.astype(np.float64)
    largest = np.abs(exact).reshape(len(exact), HEADS, DIM).max(axis=-1).repeat(DIM, axis=-1)
    bound = {
        "bfloat16": np.abs(exact) * 2.0**-8 + 2.0**-133,  # half the last bit; below the normal range a fixed step
        "float8": np.maximum(np.abs(exact) * 2.0**-4, largest * 2.0**-10),
        "int8": largest / 254,
    }[name]
    assert (np.abs(found - exact) <= bound * (1 + 1e-5) + 1e-43).all()  # float32's own rounding on top


def test_bytes_saved() -> None:
    wires = {
        name: Wire(name, "float32", "float32", 8, 64).row_bytes for name in ("native", "bfloat16", "float8", "int8")
    }
    assert wires == {"native": 2048, "bfloat16": 1024, "float8": 512 + 32, "int8": 512 + 32}


def test_what_is_no_payload() -> None:
    with pytest.raises(HandoffError, match="5 bytes is not whole rows of 32"):
        Wire("native", "float32", "float32", HEADS, DIM).decode(np.zeros(5, dtype=np.uint8))
    with pytest.raises(HandoffError, match="no wire format 'zip'"):
        Wire("zip", "float32", "float32", 1, 1)
