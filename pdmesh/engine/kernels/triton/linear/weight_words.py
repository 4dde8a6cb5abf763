"""Quantized weights as 32-bit words that lie as the tensor cores want their left operand. They are rearranged once, at load.

A warp multiplies 16 outputs with 16 inputs at a time, and each of its 32 threads brings eight weights of them: of two outputs g
and g + 8, at two pairs of neighbouring inputs. In memory these weights are neighbours too, so what a thread loads, 16 bytes at
once, is its own share of four such blocks (int4; 8 bits: two), and nothing has to change hands between threads:

    thread 4 g + t, block q:      inputs  16 q + 4 t + (0, 1)     16 q + 4 t + (2, 3)
                     output g             plane 0                 plane 2          a plane: two weights of a word, in the low
                     output g + 8         plane 1                 plane 3          and the high half of its 32 bits

    words of the matrix [N, K]:   tiles of 64 outputs (four warps) x 64 inputs (int4; 8 bits: 32)

                +---------------+---------------+----
     64 outputs | tile 0: 2 KiB | tile 1        | ...   tiles of the same outputs follow one another
                +---------------+---------------+----

Two weights leave a word with one or two operations: `word & mask | exponent` makes both halves numbers of bfloat16 at once. int4
and int8 are then too large by a number that is known, which int8 subtracts and int4's product accounts for. fp8's sign, exponent
and mantissa lie in the word where bfloat16 has its own.

Outputs are filled up to a multiple of 128, and inputs of 256, with weights of value 0.
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

TILE_ROWS = 64
PROGRAM_ROWS = 128  # outputs of a program of weight_product.py: two tiles
CHUNK_INPUTS = 256  # a row's inputs are a multiple of it
WORDS = 512  # of a tile
_INT8_ZERO = 128  # int8 is stored with this added: from 1 to 255


@dataclass(frozen=True)
class WeightWords:
    """Hold what the kernels read of one matrix [num_outputs, num_inputs]."""

    encoding: str  # "int4", "int8" or "fp8"
    words: Tensor  # [row tiles, input tiles, 512] int32
    # int4: [row tiles, groups of inputs, 64] int32, float16 scale below float16 minimum; else [N] float32
    scales: Tensor
    span: int  # inputs of a group of int4, one of 128 being two of 64; else 0
    num_outputs: int
    num_inputs: int

    @property
    def bits(self) -> int:
        return 4 if self.encoding == "int4" else 8

    @property
    def tile_inputs(self) -> int:
        return tile_inputs_of(self.bits)

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

    def codes(self) -> Tensor:
        """Return the values [N', K'] uint8 as they were packed, with what fills them up."""
        return unpacked(self.words, self.encoding)


def tile_inputs_of(bits: int) -> int:
    """Return the inputs of a tile of 64 outputs: 512 words hold so many."""
    return WORDS * 32 // (TILE_ROWS * bits)


def words_of_int8(weight: Int8Weight, device: torch.device) -> WeightWords:
    codes = (weight.values.to(device).short() + _INT8_ZERO).to(torch.uint8)
    scales = weight.scales.to(device, torch.float32).contiguous()
    return WeightWords("int8", packed(codes, "int8"), scales, 0, *weight.values.shape)


def words_of_fp8(values: Tensor, scales: Tensor) -> WeightWords:
    """Pack values [N, K] float8_e4m3fn without NaN, scales [N] float32: w[n, k] = scales[n] * values[n, k]."""
    return WeightWords("fp8", packed(values.view(torch.uint8), "fp8"), scales.contiguous(), 0, *values.shape)


def words_of_int4(weight: Int4Weight, device: torch.device) -> WeightWords:
    group = min(weight.group, 64)
    pairs = torch.stack((weight.scales.to(device), weight.minimums.to(device)), dim=-1).contiguous().view(torch.int32).squeeze(-1)
    pairs = pairs.repeat_interleave(weight.group // group, dim=1)
    pairs = F.pad(pairs, (0, -pairs.shape[1] % (CHUNK_INPUTS // group), 0, -pairs.shape[0] % PROGRAM_ROWS))  # the bits of 0.0
    scales = pairs.view(-1, TILE_ROWS, pairs.shape[1]).transpose(1, 2).contiguous()
    return WeightWords("int4", packed(weight.values.to(device), "int4"), scales, group, *weight.values.shape)


_ROWS_AT_ONCE = 8192  # of a matrix that is rearranged, so that what it takes meanwhile stays small beside a model


def packed(codes: Tensor, encoding: str) -> Tensor:
    """Rearrange codes [N, K] uint8 of 4 or 8 bits -> [row tiles, input tiles, 512] int32."""
    zero = _INT8_ZERO if encoding == "int8" else 0
    codes = F.pad(codes, (0, -codes.shape[1] % CHUNK_INPUTS, 0, -codes.shape[0] % PROGRAM_ROWS), value=zero)
    return torch.cat([_packed(rows, encoding) for rows in torch.split(codes, _ROWS_AT_ONCE)])


def _packed(codes: Tensor, encoding: str) -> Tensor:
    tile = tile_inputs_of(4 if encoding == "int4" else 8)
    row_tiles, tiles = codes.shape[0] // TILE_ROWS, codes.shape[1] // tile
    parts = codes.view(row_tiles, 4, 2, 8, tiles, tile // 16, 4, 2, 2)  # row tile, warp, g + 8, g, tile, block, t, pair, half
    parts = parts.permute(0, 4, 1, 3, 6, 5, 7, 2, 8).int()  # row tile, tile, warp, g, t, block, pair, g + 8, half
    low, high = (_placed(parts[..., half], encoding) for half in (0, 1))
    words = low | high << 16
    words = words[..., 0] | words[..., 1]
    if encoding == "int4":
        words = words[..., 0] | words[..., 1]
    return words.reshape(row_tiles, tiles, -1).contiguous()


def _placed(codes: Tensor, encoding: str) -> Tensor:
    """Move codes [..., pair, row] to their bits of a half. fp8: bfloat16's sign, and the lower bits of its exponent and the upper
    ones of its mantissa, for row 0; those of row 1 are such if what is above bit 11 goes down by four and the rest up."""
    if encoding == "fp8":
        first, second = codes[..., 0], codes[..., 1]
        first = (first & 0x80) << 8 | (first & 0x7F) << 4
        second = (second & 0x80) << 4 | (second & 0x70) << 8 | second & 0xF
        return torch.stack((first, second), dim=-1)
    shifts = [[0, 4], [8, 12]] if encoding == "int4" else [[0, 8], [0, 8]]
    return codes << torch.tensor(shifts, dtype=torch.int32, device=codes.device)


def unpacked(words: Tensor, encoding: str) -> Tensor:
    """Return the codes [N', K'] uint8 of words [row tiles, input tiles, 512]."""
    (row_tiles, tiles, _), tile = words.shape, tile_inputs_of(4 if encoding == "int4" else 8)
    pairs = words.view(row_tiles, tiles, 4, 8, 4, tile // 16, -1)  # 8 bits: one word a pair
    pairs = pairs.expand(-1, -1, -1, -1, -1, -1, 2)
    halves = torch.stack((pairs & 0xFFFF, pairs >> 16 & 0xFFFF), dim=-1)
    rows = torch.stack([_taken(halves, encoding, row) for row in (0, 1)], dim=-2).to(torch.uint8)
    return rows.permute(0, 2, 7, 3, 1, 5, 4, 6, 8).reshape(row_tiles * TILE_ROWS, tiles * tile)


def _taken(halves: Tensor, encoding: str, row: int) -> Tensor:
    """Return one row's codes of halves [..., pair, half]: what `_placed` has placed."""
    if encoding == "int4":
        return halves >> torch.tensor([[4 * row], [4 * row + 8]], device=halves.device) & 0xF
    if encoding == "int8":
        return halves >> 8 * row & 0xFF
    if row == 0:
        return halves >> 8 & 0x80 | halves >> 4 & 0x7F
    return halves >> 4 & 0x80 | halves >> 8 & 0x70 | halves & 0xF


