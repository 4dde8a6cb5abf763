"""Sampling on the device by the rules of pdmesh/engine/sampling/sampler.py, without synchronizing between logits and token ids.

`DeviceSampler` is what the runner calls. It keeps on the device what stays from step to step (batch.py), and copies the results
to the host, log-probabilities included, in one copy.

Which tokens agree with pdmesh.engine.sampling.sampler.Sampler: all choices are by the same rules, ties included, and the random
bits are the same. Exponentials, logarithms and sums of exponentials are float32 numbers that two libraries may round
differently, by some 2^-23 of themselves. So a token may differ where that decides: two scores within about 2^-20 of
each other, or a probability as close to the bound of top-p or min-p. Bits do not depend on the batch: a row is computed by
programs of its own.

The cost of a step besides its logits: rows that are greedy only are one launch, and no message. Where some are drawn at
random it is four launches, and a message of 72 bytes a row when the rows change; penalties add a launch, a message each step
with the new tokens, and 4 bytes a token of the vocabulary to read.

Bytes: adjust reads and writes a row once and scores reads it once, 12 bytes a token: 1.5 MB a row of 128 k, which a batch of 64
moves in 25 microseconds at 4 TB/s. The limit of random draws is elsewhere: top-k reads the row four times more, top-p or min-p
once more, top-p twice again, and one multiprocessor does all of a row. A pass computes an exponential or a histogram of 128 k
numbers on it: about 30 microseconds by counting instructions (not measured), so that top-p alone takes some 0.1 ms and with top-k
0.2 ms a step, however few the rows; 132 rows take as long as one. If a row were spread over several programs, its float64 sums
would have to be added by chunks in their order, so that bits still depend on the row alone; that is not done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from pdmesh.engine.kernels.triton.sampling.batch import BatchMaker, SamplingBatch, to_device
from pdmesh.engine.kernels.triton.sampling.kernels import (
    adjust_kernel,
    count_kernel,
    greedy_kernel,
    limits_kernel,
    pick_kernel,
    scores_kernel,
)
from pdmesh.engine.outputs import TokenLogprobs
from pdmesh.engine.sampling.logprobs import in_order
from pdmesh.engine.sampling.sampler import NO_TOKEN, SampledToken, SampleRow, Unseen
from pdmesh.sampling_params import SamplingParams

# Launches of the sampling kernels into buffers that stay. They only launch, so a CUDA graph may contain them.


CHUNK = 4096
_PLACES = 256  # places to count of one program


@dataclass(frozen=True)
class GreedyScratch:
    """Hold the buffers of `greedy` for up to R rows."""

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
    """Hold the buffers of `draw` for up to R rows: 12 bytes a row and token of the vocabulary. One draw at a time."""

    adjusted: Tensor  # [R, V] float32
    packed: Tensor  # [R, V] float32: probabilities that may be in top-p's set
    packed_ids: Tensor  # [R, V] int32: their token ids
    best_values: Tensor  # [R, chunks] float32: the best adjusted logits
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
    """Return the id of each row's highest logit of [R, V], the lowest among equals: [R] int32, on the device. One launch.

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
    """Draw from logits [R, V], of which rows are contiguous and unchanged, float32 or narrower -> tokens [R] int32, on the
    device.

    Counts what the batch has to count, once a batch. Raises ValueError where shapes do not fit. `chunk`: as the scratch's.
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
    """Return the stride of rows. A single row's is arbitrary, and must not lead to a kernel of its own."""
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


class DeviceDrawing:
    """Tokens drawn by launches that are queued, on their way to the host."""

    def __init__(self, tokens: Tensor, told: Tensor | None = None, counts: Sequence[int | None] = ()) -> None:
        """tokens [R] int32, on the device; `told` is the result of `_told` for rows with log-probabilities."""
        self.tokens, self._counts = tokens, counts
        self._event: torch.cuda.Event | None = None
        self._host = source = tokens if told is None else told
        if source.is_cuda:
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def finish(self) -> list[SampledToken]:
        """Wait for these draws, not for what was queued behind them."""
        if self._event is not None:
            self._event.synchronize()
        if self._counts:
            return _unpacked(self._host, self._counts)
        return [SampledToken(token, None) for token in self._host.tolist()]


