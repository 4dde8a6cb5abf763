"""The input of decode steps that have the same plan, kept from step to step.

Such a step differs from the one before it by one token for each sequence. What is short is read from the sequences again: their
last tokens, positions and slots. Block tables, which grow with the context, are only appended to, as are the blocks of a sequence
that decodes. All of it goes when no sequence runs any more: the logits of 64 sequences over 150 000 tokens take 38 MB.

    tables, kept   | seq 0: b b b b · · · · | seq 1: b b · · · · · · |     a row for each sequence, with room for more blocks
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field

import torch

from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.scheduler.sequence import Sequence

_SPARE_BLOCKS = 32  # room in each row of the tables, beyond what the longest sequence has


@dataclass(frozen=True, kw_only=True)
class DecodeBatch(StepBatch):
    """Hold a token of each of B sequences. Its content changes in place (`advance`); its arrays stay where they are, so that a
    model may keep what it made of them. The logits of a step with it may lie where those of the next one will."""

    numbers: array[int]  # [3 B] int64: the token ids, the positions, the slots, which the tensors show
    lens: array[int]  # [B] int32: context_lens
    tables: array[int]  # [B, row_blocks] int32: block_tables, and zeros behind them
    row_blocks: int
    made: list[object] = field(default_factory=list, compare=False)
    """What a model keeps for the next step with this batch, which holds it: it goes with the batch."""

    @classmethod
    def of(cls, sequences: Sequence_[Sequence], block_size: int, adapter_slots: tuple[int, ...] = ()) -> DecodeBatch:
        """Return a batch of the token of each sequence that is computed next."""
        count = len(sequences)
        row_blocks = max(sequence.num_computed // block_size + 1 for sequence in sequences) + _SPARE_BLOCKS
        numbers = array("q", bytes(3 * 8 * count))
        token_ids, positions, slots = torch.frombuffer(numbers, dtype=torch.int64).view(3, count)
        batch = cls(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            query_starts=list(range(count + 1)),
            context_lens=[0] * count,
            block_tables=[[] for _ in sequences],
            logits_rows=torch.arange(count),
            adapter_slots=adapter_slots,
            numbers=numbers,
            lens=array("i", bytes(4 * count)),
            tables=array("i", bytes(4 * count * row_blocks)),
            row_blocks=row_blocks,
        )
        has_room = batch.advance(sequences, block_size)
        assert has_room, "the rows were made long enough"
        return batch

    def advance(self, sequences: Sequence_[Sequence], block_size: int) -> bool:
        """Set the batch to the next token of the same sequences, whose blocks were only appended to; False: a row of the tables
        is full, so make a new batch."""
        token_ids, positions, slots = [], [], []
        for row, (sequence, table) in enumerate(zip(sequences, self.block_tables, strict=True)):
            position = sequence.num_computed
            index, offset = divmod(position, block_size)
            if index >= len(table) and not self._append(row, sequence.block_ids[len(table) : index + 1]):
                return False
            token_ids.append(sequence.output[-1])
            positions.append(position)
            slots.append(table[index] * block_size + offset)
        self.numbers[:] = array("q", token_ids + positions + slots)
        self.context_lens[:] = [position + 1 for position in positions]
        self.lens[:] = array("i", self.context_lens)
        return True

    def _append(self, row: int, block_ids: list[int]) -> bool:
        table = self.block_tables[row]
        end = len(table) + len(block_ids)
        if end > self.row_blocks:
            return False
        self.tables[row * self.row_blocks + len(table) : row * self.row_blocks + end] = array("i", block_ids)
        table += block_ids
        return True
