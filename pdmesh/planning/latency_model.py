"""Predicts the time of an engine step from its work, and from that the times of a prompt and a token. Pure.

A step's time is linear in its work (`docs/latency_model.md` says how well that fits):

    fixed + prefill token · tokens + prefill context · Σ contexts of those tokens        the chunk of prompts in the step
          + sequence · sequences + context token · Σ contexts of those sequences         the decode rows in the step

The same five numbers describe a step of prompts, one of decode rows and a mixed one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Work(NamedTuple):
    """Describe the work of one step. A token's context is the number of tokens that it attends to, itself included.

    `prefill_context` sums the contexts of the prompt tokens in the step, `decode_context` those of the decoding rows."""

    prefill_tokens: int = 0
    prefill_context: int = 0
    num_decoding: int = 0
    decode_context: int = 0


def prefill_context(first: int, last: int) -> int:
    """Return the sum of the contexts of the prompt tokens `first` to `last` (from 0, `last` excluded)."""
    return (last * (last + 1) - first * (first + 1)) // 2


@dataclass(frozen=True)
class LatencyModel:
    """Model one worker's steps, in seconds. `num_steps` it was fitted to: 0 means a prior from hardware and model shape.

    The errors are medians of |predicted - observed| / observed over the latest steps with and without prompt tokens."""

    fixed_s: float
    per_prefill_token_s: float
    per_prefill_context_s: float
    per_sequence_s: float
    per_context_token_s: float
    num_steps: int = 0
    prefill_error: float = 0.0
    decode_error: float = 0.0

    def step_s(self, work: Work) -> float:
        """Return the time of one step."""
        return (
            self.fixed_s
            + self.per_prefill_token_s * work.prefill_tokens
            + self.per_prefill_context_s * work.prefill_context
            + self.per_sequence_s * work.num_decoding
            + self.per_context_token_s * work.decode_context
        )

    def longest_step_s(self, chunk: int) -> float:
        """Return the time of a step that is full of prompt tokens, `chunk` of them, which attend to as many as is usual at
        most."""
        last = max(chunk, int(USUAL_CONTEXT))
        return self.step_s(Work(chunk, prefill_context(last - chunk, last)))

    def prefill_s(self, first: int, last: int, *, chunk: int, num_decoding: int = 0, decode_context: int = 0) -> float:
        """Return the time of the steps that compute a prompt's tokens `first` to `last` (excluded), at most `chunk` tokens in
        each, while `num_decoding` sequences get a token in every step."""
        num_steps = -(-(last - first) // max(1, chunk))
        alone = Work(last - first, prefill_context(first, last), num_steps * num_decoding, num_steps * decode_context)
        return self.step_s(alone) + (num_steps - 1) * self.fixed_s

    def decode_s(self, num_decoding: int, decode_context: int) -> float:
        """Return the time of a step in which sequences only decode: the time of a token."""
        return self.step_s(Work(num_decoding=num_decoding, decode_context=decode_context))


MAX_PER_ROW = 256.0
"""The most tokens of a row that are believed."""


@dataclass(frozen=True)
class Drafts:
    """Describe what speculative decoding makes of a row, a sequence's part of a step: `computed_per_row` tokens are computed for
    it, drafted ones included, and `tokens_per_row` of them are kept. Means, at least 1; 1 and 1: nothing is drafted.

    The engine drafts less the more a row costs (`pdmesh/engine/speculation/policy.py`). Here a batch has all of these drafts or,
    where they would not pay or do not fit into a step, none: that is one of the choices which the engine has."""

    tokens_per_row: float = 1.0
    computed_per_row: float = 1.0

    def added_s(self, model: LatencyModel, num_decoding: float) -> float:
        """Return by how much they lengthen a step: a row more costs what a sequence does, and its context is read once."""
        return model.per_sequence_s * num_decoding * (self.computed_per_row - 1)

    def pay(self, model: LatencyModel, num_decoding: float, decode_s: float, budget: float = math.inf) -> bool:
        """Return whether they bring tokens sooner; `decode_s`: a step without them; `budget`: the most tokens of a step."""
        if num_decoding * self.computed_per_row > budget:
            return False
        return decode_s + self.added_s(model, num_decoding) < self.tokens_per_row * decode_s

    def token_s(self, model: LatencyModel, num_decoding: float, decode_s: float) -> float:
        """Return the time in which each sequence gets a token; `decode_s`: a step without drafts."""
        return min(decode_s, (decode_s + self.added_s(model, num_decoding)) / self.tokens_per_row)


NO_DRAFTS = Drafts()


# The prior of a step's time: operations over operations a second, bytes over bytes a second.


# What real steps reach of measured limits: our own kernels do better, torch does worse.
COMPUTE_EFFICIENCY = 0.5
MEMORY_EFFICIENCY = 0.8
# What a step does besides: planning, sampling, a few launches or calls for each layer; and what each sequence's row adds to that.
OVERHEAD_S = 3e-4
OVERHEAD_PER_LAYER_S = 5e-6
OVERHEAD_PER_SEQUENCE_S = 3e-5
SUMS_PER_LAYER = 2  # over the ranks that share a model, where there are several


@dataclass(frozen=True)
class Hardware:
    """Hold the measured limits of one worker, all its ranks together: operations (a multiplication and an addition are two) and
    bytes a second. `sum_s`: of adding up a few rows over ranks; 0: there is one rank."""

    operations_per_s: float
    bytes_per_s: float
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("operations_per_s", "bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not more than 0")
        if not self.sum_s >= 0:
            raise ValueError(f"sum_s: {self.sum_s} is less than 0")


def distinct_experts(num_experts: int, top_k: int, num_tokens: float) -> float:
    """Return how many of a layer's experts a step of so many tokens reads, as expected where each token chooses `top_k` of them
    by itself and all are as likely: an expert is left out by a token with probability 1 - top_k / num_experts."""
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens) if num_experts else 0.0


USUAL_CONTEXT = 4096.0
"""Where a model with sliding windows is predicted exactly, unless the lengths of requests are known."""


def attended_share(reaches: Sequence[int], num_layers: int, context: float) -> float:
    """Return the share of its context that a token attends to, the mean over layers. `reaches`: for each layer with a window, the
    most tokens that it attends to."""
    if context <= 0:
        return 1.0
    return 1.0 - sum(1.0 - min(1.0, reach / context) for reach in reaches) / num_layers


@dataclass(frozen=True)
class ModelShape:
    """Hold the costs of a model. `attention_operations`: of one token for each token that it attends to, in all layers.
    `reaches`: see `attended_share`."""

    num_layers: int
    num_weights: int  # that each token is multiplied with
    num_head_weights: int  # that each row of logits is multiplied with
    weight_bytes: int  # that each step reads, whatever its tokens: without experts
    kv_bytes_per_token: int
    attention_operations: int
    expert_bytes: int = 0  # of one expert, in all layers that have experts
    num_experts: int = 0
    top_k: int = 0
    reaches: tuple[int, ...] = ()

    def expert_bytes_read(self, num_tokens: float) -> float:
        """Return the bytes of experts that a step of so many tokens reads."""
        return self.expert_bytes * distinct_experts(self.num_experts, self.top_k, num_tokens)


def prior_of(
    hardware: Hardware, shape: ModelShape, *, chunk: int = 1, batch: int = 1, context: float = USUAL_CONTEXT
) -> LatencyModel:
    """Return the prior: a step reads all weights once and multiplies each token with them; a token that attends reads keys and
    values.

    Of experts a step reads those of its tokens, which grow with the tokens ever more slowly. The model is linear: it is exact for
    `batch` sequences and for half as many, and above the curve for fewer; and for a step of `chunk` tokens of prompts. With
    sliding windows attention grows more slowly beyond them: the model is exact for tokens of this `context`."""
    operations_s = hardware.operations_per_s * COMPUTE_EFFICIENCY
    bytes_s = hardware.bytes_per_s * MEMORY_EFFICIENCY
    token_s = 2 * shape.num_weights / operations_s
    layer_s = OVERHEAD_PER_LAYER_S + SUMS_PER_LAYER * hardware.sum_s
    share = attended_share(shape.reaches, shape.num_layers, context)
    base = 2 * shape.expert_bytes_read(batch / 2) - shape.expert_bytes_read(batch)

    def more_s(most: int) -> float:
        return (shape.expert_bytes_read(most) - base) / bytes_s / most

    return LatencyModel(
        fixed_s=(shape.weight_bytes + base) / bytes_s + OVERHEAD_S + layer_s * shape.num_layers,
        per_prefill_token_s=token_s + more_s(chunk),
        # The tokens of a chunk share what is read.
        per_prefill_context_s=share * shape.attention_operations / operations_s,
        per_sequence_s=token_s + more_s(batch) + 2 * shape.num_head_weights / operations_s + OVERHEAD_PER_SEQUENCE_S,
        per_context_token_s=share * (shape.kv_bytes_per_token / bytes_s + shape.attention_operations / operations_s),
    )
