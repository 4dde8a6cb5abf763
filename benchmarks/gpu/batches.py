"""Prompts and steps whose numbers follow from their lengths."""

from __future__ import annotations

import torch

from pdmesh.engine.runner.batch import StepBatch


def ragged_prompts(vocab_size: int, length: int) -> list[list[int]]:
    """Five: from one token to twice the length."""
    lengths = [1, length // 2, length, length + 1, 2 * length]
    return [[(7919 * n + 104_729 * i) % vocab_size for i in range(max(1, k))] for n, k in enumerate(lengths)]


def decode_batch(contexts: list[int], block_size: int) -> StepBatch:
    """One token of each sequence, whose blocks follow one another from block 1 on."""
    tables, block = [], 1
    for context in contexts:
        needed = -(-context // block_size)
        tables.append(list(range(block, block + needed)))
        block += needed
    last = [context - 1 for context in contexts]
    slots = [table[p // block_size] * block_size + p % block_size for table, p in zip(tables, last, strict=True)]
    return StepBatch(
        token_ids=torch.arange(len(contexts)),
        positions=torch.tensor(last),
        slot_mapping=torch.tensor(slots),
        query_starts=list(range(len(contexts) + 1)),
        context_lens=list(contexts),
        block_tables=tables,
        logits_rows=torch.arange(len(contexts)),
    )
