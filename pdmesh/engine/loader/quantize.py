"""Weights in 8 and 4 bits: quantization, and dequantization as its reference.

Work goes in blocks that stay in the cache: torch's operators then run at the cache's speed instead of the memory's, an order
of magnitude apart. A row's (int4: a group's) result depends on that row alone, not on the block or the number of threads.

It does not depend on the device: a GPU makes the bits that a CPU makes. Only operators that IEEE 754 rounds alike are used, each
a kernel of its own, so that nothing is fused; sums are added in a fixed order (`_sum`), and divisors are tensors (`_over`): on a
GPU torch multiplies by the reciprocal of a number.

On a CPU call it with one torch thread (`torch.set_num_threads(1)`), from several threads of the caller's where there are
idle cores: operators this short wait for a second torch thread longer than they run as soon as other processes want the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

GROUPS = (32, 64, 128)
E4M3_MAX = 448.0
_BLOCK_WEIGHTS = 1 << 18  # 1 MiB of float32: the two or three in use at a time fit a core's share of the cache
_GPU_BLOCK_WEIGHTS = 1 << 24  # 64 MiB: a launch is short beside its work, and some ten in use are less than a layer
# Shares of a group's range that are cut off at its lower and its upper end, besides none at all. Cuts and the refit that follows
# take 15 to 30 % off the squared error (normal, heavy-tailed and real weights, groups of 32 to 128); twice as many gain 2 % more.
_CUTS = ((0.04, 0.0), (0.0, 0.04), (0.04, 0.04))


@final
@dataclass(frozen=True)
class Int8Weight:
    """w[n, k] = scales[n] * values[n, k]: symmetric, one scale for each output."""

    values: Tensor  # [N, K] int8; -128 only where a checkpoint has it
    scales: Tensor  # [N] float32, positive

    def __post_init__(self) -> None:
        if self.values.dim() != 2 or self.scales.shape != self.values.shape[:1]:
            raise ValueError(f"scales: shape {tuple(self.scales.shape)} for values {tuple(self.values.shape)}; give one per row")


@final
@dataclass(frozen=True)
class Fp8Weight:
    """w[n, k] = scales[n] * values[n, k], in e4m3: 4 bits of exponent, 3 of mantissa, no infinity."""

    values: Tensor  # [N, K] float8_e4m3fn, no NaN
    scales: Tensor  # [N] float32, positive

    def __post_init__(self) -> None:
        if self.values.dim() != 2 or self.values.dtype != torch.float8_e4m3fn or self.scales.shape != self.values.shape[:1]:
            raise ValueError(
                f"values: {tuple(self.values.shape)} of {self.values.dtype}, scales: {tuple(self.scales.shape)}; "
                "give [N, K] of float8_e4m3fn and one scale per row"
            )


@final
@dataclass(frozen=True)
class Int4Weight:
    """w[n, k] = scales[n, k // group] * values[n, k] + minimums[n, k // group]. A scale may be negative: Q4_0's are, and its
    "minimum" is the maximum then."""

    values: Tensor  # [N, K] uint8, 0..15
    scales: Tensor  # [N, K / group] float16
    minimums: Tensor  # [N, K / group] float16
    group: int

    def __post_init__(self) -> None:
        _check_group(self.values, self.group)
        groups = (self.values.shape[0], self.values.shape[1] // self.group)
        for name, tensor in (("scales", self.scales), ("minimums", self.minimums)):
            if tensor.shape != groups:
                raise ValueError(f"{name}: shape {tuple(tensor.shape)}, not {groups}: one for each group of {self.group}")


def quantize_int8(weight: Tensor, device: torch.device | str | None = None) -> Int8Weight:
    """Quantize weight [N, K] of any floating dtype: scale = largest magnitude / 127 (1 for a row of zeros), rounded to nearest.

    Each weight is off by half a scale at most. Raises ValueError for infinity or NaN. `device` is where it is computed and stays;
    the weight's own unless given.
    """
    device = weight.device if device is None else torch.device(device)
    values = torch.empty(weight.shape, dtype=torch.int8, device=device)
    scales = torch.empty(weight.shape[0], device=device)
    for rows in row_blocks(weight.shape[0], weight.shape[1], device):
        wide = weight[rows].to(device).float()
        largest = torch.maximum(wide.amax(1), wide.amin(1).neg_()) if wide.shape[1] else wide.new_zeros(len(wide))
        if not largest.isfinite().all():
            raise ValueError(_NOT_FINITE)
        # A subnormal scale would have few bits, or none.
        scale = _over(largest, 127.0).clamp_min_(torch.finfo(torch.float32).tiny).masked_fill_(largest == 0, 1.0)
        scales[rows] = scale
        values[rows] = (wide / scale[:, None]).round_()
    return Int8Weight(values, scales)


def dequantize_int8(weight: Int8Weight) -> Tensor:
    """Return [N, K] float32."""
    return weight.values * weight.scales[:, None]


def quantize_fp8(weight: Tensor, device: torch.device | str | None = None) -> Fp8Weight:
    """Quantize weight [N, K] of any floating dtype: scale = largest magnitude / 448 (1 for a row of zeros), rounded to nearest.

    Each weight is off by 1/16 at most; weights below 2^-15 of the row's largest are off by up to 2^-19 of it. Raises ValueError
    for infinity or NaN. `device`: see quantize_int8.
    """
    device = weight.device if device is None else torch.device(device)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(weight.shape[0], device=device)
    for rows in row_blocks(weight.shape[0], weight.shape[1], device):
        values[rows], scales[rows] = rounded_to_e4m3(weight[rows].to(device))
    if not scales.isfinite().all():
        raise ValueError(_NOT_FINITE)
    return Fp8Weight(values, scales)


def rounded_to_e4m3(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round [M, K] to float8_e4m3fn [M, K] and a scale for each row, [M] float32 (infinite or NaN where a row holds such)."""
    wide = matrix.float()
    largest = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(len(wide))
    # A subnormal scale would have few bits, or none.
    scales = _over(largest, E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny).masked_fill(largest == 0, 1.0)
    return (wide / scales[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def dequantize_fp8(weight: Fp8Weight) -> Tensor:
    """Return [N, K] float32."""
    return weight.values.float() * weight.scales[:, None]


def quantize_int4(weight: Tensor, group: int, device: torch.device | str | None = None) -> Int4Weight:
    """Quantize weight [N, K] of any floating dtype, K a multiple of `group`: for each group the range with the least squared
    error, among minimum to maximum, some that are a little shorter, and the least-squares refit of the best. Values are rounded
    for the scale and the minimum as they are stored, in float16.

    Weights that are exact in llama.cpp's Q4_0 and Q4_1 stay exact in groups of 32: the first ranges tried are theirs.
    Raises ValueError for another group, a K that it does not divide, infinity, NaN, and a range beyond float16. `device`: see
    quantize_int8.
    """
    _check_group(weight, group)
    device = weight.device if device is None else torch.device(device)
    num_rows, width = weight.shape
    groups = weight.contiguous().view(-1, group)
    values = torch.empty(groups.shape, dtype=torch.uint8, device=device)
    scales, minimums = (torch.empty(len(groups), dtype=torch.float16, device=device) for _ in range(2))
    for part in row_blocks(len(groups), group, device):
        wide = groups[part].to(device).float().t().contiguous()
        best = _best_fit(wide)
        values[part] = _codes(wide, best.scale, best.minimum).to(torch.uint8).t()
        scales[part], minimums[part] = best.scale, best.minimum
    by_group = (num_rows, width // group)
    return Int4Weight(values.view(num_rows, width), scales.view(by_group), minimums.view(by_group), group)


def dequantize_int4(weight: Int4Weight) -> Tensor:
    """Return [N, K] float32. The product is exact in float32, so a fused multiply-add gives the same bits."""
    groups = weight.values.float().view(*weight.scales.shape, weight.group)
    scales, minimums = weight.scales.float()[:, :, None], weight.minimums.float()[:, :, None]
    return groups.mul_(scales).add_(minimums).view(weight.values.shape)


@dataclass(frozen=True)
class _Fit:
    """A scale and a minimum for each group, and their error: all [groups] float32, the first two float16 values."""

    scale: Tensor
    minimum: Tensor
    error: Tensor  # sum of the squares; NaN or infinity where float16 does not hold scale or minimum

    def or_better(self, other: _Fit) -> _Fit:
        is_better = other.error < self.error
        return _Fit(
            torch.where(is_better, other.scale, self.scale),
            torch.where(is_better, other.minimum, self.minimum),
            torch.where(is_better, other.error, self.error),
        )


def _best_fit(groups: Tensor) -> _Fit:
    """Fit groups [group, groups] float32: a group is a column, so that operations run along the rows."""
    ranges = _ranges(groups)
    best = _fit(groups, *next(ranges))
    for first, last in ranges:
        if not best.error.any():
            return best  # weights from a file of 4 bits: nothing to gain
        best = best.or_better(_fit(groups, first, last))
    best = best.or_better(_fit(groups, *_least_squares(groups, best)))
    if best.error.isfinite().all():
        return best
    if not groups.isfinite().all():
        raise ValueError(_NOT_FINITE)
    raise ValueError("weights exceed the float16 scales and minimums of int4; give quantization int8, or none with bfloat16")


def _ranges(groups: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield candidate ranges, [groups] for code 0 and for code 15; the first is the fallback."""
    low, high = groups.amin(0), groups.amax(0)
    yield low, high
    # Q4_0: 8 steps from the largest magnitude to zero and 7 beyond. It starts from there even if that is the upper end (the
    # scale is negative then), because float16 holds 8 scales exactly, 7 not.
    largest = torch.where(high > -low, high, low)
    yield largest, largest * -0.875
    span = high - low
    for below, above in _CUTS:
        yield low + below * span, high - above * span


def _fit(groups: Tensor, first: Tensor, last: Tensor) -> _Fit:
    minimum = first.half().float()
    scale = _over(last - minimum, 15.0).half().float()
    off = _codes(groups, scale, minimum).mul_(scale).add_(minimum).sub_(groups)
    return _Fit(scale, minimum, _sum(off.mul_(off)))


def _codes(groups: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Return the nearest of 0..15 for each weight, in float32. A scale of 0 (all weights of the group are one value) gives 0."""
    return (groups - minimum).div_(scale.masked_fill(scale == 0, 1.0)).round_().clamp_(0, 15)


def _least_squares(groups: Tensor, fit: _Fit) -> tuple[Tensor, Tensor]:
    """Return the range of the straight line from codes to weights that has the least squared error, with the codes fixed."""
    codes = _codes(groups, fit.scale, fit.minimum)
    size = float(len(groups))
    mean_code, mean = _over(_sum(codes), size), _over(_sum(groups), size)
    deviation = codes.sub_(mean_code)
    spread = _sum(deviation * deviation)
    scale = _sum(deviation.mul_(groups)) / spread.clamp_min_(0.5)  # 0, or about 1 at the least
    first = mean - scale * mean_code
    return first, first + scale * 15.0


def _sum(columns: Tensor) -> Tensor:
    """Sum [group, groups] -> [groups]: the upper half is added to the lower one, until one row is left. Unlike torch's sums, the
    order is the same on every device."""
    while (half := len(columns) // 2) > 0:
        columns = columns[:half] + columns[half:]
    return columns[0]


def _over(dividends: Tensor, divisor: float) -> Tensor:
    """Divide, rounded once, on every device."""
    return dividends / torch.full_like(dividends, divisor)


def row_blocks(num_rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of rows with as many weights as suit the device, at least one row."""
    step = max(1, (_BLOCK_WEIGHTS if device.type == "cpu" else _GPU_BLOCK_WEIGHTS) // max(1, width))
    return (slice(start, start + step) for start in range(0, num_rows, step))


def in_row_blocks(shape: Sequence[int], dtype: torch.dtype, make: Callable[[slice], Tensor]) -> Tensor:
    """Return a matrix of this shape on the CPU, of what `make` returns for slices of its rows."""
    result = torch.empty(*shape, dtype=dtype)
    for part in row_blocks(result.shape[0], result.shape[1], result.device):
        result[part] = make(part)
    return result


def _check_group(matrix: Tensor, group: int) -> None:
    if group not in GROUPS:
        raise ValueError(f"quantization_group: {group} is not supported; give one of {', '.join(map(str, GROUPS))}")
    if matrix.dim() != 2 or matrix.shape[1] % group:
        raise ValueError(
            f"quantization_group: {group} does not divide the inputs of a weight of shape {tuple(matrix.shape)}; "
            "give a smaller group, or quantization int8"
        )


_NOT_FINITE = "weights hold infinity or NaN; the checkpoint is damaged, or was saved in too narrow a dtype"
