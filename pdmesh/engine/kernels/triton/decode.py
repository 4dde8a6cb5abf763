"""Decode steps in buckets: as many rows as a power of two, one recording for each.

    5 sequences ─► bucket 8:   rows 0 1 2 3 4 | 5 6 7           the last three are nobody's
                               real           | padding

A bucket's launches are the same for any batch that fits, whether recorded or not. So what a graph computes has the bits of the
same launches made one by one; and the number of rows of a product, by which libraries choose their kernels, is a bucket's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pdmesh.engine.kernels.triton.cuda_graphs import Recorder, Recording, is_same_memory
from pdmesh.engine.kernels.triton.decode_buffers import DecodeBuffers
from pdmesh.engine.kernels.triton.step import StepOutput, TritonStep
from pdmesh.engine.models.layers import ROW_MULTIPLE
from pdmesh.engine.runner.batch import StepBatch


@dataclass(frozen=True)
class DecodeSizes:
    """The most that a decode step has: sequences, and tokens of a sequence."""

    max_num_seqs: int
    max_context: int
    block_size: int

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_context", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")

    @property
    def buckets(self) -> tuple[int, ...]:
        """Rows of each, ascending: powers of two from 4 on, which is what products take at least; the last holds all."""
        most = self.max_num_seqs + -self.max_num_seqs % ROW_MULTIPLE
        powers = [ROW_MULTIPLE << shift for shift in range(most.bit_length()) if ROW_MULTIPLE << shift < most]
        return (*powers, most)


class DecodeGraphs:
    """Decode steps of one model on one pool. `recorder` None: the same launches, made one by one in each step."""

    def __init__(self, step: TritonStep, kv: Tensor, sizes: DecodeSizes, recorder: Recorder | None) -> None:
        self._step, self._kv, self._recorder = step, kv, recorder
        self._buckets = sizes.buckets
        self.buffers = DecodeBuffers(self._buckets[-1], sizes.max_context, sizes.block_size, kv.device)
        self._recordings: dict[int, Recording] = {}

    @property
    def buckets(self) -> Sequence[int]:
        return self._buckets

    def is_of(self, kv: Tensor) -> bool:
        """Whether this is the pool that they are recorded on."""
        return is_same_memory(self._kv, kv)

    def run(self, batch: StepBatch) -> StepOutput:
        """One decode step (`DecodeBuffers.why_not` says None). Outputs [batch.num_seqs, ...] hold until the next step."""
        num_rows = next(bucket for bucket in self._buckets if bucket >= batch.num_seqs)
        self.buffers.send(batch, num_rows)
        output = self._output(num_rows)
        return StepOutput(output.logits[: batch.num_seqs], output.states[: batch.num_seqs])

    def prepare(self) -> None:
        """Records all buckets, the largest first, whose memory the others share. Rows without sequences: nothing is written."""
        for bucket in reversed(self._buckets):
            self.buffers.clear(bucket)
            self._output(bucket)

    def _output(self, num_rows: int) -> StepOutput:
        if self._recorder is None:
            return self._work(num_rows)
        if (recording := self._recordings.get(num_rows)) is not None:
            recording.replay()
        else:
            recording = self._recordings[num_rows] = self._recorder.record(lambda: self._work(num_rows))
        return StepOutput(*recording.output)

    def _work(self, num_rows: int) -> StepOutput:
        self.buffers.unpack(num_rows)
        return self._step.run(self.buffers.metadata(num_rows), self._kv)
