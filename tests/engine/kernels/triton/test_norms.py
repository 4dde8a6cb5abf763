"""Norms and gates equal those of pdmesh/engine/layers: bit for bit where nothing is summed, else within a unit in the last
place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.norms import add_rms_norm, rms_norm, silu_mul
from pdmesh.engine.models import layers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
SHAPES = [(1, 64), (3, 100), (5, 1), (2, 257), (0, 8)]


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(actual: Tensor, expected: Tensor, units: float) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bound = units * EPSILON[expected.dtype] * expected.float().abs() + 1e-7
    assert bool(((actual.float() - expected.float()).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random(shape, dtype, 0), random(shape[1:], dtype, 1)
    units = 2 if dtype == torch.float16 else shape[1]
    assert_close(rms_norm(x, weight, 1e-5), layers.rms_norm(x, weight, 1e-5), units)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight = random(shape, dtype, 0), random(shape, dtype, 1), random(shape[1:], dtype, 2)
    normed, added = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(added, x + residual)
    assert_close(normed, layers.rms_norm(added, weight, 1e-5), 2 if dtype == torch.float16 else shape[1])
    out, residual_out = x.clone(), residual.clone()
    assert add_rms_norm(out, residual_out, weight, 1e-5, out, residual_out)[0] is out
    assert torch.equal(out, normed) and torch.equal(residual_out, added)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 1030)])
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = random((shape[0], 2 * shape[1]), dtype, 0) * 4
    gate, up = gate_up.chunk(2, dim=-1)
    assert_close(silu_mul(gate_up), layers.silu(gate) * up, 2 if dtype == torch.float16 else 8)


def test_silu_of_large_values_is_their_positive_part() -> None:
    assert silu_mul(torch.tensor([[-200.0, 200.0, 3.0, 3.0]], device=DEVICE)).tolist() == [[0.0, 600.0]]


def test_a_row_is_the_same_among_others() -> None:
    x, residual, weight = (random(shape, torch.float16, 3) for shape in ((6, 70), (6, 70), (70,)))
    whole = add_rms_norm(x, residual, weight, 1e-5)
    alone = add_rms_norm(x[4:5], residual[4:5], weight, 1e-5)
    assert torch.equal(alone[0], whole[0][4:5]) and torch.equal(alone[1], whole[1][4:5])


def test_rows_of_a_wider_matrix_are_read_in_place() -> None:
    wide, weight = random((3, 96), torch.float16, 0), random((32,), torch.float16, 1)
    view = wide[:, 32:64]
    assert torch.equal(rms_norm(view, weight, 1e-6, torch.empty_like(view)), rms_norm(view.contiguous(), weight, 1e-6))


def test_wrong_shapes_are_named() -> None:
    x = torch.zeros((2, 8), device=DEVICE)
    with pytest.raises(ValueError, match=r"weight: shape \(7,\)"):
        rms_norm(x, torch.zeros(7, device=DEVICE), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(x, x[:1], torch.zeros(8, device=DEVICE), 1e-5)
    with pytest.raises(ValueError, match="contiguous rows"):
        rms_norm(x.t(), torch.zeros(2, device=DEVICE), 1e-5)
    with pytest.raises(ValueError, match="gate_up"):
        silu_mul(x[:, :7])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4096), (1000, 4096), (7, 14336)])
def test_big_rows_in_bfloat16(shape: tuple[int, int]) -> None:
    x, residual, weight = (random(s, torch.bfloat16, i) for i, s in enumerate((shape, shape, shape[1:])))
    normed, added = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(added, x + residual)
    assert_close(normed, layers.rms_norm(added, weight, 1e-5), 2)
    gate_up = torch.cat((x, residual), dim=1)
    assert_close(silu_mul(gate_up), layers.silu(x) * residual, 2)
