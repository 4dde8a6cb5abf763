"""What steps take of the device's memory beside weights and pool: counted before the pool is sized, so that it leaves room.

    activations     of the widest step, launched one by one: what lives at once within a layer
    graphs          the decode buckets' logits, which stay; buffers between pieces; the graphs themselves
    attention       parts of split queries
    a draw          logits, rounded and wide, and the sampler's buffers
    expanded        one map of quantized weights, for more rows than the kernels on words take; once more where graphs hold one
    rounded         activations in fp8 and a product that is not yet what it will be, where products round them

Upper bounds of what is allocated, but for two guesses that nobody has measured: NODE_BYTES for a launch in a graph, and
OTHERS_BYTES for code of kernels and room of libraries. How much graphs took is logged at start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.engine.config import EngineConfig
from pdmesh.engine.kernels.triton.sampling_history import MOST_ROWS
from pdmesh.engine.kernels.triton.split_bounds import SplitBounds
from pdmesh.engine.kernels.triton.split_kv import Splits
from pdmesh.engine.models.config import ModelConfig

NODE_BYTES = 16 << 10
OTHERS_BYTES = 256 << 20
LAUNCHES_PER_LAYER = 11
EXPANDED_FROM = 129  # rows: above TILE_ROWS_MAX of weight_product.py
WIDE_EXPANDED_FROM = 5  # of float32, which tiles do not take: above the fewest of VECTOR_ROWS there
_SCRATCH_BYTES = 12  # of the sampler, for a row and token of the vocabulary
_LOGIT_BYTES = 4
_SELECTED_BYTES = 28  # of a row whose log-probabilities are wanted: those, logits once more, keys of 8 bytes, what makes them


@dataclass(frozen=True)
class StepBounds:
    """The most that a step has. `num_rows` of logits; `max_context` of a sequence in tokens."""

    num_tokens: int
    num_rows: int
    max_context: int


@dataclass(frozen=True)
class StepMemory:
    """Of one model. `itemsize` of activations; `is_expanded`: its weights are held in words; `is_rounded`: activations of wide
    products are rounded to fp8."""

    config: ModelConfig
    itemsize: int
    is_expanded: bool
    splits: Splits
    row_buckets: Sequence[int]
    token_buckets: Sequence[int]
    is_rounded: bool = False

    def num_bytes(self, bounds: StepBounds) -> int:
        return OTHERS_BYTES + self._draw(bounds.num_rows) + self.draft_bytes(bounds)

    def draft_bytes(self, bounds: StepBounds) -> int:
        """Of a model that drafts beside another: its draws are made in the other's buffers."""
        expanded = self._expanded(bounds.num_tokens, bounds.num_rows)
        split_tokens = SplitBounds.of(self.config.num_heads, bounds.num_rows).num_tokens
        parts = self._parts(min(split_tokens, bounds.num_tokens), bounds.max_context)
        return self.activations(bounds.num_tokens) + parts + expanded + self.graphs(bounds.max_context)

    def activations(self, num_tokens: int) -> int:
        """Residuals, queries and what is attended stay; beside them either all heads or the wide half of a layer."""
        config = self.config
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        widest = max(query + 2 * kv, 3 * config.intermediate_size)
        a_token = (4 * config.hidden_size + 2 * query + widest) * self.itemsize
        return num_tokens * (a_token + (self._rounded(query) if self.is_rounded and num_tokens >= EXPANDED_FROM else 0))

    def _rounded(self, query: int) -> int:
        """Of a token: codes of a product's input and their scale; half of gate and up in bfloat16 beside what becomes of it."""
        config = self.config
        return max(config.hidden_size, query, config.intermediate_size) + 4 + config.intermediate_size * self.itemsize

    def graphs(self, max_context: int) -> int:
        """Those of decode steps keep their logits and have parts of their own; those between attentions keep what the last one
        hands on. All compute in the memory of the widest, which is not that of steps without graphs."""
        config, buckets = self.config, (*self.row_buckets, *self.token_buckets)
        nodes = len(buckets) * LAUNCHES_PER_LAYER * (config.num_layers + 1)
        outputs = sum(self.row_buckets) * (config.vocab_size * _LOGIT_BYTES + config.hidden_size * self.itemsize)
        handed_on = sum(self.token_buckets) * config.hidden_size * self.itemsize
        most_rows = max(self.row_buckets, default=0)
        pool = self.activations(max(buckets, default=0)) + most_rows * config.vocab_size * self.itemsize
        pool += self._expanded(max(buckets, default=0), most_rows)  # between attentions no head is multiplied
        return nodes * NODE_BYTES + outputs + handed_on + pool + self._parts(most_rows, max_context)

    def _parts(self, num_queries: int, max_context: int) -> int:
        config = self.config
        return num_queries * config.num_heads * self.splits.bound(max_context) * (config.head_dim + 2) * 4

    def _draw(self, num_rows: int) -> int:
        """Counts for penalties as well, and what log-probabilities are selected with, should all rows want them."""
        rows = 1 << max(0, num_rows - 1).bit_length()
        counts = 4 * max(MOST_ROWS, rows)
        a_row = _LOGIT_BYTES + self.itemsize + _SELECTED_BYTES
        return self.config.vocab_size * (num_rows * a_row + rows * _SCRATCH_BYTES + counts)

    def _expanded(self, num_tokens: int, num_rows: int) -> int:
        """The largest map that so many tokens, or rows of logits, are multiplied with unpacked."""
        config, fewest = self.config, EXPANDED_FROM if self.itemsize == 2 else WIDE_EXPANDED_FROM
        of_layer = 2 * config.intermediate_size if num_tokens >= fewest else 0
        of_head = config.vocab_size if num_rows >= fewest else 0
        return max(of_layer, of_head) * config.hidden_size * self.itemsize if self.is_expanded else 0


def bounds_of(config: EngineConfig, max_context: int) -> StepBounds:
    """Rows: one of each sequence, and one for each token that is guessed."""
    guesses = config.max_num_seqs * config.max_draft_tokens if config.speculation != "none" else 0
    spare = max(0, config.max_num_batched_tokens - config.max_num_seqs)
    return StepBounds(config.max_num_batched_tokens, config.max_num_seqs + min(guesses, spare), max_context)
