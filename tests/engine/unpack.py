"""Oracles of the packed layouts: each weight is looked up by the index formula of its format, one by one and slowly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.loader.quantize import Int4Weight


def unpack_float32(packed: Tensor, num_rows: int, width: int) -> Tensor:
    """The [num_rows, width] float32 in a [N/16][K][16] stream, padding left out."""
    return _gathered(packed.view(torch.float32), num_rows, width, lambda n, k: (n // 16 * width + k) * 16 + n % 16)


def unpack_bfloat16(packed: Tensor, num_rows: int, width: int) -> Tensor:
    pairs = (width + 1) // 2
    return _gathered(
        packed.view(torch.bfloat16), num_rows, width, lambda n, k: ((n // 16 * pairs + k // 2) * 16 + n % 16) * 2 + k % 2
    )


def unpack_int8(packed: Tensor, num_rows: int, width: int) -> Tensor:
    """Bytes are value + 128."""
    quads = (width + 3) // 4
    return _gathered(
        packed.to(torch.int16).sub(128).to(torch.int8),
        num_rows,
        width,
        lambda n, k: ((n // 16 * quads + k // 4) * 16 + n % 16) * 4 + k % 4,
    )


def unpack_int4(packed: Tensor, num_rows: int, width: int, group: int) -> Int4Weight:
    """From panels of groups of: [g/8][16][4] bytes of halves, then 16 scales and 16 minimums in float16."""
    group_bytes = group * 8 + 64
    data = packed.numpy()
    values = np.zeros((num_rows, width), np.uint8)
    numbers = np.zeros((2, num_rows, width // group), np.float16)
    for n in range(num_rows):
        for k in range(width):
            start = (n // 16 * (width // group) + k // group) * group_bytes
            step, rest = divmod(k % group, 8)
            byte = data[start + step * 64 + n % 16 * 4 + rest % 4]
            values[n, k] = byte >> 4 if rest >= 4 else byte & 15
            for index in range(2):
                at = start + group * 8 + index * 32 + n % 16 * 2
                numbers[index, n, k // group] = data[at : at + 2].view(np.float16)[0]
    return Int4Weight(torch.from_numpy(values), torch.from_numpy(numbers[0]), torch.from_numpy(numbers[1]), group)


def _gathered(elements: Tensor, num_rows: int, width: int, index: Callable[[int, int], int]) -> Tensor:
    places = [[index(n, k) for k in range(width)] for n in range(num_rows)]
    return elements[torch.tensor(places)]
