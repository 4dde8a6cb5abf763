"""The input of decode steps that have the same plan, kept from step to step.

Such a step differs from the one before it by one token for each sequence. What is short is read from the sequences again: their
last tokens, positions and slots. Block tables, which grow with the context, are only appended to, as are the blocks of a sequence
that decodes.

    tables, kept   | seq 0: b b b b · · · · | seq 1: b b · · · · · · |     a row for each sequence, with room for more blocks
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.scheduler.sequence import Sequence

_SPARE_BLOCKS = 32  # room in each row of the tables, beyond what the longest sequence has


@dataclass(frozen=True, kw_only=True)
class DecodeBatch(StepBatch):
    """Hold a token of each of B sequences. Its content changes in place (`advance`); its tensors stay where they are."""

    native_lens: Tensor  # [B] int32: context_lens
    native_tables: Tensor  # [B, blocks] int32: block_tables, and zeros behind them

    @classmethod
    def of(cls, sequences: Sequence_[Sequence], block_size: int, adapter_slots: tuple[int, ...] = ()) -> DecodeBatch:
        """Return a batch of the token of each sequence that is computed next."""
        count = len(sequences)
        row_blocks = max(sequence.num_computed // block_size + 1 for sequence in sequences) + _SPARE_BLOCKS
        batch = cls(
            token_ids=torch.zeros(count, dtype=torch.int64),
            positions=torch.zeros(count, dtype=torch.int64),
            slot_mapping=torch.zeros(count, dtype=torch.int64),
            query_starts=list(range(count + 1)),
            context_lens=[0] * count,
            block_tables=[[] for _ in sequences],
            logits_rows=torch.arange(count),
            adapter_slots=adapter_slots,
            native_lens=torch.zeros(count, dtype=torch.int32),
            native_tables=torch.zeros((count, row_blocks), dtype=torch.int32),
        )
        has_room = batch.advance(sequences, block_size)
        assert has_room, "the rows were made long enough"
        return batch

    def advance(self, sequences: Sequence_[Sequence], block_size: int) -> bool:
        """Set the batch to the next token of the same sequences, whose blocks were only appended to; False: a row of the tables
        is full, so make a new batch."""
        positions = [sequence.num_computed for sequence in sequences]
        for row, table in enumerate(self.block_tables):
            num_blocks = positions[row] // block_size + 1
            if len(table) < num_blocks and not self._append(row, sequences[row].block_ids[len(table) : num_blocks]):
                return False
        slots = [
            table[-1] * block_size + position % block_size
            for table, position in zip(self.block_tables, positions, strict=True)
        ]
        self.context_lens[:] = [position + 1 for position in positions]
        self.token_ids.numpy()[:] = [sequence.output[-1] for sequence in sequences]
        self.positions.numpy()[:] = positions
        self.slot_mapping.numpy()[:] = slots
        self.native_lens.numpy()[:] = self.context_lens
        return True

    def _append(self, row: int, block_ids: list[int]) -> bool:
        table = self.block_tables[row]
        end = len(table) + len(block_ids)
        if end > self.native_tables.shape[1]:
            return False
        self.native_tables.numpy()[row, len(table) : end] = block_ids
        table += block_ids
        return True
