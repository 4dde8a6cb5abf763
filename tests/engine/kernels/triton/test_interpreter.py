"""The interpreter made cheaper computes and refuses what it did before."""

from __future__ import annotations

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
