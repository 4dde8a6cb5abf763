"""What a draft computes in one forward pass: for each sequence some tokens in a row, most often one."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

import torch

from pdmesh.engine.kv_cache.block_pool import num_blocks_for
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.scheduler.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens at positions `first` on; what stands before them is in the pool, and their slots are in the sequence's blocks."""

    sequence: Sequence
    first: int
    token_ids: tuple[int, ...]
    num_rows: int  # of the last tokens: their logits are wanted

    @property
    def end(self) -> int:
        return self.first + len(self.token_ids)

    def slots(self, block_size: int) -> list[int]:
        block_ids = self.sequence.block_ids
        return [block_ids[p // block_size] * block_size + p % block_size for p in range(self.first, self.end)]


def batch_of(chunks: Sequence_[Chunk], block_size: int) -> StepBatch:
    """The flat batch of chunks, in their order, in host memory."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    query_starts = [0]
    for chunk in chunks:
        token_ids += chunk.token_ids
        positions += range(chunk.first, chunk.end)
        slots += chunk.slots(block_size)
        query_starts.append(len(token_ids))
        rows += range(len(token_ids) - chunk.num_rows, len(token_ids))
    return StepBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_starts=query_starts,
        context_lens=[chunk.end for chunk in chunks],
        block_tables=[chunk.sequence.block_ids[: num_blocks_for(chunk.end, block_size)] for chunk in chunks],
        logits_rows=torch.tensor(rows, dtype=torch.int64),
    )
