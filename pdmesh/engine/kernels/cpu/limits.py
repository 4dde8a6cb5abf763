"""The machine's limits, measured with the instructions of the kernels: what a speed is to be compared with."""

from __future__ import annotations

import torch

from pdmesh.engine.kernels.cpu.arena import allocate
from pdmesh.engine.kernels.cpu.library import shared_library

GIB = 2**30
_KINDS = {"int8": 0, "bfloat16": 1, "float32": 2}


def read_bandwidth_gb_s(num_threads: int = 0, *, num_bytes: int = GIB, repeats: int = 8) -> float:
    """10^9 bytes a second of all threads streaming over `num_bytes` (larger than the caches) once; the best of `repeats`."""
    buffer = allocate(num_bytes).fill_(1)
    rate: float = shared_library().pdmesh_read_bandwidth(buffer.data_ptr(), num_bytes, _threads(num_threads), repeats)
    return rate / 1e9


def product_peak_gop_s(kind: str, num_threads: int = 0, *, repeats: int = 20) -> float:
    """10^9 operations a second (a multiplication and an addition are two) of products from registers; `kind`: int8, bfloat16 or
    float32. Raises KeyError for another."""
    rate: float = shared_library().pdmesh_product_peak(_KINDS[kind], _threads(num_threads), repeats)
    return rate / 1e9


def int8_peak_gop_s(num_threads: int = 0) -> float:
    """Of int8 products."""
    return product_peak_gop_s("int8", num_threads)


def bf16_peak_gflop_s(num_threads: int = 0) -> float:
    """Of bfloat16 products."""
    return product_peak_gop_s("bfloat16", num_threads)


def _threads(num_threads: int) -> int:
    return num_threads or torch.get_num_threads()
