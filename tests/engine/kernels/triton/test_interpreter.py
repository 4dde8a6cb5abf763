"""The interpreter made cheaper computes and refuses what it did before."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.engine.kernels.triton.paged import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="kernels are not interpreted")


@triton.jit
def _product_kernel(x: Any, y: Any, out: Any) -> None:
    rows = tl.arange(0, 4)
    tl.store(
        out + rows[:, None] * 2 + tl.arange(0, 2)[None, :], tl.load(x + rows)[:, None] * tl.load(y + tl.arange(0, 2))[None, :]
    )


@triton.jit
def _unlike_kernel(x: Any) -> None:
    tl.store(x + tl.arange(0, 4), tl.arange(0, 4) + tl.arange(0, 2))


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(4, 2, dtype=x.dtype)
    _product_kernel[(1,)](x, y, out)
    return out


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.float16, torch.float32], ids=str)
def test_shapes_are_broadcast(dtype: torch.dtype) -> None:
    x, y = torch.tensor([1, -2, 3, 4]).to(dtype), torch.tensor([5, -6]).to(dtype)
    assert torch.equal(_product(x, y), x[:, None] * y[None, :])


@pytest.mark.parametrize(("dtype", "most"), [(torch.int32, 2**31 - 1), (torch.int8, 127)], ids=str)
def test_what_leaves_its_type_is_refused(dtype: torch.dtype, most: int) -> None:
    one = torch.ones(2, dtype=dtype)
    assert _product(torch.tensor([1, most, 0, -most - 1], dtype=dtype), one)[1, 0] == most
    with pytest.raises(InterpreterError, match="overflow"):
        _product(torch.tensor([1, most, 0, 0], dtype=dtype), one * 2)
    with pytest.raises(InterpreterError, match="overflow"):
        _product(torch.tensor([1, 0, 0, -most - 1], dtype=dtype), -one)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InterpreterError, match="incompatible dimensions"):
        _unlike_kernel[(1,)](torch.zeros(4, dtype=torch.int32))


@triton.jit
def _mixed_kernel(x: Any, y: Any, out: Any, SIZE: tl.constexpr) -> None:
    rows = tl.arange(0, SIZE)
    left, right = tl.load(x + rows), tl.load(y + rows)
    tl.store(out + rows, (left + right).to(tl.float64))
    tl.store(out + SIZE + rows, (left * 3).to(tl.float64))
    tl.store(out + 2 * SIZE + rows, (left * 3.0).to(tl.float64) + (1 if (left * 3.0).dtype.is_floating() else 0))
    tl.store(out + 3 * SIZE + rows, (left + True).to(tl.float64))
    tl.store(out + 4 * SIZE + rows, (right - 3).to(tl.float64))
    tl.store(out + 5 * SIZE + rows, (left < right).to(tl.float64))
    tl.store(out + 6 * SIZE + rows, (left / right).to(tl.float64))


@triton.jit
def _shift_kernel(x: Any, out: Any, SIZE: tl.constexpr) -> None:
    rows = tl.arange(0, SIZE)
    tl.store(out + rows, tl.load(x + rows) >> 1)


def _mixed(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    out = torch.zeros(7, len(x), dtype=torch.float64)
    _mixed_kernel[(1,)](x, y, out, len(x))
    return [*out]


_SMALL = (torch.int8, torch.int32, torch.int64, torch.float16, torch.float32)


@pytest.mark.parametrize("size", [4, 8])
def test_what_is_kept_of_one_type_and_shape_serves_no_other(size: int) -> None:
    """All pairs, twice: first what operands become is found, then it is known."""
    numbers = torch.arange(size) + 1
    for x, y in [*itertools.product(_SMALL, _SMALL)] * 2:
        left, right = numbers.to(x), (numbers.flip(0) * (1 if y == torch.int8 else 100)).to(y)
        expected = [left + right, left * 3, left * 3.0 + 1, left + True, right - 3, left < right, left.float() / right.float()]
        for found, wanted in zip(_mixed(left, right), expected, strict=True):
            assert torch.equal(found, wanted.double()), (x, y)


def test_a_shift_of_an_unsigned_number_leaves_numbers_as_they_are() -> None:
    for dtype in (torch.uint8, torch.int8, torch.uint8, torch.int32):
        x, out = torch.tensor([4, 5, 6, 120]).to(dtype), torch.zeros(4, dtype=dtype)
        _shift_kernel[(1,)](x, out, 4)
        assert out.tolist() == [2, 2, 3, 60]
