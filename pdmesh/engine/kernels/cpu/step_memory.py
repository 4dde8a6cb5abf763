"""The memory of a step's buffers in the CPU kernels, from shapes alone: buffers.h and `reserve` in step.cpp.

Not counted: results of attention whose contexts are split, at most kMostPartialRows (attention_plan.h) rows of a head's values,
or what a few sequences have that are split to occupy all threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdmesh.adapter_id import MAX_RANK
from pdmesh.engine.kernels.cpu.model import PackedExperts, PackedLayer, PackedLinear, PackedMLP, PackedWeights
from pdmesh.engine.models.config import ModelConfig

_FLOAT, _OUTLIERS_BYTES, _PAIR_BYTES = 4, 40, 20
_FEW_ROWS, _SPARE_ROWS, _ALL = 3, 32, 2**31
_PANEL, _ITEM_ROWS = 16, 96
_BYTES_OF_ROWS = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 1}


@dataclass(frozen=True)
class StepBuffers:
    """Count the bytes of a step of `num_tokens` tokens and `num_rows` rows of logits on so many threads; with those on borrowed
    cores there may be `max_threads` (0: as many)."""

    config: ModelConfig
    weights: PackedWeights
    num_tokens: int
    num_rows: int
    num_threads: int
    max_threads: int = 0
    has_adapters: bool = False  # counted for the largest rank that an adapter may have

    def num_bytes(self) -> int:
        """Return the bytes of all buffers, with the logits."""
        layers = self.weights.layers
        floats = self.num_tokens * (self._states() + self._attention())
        mixed = max((self._mixed(layer.mlp) for layer in layers if isinstance(layer.mlp, PackedExperts)), default=0)
        inner = max(rows * _padded(mlp.down.num_inputs) for layer in layers for mlp, rows in self._mlps(layer))
        logits = self.num_rows * self.config.vocab_size
        spare = _SPARE_ROWS * (self._query_width() + 1)
        return (
            (floats + inner + logits + spare) * _FLOAT + mixed + self._prepared() + (self._adapted() if self.has_adapters else 0)
        )

    @property
    def _most_threads(self) -> int:
        return max(self.num_threads, self.max_threads)

    def _states(self) -> int:
        """Return the floats of a token beside attention and MLP: its state and what is added to it, queries, keys and values."""
        config, first = self.config, self.weights.layers[0]
        is_added_at_once = not config.parallel and not config.post_norm and config.residual_multiplier == 1.0
        return _padded(config.hidden_size) * (1 if is_added_at_once else 2) + _padded(first.qkv.num_outputs)

    def _attention(self) -> int:
        """Return the floats of a token's queries and their scales, and of what attention gives, also as multiplied by a latent's
        maps."""
        config, latent = self.config, self.config.latent
        if latent is None:
            return 2 * config.num_heads * config.head_dim + config.num_heads
        queries = _padded(config.num_heads * (latent.nope_dim + latent.rope_dim)) if latent.query_rank else 0
        values = _padded(config.num_heads * latent.value_dim)
        return config.num_heads * (latent.width + 2 * latent.kv_rank + 1) + queries + values

    def _query_width(self) -> int:
        """Return the numbers of a query, which are as many as attention multiplies with a key."""
        latent = self.config.latent
        return self.config.head_dim if latent is None else latent.kv_rank + latent.rope_dim

    def _mixed(self, experts: PackedExperts) -> int:
        """Return the bytes around a mixture: the router's logits, each chosen expert's contribution, and their sum."""
        hidden, pairs = _padded(self.config.hidden_size), self.num_tokens * experts.config.top_k
        floats = self.num_tokens * (_padded(experts.router.num_outputs) + hidden) + pairs * hidden
        return floats * _FLOAT + pairs * _PAIR_BYTES

    def _adapted(self) -> int:
        """Return the bytes of what adapters read and add (adapters.h): rows in float32, A x of three maps, tiles."""
        products = [linear for linear, _ in self._products()]
        inputs = max(_padded(linear.num_inputs) for linear in products)
        panels = max(linear.num_outputs for linear in products) // _PANEL // self.num_threads + 4
        tile = min(self.num_tokens, _ITEM_ROWS) * panels * _PANEL
        return (self.num_tokens * (inputs + 3 * MAX_RANK) + self._most_threads * (_FEW_ROWS * inputs + tile)) * _FLOAT

    def _prepared(self) -> int:
        """Return the bytes of rows that are rounded to the format of their product's weights: one buffer for all products, and
        one for each thread with a few rows. Each has room for a row's norm."""
        products = list(self._products())
        shared, own = ([_row_parts(linear, min(rows, most)) for linear, rows in products] for most in (_ALL, _FEW_ROWS))
        room = max(2 * _padded(linear.num_inputs) + 16 for linear, _ in products) * _FLOAT
        return _most(shared) + room + self._most_threads * (_most(own) + room)

    def _products(self) -> Iterator[tuple[PackedLinear, int]]:
        """Give every map with its rows."""
        for layer in self.weights.layers:
            yield from ((linear, self.num_tokens) for linear in (layer.qkv, layer.output))
            yield from ((linear, rows) for mlp, rows in self._mlps(layer) for linear in mlp.linears)
            if isinstance(layer.mlp, PackedExperts):
                yield layer.mlp.router, self.num_tokens
            if layer.latent is not None:
                each_head = self.num_tokens * self.config.num_heads
                yield from ((maps[0], each_head) for maps in (layer.latent.key_maps, layer.latent.value_maps))
                if layer.latent.queries is not None:
                    yield layer.latent.queries, self.num_tokens
        yield self.weights.head, self.num_tokens

    def _mlps(self, layer: PackedLayer) -> Iterator[tuple[PackedMLP, int]]:
        """Give a layer's MLPs with their rows; experts have one size."""
        if isinstance(layer.mlp, PackedMLP):
            yield layer.mlp, self.num_tokens
            return
        yield layer.mlp.experts[0], self.num_tokens * layer.mlp.config.top_k
        if layer.mlp.shared is not None:
            yield layer.mlp.shared, self.num_tokens


def _most(parts: Sequence[tuple[int, int, int]]) -> int:
    """Return the sum of each part's largest."""
    return sum(max(each) for each in zip(*parts, strict=True))


def _row_parts(linear: PackedLinear, num_rows: int) -> tuple[int, int, int]:
    """Return the bytes of a product's rows, of their scales and sums, and of their outliers."""
    stride = -(-linear.num_inputs * _BYTES_OF_ROWS[linear.format] // 64) * 64 | 64
    num_rows += _SPARE_ROWS
    groups = linear.num_inputs // linear.group if linear.format == "int4" else 1
    return stride * num_rows, 2 * _FLOAT * groups * num_rows, _OUTLIERS_BYTES * num_rows


def _padded(width: int) -> int:
    return -(-width // 16) * 16
