"""Rows of bytes between room on a device and memory of the host in which they lie apart.

    room [rows, n], contiguous        host [rows, n], n bytes of each row_bytes: what lies beside them is others', and stays

torch would make such a copy by way of memory of its own, and wait for it: it keeps `non_blocking` for contiguous memory alone. So
on CUDA it is one call of the driver, for the copy engine, on the current stream.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from pdmesh.engine.kv_cache.cuda_driver import Driver

_HOST, _DEVICE = 1, 2  # CUmemorytype


def copy_rows(target: Tensor, source: Tensor) -> None:
    """Both [rows, n] uint8, their bytes side by side. Between a device and the host, which has to be pinned, it is launched and
    nobody waits. Raises CudaError."""
    if target.device == source.device or (target.is_contiguous() and source.is_contiguous()):
        target.copy_(source, non_blocking=True)
    else:
        _launch(target, source)


class _Place(ctypes.Structure):
    """Half of the driver's description: one end of the copy."""

    _fields_ = [
        ("first_byte", ctypes.c_size_t),
        ("first_row", ctypes.c_size_t),
        ("memory_type", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    ]

    @classmethod
    def of(cls, rows: Tensor) -> _Place:
        if rows.device.type == "cuda":
            return cls(memory_type=_DEVICE, device=rows.data_ptr(), pitch=rows.stride(0))
        return cls(memory_type=_HOST, host=rows.data_ptr(), pitch=rows.stride(0))


class RowsCopy(ctypes.Structure):
    """CUDA_MEMCPY2D, as cuda.h lays it out."""

    _fields_ = [("source", _Place), ("target", _Place), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]

    @classmethod
    def of(cls, target: Tensor, source: Tensor) -> RowsCopy:
        return cls(source=_Place.of(source), target=_Place.of(target), width=target.shape[1], height=target.shape[0])


def _launch(target: Tensor, source: Tensor) -> None:
    device = target.device if target.device.type == "cuda" else source.device
    driver, stream = _driver_of(device), torch.cuda.current_stream(device).cuda_stream
    with driver.current():
        driver.call("cuMemcpy2DAsync_v2", ctypes.byref(RowsCopy.of(target, source)), ctypes.c_void_p(stream))


@cache
def _driver_of(device: torch.device) -> Driver:
    return Driver(torch.cuda.current_device() if device.index is None else device.index)
