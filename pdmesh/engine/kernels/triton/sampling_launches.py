"""Launches of the sampling kernels into buffers that stay. They only launch: a CUDA graph may hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pdmesh.engine.kernels.triton.sampling_batch import SamplingBatch
from pdmesh.engine.kernels.triton.sampling_filters import limits_kernel
from pdmesh.engine.kernels.triton.sampling_kernels import adjust_kernel, count_kernel, greedy_kernel, pick_kernel, scores_kernel

CHUNK = 4096
_PLACES = 256  # to count, of one program


@dataclass(frozen=True)
class GreedyScratch:
    """Buffers of `greedy` for up to R rows."""

    best_values: Tensor  # [R, chunks] float32
    best_ids: Tensor  # [R, chunks] int32
    arrivals: Tensor  # [R] int32, 0 between launches
    vocab_size: int

    @staticmethod
    def of(num_rows: int, vocab_size: int, device: torch.device, *, chunk: int = CHUNK) -> GreedyScratch:
        chunks = triton.cdiv(vocab_size, chunk)
        return GreedyScratch(
            best_values=torch.empty((num_rows, chunks), device=device),
            best_ids=torch.empty((num_rows, chunks), dtype=torch.int32, device=device),
            arrivals=torch.zeros(num_rows, dtype=torch.int32, device=device),
            vocab_size=vocab_size,
        )

    def fits(self, logits: Tensor, chunk: int) -> bool:
        has_chunks = self.best_values.shape[1] == triton.cdiv(self.vocab_size, chunk)
        return self.arrivals.shape[0] >= logits.shape[0] and self.vocab_size == logits.shape[1] and has_chunks


@dataclass(frozen=True)
class SamplingScratch:
    """Buffers of `draw` for up to R rows: 12 bytes a row and token of the vocabulary. One draw at a time."""

    adjusted: Tensor  # [R, V] float32
    packed: Tensor  # [R, V] float32: probabilities that may be in top-p's set
    packed_ids: Tensor  # [R, V] int32: whose
    best_values: Tensor  # [R, chunks] float32: of adjusted logits
    best_ids: Tensor  # [R, chunks] int32
    score_values: Tensor  # [R, chunks] float32
    score_ids: Tensor  # [R, chunks] int32
    limits: Tensor  # [R, 3] int64
    sums: Tensor  # [R, 2] float32

    @staticmethod
    def of(num_rows: int, vocab_size: int, device: torch.device, *, chunk: int = CHUNK) -> SamplingScratch:
        wide, narrow = (num_rows, vocab_size), (num_rows, triton.cdiv(vocab_size, chunk))
        return SamplingScratch(
            adjusted=torch.empty(wide, device=device),
            packed=torch.empty(wide, device=device),
            packed_ids=torch.empty(wide, dtype=torch.int32, device=device),
            best_values=torch.empty(narrow, device=device),
            best_ids=torch.empty(narrow, dtype=torch.int32, device=device),
            score_values=torch.empty(narrow, device=device),
            score_ids=torch.empty(narrow, dtype=torch.int32, device=device),
            limits=torch.empty((num_rows, 3), dtype=torch.int64, device=device),
            sums=torch.empty((num_rows, 2), device=device),
        )

    def fits(self, logits: Tensor) -> bool:
        return self.adjusted.shape[0] >= logits.shape[0] and self.adjusted.shape[1] == logits.shape[1]


def greedy(logits: Tensor, scratch: GreedyScratch, *, chunk: int = CHUNK) -> Tensor:
    """logits [R, V] -> the id of each row's highest, the lowest among equals: [R] int32, on the device. One launch.

    Raises ValueError where shapes do not fit. `chunk`: tokens of a program, the same as the scratch's.
    """
    _check_logits(logits)
    if not scratch.fits(logits, chunk):
        raise ValueError(f"scratch: for {scratch.arrivals.shape[0]} rows of {scratch.vocab_size}, not {tuple(logits.shape)}")
    num_rows, vocab_size = logits.shape
    chunks = scratch.best_values.shape[1]
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    greedy_kernel[(num_rows, chunks)](
        logits, scratch.best_values, scratch.best_ids, scratch.arrivals, tokens, _stride(logits),
        VOCAB=vocab_size, NUM_CHUNKS=chunks, CHUNKS=triton.next_power_of_2(chunks), CHUNK=chunk, num_warps=8,
    )  # fmt: skip
    return tokens


def draw(logits: Tensor, batch: SamplingBatch, scratch: SamplingScratch, *, chunk: int = CHUNK) -> Tensor:
    """logits [R, V], of which rows are contiguous and unchanged, float32 or narrower -> tokens [R] int32, on the device.

    Counts what the batch has to count: once a batch. Raises ValueError where shapes do not fit. `chunk`: as the scratch's.
    """
    _check(logits, batch, scratch, chunk)
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    chunks = scratch.best_values.shape[1]
    sizes = {"NUM_CHUNKS": chunks, "CHUNKS": triton.next_power_of_2(chunks)}
    exact = {"VOCAB": vocab_size, "CHUNK": chunk, "enable_fp_fusion": False}
    message, best, scores = batch.message, (scratch.best_values, scratch.best_ids), (scratch.score_values, scratch.score_ids)
    if batch.num_places:
        count_kernel[(triton.cdiv(batch.num_places, _PLACES),)](
            batch.counts, message, batch.first_place, batch.num_prompt, batch.num_places, BLOCK=_PLACES, num_warps=4
        )
    adjust_kernel[(num_rows, chunks)](
        logits, scratch.adjusted, *best, batch.counts, message, _stride(logits), num_warps=8, **exact
    )  # fmt: skip
    if batch.is_random:
        limits_kernel[(num_rows,)](
            scratch.adjusted, scratch.best_values, scratch.packed, scratch.packed_ids, scratch.limits, scratch.sums, message,
            num_warps=16, **sizes, **exact,
        )  # fmt: skip
        scores_kernel[(num_rows, chunks)](
            scratch.adjusted, scratch.best_values, *scores, scratch.limits, scratch.sums, message, batch.ahead,
            num_warps=8, **sizes, **exact,
        )  # fmt: skip
    pick_kernel[(num_rows,)](*best, *scores, message, tokens, num_warps=1, **sizes)
    return tokens


def _stride(logits: Tensor) -> int:
    """Of rows. A single row's is anything, and must not be a kernel of its own."""
    return logits.stride(0) if logits.shape[0] > 1 else logits.shape[1]


def _check_logits(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits: shape {tuple(logits.shape)}; give [R, V] with contiguous rows")


def _check(logits: Tensor, batch: SamplingBatch, scratch: SamplingScratch, chunk: int) -> None:
    _check_logits(logits)
    if tuple(logits.shape) != (batch.num_rows, batch.vocab_size):
        raise ValueError(f"logits: shape {tuple(logits.shape)}; give {[batch.num_rows, batch.vocab_size]}")
    if not scratch.fits(logits):
        raise ValueError(f"scratch: for {tuple(scratch.adjusted.shape)}, not {tuple(logits.shape)}")
    if scratch.best_values.shape[1] != triton.cdiv(logits.shape[1], chunk):
        raise ValueError(f"chunk: {chunk} is not what the scratch was made for")
