"""Weights of one layer, one after the other in large pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdmesh.engine.kv_cache.large_pages import private_memory

_ALIGNMENT = 64
_HUGE_PAGE = 2 * 2**20


def allocate(num_bytes: int) -> Tensor:
    """`num_bytes` zero bytes (uint8), from the beginning of a large page on."""
    whole = torch.frombuffer(private_memory(num_bytes + _HUGE_PAGE), dtype=torch.uint8)
    offset = -whole.data_ptr() % _HUGE_PAGE
    return whole[offset : offset + num_bytes]


def gather(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the tensors, one after the other in one allocation, each at a multiple of 64 bytes."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = allocate(end)
    copies = []
    for tensor, start in zip(tensors, starts, strict=True):
        copy = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(copy.copy_(tensor))
    return copies