# Weights as the tensor cores' left operand, within the kernels
#
# word: [row tiles, tiles, words of a tile]. What is returned has [64 row tiles, inputs], each weight in the thread that read it.
# For the tensor cores of old (mma.sync, here for up to 8 rows of activations) a thread's four inputs of a block may be
# neighbours; for Hopper's (wgmma) they are two and two, and WIDE puts both factors' inputs in that order.


@triton.constexpr_function
def is_bfloat16(dtype: tl.dtype) -> bool:
    return bool(dtype == tl.bfloat16)


@triton.constexpr_function
def excess(dtype: tl.dtype) -> float:
    """Return by how much `int4_values` are too large."""
    return 128.0 if dtype == tl.bfloat16 else 0.0


@triton.constexpr_function
def lacking(dtype: tl.dtype) -> float:
    """Return the factor by which `fp8_values` are too small: e4m3's exponent of 7 in the place of one of 127, or 15."""
    return 2.0**120 if dtype == tl.bfloat16 else 2.0**8


@triton.constexpr_function
def _exponent(dtype: tl.dtype) -> int:
    """Return two halves with the exponent under which the lowest bit of the mantissa is 1: 2^7 of bfloat16, 2^10 of float16."""
    return 0x43004300 if dtype == tl.bfloat16 else 0x64006400


