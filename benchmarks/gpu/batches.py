"""Prompts and steps whose numbers follow from their lengths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.shapes import Heads
from pdmesh.engine.kernels.triton.metadata import StepMetadata
from pdmesh.engine.runner.batch import StepBatch
from tests.support.random_weights import generator_of

# Random keys and values in a paged pool whose blocks lie scattered, and the same in one piece for those who want them so.


BLOCK_SIZE = 16


@dataclass(frozen=True)
class Sequence:
    """One sequence of `context` tokens, of which the last `queries` are computed now."""

    heads: Heads
    query: Tensor  # [queries, num_heads, head_dim]
    kv: Tensor  # [2, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]
    table: list[int]
    context: int

    @classmethod
    def random(cls, heads: Heads, context: int, queries: int, device: str, dtype: torch.dtype) -> Sequence:
        num_blocks = -(-context // BLOCK_SIZE)
        generator = generator_of(f"{heads} {context} {queries}", device)
        shape = (2, num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        kv = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        query = torch.randn((queries, heads.num_heads, heads.head_dim), generator=generator, device=device, dtype=dtype)
        table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(context)).tolist()
        return cls(heads, query, kv, table, context)

    def meta(self) -> StepMetadata:
        return StepMetadata.of(self._batch(), self.query.device)

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query [1, num_heads, Q, D], keys and values [1, num_kv_heads, K, D] as torch's attention takes them."""
        rows = torch.tensor(self.table, device=self.kv.device)
        key, value = (x.index_select(0, rows).flatten(0, 1)[: self.context].transpose(0, 1)[None].contiguous() for x in self.kv)
        return self.query.transpose(0, 1)[None].contiguous(), key, value

    def _batch(self) -> StepBatch:
        queries = self.query.shape[0]
        positions = torch.arange(self.context - queries, self.context)
        return StepBatch(
            token_ids=torch.zeros(queries, dtype=torch.int64),
            positions=positions,
            slot_mapping=torch.tensor(self.table)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            query_starts=[0, queries],
            context_lens=[self.context],
            block_tables=[self.table],
            logits_rows=torch.arange(queries),
        )


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
