"""Quantized weights as 32-bit words, in the order in which the kernels stream them. They are rearranged once, at load.

A word holds P values of one row (P = 8 for int4, 4 for int8 and fp8), value p in bits p * 32/P and up: "plane" p of the word.
Which inputs they belong to makes two things cheap. Planes of neighbouring words are neighbouring inputs, so one vector load of
activations serves them; and a word lies inside one quantization group, so that scale and minimum are applied once for 8 weights.

    one span of a row (int4: a quantization group; else 128 inputs), J = span / P words:

        word:      0        1      ...    J-1
        plane 0   k=0      k=1     ...   k=J-1
        plane 1   k=J      k=J+1   ...   k=2J-1
          ...
        plane P-1  ...                   k=span-1

    words of the matrix [N, K]: tiles of 64 rows x 32 words, 8 KiB in one piece; the tiles of the same rows follow one another:

                 32 words = 128 bytes = 32 P inputs (256 for int4, 128 for int8, fp8)
                +----------------------+----------------------+----
        64 rows | tile 0: 8 KiB, first | tile 1: the next     | ...   one program reads a run of these
                +----------------------+----------------------+----
        64 rows | after the last one of the row above         | ...

A row's 128 bytes are one cache line, and a program's share of the matrix is one contiguous piece of memory. Rows and inputs that
the matrix lacks are filled up with weights of value 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.engine.kernels.triton.launching import settle_keys
from pdmesh.engine.loader.quantize import Int4Weight, Int8Weight

TILE_ROWS, TILE_WORDS = 64, 32
_SPAN = 128  # inputs of a span where there are no groups
_INT8_ZERO = 128  # int8 is stored with this added: from 1 to 255


@dataclass(frozen=True)
class WeightWords:
    """Hold what the kernels read of one matrix [num_outputs, num_inputs]."""

    encoding: str  # "int4", "int8" or "fp8"
    words: Tensor  # [row tiles, input tiles, 64, 32] int32
    # int4: [row tiles, input tiles, 64, tile inputs / span] int32, float16 scale below float16 minimum; else [N] float32
    scales: Tensor
    span: int
    num_outputs: int
    num_inputs: int

    @property
    def bits(self) -> int:
        return 4 if self.encoding == "int4" else 8

    @property
    def num_tiles(self) -> int:
        """Return the number of tiles along the inputs."""
        return self.words.shape[1]

    @property
    def num_row_tiles(self) -> int:
        return self.words.shape[0]

    @property
    def num_bytes(self) -> int:
        """Return the bytes that one pass over the weight reads."""
        return self.words.numel() * 4 + self.scales.numel() * 4


def words_of_int8(weight: Int8Weight, device: torch.device) -> WeightWords:
    values = _padded((weight.values.to(device).short() + _INT8_ZERO).to(torch.uint8), 8, _INT8_ZERO)
    scales = weight.scales.to(device, torch.float32).contiguous()
    return WeightWords("int8", _shuffled(values, 8, _SPAN), scales, _SPAN, *weight.values.shape)


def words_of_fp8(values: Tensor, scales: Tensor) -> WeightWords:
    """Pack values [N, K] float8_e4m3fn without NaN, scales [N] float32: w[n, k] = scales[n] * values[n, k]."""
    codes = _padded(values.view(torch.uint8), 8, 0)
    return WeightWords("fp8", _shuffled(codes, 8, _SPAN), scales.contiguous(), _SPAN, *values.shape)


def words_of_int4(weight: Int4Weight, device: torch.device) -> WeightWords:
    values = _padded(weight.values.to(device), 4, 0)
    pairs = torch.stack((weight.scales.to(device), weight.minimums.to(device)), dim=-1).contiguous().view(torch.int32).squeeze(-1)
    in_tile = tile_inputs(4) // weight.group
    pairs = F.pad(pairs, (0, -pairs.shape[1] % in_tile, 0, -pairs.shape[0] % TILE_ROWS))  # zeros are the bits of 0.0
    return WeightWords("int4", _shuffled(values, 4, weight.group), _tiled(pairs, in_tile), weight.group, *weight.values.shape)


def tile_inputs(bits: int) -> int:
    """Return the inputs of a row of a tile."""
    return TILE_WORDS * 32 // bits


def _padded(values: Tensor, bits: int, zero: int) -> Tensor:
    missing = (0, -values.shape[1] % tile_inputs(bits), 0, -values.shape[0] % TILE_ROWS)
    return F.pad(values, missing, value=zero)


def _shuffled(values: Tensor, bits: int, span: int) -> Tensor:
    """values [N', K'] uint8 of `bits` bits -> [row tiles, input tiles, 64, 32] int32."""
    planes = 32 // bits
    by_plane = values.view(values.shape[0], -1, planes, span // planes)
    words = by_plane[:, :, 0].int()
    for plane in range(1, planes):
        words |= by_plane[:, :, plane].int() << plane * bits
    return _tiled(words.flatten(1), TILE_WORDS)


def _tiled(matrix: Tensor, width: int) -> Tensor:
    """[N', X] -> [N' / 64, X / width, 64, width]."""
    return matrix.view(matrix.shape[0] // TILE_ROWS, TILE_ROWS, -1, width).transpose(1, 2).contiguous()


# Values of words, within the kernels
#
# How a value leaves its word: OR-ed under the exponent of 2^23 a plane's bits are the float 2^23 + value * 2^shift, exactly; one
# subtraction leaves value * 2^shift. That is two operations a weight where shift, mask and conversion from integer would be
# three, the conversion at a quarter of the rate. Bits from 23 up would fall into the exponent, so the upper planes are shifted
# down first, all at once. The 2^shift goes into the other factor, which is exact too.


@triton.constexpr_function
def _shift(plane: int, bits: int) -> int:
    """Return by how many bits plane's values are still shifted up when `plane_values` returns them."""
    return bits * (plane % (23 // bits))


@triton.constexpr_function
def shrink(plane: int, bits: int, is_fp8: bool) -> float:
    """Return the factor that turns what `plane_values` returns into values."""
    return 1.0 if is_fp8 else 2.0 ** -_shift(plane, bits)


EXPONENT = tl.constexpr(0x4B000000)  # of 2^23
HALF_WAY = tl.constexpr(2.0**60)  # of the 2^120 by which `small_fp8` is too small: the other half is put right at the end


@triton.jit
def exponent_in_register(M: tl.tensor, number: tl.constexpr) -> tl.tensor:
    """Return the number, in a way that the compiler cannot know it: `word & mask | exponent` is one instruction with one number
    written into it, and two with two. Not for the tensor cores' operands, which it would send through shared memory."""
    return number + tl.minimum(M, 0)


@triton.jit
def plane_values(word: tl.tensor, plane: tl.constexpr, exponent: tl.tensor, BITS: tl.constexpr, FP8: tl.constexpr) -> tl.tensor:
    """Return the float32 values of one plane, times 2^_shift (fp8: the values)."""
    if FP8:
        # e4m3's exponent and mantissa at the place of float32's lack a factor 2^(127 - 7): subnormal numbers are right as
        # well.
        return small_fp8(word, plane) * 1.329227995784916e36
    shift: tl.constexpr = _shift(plane, BITS)
    down: tl.constexpr = 0 if plane < 23 // BITS else BITS * (23 // BITS)
    zero: tl.constexpr = 8388608.0 + (128 if BITS == 8 else 0) * 2.0**shift
    return (((word >> down) & (((1 << BITS) - 1) << shift)) | exponent).to(tl.float32, bitcast=True) - zero


@triton.jit
def small_fp8(word: tl.tensor, plane: tl.constexpr) -> tl.tensor:
    """Return the float32 values of a plane of fp8, times 2^-120. Of the byte shifted up the sign stays, and what the second shift
    copies of it is masked off."""
    moved = word << (24 - 8 * plane) if plane < 3 else word
    return ((moved >> 4) & -0x78100000).to(tl.float32, bitcast=True)


@triton.jit
def nibble_values(word: tl.tensor, plane: tl.constexpr, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return 256 plus the values of an even plane of int4, 16 plus those of an odd one, float32. Two planes share a shift:

    bits   31 | exponent of 16 | 22 .. 19: odd plane |                            16 + value
           31 | exponent of 256 |            18 .. 15: even plane |              256 + value
    """
    left: tl.constexpr = 15 - 8 * (plane // 2)
    moved = word << left if left > 0 else word >> -left
    if plane % 2 == 0:
        return ((moved & (15 << 15)) | low).to(tl.float32, bitcast=True)
    return ((moved & (15 << 19)) | high).to(tl.float32, bitcast=True)


@triton.jit
def group_scale(scales: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Return scale and minimum (float32) of an int4 group."""
    pair = tl.load(scales + at)
    scale = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    minimum = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, minimum


@triton.jit
def int4_planes(word: tl.tensor, scale: tl.tensor, minimum: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the weights of [64, 32] words of int4 [64, 256], plane by plane, of that dtype, each rounded once."""
    low, high = tl.fma(scale, -256.0, minimum), tl.fma(scale, -16.0, minimum)
    p0, p1 = int4_plane(word, 0, scale, low, dtype), int4_plane(word, 1, scale, high, dtype)
    p2, p3 = int4_plane(word, 2, scale, low, dtype), int4_plane(word, 3, scale, high, dtype)
    p4, p5 = int4_plane(word, 4, scale, low, dtype), int4_plane(word, 5, scale, high, dtype)
    p6, p7 = int4_plane(word, 6, scale, low, dtype), int4_plane(word, 7, scale, high, dtype)
    lower = tl.join(tl.join(p0, p1), tl.join(p2, p3))
    upper = tl.join(tl.join(p4, p5), tl.join(p6, p7))
    return tl.permute(tl.join(lower, upper), (0, 4, 3, 2, 1)).reshape(64, 256)


@triton.jit
def int4_plane(word: tl.tensor, plane: tl.constexpr, scale: tl.tensor, rest: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return tl.fma(nibble_values(word, plane, 0x43800000, 0x41800000), scale, rest).to(dtype)


@triton.jit
def byte_planes(word: tl.tensor, FP8: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Return the codes' values of [64, 32] words of 8 bits [64, 128], plane by plane, of that dtype, which are exact."""
    lower = tl.join(_byte_plane(word, 0, FP8, dtype), _byte_plane(word, 1, FP8, dtype))
    upper = tl.join(_byte_plane(word, 2, FP8, dtype), _byte_plane(word, 3, FP8, dtype))
    return tl.permute(tl.join(lower, upper), (0, 3, 2, 1)).reshape(64, 128)


@triton.jit
def _byte_plane(word: tl.tensor, plane: tl.constexpr, FP8: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    return (plane_values(word, plane, EXPONENT, 8, FP8) * shrink(plane, 8, FP8)).to(dtype)


settle_keys(globals())
