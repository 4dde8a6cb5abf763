"""A watch over what an engine keeps between decode steps: it equals what is built anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pdmesh.engine.engine import Engine
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.runner.decode_batch import DecodeBatch
from pdmesh.engine.runner.model_runner import KeptInput, SampledOutput, _owners
from pdmesh.engine.scheduler.scheduler import SchedulerOutput
from pdmesh.engine.scheduler.sequence import Sequence


class KeptWatch:
    """Check each step of `engine` that repeats its plan; count those steps."""

    def __init__(self, engine: Engine) -> None:
        self.num_repeats = 0
        self._runner, self._scheduler, self._run_again = engine._runner, engine._scheduler, engine._runner._run_again
        engine._runner._run_again = self._checked  # type: ignore[method-assign]

    def _checked(self, plan: SchedulerOutput) -> dict[Sequence, list[SampledOutput]]:
        self.num_repeats += 1
        assert [(piece.num_tokens, piece.copies, len(piece.draft)) for piece in plan.pieces] == [(1, (), 0)] * len(plan.pieces)
        assert all(sequence.is_decoding and sequence.is_going_on for sequence in plan.sequences)
        draws = self._run_again(plan)
        kept = self._runner._kept
        assert kept is not None
        assert kept._batch is not None
        assert_same_batch(kept._batch, self._runner.batch_of(plan.pieces))
        self._compare_rows(kept, plan)
        return draws

    def _compare_rows(self, kept: KeptInput, plan: SchedulerOutput) -> None:
        fresh = [self._runner._sample_row(owner) for owner in _owners(plan.pieces)]
        assert [replace(row, allowed=None) for row in kept._rows] == [replace(row, allowed=None) for row in fresh]
        for row, expected in zip(kept._rows, fresh, strict=True):
            assert (row.allowed is None) == (expected.allowed is None)
            assert row.allowed is None or np.array_equal(row.allowed, expected.allowed)  # type: ignore[arg-type]


def assert_same_batch(kept: DecodeBatch, fresh: StepBatch) -> None:
    for name in ("token_ids", "positions", "slot_mapping", "logits_rows"):
        assert torch.equal(getattr(kept, name), getattr(fresh, name)), name
    for name in ("query_starts", "context_lens", "block_tables", "tails", "adapter_slots", "num_seqs", "num_tokens"):
        assert getattr(kept, name) == getattr(fresh, name), name
    assert kept.lens.tolist() == fresh.context_lens
    for row, table in enumerate(fresh.block_tables):
        blocks = kept.tables[row * kept.row_blocks : (row + 1) * kept.row_blocks].tolist()
        assert blocks == table + [0] * (kept.row_blocks - len(table))
