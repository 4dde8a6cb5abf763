"""Bytes and operations of what is measured, from shapes alone; a multiplication and an addition are two operations.

    decode step   bytes       weights of the maps and the head, once  +  keys and values of every sequence's context, once
    prefill       operations  2 * weights of the maps * tokens  +  2 * weights of the head  +  attention over n^2 / 2 pairs

A step also reads one row of embeddings a sequence and writes its keys and values: less than a thousandth, left out.
"""

from __future__ import annotations

from benchmarks.gpu.shapes import Heads
from pdmesh.engine.hardware import ModelCost
from pdmesh.engine.kernels.triton.split_kv import Splits


def decode_bytes(cost: ModelCost, contexts: list[int]) -> int:
    """Of one step in which these sequences attend to so many tokens each."""
    return cost.weight_bytes + cost.kv_bytes_per_token * sum(contexts)


def prefill_operations(cost: ModelCost, num_tokens: int) -> float:
    """Of a prompt from its first token, with the logits of the last one."""
    pairs = num_tokens * (num_tokens + 1) / 2
    return 2.0 * (cost.num_weights * num_tokens + cost.num_head_weights) + cost.attention_operations * pairs


def attention_bytes(heads: Heads, context: int, item_size: int, splits: Splits) -> int:
    """Of one layer and one query: keys and values read; parts written and read again where keys are split."""
    parts = splits.num_splits(context)
    merged = 2 * 4 * heads.num_heads * (heads.head_dim + 2) * parts if parts > 1 else 0
    return 2 * context * heads.num_kv_heads * heads.head_dim * item_size + merged


def causal_operations(heads: Heads, num_tokens: int) -> float:
    """Of one layer's attention among so many tokens: each sees itself and what is before it."""
    return 4.0 * heads.num_heads * heads.head_dim * num_tokens * (num_tokens + 1) / 2


def product_operations(rows: int, inner: int, columns: int) -> float:
    return 2.0 * rows * inner * columns
