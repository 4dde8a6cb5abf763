"""Shapes of the models that are measured, and how much of each: in full, or so little that Triton's interpreter bears it.

The shapes are those of the models' published config.json. Weights are random, so no text comes out; times of dense kernels do not
depend on the weights' values, beyond the few percent by which random operands draw more power than zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.engine.hardware import ModelCost
from pdmesh.engine.kernels.triton.metadata import StepMetadata
from pdmesh.engine.kernels.triton.split_kv import Splits
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.registry import model_config
from pdmesh.engine.runner.batch import StepBatch
from tests.support.random_weights import generator_of

_LLAMA: Mapping[str, object] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "dtype": "bfloat16",
}
_FULL: Mapping[str, Mapping[str, object]] = {
    "1B": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8B": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
_TINY: Mapping[str, object] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}


@dataclass(frozen=True)
class Heads:
    """Of one layer's attention. A mixture of experts has ordinary attention: only that is measured of Qwen3-30B-A3B."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Scale:
    """How much is computed. Lengths in tokens."""

    dtype: str
    models: Mapping[str, Mapping[str, object]]
    heads: Mapping[str, Heads]
    batches: tuple[int, ...]
    prompt: int
    steps: int  # of decoding that are timed
    greedy_tokens: int
    long_context: int
    short_contexts: tuple[int, ...]  # that do not occupy the chip
    prefill: int
    many: int  # sequences beside continuous batching
    output: int  # tokens of each of them
    single_output: int  # tokens of one sequence beside `generate`
    copy_bytes: int
    product_size: int
    handed_off: int  # bytes of keys and values

    def config(self, model: str) -> ModelConfig:
        return model_config(self.models[model])

    @property
    def max_context(self) -> int:
        """Of engines that decode: room for every case but the prefill's."""
        return max(self.prompt + max(self.steps + 64, self.output, self.single_output), 2 * self.prompt)


FULL = Scale(
    dtype="bfloat16",
    models=_FULL,
    heads={"8B": Heads(32, 8, 128), "1B": Heads(32, 8, 64), "Qwen3-30B-A3B": Heads(32, 4, 128)},
    batches=(1, 32),
    prompt=128,
    steps=200,
    greedy_tokens=64,
    long_context=65_536,
    short_contexts=(1024, 2048, 4096),
    prefill=8192,
    many=32,
    output=1000,
    single_output=256,
    copy_bytes=1 << 32,
    product_size=8192,
    handed_off=10**9,
)
TINY = Scale(
    dtype="float32",
    models={name: {**shape, **_TINY} for name, shape in _FULL.items()},
    heads={"8B": Heads(4, 2, 16), "1B": Heads(4, 2, 16), "Qwen3-30B-A3B": Heads(4, 1, 16)},
    batches=(1, 3),
    prompt=5,
    steps=3,
    greedy_tokens=4,
    long_context=600,
    short_contexts=(40,),
    prefill=24,
    many=3,
    output=4,
    single_output=4,
    copy_bytes=1 << 20,
    product_size=64,
    handed_off=30_000,
)


# Bytes and operations of what is measured, from shapes alone; a multiplication and an addition are two operations.
#
#     decode step   bytes       weights of the maps and the head, once  +  keys and values of every sequence's context, once
#     prefill       operations  2 * weights of the maps * tokens  +  2 * weights of the head  +  attention over n^2 / 2 pairs
#
# A step also reads one row of embeddings a sequence and writes its keys and values: less than a thousandth, left out.


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


# Prompts and steps whose numbers follow from their lengths.


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
