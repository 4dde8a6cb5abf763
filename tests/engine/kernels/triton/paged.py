"""Random sequences over a paged pool whose other slots hold NaN, and attention the plain way: what kernels are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.metadata import Capacity, StepMetadata
from pdmesh.engine.kernels.triton.split_kv import SplitBounds
from pdmesh.engine.runner.batch import StepBatch, Tail

FEW = SplitBounds(16, 1 << 20)  # whoever has more queries is walked
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16


@dataclass
class Sequences:
    """Queries, keys and values of sequences (context length, number of queries); a sequence's numbers follow from its seed, the
    places of its blocks from `layout`. `tail`: so many last keys of each lie in reverse, or one in a block of its own."""

    shape: Shape
    lengths: Sequence[tuple[int, int]]
    dtype: torch.dtype = torch.float32
    layout: int = 0
    tail: int = 0
    seeds: Sequence[int] | None = None
    query: Tensor = field(init=False)
    kv: Tensor = field(init=False)
    batch: StepBatch = field(init=False)
    data: list[tuple[Tensor, Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        self.data = [
            _random(shape, *lengths, seed, self.dtype)
            for lengths, seed in zip(self.lengths, self.seeds or range(len(self.lengths)), strict=True)
        ]
        num_blocks = 3 + sum(1 + -(-context // shape.block_size) for context, _ in self.lengths)
        self.kv = torch.full((2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim), float("nan")).to(self.dtype)
        blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(self.layout)).tolist()
        tables, tails, slots = [], {}, []
        for index, ((context, queries), (_, key, value)) in enumerate(zip(self.lengths, self.data, strict=True)):
            table = [blocks.pop() for _ in range(-(-context // shape.block_size))]
            places = [table[p // shape.block_size] * shape.block_size + p % shape.block_size for p in range(context)]
            if tail := min(self.tail, context):
                elsewhere = [blocks.pop() * shape.block_size] if tail == 1 else places[-tail:][::-1]
                places[-tail:] = elsewhere
                tails[index] = Tail(context - tail, elsewhere)
            self.kv[0].flatten(0, 1)[places] = key
            self.kv[1].flatten(0, 1)[places] = value
            tables.append(table)
            slots += places[context - queries :]
        self.query = torch.cat([query for query, _, _ in self.data]).to(DEVICE)
        self.kv = self.kv.to(DEVICE)
        self.batch = _batch(self.lengths, tables, tails, slots)

    def meta(self, capacity: Capacity | None = None) -> StepMetadata:
        return StepMetadata.of(self.batch, DEVICE, capacity or self.capacity())

    def capacity(self, bounds: SplitBounds = FEW) -> Capacity:
        return Capacity.of(self.batch, bounds)

    def naive(self, window: int | None = None, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
        """[T, num_heads, head_dim] float32: softmax over the visible keys, in float64."""
        each = [naive_attention(*data, window, softcap, sinks) for data in self.data]
        return torch.cat(each or [torch.empty(0)]).to(DEVICE)


def _random(shape: Shape, context: int, queries: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    heads = torch.randn((context, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim), generator=generator).to(dtype)
    query, key, value = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
    return query[context - queries :], key, value


def naive_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """query [Q, H, D], the last of the positions of key and value [K, KVH, D]."""
    queries, context, group = query.shape[0], key.shape[0], query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * query.shape[2] ** -0.5
    scores = (scores / softcap).tanh() * softcap if softcap else scores
    distance = (torch.arange(queries) + context - queries)[:, None] - torch.arange(context)
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    scores = scores.masked_fill(hidden, float("-inf"))
    beside = (
        torch.empty((query.shape[1], queries, 0)) if sinks is None else sinks.double().cpu()[:, None, None].expand(-1, queries, 1)
    )
    weights = torch.cat((scores, beside), 2).softmax(-1)[:, :, :context]
    return torch.einsum("hqk,khd->qhd", weights, value).float()


def _batch(lengths: Sequence[tuple[int, int]], tables: list[list[int]], tails: dict[int, Tail], slots: list[int]) -> StepBatch:
    num_tokens = sum(queries for _, queries in lengths)
    return StepBatch(
        token_ids=torch.arange(num_tokens),
        positions=torch.tensor([p for context, queries in lengths for p in range(context - queries, context)], dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_starts=[0, *accumulate(queries for _, queries in lengths)],
        context_lens=[context for context, _ in lengths],
        block_tables=tables,
        logits_rows=torch.arange(num_tokens),
        tails=tails,
    )
