"""What a model costs and what this machine can do, to predict a step's time before any was measured."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from pdmesh.engine.kernels.cpu import library
from pdmesh.engine.kernels.cpu.library import default_threads
from pdmesh.engine.kernels.cpu.model import NativeModel
from pdmesh.engine.kv_cache.pool import KVShape
from pdmesh.engine.loader.loader import LoadedModel
from pdmesh.engine.memory import free_memory

if TYPE_CHECKING:
    from pdmesh.engine.kernels.triton.model import TritonModel

# Enough to measure the speed without delaying the start much: some 20 ms on two idle cores.
_CPU_BYTES, _CUDA_BYTES = 1 << 25, 1 << 28
_CPU_SIZE, _CUDA_SIZE = 512, 4096  # rows and columns of torch's product
_REPEATS = 3


@dataclass(frozen=True)
class ModelCost:
    """Hold the cost of one model in the number formats that it is computed in."""

    backend: str  # native, triton or torch
    numbers: str  # number format of its products: int8, bfloat16, float16 or float32
    num_layers: int
    num_weights: int  # weights that each token is multiplied with
    num_head_weights: int  # weights that each row of logits is multiplied with
    weight_bytes: int  # bytes that each step reads, whatever its tokens: without experts
    kv_bytes_per_token: int
    attention_operations: int  # operations of one token for each token that it attends to
    expert_bytes: int = 0  # of one expert, in all layers that have experts: read where a token chose it
    num_experts: int = 0
    top_k: int = 0  # experts that a token is multiplied with
    reaches: tuple[int, ...] = ()  # for each layer with a sliding window, the most tokens that a token attends to


@dataclass(frozen=True)
class MachineLimits:
    """Hold operations (a multiplication and an addition are two) and bytes a second."""

    operations_per_s: float
    bytes_per_s: float

    def of_devices(self, count: int) -> MachineLimits:
        """Return the limits of `count` devices like this one, together."""
        return MachineLimits(self.operations_per_s * count, self.bytes_per_s * count)


def cost_of(loaded: LoadedModel, kv: KVShape) -> ModelCost:
    """Return the cost, from shapes and formats alone."""
    config, model = loaded.config, loaded.model
    count, num_head_weights = config.weights, config.vocab_size * config.hidden_size
    numbers = str(loaded.dtype).removeprefix("torch.")
    held_bytes = (count.total + num_head_weights) * loaded.dtype.itemsize
    backend = "native" if isinstance(model, NativeModel) else getattr(model, "backend", "torch")
    if backend == "triton":  # its products are in the dtype, whatever the format of the weights
        held_bytes = cast("TritonModel", model).bytes_per_step
    if isinstance(model, NativeModel):
        quantized = model.weights.head.format in ("int8", "int4")
        numbers, held_bytes = "int8" if quantized else numbers, model.weights.bytes_per_step
    # Kernels count the bytes of all maps, every expert's included, in formats that differ little.
    expert_bytes = round(held_bytes * count.expert / (count.total + num_head_weights))
    return ModelCost(
        backend=backend,
        numbers=numbers,
        num_layers=config.num_layers,
        num_weights=count.active,
        num_head_weights=num_head_weights,
        weight_bytes=held_bytes - count.num_experts * expert_bytes,
        # On a device a rank's pool has its own heads only.
        kv_bytes_per_token=kv.bytes_per_block // kv.block_size * (config.pool_heads // kv.num_kv_heads),
        attention_operations=config.attention_operations,
        expert_bytes=expert_bytes,
        num_experts=count.num_experts,
        top_k=count.top_k,
        reaches=config.reaches,
    )


@functools.cache
def measure_limits(backend: str, numbers: str, device: str, num_threads: int, num_ranks: int = 1) -> MachineLimits:
    """Return the limits of the cores that the calling thread may use, measured once per process. `num_threads` 0: the engine's
    default.

    They are those of all `num_ranks` that share a model: on the CPU these share the cores and the memory of one machine, which
    are measured whole; on CUDA each has a GPU, of which this process measures its own."""
    num_threads = num_threads or default_threads() * num_ranks  # a rank has its share of torch's threads
    if backend == "native":
        return MachineLimits(
            library.product_peak_gop_s(numbers, num_threads, repeats=_REPEATS) * 1e9,
            library.read_bandwidth_gb_s(num_threads, num_bytes=_CPU_BYTES, repeats=_REPEATS) * 1e9,
        )
    if device == "cuda":
        return _torch_limits(getattr(torch, numbers), device).of_devices(num_ranks)
    with _torch_threads(num_threads):
        return _torch_limits(getattr(torch, numbers), device)


@contextlib.contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def _torch_limits(dtype: torch.dtype, device: str) -> MachineLimits:
    size = _CUDA_SIZE if device == "cuda" else _CPU_SIZE
    factor = torch.ones((size, size), dtype=dtype, device=device)
    # On a GPU the pool may have left no more memory than steps need.
    num_bytes = min(_CUDA_BYTES, free_memory(device) // 4) if device == "cuda" else _CPU_BYTES
    stream = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    return MachineLimits(
        2 * size**3 / _best_s(lambda: factor @ factor, device),
        2 * stream.nbytes / _best_s(stream.clone, device),  # read and written
    )


def _best_s(work: Callable[[], object], device: str) -> float:
    """Return the time of the best repetition; the first one warms up."""
    return min([_timed_s(work, device) for _ in range(_REPEATS + 1)][1:])


def _timed_s(work: Callable[[], object], device: str) -> float:
    started = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return max(time.perf_counter() - started, 1e-9)
