"""Blocks of a GGUF file's tensors (layouts: ggml-common.h): 4 bits unchanged, everything as float32.

The `gguf` package dequantizes them all; the common ones are done here in a quarter of its time, to equal values. Rows are
[N, bytes of a row] uint8 for quantized types, [N, ...] of their own dtype for others.
"""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from pdmesh.engine.loader.quantize import Int4Weight, dequantize_int4

INT4_GROUP = 32
_INT4_TYPES = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1)


def dequantize_rows(rows: np.ndarray, kind: GGMLQuantizationType) -> Tensor:
    """Return float32, a copy. Exact: the values that ggml's own dequantization gives."""
    weight = int4_rows(rows, kind)
    if weight is not None:
        return dequantize_int4(weight)
    if kind == GGMLQuantizationType.Q8_0:
        return _dequantize_q8_0(rows)
    return torch.from_numpy(np.array(dequantize(rows, kind), dtype=np.float32))


def int4_rows(rows: np.ndarray, kind: GGMLQuantizationType) -> Int4Weight | None:
    """Return the codes, scales and minimums of Q4_0 or Q4_1. None for another type, and for numbers that float16 does not hold.

    A block is a float16 scale; in Q4_1 a float16 minimum (Q4_0 counts from -8, exact in float16 unless it overflows); then 16
    bytes with the weights 0..15 of the block in their low halves and 16..31 in their high halves.
    """
    if kind not in _INT4_TYPES:
        return None
    blocks = _blocks(rows, kind)
    codes, head = blocks[:, :, -INT4_GROUP // 2 :], blocks[:, :, : -INT4_GROUP // 2]
    values = np.concatenate((codes & 15, codes >> 4), axis=2).reshape(len(rows), -1)
    numbers = np.ascontiguousarray(head).view(np.float16)
    scales = np.ascontiguousarray(numbers[:, :, 0])
    with np.errstate(over="ignore"):
        minimums = np.ascontiguousarray(numbers[:, :, 1]) if numbers.shape[2] == 2 else scales * np.float16(-8)
    if not (np.isfinite(scales).all() and np.isfinite(minimums).all()):
        return None
    return Int4Weight(torch.from_numpy(values), torch.from_numpy(scales), torch.from_numpy(minimums), INT4_GROUP)


def _dequantize_q8_0(rows: np.ndarray) -> Tensor:
    """Dequantize blocks of a float16 scale and 32 int8."""
    blocks = _blocks(rows, GGMLQuantizationType.Q8_0)
    scales = torch.from_numpy(np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)).float()
    values = torch.from_numpy(np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)).float()
    return values.mul_(scales).view(len(rows), -1)


def _blocks(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Return [N, blocks of a row, bytes of a block]."""
    _, num_bytes = GGML_QUANT_SIZES[kind]
    return rows.reshape(len(rows), -1, num_bytes)
