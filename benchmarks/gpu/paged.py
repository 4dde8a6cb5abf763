"""Random keys and values in a paged pool whose blocks lie scattered, and the same in one piece for those who want them so."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.drawn import generator_of
from benchmarks.gpu.shapes import Heads
from pdmesh.engine.kernels.triton.metadata import StepMetadata
from pdmesh.engine.runner.batch import StepBatch

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