@triton.jit
def exponents(M: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the exponents in a way that the compiler cannot know them: `word & mask | exponent` is one instruction with one
    number written into it, and two with two."""
    return _exponent(dtype) + tl.minimum(M, 0)


@triton.jit
def group_words(group: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """Return the places of a row tile's words of one group of int4: a tile, or of 32 inputs every thread's first or last two."""
    if GROUP == 32:
        at = tl.arange(0, 256)
        places = group // 2 * 512 + at // 2 * 4 + at % 2 + group % 2 * 2
    else:
        places = group * 512 + tl.arange(0, 512)
    return places


@triton.jit
def int4_values(
    word: tl.tensor, exponent: tl.tensor, dtype: tl.constexpr, TILES: tl.constexpr, ROW_TILES: tl.constexpr, WIDE: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return the values and `excess`."""
    BLOCKS: tl.constexpr = word.shape[2] // 128
    MASK: tl.constexpr = 0x000F000F
    p0, p1 = _halves((word & MASK) | exponent, dtype), _halves(((word >> 4) & MASK) | exponent, dtype)
    p2, p3 = _halves(((word >> 8) & MASK) | exponent, dtype), _halves(((word >> 12) & MASK) | exponent, dtype)
    values = tl.join(tl.join(p0, p1), tl.join(p2, p3))  # row tile, tile, word, half, g + 8, pair
    values = values.reshape(ROW_TILES, TILES, 4, 8, 4, BLOCKS, 2, 2, 2)  # .., warp, g, t, block, half, g + 8, pair
    if WIDE:
        values = tl.permute(values, (0, 2, 7, 3, 1, 5, 8, 4, 6))
    else:
        values = tl.permute(values, (0, 2, 7, 3, 1, 5, 4, 8, 6))
    values = values.reshape(64 * ROW_TILES, 16 * BLOCKS * TILES)
    if not is_bfloat16(dtype):
        values = values - 1024.0
    return values


@triton.jit
def byte_values(
    word: tl.tensor, exponent: tl.tensor, dtype: tl.constexpr, FP8: tl.constexpr, TILES: tl.constexpr, ROW_TILES: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the values of 8 bits; those of fp8 are too small by `lacking`."""
    if FP8:
        first, second = _fp8_halves(word, dtype)
    else:
        first, second = _int8_plane(word, exponent, dtype), _int8_plane(word >> 8, exponent, dtype)
    values = tl.join(first, second).reshape(ROW_TILES, TILES, 4, 8, 4, 2, 2, 2, 2)  # .., pair, half, g + 8
    if WIDE:
        values = tl.permute(values, (0, 2, 8, 3, 1, 5, 6, 4, 7))
    else:
        values = tl.permute(values, (0, 2, 8, 3, 1, 5, 4, 6, 7))
    return values.reshape(64 * ROW_TILES, 32 * TILES)


@triton.jit
def in_order(x: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """Return activations [inputs, rows] in the order of the weights' inputs."""
    if WIDE:
        blocks = x.reshape(x.shape[0] // 16, 4, 2, 2, x.shape[1])
        return tl.permute(blocks, (0, 2, 1, 3, 4)).reshape(x.shape[0], x.shape[1])
    return x


@triton.jit
def numbers(
    word: tl.tensor, FORMAT: tl.constexpr, TILES: tl.constexpr, ROW_TILES: tl.constexpr, WIDE: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return what the codes stand for, without scales, in float32: for products in which weights are rounded."""
    exponent: tl.constexpr = _exponent(tl.bfloat16)
    if FORMAT == "int4":
        result = int4_values(word, exponent, tl.bfloat16, TILES, ROW_TILES, WIDE).to(tl.float32) - excess(tl.bfloat16)
    elif FORMAT == "int8":
        result = byte_values(word, exponent, tl.bfloat16, False, TILES, ROW_TILES, WIDE).to(tl.float32)
    else:
        values = byte_values(word, exponent, tl.bfloat16, True, TILES, ROW_TILES, WIDE)
        bits = values.to(tl.int16, bitcast=True).to(tl.int32) << 16  # as small numbers might be rounded to zero on the way
        result = bits.to(tl.float32, bitcast=True) * lacking(tl.bfloat16)
    return result


@triton.jit
def scale_and_minimum(pair: tl.tensor) -> tl.tensor:
    """Return both of an int4 group, float32."""
    scale = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    minimum = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, minimum


@triton.jit
def _halves(pairs: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return both halves of words as numbers, side by side; in registers they are where they were."""
    low = (pairs & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _int8_plane(word: tl.tensor, exponent: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the lower bytes of halves. bfloat16's mantissa has seven bits: 128 + the lower seven, and 128 or 256 for the upper
    one, exact sums of exact numbers."""
    if is_bfloat16(dtype):
        lower = _halves((word & 0x007F007F) | exponent, dtype).to(tl.float32) - 384.0
        upper = _halves((word & 0x00800080) | exponent, dtype).to(tl.float32)
        return (lower.to(dtype).to(tl.float32) + upper).to(dtype)
    return _halves((word & 0x00FF00FF) | exponent, dtype) - 1152.0


@triton.jit
def _fp8_halves(word: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    first = word & -0x780F7810  # 0x87F087F0
    second = ((word << 4) & -0x7F0F7F10) | ((word >> 4) & 0x07000700)  # 0x80F080F0
    if not is_bfloat16(dtype):  # whose exponent ends three bits higher
        first = ((first & 0x07F007F0) << 3) | (first & -0x7FFF8000)
        second = ((second & 0x07F007F0) << 3) | (second & -0x7FFF8000)
    return _halves(first, dtype), _halves(second, dtype)


settle_keys(globals())
