"""Products with unquantized weights: against float64, and a row's bits wherever it stands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.cuda_graphs import make_recorder
from pdmesh.engine.kernels.triton.linear.dense import FEW_ROWS, TritonDense, VectorDense
from pdmesh.engine.kernels.triton.norms import gate_mul
from tests.gpu.errors import UNIT, over_bound
from tests.support.random_weights import generator_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(6, 1024), (70, 96), (129, 520), (64, 1100)]


def random(name: str, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator_of(name, "cpu")).to(DEVICE, dtype)


def over(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    """The error over its bound; a bias is one term more."""
    wide = [each.double() for each in (x, weight)]
    exact, sizes = wide[0] @ wide[1].t(), wide[0].abs() @ wide[1].t().abs()
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    bound = (weight.shape[1] + 1) * UNIT[torch.float32] * sizes + UNIT[x.dtype] * exact.abs()
    return over_bound(found.double(), exact, bound)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 20, FEW_ROWS + 6])
def test_products(n: int, k: int, dtype: torch.dtype, m: int) -> None:
    weight, bias, x = random("w", n, k, dtype=dtype), random("b", n, dtype=dtype), random("x", m, k, dtype=dtype)
    linear = TritonDense(weight, bias)
    assert over(linear(x), x, weight, bias) <= 1


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    weight = random("w", 70, 520, dtype=torch.bfloat16)
    x = random("x", FEW_ROWS + 6, 520, dtype=torch.bfloat16)
    linear = TritonDense(weight)
    assert linear(x[:0]).shape == (0, 70)
    together = linear(x)
    for first, last in ((0, 1), (3, 20), (6, 70), (69, 70)):
        assert torch.equal(linear(x[first:last]), together[first:last])


def test_what_it_cannot_take_is_named() -> None:
    weight = random("w", 6, 96, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"invariant: weights of torch\.float32"):
        TritonDense(weight)
    with pytest.raises(ValueError, match=r"x: torch\.float32, and weights of torch\.bfloat16"):
        TritonDense(weight.bfloat16())(weight)
    with pytest.raises(ValueError, match=r"x: shape \(96, 6\), strides \(1, 96\); give \[M, 96\]"):
        TritonDense(weight.bfloat16())(weight.bfloat16().t())


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (4096, 14336), (2048, 8192)])
def test_a_row_of_a_large_map_has_the_same_bits_alone_and_in_any_batch(n: int, k: int) -> None:
    """The tensor cores' sums have one order, whatever the width of the tile."""
    linear = TritonDense(random("w", n, k, dtype=torch.bfloat16) / k**0.5)
    x = random("x", 2048, k, dtype=torch.bfloat16)
    alone = linear(x[:1])
    for m in (2, 16, 17, 33, 64, 65, 100, 128, 256, 2048):
        assert torch.equal(linear(x[:m])[:1], alone), m
        assert torch.equal(linear(x[:m].flip(0))[-1:], alone), m


@pytest.mark.gpu
def test_graphs_are_recorded_again_after_all_were_dropped() -> None:
    """torch gives a pool up with its last graph; the recorder keeps one."""
    recorder, x = make_recorder(DEVICE), torch.ones(64, device=DEVICE)
    for _ in range(2):
        recording = recorder.record(lambda: (x * 2,))
        recording.replay()
        assert torch.equal(recording.output[0], x * 2)
        del recording


@pytest.mark.parametrize(("n", "k"), [*SHAPES, (10, 4128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [True, False])
def test_a_row_by_the_vector_kernel(n: int, k: int, dtype: torch.dtype, biased: bool) -> None:
    weight, x = random("w", n, k, dtype=dtype), random("x", 1, k, dtype=dtype)
    bias = random("b", n, dtype=dtype) if biased else None
    assert over(VectorDense(weight, bias)(x), x, weight, bias) <= 1


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("biased", [True, False])
def test_gate_and_up_come_as_one_kernel_makes_of_two(activation: str, biased: bool) -> None:
    weight, x = random("w", 2 * 37, 2064, dtype=torch.bfloat16) / 45, random("x", 1, 2064, dtype=torch.bfloat16)
    linear = VectorDense(weight, random("b", 2 * 37, dtype=torch.bfloat16) if biased else None)
    assert torch.equal(linear.gated(x, activation), gate_mul(linear(x), activation))


def test_more_rows_are_the_librarys() -> None:
    weight, x = random("w", 16, 96, dtype=torch.bfloat16), random("x", 8, 96, dtype=torch.bfloat16)
    linear = VectorDense(weight)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight))
    assert torch.equal(linear.gated(x, "silu"), gate_mul(linear(x), "silu"))


def test_what_the_vector_kernel_cannot_take_is_named() -> None:
    with pytest.raises(ValueError, match=r"weight: torch\.float32; give float16 or bfloat16"):
        VectorDense(torch.zeros(4, 16))
    with pytest.raises(ValueError, match=r"x: torch\.bfloat16 \(1, 17\); give \[1, 16\] of torch\.bfloat16"):
        VectorDense(torch.zeros(4, 16, dtype=torch.bfloat16))(torch.zeros(1, 17, dtype=torch.bfloat16))
