"""8 and 4 bits: how far off a weight may be, what comes back exactly, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pdmesh.engine.loader import quantize as loader_quantize
from pdmesh.engine.loader.quantize import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    dequantize_int4,
    dequantize_int8,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)

groups = st.sampled_from([32, 64, 128])
magnitudes = st.sampled_from([1e-30, 1e-6, 1e-3, 0.05, 1.0, 100.0])
Q4_TYPES = [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1]


def heavy_tailed(seed: int, num_rows: int, width: int, magnitude: float) -> Tensor:
    """Mostly small, now and then ten times as large, as weights are."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn((2, num_rows, width), generator=generator)
    return normal[0] * normal[1].exp() * magnitude


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 70), magnitudes)
def test_int8_is_off_by_half_a_scale_at_most(seed: int, num_rows: int, width: int, magnitude: float) -> None:
    weight = heavy_tailed(seed, num_rows, width, magnitude)
    quantized = quantize_int8(weight)
    error = (dequantize_int8(quantized) - weight).abs()
    assert (error <= quantized.scales[:, None] * 0.50001).all()
    assert torch.equal(quantized.values.abs().amax(1), torch.full((num_rows,), 127, dtype=torch.int8))


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38, -3e38])
def test_int8_of_extreme_rows(value: float) -> None:
    weight = torch.tensor([[value, 0.0, -value / 2], [1.0, 2.0, -3.0]])
    quantized = quantize_int8(weight)
    assert quantized.scales.isfinite().all()
    assert (quantized.scales > 0).all()
    assert ((dequantize_int8(quantized) - weight).abs() <= quantized.scales[:, None] * 0.50001).all()


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 3), groups, magnitudes)
def test_int4_is_no_worse_than_minimum_and_maximum(seed: int, rows: int, num_groups: int, group: int, magnitude: float) -> None:
    weight = heavy_tailed(seed, rows, num_groups * group, magnitude)
    error = squared_error(weight, quantize_int4(weight, group))
    naive = squared_error(weight, by_minimum_and_maximum(weight, group))
    assert (error <= naive * 1.00001 + 1e-30).all()
    by_group = weight.view(rows, -1, group)
    low, high = by_group.amin(2), by_group.amax(2)
    # Half a step, and float16's rounding of the minimum and of 15 steps.
    bound = (high - low) / 30 + (low.abs() + high - low) * 2**-11 + 2**-20
    assert (error.sqrt() <= bound * group**0.5).all()


def squared_error(weight: Tensor, quantized: Int4Weight) -> Tensor:
    return (dequantize_int4(quantized) - weight).square().view(*quantized.scales.shape, -1).sum(2)


def by_minimum_and_maximum(weight: Tensor, group: int) -> Int4Weight:
    by_group = weight.view(len(weight), -1, group)
    minimums = by_group.amin(2).half()
    scales = ((by_group.amax(2) - minimums.float()) / 15).half()
    steps = scales.float().masked_fill(scales == 0, 1.0)
    values = ((by_group - minimums.float()[:, :, None]) / steps[:, :, None]).round().clamp(0, 15).byte()
    return Int4Weight(values.view(weight.shape), scales, minimums, group)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from(Q4_TYPES), magnitudes, st.floats(-5, 5))
def test_what_llama_cpp_quantized_comes_back_exactly(
    seed: int, num_rows: int, kind: GGMLQuantizationType, magnitude: float, offset: float
) -> None:
    original = heavy_tailed(seed, num_rows, 96, magnitude) + offset * magnitude
    original[0, :32] = 0.0
    weight = torch.from_numpy(dequantize(quantize(original.numpy(), kind), kind).astype(np.float32))
    assert torch.equal(dequantize_int4(quantize_int4(weight, 32)), weight)


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0, 1e-9])
def test_a_group_of_one_value(value: float) -> None:
    quantized = quantize_int4(torch.full((2, 64), value), 32)
    expected = torch.full((2, 64), value).half().float()
    assert torch.equal(dequantize_int4(quantized), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_quantized_as_if_wide(dtype: torch.dtype) -> None:
    weight = heavy_tailed(1, 20, 128, 0.05).to(dtype)
    assert_equal(quantize_int8(weight), quantize_int8(weight.float()))
    assert_equal(quantize_int4(weight, 64), quantize_int4(weight.float(), 64))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3000), st.integers(1, 2))
def test_a_row_does_not_depend_on_its_block_its_neighbours_or_the_threads(seed: int, block: int, threads: int) -> None:
    weight = heavy_tailed(seed, 70, 128, 0.05)
    expected = quantize_int8(weight), quantize_int4(weight, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_quantize, "_BLOCK_WEIGHTS", block)
        torch.set_num_threads(threads)
        try:
            blockwise = quantize_int8(weight), quantize_int4(weight, 32)
        finally:
            torch.set_num_threads(1)
    assert_equal(blockwise[0], expected[0])
    assert_equal(blockwise[1], expected[1])
    assert torch.equal(quantize_int4(weight[30:31], 32).values, expected[1].values[30:31])


