"""What this machine can do at most: read bandwidth and matrix-product peak, as far as torch shows them."""

import time

import torch


def read_bandwidth_gb_s(megabytes: int = 1024, repeats: int = 5) -> float:
    """GB/s of reading float32 memory with torch's sum, best of `repeats`. A native streaming read is faster (up to twice)."""
    data = torch.ones(megabytes * 2**20 // 4)
    return max(data.nbytes / _seconds(data.sum) / 1e9 for _ in range(repeats))


def gemm_peak_gflop_s(size: int = 2048, repeats: int = 5) -> float:
    """GFLOP/s of a square float32 product, best of `repeats`."""
    a, b = torch.rand(size, size), torch.rand(size, size)
    return max(2 * size**3 / _seconds(lambda: a @ b) / 1e9 for _ in range(repeats))


def _seconds(work: object) -> float:
    started = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - started
