"""Norms, gates and products with quantized weights equal the reference over a grid of sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdmesh.engine.kernels.triton.linear.linear import make_triton_linear
from pdmesh.engine.kernels.triton.linear.weight_product import NARROW_ROWS, PRODUCT_ROWS_MAX
from pdmesh.engine.kernels.triton.norms import add_rms_norm, rms_norm, silu_mul
from pdmesh.engine.models import layers
from tests.engine.kernels.triton.grid import name_of, pairwise
from tests.engine.kernels.triton.test_linear import activations, assert_within_bound, quantized
from tests.engine.kernels.triton.test_norms import assert_close, random

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
NORMS = pairwise(
    width=[64, 96, 128, 256, 1, 100, 5000],
    num_rows=[1, 2, 7],
    eps=[1e-6, 0.5, 4.0],
    dtype=DTYPES,
    form=["norm", "add", "in place"],
    view=[False, True],
)


@pytest.mark.parametrize("row", NORMS, ids=name_of)
def test_norms(row: dict[str, Any]) -> None:
    width, dtype, eps = row["width"], row["dtype"], row["eps"]
    # Rows of x and of the residual lie at different distances, with columns on both sides that are nobody's.
    wide = [random((row["num_rows"], width + 2 * margin), dtype, margin) for margin in (3, 5)]
    x, residual = (full[:, m:-m] if row["view"] else full[:, m:-m].clone() for full, m in zip(wide, (3, 5), strict=True))
    weight, units = random((width,), dtype, 2), 2 if dtype != torch.float32 else max(4, width / 4)
    if row["form"] == "norm":
        assert_close(rms_norm(x, weight, eps), layers.rms_norm(x, weight, eps), units)
        return
    sum_of_both, outside = x + residual, [full[:, [0, 1, 2, -3, -2, -1]].clone() for full in wide]
    places = (x, residual) if row["form"] == "in place" else (None, None)
    normed, added = add_rms_norm(x, residual, weight, eps, *places)
    assert torch.equal(added, sum_of_both)
    assert_close(normed, layers.rms_norm(sum_of_both, weight, eps), units)
    assert all(torch.equal(full[:, [0, 1, 2, -3, -2, -1]], was) for full, was in zip(wide, outside, strict=True))


@pytest.mark.parametrize(
    "row", pairwise(width=[64, 1, 1023, 1024, 1025, 2100], num_rows=[1, 2, 5], dtype=DTYPES, view=[False, True]), ids=name_of
)
def test_gates(row: dict[str, Any]) -> None:
    width, dtype = row["width"], row["dtype"]
    wide = random((row["num_rows"], 2 * width + 6), dtype, 0) * 4
    gate_up = wide[:, 3:-3] if row["view"] else wide[:, : 2 * width].contiguous()
    room = torch.full((row["num_rows"], width + 2), 7.0, dtype=dtype, device=wide.device)
    silu_mul(gate_up, room[:, 1:-1])
    expected = layers.silu(gate_up[:, :width]) * gate_up[:, width:]
    assert_close(room[:, 1:-1], expected, 2 if dtype != torch.float32 else 8)
    assert (room[:, [0, -1]] == 7).all()


PRODUCTS = pairwise(
    num_rows=[1, 2, 3, 4, 5, 8, 9, 16, 17, 100, 128, 129],
    format=["int8", "int4-32", "int4-64", "int4-128", "fp8"],
    num_inputs=[128, 384, 512, 1152],
    num_outputs=[5, 64, 130],
    dtype=DTYPES,
    bias=[False, True],
    invariant=[False, True],
)


@pytest.mark.parametrize("row", PRODUCTS, ids=name_of)
def test_products(row: dict[str, Any]) -> None:
    weight, dense = quantized(row["format"], row["num_outputs"], row["num_inputs"])
    dtype, is_int4 = row["dtype"], row["format"].startswith("int4")
    invariant = row["invariant"] and dtype != torch.float32
    x = activations(row["num_rows"], row["num_inputs"], dtype)
    bias = activations(1, row["num_outputs"], dtype, 2)[0] if row["bias"] else None
    result = make_triton_linear(weight, bias, invariant)(x)
    # WordLinear's table: which weights are rounded.
    is_exact = invariant or (row["num_rows"] <= PRODUCT_ROWS_MAX and dtype != torch.float32)
    is_exact &= not is_int4 or (row["num_rows"] <= NARROW_ROWS and not invariant)
    assert_within_bound(result, x, dense, bias, 1 if is_exact else 2)