# Operators of torch that round once by IEEE 754, or not at all, on every device; and what only moves numbers or makes room.
ROUNDED_ALIKE = {"add", "sub", "mul", "div", "neg", "abs", "round", "clamp", "clamp_min", "maximum", "amax", "amin", "_to_copy"}
ROUNDED_ALIKE |= {"gt", "lt", "eq", "ne", "isfinite", "all", "any", "where", "masked_fill", "_local_scalar_dense"}
MOVED = {"empty", "zeros", "full_like", "copy", "clone", "detach", "view", "_unsafe_view", "t", "slice", "select", "unsqueeze"}


class Audit(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base has no annotations
    """Which operators run; a division by a number is one of its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if name == "div" and not isinstance(args[1], Tensor):
            name = "division by a number"
        self.names.add(name)
        return func(*args, **(kwargs or {}))


def test_every_operator_rounds_alike_on_every_device() -> None:
    """On a GPU a division by a number is a product with its reciprocal, and torch's sums have another order."""
    weight = heavy_tailed(1, 20, 128, 0.05).bfloat16()
    with Audit() as audit:
        all_made = [quantize_int8(weight), quantize_fp8(weight), *(quantize_int4(weight, group) for group in (32, 64, 128))]
    for made in all_made:
        assert isinstance(made, Int8Weight | Fp8Weight | Int4Weight)
        assert made.values.shape == weight.shape
    assert audit.names >= {"add", "div", "amax"}
    assert audit.names - ROUNDED_ALIKE - MOVED == set()


def test_columns_are_added_in_one_order() -> None:
    columns = heavy_tailed(4, 32, 5, 1.0)
    expected = columns.numpy()
    while len(expected) > 1:
        expected = expected[: len(expected) // 2] + expected[len(expected) // 2 :]
    assert np.array_equal(loader_quantize._sum(columns).numpy(), expected[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("magnitude", [1e-6, 0.05, 100.0])
def test_a_gpu_quantizes_to_the_bits_of_a_cpu(dtype: torch.dtype, magnitude: float) -> None:
    weight = heavy_tailed(5, 3000, 1024, magnitude).clamp(-6e4, 6e4).to(dtype)
    assert_equal(quantize_int8(weight, "cuda"), quantize_int8(weight))
    assert_equal(quantize_fp8(weight, "cuda"), quantize_fp8(weight))
    for group in (32, 64, 128):
        assert_equal(quantize_int4(weight, group, "cuda"), quantize_int4(weight, group))


def test_threads_do_not_change_a_bit_of_a_large_weight() -> None:
    weight = heavy_tailed(3, 1100, 512, 0.05)  # more than a block, and enough for torch to share it out
    expected = quantize_int8(weight), quantize_int4(weight, 128)
    torch.set_num_threads(2)
    try:
        shared_out = quantize_int8(weight), quantize_int4(weight, 128)
    finally:
        torch.set_num_threads(1)
    assert_equal(shared_out[0], expected[0])
    assert_equal(shared_out[1], expected[1])


def assert_equal(ours: Int8Weight | Int4Weight | Fp8Weight, theirs: Int8Weight | Int4Weight | Fp8Weight) -> None:
    assert torch.equal(ours.values.cpu().view(torch.uint8), theirs.values.view(torch.uint8))
    assert torch.equal(ours.scales.cpu(), theirs.scales)
    if isinstance(ours, Int4Weight) and isinstance(theirs, Int4Weight):
        assert torch.equal(ours.minimums.cpu(), theirs.minimums)


def test_a_weight_that_is_not_contiguous_is_quantized_like_its_copy() -> None:
    weight = heavy_tailed(2, 64, 96, 0.05).t()
    assert_equal(quantize_int8(weight), quantize_int8(weight.contiguous()))
    assert_equal(quantize_int4(weight, 64), quantize_int4(weight.contiguous(), 64))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    weight = heavy_tailed(0, 40, 64, 0.05)
    weight[33, 50] = value
    for attempt in (lambda: quantize_int8(weight), lambda: quantize_int4(weight, 32)):
        with pytest.raises(ValueError, match="infinity or NaN; the checkpoint is damaged"):
            attempt()


@pytest.mark.parametrize("values", [(-1.2e6, 0.0), (-70000.0, -69000.0), (0.0, 2e6), (1e38, 1.1e38)])
def test_int4_refuses_what_float16_does_not_hold(values: tuple[float, float]) -> None:
    weight = torch.zeros(3, 32)
    weight[1] = torch.linspace(*values, 32)
    with pytest.raises(ValueError, match="exceed the float16 scales and minimums of int4; give quantization int8"):
        quantize_int4(weight, 32)


@pytest.mark.parametrize(
    ("width", "group", "message"), [(64, 16, "16 is not supported; give one of 32, 64, 128"), (96, 64, "64 does not divide")]
)
def test_int4_refuses_other_groups(width: int, group: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"quantization_group: {message}"):
        quantize_int4(torch.zeros(2, width), group)


def test_parts_that_do_not_fit_together_are_refused() -> None:
    values = torch.zeros(4, 64, dtype=torch.uint8)
    numbers = torch.zeros(4, 2, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"scales: shape \(3,\) for values \(4, 64\)"):
        Int8Weight(values.char(), torch.zeros(3))
    with pytest.raises(ValueError, match=r"minimums: shape \(4, 1\), not \(4, 2\)"):
        Int4Weight(values, numbers, numbers[:, :1], 32)
