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
from torch import Tensor

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
