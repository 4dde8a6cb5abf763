"""Shapes of the models that are measured, and how much of each: in full, or so little that Triton's interpreter bears it.

The shapes are those of the models' published config.json. Weights are random, so no text comes out; times of dense kernels do not
depend on the weights' values, beyond the few percent by which random operands draw more power than zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdmesh.engine.hardware import ModelCost
from pdmesh.engine.kernels.triton.split_kv import Splits
from pdmesh.engine.models.config import ModelConfig

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
        return ModelConfig.from_dict(self.models[model])

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
