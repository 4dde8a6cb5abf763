"""Linear maps for each format of weights: words of int4, int8 and fp8 for the kernels of weight_product.py, and torch's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.engine.kernels.triton.kv import FLOAT8_MAX, FLOAT8_MIN_NORMAL, FLOAT8_SUBNORMAL
from pdmesh.engine.kernels.triton.launching import settle_keys
from pdmesh.engine.kernels.triton.linear.dense import TritonDense, VectorDense
from pdmesh.engine.kernels.triton.linear.weight_product import (
    HALVES,
    INVARIANT_BLOCK,
    PRODUCT_ROWS_MAX,
    WordProduct,
    expanded,
)
from pdmesh.engine.kernels.triton.linear.weight_words import WeightWords, words_of_fp8, words_of_int4, words_of_int8
from pdmesh.engine.kernels.triton.norms import gate_mul
from pdmesh.engine.loader.quantize import Fp8Weight, Int4Weight, Int8Weight
from pdmesh.engine.models.layers import Linear, make_linear

# A linear map over weights in words: the number of rows selects the kernel


class WordLinear:
    """[M, K] -> [M, N] of the same dtype (pdmesh.engine.models.layers.Linear).

    | rows | kernel | numbers |
    | --- | --- | --- |
    | up to 128 | product | int4 of more than 8 rows rounded to x's dtype, others exact; float32 sums on the tensor cores |
    | more | expand, `F.linear` | weights rounded to x's dtype; the library's sums (activations in fp8: linear.py) |

    A row's bits depend on nothing beside it, but differ between one row, up to 8, and up to 16, 32, 64 and 128, where M rounds up
    to. `invariant` takes tiles of 16 rows for every M: slower for a prompt (each 16 rows read the weights again, from the L2
    cache), the same bits for a row wherever it stands.

    Error of the sum of K products, u = 2^-24 and d = x's unit roundoff (2^-8 bfloat16, 2^-11 float16), S = sum |x| |w|: at
    most K u S where weights are exact (int4 in bfloat16: K u (S + 128 sum |x| scale), as a group's products are of weights that
    are 128 scales too large, and the sum of the group's activations is subtracted); (K u + d) S otherwise; plus d |result| by the
    last rounding. float32 inputs: expand and `F.linear`; not with `invariant`, which refuses them.
    """

    def __init__(self, weight: WeightWords, bias: Tensor | None, invariant: bool) -> None:
        self.weight, self.bias, self.invariant = weight, bias, invariant
        self.product = WordProduct(weight, bias)
        kernels = f"tile{INVARIANT_BLOCK}" if invariant else f"tile{PRODUCT_ROWS_MAX}-{self._many}"
        self.kind = f"triton-{weight.encoding}-{kernels}"

    @property
    def _many(self) -> str:
        """Name what `_product_of_many` does."""
        return "mm"

    def __call__(self, x: Tensor) -> Tensor:
        if self.invariant:
            return self._invariant(x)
        if x.shape[0] <= PRODUCT_ROWS_MAX and x.dtype in HALVES:
            return self.product(x)
        return self._product_of_many(x)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Return what `gate_mul` makes of the product: the weight's rows are gate and up. Up to 128 rows are one kernel."""
        if self.invariant or x.shape[0] > PRODUCT_ROWS_MAX or x.dtype not in HALVES or not self.product.gates:
            return gate_mul(self(x), activation)
        return self.product(x, activation=activation)

    def _invariant(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0], self.weight.num_outputs))
        for first in range(0, x.shape[0], PRODUCT_ROWS_MAX):
            part = slice(first, first + PRODUCT_ROWS_MAX)
            self.product(x[part], out[part], INVARIANT_BLOCK)
        return out

    def _product_of_many(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, expanded(self.weight, x.dtype), bias)


