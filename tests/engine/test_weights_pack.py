"""Packed weights: every weight is where the layout says, padding is zero, and storage is aligned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdmesh.engine.loader.pack import (
    concat_rows,
    interleave_gate_up,
    pack_bfloat16,
    pack_float32,
    pack_int4,
    pack_int8,
    pad_to_panels,
)
from pdmesh.engine.loader.quantize import Int4Weight, Int8Weight, quantize_int4, quantize_int8
from tests.engine.unpack import unpack_bfloat16, unpack_float32, unpack_int4, unpack_int8

num_rows = st.integers(1, 50)
widths = st.integers(1, 23)
fields = {Int8Weight: ("values", "scales"), Int4Weight: ("values", "scales", "minimums")}


def random(rows: int, width: int) -> Tensor:
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(rows * 1000 + width))


def padded(rows: int, multiple: int = 16) -> int:
    return rows + -rows % multiple


@settings(max_examples=30, deadline=None)
@given(num_rows, widths)
def test_floats_are_where_the_layout_says(rows: int, width: int) -> None:
    weight = random(rows, width)
    packed = pack_float32(weight)
    assert (packed.dtype, packed.shape) == (torch.uint8, (padded(rows) * width * 4,))
    assert torch.equal(unpack_float32(packed, rows, width), weight)
    assert not unpack_float32(packed, padded(rows), width)[rows:].any()
    packed = pack_bfloat16(weight)
    assert packed.shape == (padded(rows) * padded(width, 2) * 2,)
    assert torch.equal(unpack_bfloat16(packed, rows, width), weight.bfloat16())
    assert not unpack_bfloat16(packed, padded(rows), padded(width, 2))[:, width:].any()


@settings(max_examples=30, deadline=None)
@given(num_rows, widths)
def test_int8_is_where_the_layout_says(rows: int, width: int) -> None:
    weight = quantize_int8(random(rows, width))
    packed = pack_int8(weight)
    assert packed.shape == (padded(rows) * padded(width, 4),)
    assert torch.equal(unpack_int8(packed, rows, width), weight.values)
    whole = unpack_int8(packed, padded(rows), padded(width, 4))
    assert not whole[rows:].any()
    assert not whole[:, width:].any()


@settings(max_examples=30, deadline=None)
@given(num_rows, st.integers(1, 3), st.sampled_from([32, 64, 128]))
def test_int4_is_where_the_layout_says(rows: int, num_groups: int, group: int) -> None:
    width = num_groups * group
    weight = quantize_int4(random(rows, width), group)
    packed = pack_int4(weight)
    assert packed.shape == (padded(rows) // 16 * num_groups * (group * 8 + 64),)
    assert_same(unpack_int4(packed, rows, width, group), weight)
    rest = unpack_int4(packed, padded(rows), width, group)
    assert not any(getattr(rest, name)[rows:].any() for name in fields[Int4Weight])


@pytest.mark.parametrize("pack", [pack_float32, pack_bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_floating_dtype_and_any_strides(pack: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    weight = random(33, 32).to(dtype)
    assert torch.equal(pack(weight), pack(weight.float()))
    assert torch.equal(pack(weight.t()), pack(weight.t().contiguous()))


def test_a_tensor_that_begins_within_a_unit_of_its_storage() -> None:
    storage = random(1, 1 + 20 * 8).bfloat16().view(-1)
    weight = storage[1:].view(20, 8)
    assert torch.equal(pack_bfloat16(weight), pack_bfloat16(weight.clone()))


@pytest.mark.parametrize("rows", [1, 16, 160])
def test_storage_begins_at_a_cache_line(rows: int) -> None:
    weight = random(rows, 96)
    packed = [pack_float32(weight), pack_bfloat16(weight), pack_int8(quantize_int8(weight)), pack_int4(quantize_int4(weight, 32))]
    assert [tensor.data_ptr() % 64 for tensor in packed] == [0, 0, 0, 0]


@pytest.mark.parametrize("rows", [16, 17])
def test_packing_leaves_its_weight_alone(rows: int) -> None:
    """A single unit of inputs too, which is in panel order as it is."""
    for width, pack in ((1, pack_float32), (2, pack_bfloat16)):
        weight = random(rows, width).to(torch.float32 if width == 1 else torch.bfloat16)
        assert pack(weight).data_ptr() != weight.data_ptr()
    quantized = quantize_int8(random(rows, 4))
    before = quantized.values.clone()
    pack_int8(quantized).zero_()
    assert torch.equal(quantized.values, before)


def as_float(weight: Tensor) -> Tensor:
    return weight


def as_int4(weight: Tensor) -> Int4Weight:
    return quantize_int4(weight, 32)


@pytest.mark.parametrize("rows", [1, 16, 40])
def test_gate_and_up_alternate_in_panels(rows: int) -> None:
    gate, up = random(rows, 64), -random(rows, 64)
    both = interleave_gate_up(gate, up)
    assert both.shape == (2 * padded(rows), 64)
    panels = both.view(-1, 2, 16, 64)
    assert torch.equal(panels[:, 0].reshape(-1, 64)[:rows], gate)
    assert torch.equal(panels[:, 1].reshape(-1, 64)[:rows], up)
    assert not panels.transpose(0, 1).reshape(2, -1, 64)[:, rows:].any()
    assert torch.equal(interleave_gate_up(gate[:, 0], up[:, 0]), both[:, 0])


@pytest.mark.parametrize("quantize", [quantize_int8, as_int4])
def test_quantized_weights_are_arranged_as_floats_are(quantize: Callable[[Tensor], Int8Weight | Int4Weight]) -> None:
    first, second = random(32, 64), -random(48, 64)
    assert_same(concat_rows([quantize(first), quantize(second)]), quantize(torch.cat((first, second))))
    assert_same(interleave_gate_up(quantize(first), quantize(-first)), quantize(interleave_gate_up(first, -first)))
    assert concat_rows([first]) is first


@pytest.mark.parametrize("quantize", [quantize_int8, as_int4])
def test_padding_between_gate_and_up_stands_for_zero(quantize: Callable[[Tensor], Int8Weight | Int4Weight]) -> None:
    both = interleave_gate_up(quantize(random(5, 64)), quantize(random(5, 64)))
    padding = torch.arange(32) % 16 >= 5
    assert not any(getattr(both, name)[padding].any() for name in fields[type(both)])


@pytest.mark.parametrize("quantize", [as_float, quantize_int8, as_int4])
def test_parts_quantized_differently_are_refused(quantize: Callable[[Tensor], Tensor | Int8Weight | Int4Weight]) -> None:
    weight = random(16, 64)
    with pytest.raises(ValueError, match=r"parts of one map are .*, int4 in groups of 64; quantize them alike"):
        concat_rows([quantize(weight), quantize_int4(weight, 64)])


def test_scales_are_padded_to_whole_panels() -> None:
    scales = torch.ones(17)
    assert torch.equal(pad_to_panels(scales), torch.cat((scales, torch.zeros(15))))
    assert pad_to_panels(scales[:16]).shape == (16,)


def assert_same(ours: Int8Weight | Int4Weight, theirs: Int8Weight | Int4Weight) -> None:
    assert type(ours) is type(theirs)
    for name in fields[type(ours)]:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
