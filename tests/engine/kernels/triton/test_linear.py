"""Products with quantized weights equal those with the dequantized ones, within the bounds that WordLinear states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.linear.linear import (
    WordLinear,
    make_triton_linear,
    multiplies_fp8,
    rounded_rows,
    scaled_product,
)
from pdmesh.engine.kernels.triton.linear.weight_product import NARROW_ROWS, ProductShape, Shares, WordProduct, expanded
from pdmesh.engine.kernels.triton.linear.weight_words import (
    WeightWords,
    packed,
    unpacked,
    words_of_fp8,
    words_of_int4,
    words_of_int8,
)
from pdmesh.engine.kernels.triton.norms import gate_mul
from pdmesh.engine.kernels.triton.tiles import HOPPER_BYTES
from pdmesh.engine.loader.quantize import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    dequantize_fp8,
    dequantize_int4,
    dequantize_int8,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    rounded_to_e4m3,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
FORMATS = ["int8", "int4-32", "int4-64", "int4-128", "fp8"]
Weight = Int8Weight | Int4Weight | Fp8Weight


def quantized(name: str, n: int, k: int, seed: int = 0) -> tuple[Weight, Tensor]:
    """A random weight and its float32 values."""
    dense = torch.randn((n, k), generator=torch.Generator().manual_seed(seed)) * 0.1
    if name == "int8":
        int8 = quantize_int8(dense)
        return Int8Weight(int8.values.to(DEVICE), int8.scales.to(DEVICE)), dequantize_int8(int8).to(DEVICE)
    if name == "fp8":
        fp8 = quantize_fp8(dense.to(DEVICE))
        return fp8, dequantize_fp8(fp8)
    int4 = quantize_int4(dense, int(name.split("-")[1]))
    moved = Int4Weight(int4.values.to(DEVICE), int4.scales.to(DEVICE), int4.minimums.to(DEVICE), int4.group)
    return moved, dequantize_int4(int4).to(DEVICE)


def words_of(weight: Weight) -> WeightWords:
    if isinstance(weight, Int8Weight):
        return words_of_int8(weight, DEVICE)
    return words_of_int4(weight, DEVICE) if isinstance(weight, Int4Weight) else words_of_fp8(weight.values, weight.scales)


def activations(m: int, k: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn((m, k), generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_within_bound(actual: Tensor, x: Tensor, dense: Tensor, bias: Tensor | None, roundings: int) -> None:
    """|error| <= (K u + roundings d) sum |x| |w| + d |result|: see WordLinear."""
    exact = x.double() @ dense.double().T
    size = x.double().abs() @ dense.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    unit = UNIT[x.dtype]
    bound = (x.shape[1] * 2.0**-24 + (roundings - 1) * unit) * size + unit * exact.abs() + 1e-7
    assert actual.dtype == x.dtype
    assert bool(((actual.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(64, 256), (5, 128), (70, 384), (130, 640)])
def test_words_hold_every_weight_exactly(name: str, n: int, k: int) -> None:
    weight, dense = quantized(name, n, k)
    assert torch.equal(expanded(words_of(weight), torch.float32), dense)


@pytest.mark.parametrize(("encoding", "most"), [("int4", 16), ("int8", 256), ("fp8", 256)])
def test_what_was_packed_can_be_unpacked(encoding: str, most: int) -> None:
    codes = torch.randint(0, most, (200, 300), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    back = unpacked(packed(codes, encoding), encoding)
    assert back.shape == (256, 512) and torch.equal(back[:200, :300], codes)


def test_a_thread_holds_what_the_tensor_cores_want_of_it() -> None:
    """PTX, mma.m16n8k16: of outputs g and g + 8 two pairs of inputs each; the pairs are ours to choose, here four neighbours."""
    codes = torch.zeros((128, 256), dtype=torch.uint8)
    codes[16 + 3, 16 * 2 + 4 * 1 + 3] = 5  # warp 1, g = 3, block 2, t = 1, second pair, upper half
    [(row_tile, tile, place)] = packed(codes, "int4").nonzero().tolist()
    assert (row_tile, tile, place) == (0, 0, (1 * 32 + 4 * 3 + 1) * 4 + 2)
    assert packed(codes, "int4")[0, 0, place] == 5 << (16 + 8)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (1, 70, 2048), (2, 66, 1152), (8, 5, 512), (9, 70, 384), (33, 10, 1152)])
def test_the_kernel_equals_the_product_with_dequantized_weights(name: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    weight, dense = quantized(name, n, k)
    x, bias = activations(m, k, dtype), activations(1, n, dtype, 2)[0]
    rounded = name.startswith("int4") and m > NARROW_ROWS
    assert_within_bound(WordProduct(words_of(weight), bias)(x), x, dense, bias, 2 if rounded else 1)


@pytest.mark.parametrize("name", ["int8", "int4-64", "fp8"])
@pytest.mark.parametrize("m", [1, 4, 5, 9, 130])
def test_the_linear_map_takes_any_number_of_rows(name: str, m: int) -> None:
    weight, dense = quantized(name, 66, 256)
    x, bias = activations(m, 256, torch.float16), activations(1, 66, torch.float16, 2)[0]
    assert_within_bound(make_triton_linear(weight, bias)(x), x, dense, bias, 3)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 256, 512), (1, 128, 1152), (2, 256, 512), (8, 128, 1152), (20, 256, 512), (130, 128, 256)]
)
def test_a_gate_in_the_product_gives_the_bits_of_one_behind_it(name: str, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    """In one share of the inputs, in several, and in such as end behind the inputs."""
    weight, _ = quantized(name, n, k)
    linear, x = make_triton_linear(weight, activations(1, n, dtype, 2)[0]), activations(m, k, dtype)
    assert isinstance(linear, WordLinear)
    for activation in ("silu", "gelu_tanh") if m == 1 else ("silu",):
        assert torch.equal(linear.gated(x, activation), gate_mul(linear(x), activation))


@pytest.mark.parametrize(("invariant", "dtype"), [(True, torch.float16), (False, torch.float32)])
def test_a_gate_of_other_products_comes_behind_them(invariant: bool, dtype: torch.dtype) -> None:
    linear, x = make_triton_linear(quantized("int8", 128, 256)[0], None, invariant), activations(3, 256, dtype)
    assert isinstance(linear, WordLinear)
    assert torch.equal(linear.gated(x, "silu"), gate_mul(linear(x), "silu"))


def test_a_gate_that_begins_within_a_tile_comes_behind_the_product() -> None:
    linear, x = make_triton_linear(quantized("int8", 70, 256)[0]), activations(2, 256, torch.float16)
    assert isinstance(linear, WordLinear)
    assert torch.equal(linear.gated(x, "silu"), gate_mul(linear(x), "silu"))
    with pytest.raises(ValueError, match="activation: gate and up of 70 outputs do not both begin with a tile"):
        linear.product(x, activation="silu")


@pytest.mark.parametrize("name", ["int8", "int4-32", "fp8"])
def test_an_invariant_map_gives_a_row_the_same_bits_wherever_it_stands(name: str) -> None:
    weight, dense = quantized(name, 8, 1024)
    linear = make_triton_linear(weight, invariant=True)
    x = activations(130, 1024, torch.float16)
    whole = linear(x)
    assert_within_bound(whole, x, dense, None, 2)
    for rows in ([0], [129], [17, 3, 128], list(range(40, 60))):
        assert torch.equal(linear(x[rows]), whole[rows])


def test_a_product_leaves_its_counters_as_it_found_them() -> None:
    weight, _ = quantized("int8", 66, 1024)
    product, x = WordProduct(words_of(weight), None), activations(1, 1024, torch.float16)
    assert product.shares(ProductShape.of(8, 1, HOPPER_BYTES)).splits > 1
    first = product(x)
    assert not product._arrivals.any()
    out = torch.empty_like(first)
    assert product(x, out) is out and torch.equal(out, first)
    with pytest.raises(ValueError, match="x: 129 rows; a launch takes 128"):
        product(activations(129, 1024, torch.float16))


def test_shares_cover_the_inputs_and_depend_on_the_shape_alone() -> None:
    for outputs in (1, 3, 32, 224, 1002):
        for num_chunks in (1, 2, 7, 16, 37, 112):
            for programs in (132, 448, 896):
                shares = Shares.of(outputs, num_chunks, programs)
                assert (shares.splits - 1) * shares.chunks < num_chunks <= shares.splits * shares.chunks
                assert shares.chunks > 1 or num_chunks == 1
    assert Shares.of(32, 16, 448) == Shares(8, 2)  # one row by 4096 x 4096 in int4: 256 programs
    assert Shares.of(224, 16, 448) == Shares(2, 8)  # gate and up of 8B
    assert Shares.of(32, 37, 448) == Shares(13, 3)  # a number of chunks that cannot be divided
    assert Shares.of(1002, 16, 448) == Shares(1, 16)  # a head of 128 k tokens


def test_every_code_of_fp8_is_itself() -> None:
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    values = torch.tensor([codes + [0] * 2], dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    words = words_of_fp8(values, torch.ones(1, device=DEVICE))
    assert torch.equal(expanded(words, torch.float32), values.float())
    assert torch.equal(expanded(words, torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block", [None, 16])
def test_every_code_of_fp8_is_itself_in_the_product(dtype: torch.dtype, block: int | None) -> None:
    """Small numbers, too: those of e4m3 below its normal ones are such numbers of bfloat16 to the tensor cores."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8, device=DEVICE)
    values = torch.cat((codes, codes[:2])).view(1, 256).view(torch.float8_e4m3fn)
    product, one = WordProduct(words_of_fp8(values, torch.ones(1, device=DEVICE)), None), torch.eye(256, device=DEVICE).to(dtype)
    rows = [product(one[first : first + 8], block=block) for first in range(0, 256, 8)]
    assert torch.equal(torch.cat(rows).flatten().float(), values.float().flatten())


