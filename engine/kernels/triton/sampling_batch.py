"""What a batch of draws needs, as tensors on the device: one entry a row, and tables that rows point into.

A CUDA graph captures the addresses: keep the tensors, copy the next step's contents into them (`SamplingBatch.copy_`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling import SampleRow

IN_PROMPT = 1 << 30  # bit of a count: the token stands in the prompt; below it: how often in the output
NOWHERE = -1
COUNT_ROW = 3  # of a batch's `places`
_FLOATS = ("temperature", "top_p", "floor", "min_p", "repetition", "presence", "frequency")


@dataclass(frozen=True)
class SamplingBatch:
    """R rows. Neutral values change nothing; temperature 0 is greedy."""

    floats: Tensor  # [7, R] float32, see the properties
    seeds: Tensor  # [R] int64: the unsigned seed's bits
    places: Tensor  # [5, R] int32: choice, index in the output, top_k (0: all), row of counts, row of masks (-1: none)
    forbidden: Tensor  # [R, F] int32, -1 where there is none; F a power of two
    counts: Tensor  # [C, V] int32: see IN_PROMPT
    masks: Tensor  # [G, ceil(V / 32)] int32: token t is allowed if bit t % 32 of word t // 32 is set
    is_counted: bool  # whether any row has counts
    is_random: bool  # whether any row's temperature may be above 0: else half of the kernels are not launched

    @property
    def num_rows(self) -> int:
        return self.seeds.shape[0]

    def copy_(self, other: SamplingBatch) -> None:
        """Takes over the contents of a batch of the same shapes. Raises ValueError for others."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, Tensor):
                if mine.shape != theirs.shape:
                    raise ValueError(f"{field.name}: shape {tuple(theirs.shape)}, not {tuple(mine.shape)}")
                mine.copy_(theirs, non_blocking=True)

    @staticmethod
    def of(rows: Sequence[SampleRow], vocab_size: int, device: torch.device) -> SamplingBatch:
        """From what the runner says of each row. Copies to the device, waits for nothing that runs there."""
        counted = [row for row in rows if _is_counted(row)]
        masked = [row for row in rows if row.allowed is not None]
        place_of = {id(row): place for place, row in enumerate(counted)}
        mask_of = {id(row): place for place, row in enumerate(masked)}
        floats = [_floats(row, vocab_size) for row in rows]
        places = [
            (
                row.choice,
                row.index,
                min(row.params.top_k, vocab_size),
                place_of.get(id(row), NOWHERE),
                mask_of.get(id(row), NOWHERE),
            )
            for row in rows
        ]
        return SamplingBatch(
            floats=to_device(np.array(floats, np.float64).reshape(len(rows), len(_FLOATS)).T.astype(np.float32), device),
            seeds=to_device(np.array([row.params.seed for row in rows], np.uint64).view(np.int64), device),
            places=to_device(np.array(places, np.int32).reshape(len(rows), 5).T.copy(), device),
            forbidden=to_device(_forbidden(rows), device),
            counts=counts_of([(row.prompt, row.output) for row in counted], vocab_size, device),
            masks=to_device(_masks(masked, vocab_size), device),
            is_counted=bool(counted),
            is_random=any(not row.params.greedy for row in rows),
        )


def counts_of(histories: Sequence[tuple[Sequence[int], Sequence[int]]], vocab_size: int, device: torch.device) -> Tensor:
    """[C, vocab_size] int32 from prompts and outputs; one row, unused, where there is none."""
    counts = torch.zeros((max(1, len(histories)), vocab_size), dtype=torch.int32, device=device)
    prompts = _flat((prompt for prompt, _ in histories), vocab_size, device)
    outputs = _flat((output for _, output in histories), vocab_size, device)
    counts.view(-1).index_fill_(0, prompts, IN_PROMPT)
    counts.view(-1).scatter_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))
    return counts


def count_drawn(counts: Tensor, count_rows: Tensor, tokens: Tensor) -> None:
    """Counts one more token of each row's output, on the device: counts [C, V], count_rows [R] (-1: not counted), tokens [R]."""
    is_counted = count_rows >= 0
    places = count_rows.clamp_min(0).long() * counts.shape[1] + tokens
    counts.view(-1).scatter_add_(0, places, is_counted.to(counts.dtype))


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Through pinned memory, so that the copy is only queued."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _floats(row: SampleRow, vocab_size: int) -> tuple[float, ...]:
    params = row.params
    has_output = len(row.output) > 0
    return (
        params.temperature,
        params.top_p,
        (1.0 - params.top_p) / vocab_size,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty if has_output else 0.0,
        params.frequency_penalty if has_output else 0.0,
    )


def _is_counted(row: SampleRow) -> bool:
    params = row.params
    return params.repetition_penalty != 1.0 or bool(len(row.output) and (params.presence_penalty or params.frequency_penalty))


def _forbidden(rows: Sequence[SampleRow]) -> NDArray[np.int32]:
    lists = [sorted(row.forbidden) for row in rows]
    longest = max((len(tokens) for tokens in lists), default=0)
    width = 1 << (longest - 1).bit_length() if longest else 1  # few widths: each is a kernel of its own
    table = np.full((len(rows), width), NOWHERE, np.int32)
    for line, tokens in zip(table, lists, strict=True):
        line[: len(tokens)] = np.minimum(tokens, 2**31 - 1)  # beyond the vocabulary: nobody's
    return table


def _masks(rows: Sequence[SampleRow], vocab_size: int) -> NDArray[np.int32]:
    table = np.zeros((max(1, len(rows)), -(-vocab_size // 32)), np.uint32)
    for line, row in zip(table, rows, strict=False):
        assert row.allowed is not None
        line[:] = row.allowed[: len(line)]
    return table.view(np.int32)


def _flat(lists: Iterable[Sequence[int]], vocab_size: int, device: torch.device) -> Tensor:
    """Indices into the flat counts."""
    parts = [np.asarray(tokens, np.int64).reshape(-1) + row * vocab_size for row, tokens in enumerate(lists)]
    return to_device(np.concatenate(parts) if parts else np.zeros(0, np.int64), device)
