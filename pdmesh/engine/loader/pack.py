"""Weights in the order in which the native kernels read them: panels of 16 outputs, a vector lane for each.

    float32   [N/16][K  ][16]     float32
    bfloat16  [N/16][K/2][16][2]  bfloat16
    int8      [N/16][K/4][16][4]  uint8, value + 128; the scales stay apart, [N] float32
    int4      [N/16][K/g] of: [g/8][16][4] bytes, then 16 scales and 16 minimums in float16
              byte b of step s: value 8s+b of the group in the low half, value 8s+4+b in the high half

So every format is a transposition of 4-byte units, and a panel is one stream of memory. N is padded with rows of zeros to a
multiple of 16, K with zeros to a whole unit. Functions return the bytes as a flat uint8 tensor that begins at a multiple of
64 bytes (torch's CPU allocator sees to it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.engine.loader.quantize import Fp8Weight, Int4Weight, Int8Weight

PANEL = 16
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector
Weight = Tensor | Int8Weight | Int4Weight | Fp8Weight
_W = TypeVar("_W", bound=Weight)


def pack_float32(weight: Tensor) -> Tensor:
    """weight [N, K] of any floating dtype -> N' * K * 4 bytes."""
    return _bytes(_panels(_units(weight.float())))


def pack_bfloat16(weight: Tensor) -> Tensor:
    """weight [N, K] of any floating dtype, rounded to nearest even -> N' * K' * 2 bytes, K' even."""
    return _bytes(_panels(_units(weight.bfloat16())))


def pack_int8(weight: Int8Weight) -> Tensor:
    """-> N' * K' bytes, K' a multiple of 4, each its value + 128: the dot instruction multiplies unsigned weights with signed
    activations. The scales are not among them (see `pad_to_panels`)."""
    return _bytes(_panels(_units(weight.values))).bitwise_xor_(0x80)


def pack_int4(weight: Int4Weight) -> Tensor:
    """-> N' * K / 2 bytes of values and N' * K / group * 4 of scales and minimums."""
    halves = _units(weight.values).view(len(weight.values), -1, 2)
    values = _panels((halves[:, :, 1] << 4).bitwise_or_(halves[:, :, 0]))
    scales, minimums = (_bytes(_panels(tensor)) for tensor in (weight.scales, weight.minimums))
    shape = (len(values), weight.scales.shape[1], -1)
    return _bytes(torch.cat([part.view(shape) for part in (_bytes(values), scales, minimums)], dim=2))


def interleave_gate_up(gate: _W, up: _W) -> _W:
    """gate [I, K] and up [I, K] -> [2 * I', K]: gate rows 0..15, up rows 0..15, gate rows 16..31, and so on, so that one tile of
    the kernel holds a gate and its up. Each is padded with rows of zeros to I', a multiple of 16. Biases [I] go the same way."""
    return _by_rows(_alternate_panels, (gate, up))


def concat_rows(parts: Sequence[_W]) -> _W:
    """Maps of the same input as one: [N1, K], [N2, K], ... -> [N1 + N2 + ..., K]. A single part is passed on without a copy."""
    return parts[0] if len(parts) == 1 else _by_rows(_cat, parts)


def pad_to_panels(tensor: Tensor) -> Tensor:
    """[N, ...] -> [N', ...] with zeros, N' a multiple of 16: biases and scales for kernels that read whole panels."""
    missing = -tensor.shape[0] % PANEL
    return tensor if missing == 0 else torch.cat((tensor, tensor.new_zeros((missing, *tensor.shape[1:]))))


def _by_rows(join: Callable[[list[Tensor]], Tensor], parts: Sequence[_W]) -> _W:
    """`join` applied to whatever has a row for each output. Raises ValueError for parts that are not quantized alike."""
    formats = [_format(part) for part in parts]
    if len(set(formats)) > 1:
        raise ValueError(f"quantization: parts of one map are {', '.join(formats)}; quantize them alike")
    joined = [join(list(column)) for column in zip(*map(_row_tensors, parts), strict=True)]
    first: Weight = parts[0]
    if isinstance(first, Int8Weight | Fp8Weight):
        return cast(_W, type(first)(*joined))
    return cast(_W, Int4Weight(joined[0], joined[1], joined[2], first.group) if isinstance(first, Int4Weight) else joined[0])


def _format(weight: Weight) -> str:
    if isinstance(weight, Tensor):
        return str(weight.dtype)
    if isinstance(weight, Int4Weight):
        return f"int4 in groups of {weight.group}"
    return "int8" if isinstance(weight, Int8Weight) else "fp8"


def _row_tensors(weight: Weight) -> tuple[Tensor, ...]:
    if isinstance(weight, Tensor):
        return (weight,)
    scaled = (weight.values, weight.scales)
    return (*scaled, weight.minimums) if isinstance(weight, Int4Weight) else scaled


def _cat(tensors: list[Tensor]) -> Tensor:
    """Of fp8 by bytes: not every device of torch's concatenates it as it is."""
    first = tensors[0]
    if first.dtype != torch.float8_e4m3fn:
        return torch.cat(tensors)
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(first.dtype)


def _alternate_panels(tensors: list[Tensor]) -> Tensor:
    panels = [_split_panels(tensor) for tensor in tensors]
    return torch.stack(panels, dim=1).flatten(0, 2)


def _units(matrix: Tensor) -> Tensor:
    """[N, K] -> [N, units] int32: a row's bytes, padded with zeros, in units of 4."""
    per_unit = 4 // matrix.itemsize
    missing = -matrix.shape[1] % per_unit
    padded = F.pad(matrix, (0, missing)) if missing else matrix.contiguous()
    # A tensor mapped from a file may begin in the middle of a unit.
    return (padded.clone() if padded.storage_offset() % per_unit else padded).view(torch.int32)


def _panels(rows: Tensor) -> Tensor:
    """[N, U] -> [N / 16, U, 16], N padded. Always a copy: `contiguous` would pass on a single column as it is."""
    return _split_panels(rows).transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _split_panels(tensor: Tensor) -> Tensor:
    """[N, ...] -> [N / 16, 16, ...], N padded."""
    padded = pad_to_panels(tensor)
    return padded.reshape(len(padded) // PANEL, PANEL, *padded.shape[1:])


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.view(-1).view(torch.uint8)
    assert flat.data_ptr() % _ALIGNMENT == 0, "torch's CPU allocator no longer aligns to 64 bytes"
    return flat