def test_fp8_is_off_by_a_sixteenth_at_most() -> None:
    dense = torch.randn((4, 96), generator=torch.Generator().manual_seed(0))
    error = (dequantize_fp8(quantize_fp8(dense)) - dense).abs()
    assert bool((error <= dense.abs() / 16 + dense.abs().amax(1, keepdim=True) * 2.0**-18).all())
    with pytest.raises(ValueError, match="infinity or NaN"):
        quantize_fp8(torch.tensor([[1.0, float("inf")]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 33, 2048, 5000])
def test_rows_are_rounded_as_torch_rounds_them(dtype: torch.dtype, width: int) -> None:
    """Rows of all sizes: ties, numbers below the normal ones, zeros of both signs."""
    x = activations(12, width, torch.float32) * torch.randn(12, width, generator=torch.Generator().manual_seed(2)).exp().to(
        DEVICE
    )
    x *= (2.0 ** torch.arange(-12, 12, 2, device=DEVICE))[:, None]
    x[1], x[2] = 0.0, torch.where(x[2] < 0, -1.0, 1.5) * 2.0**-122  # its scale would be subnormal
    x[3, ::2] *= 2.0**-14
    x[4], x[5, ::3] = torch.arange(width, device=DEVICE) % 449 - 224.0, -0.0
    x[4, 0] = 448.0  # its scale is 1, its numbers whole: ties are there
    x = x.to(dtype)
    codes, scales = rounded_rows(x)
    expected, expected_scales = rounded_to_e4m3(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    wide = torch.cat((x, x), 1)[:, width:]
    assert torch.equal(rounded_rows(wide)[0].view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
def test_a_row_that_is_not_finite_has_such_a_scale(value: float) -> None:
    x = activations(3, 40, torch.bfloat16)
    x[1, 7] = value
    scales = rounded_rows(x)[1]
    assert scales.isfinite().tolist() == [True, False, True]
    with pytest.raises(ValueError, match="with contiguous rows"):
        rounded_rows(x.t())


def test_what_the_kernels_cannot_read_is_named() -> None:
    weight, dense = quantized("int8", 8, 128)
    linear = make_triton_linear(weight)
    assert isinstance(linear, WordLinear) and linear.kind == "triton-int8-tile128-mm"
    with pytest.raises(ValueError, match=r"x: shape \(1, 64\)"):
        linear(activations(1, 64, torch.float16))
    with pytest.raises(ValueError, match=r"bias: shape \(3,\), not \(8,\)"):
        make_triton_linear(weight, torch.zeros(3))
    with pytest.raises(ValueError, match="x: dtype"):
        make_triton_linear(weight, invariant=True)(activations(1, 128, torch.float32))
    with pytest.raises(ValueError, match=r"invariant: weights of torch\.float32"):
        make_triton_linear(dense, invariant=True)
    with pytest.raises(ValueError, match="values"):
        Fp8Weight(dense, torch.ones(8))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("m", [1, 3, 8, 16, 100, 128, 300])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (4096, 14336), (2048, 768)])
def test_big_products_in_bfloat16(name: str, m: int, n: int, k: int) -> None:
    weight, dense = quantized(name, n, k)
    x = activations(m, k, torch.bfloat16)
    assert_within_bound(make_triton_linear(weight)(x), x, dense, None, 3)
    invariant = make_triton_linear(weight, invariant=True)
    assert torch.equal(invariant(x)[m - 1 :], invariant(x[m - 1 :]))


@pytest.mark.skipif(not multiplies_fp8(DEVICE), reason="needs tensor cores of e4m3")
def test_the_units_of_fp8_equal_products_of_rounded_activations() -> None:
    weight, dense = quantized("fp8", 512, 1024)
    assert isinstance(weight, Fp8Weight)
    x = activations(256, 1024, torch.bfloat16)
    rounded = dequantize_fp8(quantize_fp8(x.float()))
    actual = scaled_product(x, words_of(weight), None).double()
    size = rounded.double().abs() @ dense.double().abs().T
    exact = rounded.double() @ dense.double().T
    assert bool(
        ((actual - exact).abs() <= UNIT[x.dtype] * exact.abs() + 2.0**-12 * size).all()
    )  # fp8 units sum with 13 bits or more
