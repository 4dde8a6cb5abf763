"""The limits of a hand-off through memory: copies between buffers larger than the caches, by memcpy and past the caches."""

from __future__ import annotations

import ctypes
import mmap
import time
from functools import cache

import numpy as np

from kvtransfer.native.library import PROJECT, Native, address_of
from pdmesh.engine.kernels.cpu.build import load_library


def copy_bandwidth_gb_s(num_bytes: int) -> float:
    """10^9 bytes copied a second by one thread, once, between buffers whose pages are there."""
    target, source = _buffers(num_bytes)
    started = time.perf_counter()
    ctypes.memmove(address_of(memoryview(target)), address_of(memoryview(source)), num_bytes)
    return num_bytes / (time.perf_counter() - started) / 1e9


def streamed_bandwidth_gb_s(num_bytes: int) -> float:
    """The same with stores past the caches, which spare reading what is overwritten; without a checksum. Raises ValueError where
    the native library has no such copy."""
    target, source = _buffers(num_bytes)
    runs = np.array([[address_of(memoryview(target)), address_of(memoryview(source)), num_bytes]])
    started = time.perf_counter()
    _unsummed().copy(0, runs, streams=True)
    return num_bytes / (time.perf_counter() - started) / 1e9


@cache
def _unsummed() -> Native:
    return Native(load_library(lambda _text: None, project=PROJECT), "unsummed")


@cache
def _buffers(num_bytes: int) -> tuple[mmap.mmap, mmap.mmap]:
    buffers = mmap.mmap(-1, num_bytes), mmap.mmap(-1, num_bytes)
    for buffer in buffers:
        buffer[:] = b"\1" * num_bytes
    return buffers