def on_device(weight: torch.Tensor, bias: Tensor | None) -> tuple[torch.device, Tensor | None]:
    """Return the device of a weight's values, and the bias there."""
    return weight.device, None if bias is None else bias.to(weight.device)


# Activations rounded to e4m3, with a scale for each row: the input of `scaled_product`.
#
# A program owns a row and walks it twice, for its largest magnitude and to divide and round: the row is read from memory once
# (the second time it is in the cache, 28 KB for 14336 inputs) and its codes are written once, 3 bytes an activation of 16 bits.
# Torch's operators would take five passes with float32 between them, some 40 bytes. The width is no constant: one kernel serves
# all maps.


# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"


_BLOCK = 2048
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def _code_of(x):
    """Return bits of the e4m3 nearest to x, ties to even, saturated; -0.0 stays what it is. x is rounded here, as the
    interpreter's cast rounds otherwise."""
    size = tl.minimum(tl.abs(x), FLOAT8_MAX)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (size + FLOAT8_SUBNORMAL) - FLOAT8_SUBNORMAL
    code = tl.where(size < FLOAT8_MIN_NORMAL, small, normal).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80).to(tl.uint8)


@triton.jit
def round_rows_kernel(x, codes, scales, width, stride_x, stride_codes, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    largest, is_nan = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, width, BLOCK):
        value = tl.load(x + row * stride_x + first + at, mask=first + at < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
        is_nan |= (value != value).to(tl.int32)  # a maximum may ignore it
    most = tl.where(tl.max(is_nan, axis=0) > 0, float("nan"), tl.max(largest, axis=0))
    scale = tl.div_rn(most, FLOAT8_MAX)
    scale = tl.where(scale < _SMALLEST_NORMAL, _SMALLEST_NORMAL, scale)  # a subnormal one would have few bits, or none
    scale = tl.where(most == 0.0, 1.0, scale)
    tl.store(scales + row, scale)
    for first in range(0, width, BLOCK):
        present = first + at < width
        value = tl.load(x + row * stride_x + first + at, mask=present, other=0.0).to(tl.float32)
        tl.store(codes + row * stride_codes + first + at, _code_of(tl.div_rn(value, scale)), mask=present)


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [M, K] of any floating dtype -> float8_e4m3fn [M, K] and a scale for each row, [M] float32: the bits of
    pdmesh.engine.loader.quantize.rounded_to_e4m3. A row with infinity or NaN has such a scale, and arbitrary codes.

    Raises ValueError for rows that are not contiguous.
    """
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(f"x: shape {tuple(x.shape)}, strides {x.stride()}; give [M, K] with contiguous rows")
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(x.shape[0], device=x.device)
    if len(x):
        round_rows_kernel[(len(x),)](
            x, codes, scales, x.shape[1], x.stride(0), codes.stride(0), BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


settle_keys(globals())


# Weights in fp8 (e4m3: 4 bits of exponent, 3 of mantissa, no infinity), one float32 scale an output.
#
# For few rows the weights are words like int8's, and activations stay unchanged. For many rows Hopper multiplies fp8 by fp8 at
# twice bfloat16's rate: activations are rounded to e4m3 then, with a scale for each row, by `torch._scaled_mm`. That rounding is
# off by up to 1/16 of an activation, and shows: it is done only where a product is bound by the matrix units, and only if
# `rounds_activations` (the flag --fp8-activations, which the numeric mode names). Elsewhere, and for sizes that are no multiples
# of 16 and float32, weights are expanded. A CPU has no such units, but torch computes the same there, for tests.
#
# Error of the sum of K products then, S = sum |x| |w| with the weights that the codes stand for: at most (2^-4 + 2^-12) S, and of
# activations below 2^-15 of a row's largest up to 2^-19 of that each; the units sum with 13 bits or more. Torch rounds the result
# to bfloat16 whatever x is, as its products with a scale a row give nothing else: off by 2^-8 |result| for float16 too, and once
# more where there is a bias.


def fp8_linear(
    weight: Fp8Weight, bias: Tensor | None = None, invariant: bool = False, rounds_activations: bool = False
) -> WordLinear:
    """Map weight [N, K], bias [N] to a linear map on the device of the weight's values. Raises ValueError where that cannot
    multiply in fp8 and `rounds_activations` asks for it."""
    device, bias = on_device(weight.values, bias)
    words = words_of_fp8(weight.values, weight.scales.float())
    if not rounds_activations:
        return WordLinear(words, bias, invariant)
    if not multiplies_fp8(device):
        raise ValueError("fp8_activations: this GPU has no units that multiply fp8 (Ada, Hopper and later have); leave it out")
    return Fp8Linear(words, bias, invariant)


def multiplies_fp8(device: torch.device) -> bool:
    """Return whether it does: by tensor cores of e4m3, compute capability 8.9 and from 9.0 on; or on a CPU."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


class Fp8Linear(WordLinear):
    """A WordLinear whose products of many rows round the activations."""

    @property
    def _many(self) -> str:
        return "scaledmm"

    def _product_of_many(self, x: Tensor) -> Tensor:
        if x.dtype not in HALVES or self.weight.num_inputs % 16 or self.weight.num_outputs % 16:
            return super()._product_of_many(x)
        return scaled_product(x, self.weight, self.bias)


def scaled_product(x: Tensor, weight: WeightWords, bias: Tensor | None) -> Tensor:
    """Return x [M, K], rounded to e4m3 by rows, times the weight's own codes, summed in float32; scales and bias at the end."""
    values, scales = rounded_rows(x)
    codes = expanded(weight, torch.uint8).view(torch.float8_e4m3fn)
    product = torch._scaled_mm(
        values, codes.t(), scale_a=scales[:, None], scale_b=weight.scales[None, :], out_dtype=torch.bfloat16
    )
    product = product.to(x.dtype)
    return product if bias is None else product.add_(bias.to(x.dtype))


# Weight-only int4: a float16 scale and minimum for each group of 32, 64 or 128 inputs of an output.
#
# Each weight is read as 4 bits, and each group as 32 bits: 1 or 0.5 bits more a weight, as a group of 128 lies as two of 64.


def int4_linear(weight: Int4Weight, bias: Tensor | None = None, invariant: bool = False) -> WordLinear:
    """Return a map of weight [N, K], bias [N] on the device of the weight's values; see WordLinear for the numbers."""
    device, bias = on_device(weight.values, bias)
    return WordLinear(words_of_int4(weight, device), bias, invariant)


# Weight-only int8: one float32 scale an output, applied to the finished sums.


def int8_linear(weight: Int8Weight, bias: Tensor | None = None, invariant: bool = False) -> WordLinear:
    """Return a map of weight [N, K], bias [N] on the device of the weight's values. A byte a weight; for the numbers see
    WordLinear."""
    device, bias = on_device(weight.values, bias)
    return WordLinear(words_of_int8(weight, device), bias, invariant)


def make_triton_linear(
    weight: Tensor | Int8Weight | Int4Weight | Fp8Weight,
    bias: Tensor | None = None,
    invariant: bool = False,
    *,
    rounds_activations: bool = False,
) -> Linear:
    """Return a map on the device of the weight. Unquantized weights take torch's product, whose bits depend on the number of
    rows; with `invariant` TritonDense. `rounds_activations` is for fp8 weights, see Fp8Linear."""
    if isinstance(weight, Int8Weight):
        return int8_linear(weight, bias, invariant)
    if isinstance(weight, Int4Weight):
        return int4_linear(weight, bias, invariant)
    if isinstance(weight, Fp8Weight):
        return fp8_linear(weight, bias, invariant, rounds_activations)
    if invariant:
        return TritonDense(weight, bias)
    if weight.device.type != "cpu" and weight.dtype in HALVES:
        return VectorDense(weight, bias)
    return make_linear(weight, bias)