class DeviceSampler:
    """Implement TokenSampler of the model runner. Not for two threads at once: it keeps its buffers from call to call."""

    def __init__(self, chunk: int = CHUNK, num_seqs: int = 0) -> None:
        """`chunk`: tokens of the vocabulary that one program takes, a power of two. `num_seqs`: how many sequences the buffers
        have room for from their first use on, as each buffer that grows leaves a freed one behind that is too small for reuse."""
        self._chunk, self._num_seqs = chunk, num_seqs
        self._scratch: SamplingScratch | None = None
        self._greedy_scratch: GreedyScratch | None = None
        self._maker: BatchMaker | None = None

    @torch.inference_mode()
    def prepare(self, vocab_size: int, device: torch.device) -> None:
        """Compile all that sampling from such logits will ever launch, by sampling from some: seconds, where nothing is
        cached."""
        logits = torch.zeros((1, vocab_size), device=device)
        for row in _rows_of_all_kinds(vocab_size):
            self.sample(logits, [row])

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Sample logits [R, V] float32, one SampleRow each -> R tokens. The logits are not changed. Greedy ties: the lowest
        id."""
        return self.start(logits, rows).finish() if rows else []

    @torch.inference_mode()
    def start(self, logits: Tensor, rows: Sequence[SampleRow], unseen: Unseen | None = None) -> DeviceDrawing:
        """Start `sample` without waiting, for at least one row. The logits may change afterwards. `unseen`: one token more of
        each."""
        tokens = self._drawn(logits, rows, unseen)
        counts = [row.params.logprobs for row in rows]
        if all(count is None for count in counts):
            return DeviceDrawing(tokens)
        return DeviceDrawing(tokens, _told(logits, tokens, counts), counts)

    def _drawn(self, logits: Tensor, rows: Sequence[SampleRow], unseen: Unseen | None) -> Tensor:
        logits = _aligned(logits)
        maker = self._maker_for(logits)
        plans = maker.plans(rows)
        if all(not plan.is_random and plan.is_free(row) for row, plan in zip(rows, plans, strict=True)):
            return greedy(logits, self._greedy_room(logits), chunk=self._chunk)
        return draw(logits, maker.of(rows, plans, unseen), self._room(logits), chunk=self._chunk)

    def _maker_for(self, logits: Tensor) -> BatchMaker:
        maker = self._maker
        if maker is None or maker.vocab_size != logits.shape[1] or maker.device != logits.device:
            self._maker = maker = BatchMaker(logits.shape[1], logits.device, self._num_seqs)
        return maker

    def _room(self, logits: Tensor) -> SamplingScratch:
        room, (num_rows, vocab_size) = self._scratch, logits.shape
        if room is None or not room.fits(logits):
            num_rows = triton.next_power_of_2(max(num_rows, self._num_seqs))
            self._scratch = room = SamplingScratch.of(num_rows, vocab_size, logits.device, chunk=self._chunk)
        return room

    def _greedy_room(self, logits: Tensor) -> GreedyScratch:
        room, (num_rows, vocab_size) = self._greedy_scratch, logits.shape
        if room is None or not room.fits(logits, self._chunk):
            num_rows = triton.next_power_of_2(num_rows)
            self._greedy_scratch = room = GreedyScratch.of(num_rows, vocab_size, logits.device, chunk=self._chunk)
        return room


def _aligned(logits: Tensor) -> Tensor:
    """Return logits at an aligned address, which the kernels need: a model's are; a view of some rows may not be."""
    return logits if logits.data_ptr() % 16 == 0 else logits.clone()


def _rows_of_all_kinds(vocab_size: int) -> list[SampleRow]:
    """Return a row that is greedy only, and one that uses everything."""
    plain = SamplingParams(temperature=0.0, max_tokens=1)
    everything = SamplingParams(
        temperature=1.0, top_k=2, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
        min_tokens=2, max_tokens=2, stop_token_ids=(1,), logit_bias=((0, 1.0),), logprobs=1, seed=1,
    )  # fmt: skip
    allowed = np.full(-(-vocab_size // 32), 2**32 - 1, np.uint32)
    return [
        SampleRow(plain, 0, 0, (), (), frozenset()),
        SampleRow(everything, 0, 1, (0,), (0,), frozenset(), allowed, num_guessed=1),
        SampleRow(everything, 0, 1, (0,), (0,), frozenset(), allowed),
    ]


def _told(logits: Tensor, tokens: Tensor, counts: Sequence[int | None]) -> Tensor:
    """Return int32, on the device: tokens [R], then of the raw logits [R, V] a line of `_likeliest` for each row that asked for
    `count` likeliest tokens besides its own."""
    asked, most = _asked(counts), min(_most(counts), logits.shape[1])
    return torch.cat((tokens, _likeliest(logits, tokens, to_device(np.array(asked, np.int64), logits.device), most).flatten()))


def _unpacked(host: Tensor, counts: Sequence[int | None]) -> list[SampledToken]:
    """Unpack what `_told` packed for these counts."""
    asked, ids = _asked(counts), host[: len(counts)].tolist()
    lines = host[len(counts) :].view(len(asked), -1)
    most = (lines.shape[1] - 1) // 2
    listed = {place: _listed(line, ids[place], min(counts[place] or 0, most)) for place, line in zip(asked, lines, strict=True)}
    return [SampledToken(token, None if token == NO_TOKEN else listed.get(place)) for place, token in enumerate(ids)]


def _asked(counts: Sequence[int | None]) -> list[int]:
    return [place for place, count in enumerate(counts) if count is not None]


def _most(counts: Sequence[int | None]) -> int:
    return max(count for count in counts if count is not None)


def _likeliest(logits: Tensor, tokens: Tensor, asked: Tensor, most: int) -> Tensor:
    """Return [A, 1 + 2 * most] int32 of the rows `asked` [A]: the bits of the drawn token's log-probability, ids of the likeliest
    (the lowest first among equals), the bits of their log-probabilities."""
    logprobs = logits.index_select(0, asked).float().log_softmax(-1)
    drawn = tokens.index_select(0, asked).long().clamp_(min=0)  # of NO_TOKEN nothing is reported
    ids = in_order(logprobs).topk(most).indices
    chosen, values = logprobs.gather(1, drawn[:, None]), logprobs.gather(1, ids)
    return torch.cat((chosen.view(torch.int32), ids.int(), values.view(torch.int32)), 1)


def _listed(line: Tensor, token: int, count: int) -> TokenLogprobs:
    """Unpack one line of `_likeliest`."""
    most = (len(line) - 1) // 2
    values = line.view(torch.float32).tolist()
    return TokenLogprobs((token, values[0]), tuple(zip(line[1 : 1 + count].tolist(), values[1 + most :][:count], strict=True)))
