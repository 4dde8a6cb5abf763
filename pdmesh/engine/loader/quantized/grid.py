"""Weights on a uniform grid, w = scale * (code - zero), and the unpacking of codes from words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, final

import torch
from torch import Tensor

from pdmesh.engine.loader.quantize import GROUPS, Int4Weight, Int8Weight, in_row_blocks


class Codes(Protocol):
    """A weight [N, K] as its file has it."""

    @property
    def num_rows(self) -> int: ...

    def rows(self, picked: Tensor) -> Codes:
        """Return the weight of some rows, in this order."""

    def dequantize(self) -> Tensor:
        """Return [N, K]."""

    def int4(self, group: int) -> Int4Weight | None:
        """Return the same codes for kernels with groups of this size, or None where the weight has no such grid."""

    def int8(self) -> Int8Weight | None:
        """Return the same weights as int8 with one scale for each row, or None where they are not."""


@final
@dataclass(frozen=True)
class Grid:
    """w[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g]), where g is k // group, or index[k] where columns of one group do not
    lie side by side (act-order)."""

    codes: Tensor  # [N, K] uint8
    scales: Tensor  # [N, G] float16, bfloat16 or float32
    zeros: Tensor  # [N, G] int16
    bits: int
    group: int
    index: Tensor | None = None  # [K] int64

    @property
    def num_rows(self) -> int:
        return len(self.codes)

    def rows(self, picked: Tensor) -> Grid:
        """Return the grid of some rows, in this order."""
        return replace(self, codes=self.codes[picked], scales=self.scales[picked], zeros=self.zeros[picked])

    def dequantize(self) -> Tensor:
        """Return [N, K] in the dtype of the scales: the difference and the product in float32, where both are exact for 16-bit
        scales, rounded once. It is what the packages compute that wrote the file."""
        return in_row_blocks(self.codes.shape, self.scales.dtype, self._dequantize)

    def _dequantize(self, rows: slice) -> Tensor:
        codes, scales, zeros = self.codes[rows].float(), self.scales[rows].float(), self.zeros[rows].float()
        if self.index is not None:
            return codes.sub_(zeros[:, self.index]).mul_(scales[:, self.index])
        groups = codes.view(*scales.shape, -1)
        return groups.sub_(zeros[:, :, None]).mul_(scales[:, :, None]).flatten(1)

    def int4(self, group: int) -> Int4Weight | None:
        """Return the same codes for the kernels' groups, which have to lie within the checkpoint's. The minimum, -zero * scale,
        is rounded to float16, which moves a weight by 1/128 of a step at most. None where this grid is not theirs: more than
        4 bits, act-order, a scale that float16 does not hold."""
        halves = self.scales.half()
        minimums = (self.zeros.float() * halves.float()).neg_().half()
        is_theirs = self.bits <= 4 and self.index is None and group in GROUPS and self.group % group == 0
        if not (is_theirs and torch.equal(halves.float(), self.scales.float()) and minimums.isfinite().all()):
            return None
        times = self.group // group
        return Int4Weight(self.codes, halves.repeat_interleave(times, 1), minimums.repeat_interleave(times, 1), group)

    def int8(self) -> Int8Weight | None:
        """Return the same weights with one scale for each row. None where a row has several, or values beyond int8."""
        if self.scales.shape[1] != 1:
            return None
        values = self.codes.short() - self.zeros
        if values.numel() and (int(values.min()) < -128 or int(values.max()) > 127):
            return None
        return Int8Weight(values.to(torch.int8), self.scales[:, 0].float())


def make_grid(
    codes: Tensor, scales: Tensor, zeros: Tensor | int, *, bits: int, group: int = 0, index: Tensor | None = None
) -> Grid:
    """Return the grid. `group` 0: a row has one scale. An index that only counts groups up is left out."""
    width = codes.shape[1]
    group = group or width
    plain = torch.arange(width) // group
    if index is not None and (index.numel() == 0 or torch.equal(index.long(), plain)):
        index = None
    if index is None and width % group:
        index = plain  # the last group is short
    zeros = torch.full(scales.shape, zeros, dtype=torch.int16) if isinstance(zeros, int) else zeros.short()
    return Grid(codes, scales.contiguous(), zeros.contiguous(), bits, group, None if index is None else index.long())


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack [R, W] int32 -> [R, W * 32 / bits] uint8: a row is one stream of bits, from the lowest of each word on."""
    stream = words.contiguous().view(torch.uint8)
    if bits == 8:
        return stream
    if bits == 4:
        return torch.stack((stream & 15, stream >> 4), dim=2).flatten(1)
    units = stream.view(len(stream), -1, bits).int()  # 8 codes in as many bytes as a code has bits
    unit = sum(units[:, :, byte] << (8 * byte) for byte in range(bits))
    assert isinstance(unit, Tensor)
    return torch.stack([((unit >> (bits * code)) & ((1 << bits) - 1)).to(torch.uint8) for code in range(8)], dim=2).flatten(1)


def look_up(pairs: Tensor, table: Tensor, *, high_first: bool = False) -> Tensor:
    """Return for each byte the two numbers of a table of 16 that its halves name, [...] uint8 -> [..., 2] of the table's dtype:
    the lower half's is the first unless `high_first`."""
    low, high = table.repeat(16), table.repeat_interleave(16)
    both = torch.stack((high, low) if high_first else (low, high), dim=1)  # of each of the 256 bytes
    as_one = both.view({2: torch.int32, 4: torch.int64}[table.itemsize]).flatten()
    return as_one[pairs.flatten().int()].view(table.dtype).view(*pairs.shape, 2)
