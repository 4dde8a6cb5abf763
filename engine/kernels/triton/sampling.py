"""Drawing tokens on the device: engine/sampling.py's rules, without a word from the host between logits and token ids.

`draw` only launches kernels, into buffers that stay: a CUDA graph may hold it. `DeviceSampler.sample` is what the runner calls;
it brings back what it returns, log-probabilities included, in one copy at the end.

Which tokens agree with engine.sampling.Sampler. All choices are by the same rules, ties included, and the random bits are the
same. Exponentials, logarithms and sums of exponentials are float32 numbers that two libraries may round differently, by some
2^-23 of themselves. So a token may differ where the outcome hangs on that: two scores within about 2^-20 of each other, or a
probability as close to the bound of top-p or min-p. Bits do not depend on the batch: a row is computed by programs of its own.

Bytes: adjust reads and writes a row once and scores reads it once, 12 bytes a token of the vocabulary: 1.5 MB a row of 128 k,
which a batch of 64 moves in 25 microseconds at 4 TB/s; a single row is bound by four launches. Top-k reads the row four times
more and top-p three times, by one multiprocessor a row from the L2 cache, about 5 microseconds each time (counted, not measured).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from engine.kernels.triton.sampling_batch import COUNT_ROW, SamplingBatch, count_drawn, to_device
from engine.kernels.triton.sampling_kernels import adjust_kernel, limits_kernel, pick_kernel, scores_kernel
from engine.outputs import TokenLogprobs
from engine.sampling import SampledToken, SampleRow, Unseen

_CHUNK = 4096


@dataclass(frozen=True)
class SamplingScratch:
    """Buffers of `draw` for up to R rows: 12 bytes a row and token of the vocabulary. One draw at a time."""

    adjusted: Tensor  # [R, V] float32
    packed: Tensor  # [R, V] float32: probabilities that may be in top-p's set
    packed_ids: Tensor  # [R, V] int32: whose
    best_values: Tensor  # [2, R, chunks] float32: of adjusted logits, of scores
    best_ids: Tensor  # [2, R, chunks] int32
    limits: Tensor  # [R, 3] int64
    sums: Tensor  # [R, 2] float32

    @staticmethod
    def of(num_rows: int, vocab_size: int, device: torch.device, *, chunk: int = _CHUNK) -> SamplingScratch:
        chunks = triton.cdiv(vocab_size, chunk)
        return SamplingScratch(
            adjusted=torch.empty((num_rows, vocab_size), device=device),
            packed=torch.empty((num_rows, vocab_size), device=device),
            packed_ids=torch.empty((num_rows, vocab_size), dtype=torch.int32, device=device),
            best_values=torch.empty((2, num_rows, chunks), device=device),
            best_ids=torch.empty((2, num_rows, chunks), dtype=torch.int32, device=device),
            limits=torch.empty((num_rows, 3), dtype=torch.int64, device=device),
            sums=torch.empty((num_rows, 2), device=device),
        )


def draw(
    logits: Tensor, batch: SamplingBatch, scratch: SamplingScratch, tokens: Tensor | None = None, *, chunk: int = _CHUNK
) -> Tensor:
    """logits [R, V], of which rows are contiguous and unchanged, float32 or narrower -> tokens [R] int32, on the device.

    Raises ValueError where shapes do not fit. `chunk`: tokens of a program, the same as the scratch's.
    """
    num_rows, vocab_size = _check(logits, batch, scratch, chunk)
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device) if tokens is None else tokens
    if num_rows == 0:
        return tokens
    temperature, top_p, floor, min_p, repetition, presence, frequency = batch.floats.unbind()
    choice, index, top_k, count_row, mask_row = batch.places.unbind()
    (best_values, score_values), (best_ids, score_ids) = scratch.best_values.unbind(), scratch.best_ids.unbind()
    chunks = scratch.best_values.shape[2]
    sizes = {"NUM_CHUNKS": chunks, "CHUNKS": triton.next_power_of_2(chunks)}
    exact = {"VOCAB": vocab_size, "CHUNK": chunk, "enable_fp_fusion": False}
    adjust_kernel[(num_rows, chunks)](
        logits, scratch.adjusted, best_values, best_ids, batch.counts, count_row, batch.masks, mask_row, batch.forbidden,
        repetition, presence, frequency, logits.stride(0), batch.masks.shape[1],
        NUM_FORBIDDEN=batch.forbidden.shape[1], num_warps=8, **exact,
    )  # fmt: skip
    if batch.is_random:
        limits_kernel[(num_rows,)](
            scratch.adjusted, best_values, scratch.packed, scratch.packed_ids, scratch.limits, scratch.sums,
            temperature, top_k, top_p, floor, min_p, num_warps=16, **sizes, **exact,
        )  # fmt: skip
        scores_kernel[(num_rows, chunks)](
            scratch.adjusted, best_values, score_values, score_ids, scratch.limits, scratch.sums,
            temperature, top_p, min_p, batch.seeds, choice, index, num_warps=8, **sizes, **exact,
        )  # fmt: skip
    pick_kernel[(num_rows,)](best_values, best_ids, score_values, score_ids, temperature, tokens, num_warps=1, **sizes)
    return tokens


class DeviceDrawing:
    """What was drawn by launches already queued, on its way to the host."""

    def __init__(self, tokens: Tensor, told: Tensor | None = None, counts: Sequence[int | None] = ()) -> None:
        """tokens [R] int32, on the device; `told`: what `_told` packs of rows that asked for log-probabilities."""
        self.tokens, self._counts = tokens, counts
        self._event: torch.cuda.Event | None = None
        self._host = source = tokens if told is None else told
        if source.is_cuda:
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def finish(self) -> list[SampledToken]:
        """Waits for these draws, not for what was queued behind them."""
        if self._event is not None:
            self._event.synchronize()
        if self._counts:
            return _unpacked(self._host, self._counts)
        return [SampledToken(token, None) for token in self._host.tolist()]


class DeviceSampler:
    """engine.runner.TokenSampler. Not for two threads at once: it keeps its buffers from call to call."""

    def __init__(self, chunk: int = _CHUNK) -> None:
        """`chunk`: tokens of the vocabulary that one program takes, a power of two."""
        self._chunk = chunk
        self._scratch: SamplingScratch | None = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """logits [R, V] float32, one SampleRow for each -> R tokens. The logits are not changed. Greedy ties: the lowest id."""
        return self.start(logits, rows).finish() if rows else []

    @torch.inference_mode()
    def start(self, logits: Tensor, rows: Sequence[SampleRow], unseen: Unseen | None = None) -> DeviceDrawing:
        """As `sample`, without waiting; of one row at least. The logits may change after. `unseen`: one token more of each."""
        batch = SamplingBatch.of(rows, logits.shape[1], logits.device)
        if unseen is not None and batch.is_counted:
            before = unseen.tokens.index_select(0, to_device(np.array(unseen.places, np.int64), logits.device))
            count_drawn(batch.counts, batch.places[COUNT_ROW], before)
        tokens = draw(logits, batch, self._room(len(rows), logits), chunk=self._chunk)
        counts = [row.params.logprobs for row in rows]
        if all(count is None for count in counts):
            return DeviceDrawing(tokens)
        return DeviceDrawing(tokens, _told(logits, tokens, counts), counts)

    def _room(self, num_rows: int, logits: Tensor) -> SamplingScratch:
        room = self._scratch
        if room is None or room.sums.shape[0] < num_rows or room.adjusted.shape[1] != logits.shape[1]:
            self._scratch = room = SamplingScratch.of(
                triton.next_power_of_2(num_rows), logits.shape[1], logits.device, chunk=self._chunk
            )
        return room


def _told(logits: Tensor, tokens: Tensor, counts: Sequence[int | None]) -> Tensor:
    """int32, on the device: tokens [R], then of the raw logits [R, V] a line of `_likeliest` for each row that asked for `count`
    likeliest tokens beside."""
    asked, most = _asked(counts), min(_most(counts), logits.shape[1])
    return torch.cat((tokens, _likeliest(logits, tokens, to_device(np.array(asked, np.int64), logits.device), most).flatten()))


def _unpacked(host: Tensor, counts: Sequence[int | None]) -> list[SampledToken]:
    """From what `_told` packed for these counts."""
    asked, ids = _asked(counts), host[: len(counts)].tolist()
    lines = host[len(counts) :].view(len(asked), -1)
    most = (lines.shape[1] - 1) // 2
    listed = {place: _listed(line, ids[place], min(counts[place] or 0, most)) for place, line in zip(asked, lines, strict=True)}
    return [SampledToken(token, listed.get(place)) for place, token in enumerate(ids)]


def _asked(counts: Sequence[int | None]) -> list[int]:
    return [place for place, count in enumerate(counts) if count is not None]


def _most(counts: Sequence[int | None]) -> int:
    return max(count for count in counts if count is not None)


def _likeliest(logits: Tensor, tokens: Tensor, asked: Tensor, most: int) -> Tensor:
    """[A, 1 + 2 * most] int32 of the rows `asked` [A]: the bits of the drawn token's log-probability, ids of the likeliest (the
    lowest first among equals), the bits of their log-probabilities."""
    logprobs = logits.index_select(0, asked).float().log_softmax(-1)
    drawn = tokens.index_select(0, asked).long()
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)  # topk leaves the order of equals open
    chosen = logprobs.gather(1, drawn[:, None])
    bits = [x.contiguous().view(torch.int32) for x in (chosen, values[:, :most])]
    return torch.cat((bits[0], ids[:, :most].int(), bits[1]), 1)


def _listed(line: Tensor, token: int, count: int) -> TokenLogprobs:
    """From one line of `_likeliest`."""
    most = (len(line) - 1) // 2
    values = line.view(torch.float32).tolist()
    return TokenLogprobs((token, values[0]), tuple(zip(line[1 : 1 + count].tolist(), values[1 + most :][:count], strict=True)))


def _check(logits: Tensor, batch: SamplingBatch, scratch: SamplingScratch, chunk: int) -> tuple[int, int]:
    """The numbers of rows and of tokens."""
    if logits.dim() != 2 or logits.stride(1) != 1 or logits.shape[0] != batch.num_rows:
        raise ValueError(f"logits: shape {tuple(logits.shape)}; give [{batch.num_rows}, V] with contiguous rows")
    num_rows, vocab_size = logits.shape
    if scratch.adjusted.shape[0] < num_rows or scratch.adjusted.shape[1] != vocab_size:
        raise ValueError(f"scratch: for {tuple(scratch.adjusted.shape)}, not {tuple(logits.shape)}")
    if scratch.best_values.shape[2] != triton.cdiv(vocab_size, chunk):
        raise ValueError(f"chunk: {chunk} is not what the scratch was made for")
    if batch.counts.shape[1] != vocab_size or batch.masks.shape[1] != triton.cdiv(vocab_size, 32):
        raise ValueError(
            f"batch: counts of {batch.counts.shape[1]} tokens, masks of {batch.masks.shape[1]} words for {vocab_size}"
        )
    return num_rows, vocab_size
