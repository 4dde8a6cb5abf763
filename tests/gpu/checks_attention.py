"""Attention over ragged batches against the engine's reference, which computes in float32 with torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.shapes import Heads
from pdmesh.engine.attention.base import ReferenceAttention
from pdmesh.engine.kernels.triton.attention import TritonAttention
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.runner.batch import StepBatch
from tests.gpu.checks import Check, random
from tests.gpu.compare import relative_error

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
BLOCK_SIZE = 16
# (context, queries): one token, the ends of blocks and of splits, a chunk behind others, a whole prompt.
LENGTHS = [(1, 1), (256, 1), (257, 1), (40, 18), (900, 16), (130, 130)]
LONG = [(20_000, 1), (16_400, 9), (3000, 700)]


def attention_checks(context: Context) -> Iterator[tuple[str, Check]]:
    lengths = LENGTHS + (LONG if context.device != "cpu" else [])
    for model, heads in context.scale.heads.items():
        for window in (None, 70):
            name = f"attention, heads of {model}{'' if window is None else f', window {window}'}"
            yield name, lambda c, h=heads, w=window: _attention(c, h, w, lengths)  # type: ignore[misc]


def _attention(context: Context, heads: Heads, window: int | None, lengths: list[tuple[int, int]]) -> float:
    config, batch = _config(context, heads, window), ragged_batch(lengths)
    num_blocks = 1 + max(block for table in batch.block_tables for block in table)
    kv = random(context, "kv", 1, 2, num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    query = random(context, "query", batch.num_tokens, heads.num_heads, heads.head_dim)
    key, value = (random(context, name, batch.num_tokens, heads.num_kv_heads, heads.head_dim) for name in ("key", "value"))
    plans = [attention(config, context.device).plan(batch, BLOCK_SIZE) for attention in (TritonAttention, ReferenceAttention)]
    found, expected = (plan.run(0, query, key, value, kv.clone()) for plan in plans)
    starts = batch.query_starts
    worst = max(relative_error(found[a:b], expected[a:b]) for a, b in pairwise(starts))
    return worst / TOLERANCE[context.dtype]


def _config(context: Context, heads: Heads, window: int | None) -> ModelConfig:
    return replace(
        context.scale.config("8B"),
        num_layers=1,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        windows=(window,),
    )


def ragged_batch(lengths: list[tuple[int, int]]) -> StepBatch:
    """Blocks lie scattered, as after a while of serving."""
    needed = [-(-context // BLOCK_SIZE) for context, _ in lengths]
    blocks = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(3)).tolist()
    tables = [[blocks.pop() for _ in range(count)] for count in needed]
    positions = [list(range(context - queries, context)) for context, queries in lengths]
    slots = [t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for t, ps in zip(tables, positions, strict=True) for p in ps]
    flat = torch.tensor([p for ps in positions for p in ps])
    return StepBatch(
        token_ids=torch.zeros_like(flat),
        positions=flat,
        slot_mapping=torch.tensor(slots),
        query_starts=[0, *accumulate(queries for _, queries in lengths)],
        context_lens=[context for context, _ in lengths],
        block_tables=tables,
        logits_rows=torch.arange(len(flat)),
    )
