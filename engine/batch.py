"""What the scheduler gives the model for one step: flat tokens of several sequences, no padding.

    tokens        | seq 0 (a decode row) | seq 1 (a chunk of 3) | ...      T tokens in all
    query_starts  0                      1                      4  ...      B + 1 numbers

A slot is a token's place in the KV pool: slot = block_id * block_size + offset in the block.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepBatch:
    """One step's work. T tokens of B sequences; R of the tokens need logits."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 in each sequence
    slot_mapping: Tensor  # [T] int64: the slot where a token's keys and values are written
    query_starts: list[int]  # B + 1: sequence b owns tokens query_starts[b] to query_starts[b + 1]
    context_lens: list[int]  # B: tokens visible to the sequence's last query, itself included
    block_tables: list[list[int]]  # B: block ids, at least ceil(context_len / block_size) of them
    logits_rows: Tensor  # [R] int64: the tokens (rows of T) whose logits are needed

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]
