"""Attention over the paged pool, behind one interface: a new backend is one new file and one line in `BACKENDS`.

`plan()` once per step turns block tables into the indices of the backend's kernels; `run()` is called once per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.layers import ROW_MULTIPLE
from pdmesh.engine.runner.batch import StepBatch, Tail

# The reference attention: plain torch over the paged pool, a chunk of keys at a time with an online softmax
# (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022, algorithm 1), in float32.
#
# Bits: a query's result depends on its own keys alone, never on the batch, the chunking of its prompt or where its blocks lie:
# - keys are taken in chunks that start at fixed positions (0, 128, 256, ...), always of full width, and accumulated in
#   order: no other split and no other width of a product exists;
# - keys that a query may not see get probability exactly 0, so a chunk without visible keys changes nothing, and it does not
#   matter whether it is skipped (another query's horizon decides that) or computed;
# - query rows are padded to a multiple of 4. That a product's bits do not depend on the number of its rows then is a property of
#   the library, measured for MKL with float32 (up to 1536 rows, 1 to 4 threads); tests compare with torch.equal. (Products of
#   several widths would not do: MKL splits sums longer than 192 by their length.) cuBLAS promises less: on CUDA equality across
#   batches is likely, not guaranteed.
#
# Rows of one query (decode) are batched over sequences; a chunk of several queries is attended for its sequence alone.
# Query heads that share a key/value head are rows of one product: keys are never repeated.


CHUNK_KEYS = 128
# Below every score, yet finite: exp(masked - LOWEST) and exp(LOWEST - score) are 0, never NaN.
LOWEST_MAX = -1e30


class ReferenceAttention:
    name = "reference"

    def __init__(self, config: ModelConfig, device: str, sinks: Sequence[Tensor] = ()) -> None:
        """`sinks`: the logits [num_heads] of each layer's, of a model that has attention sinks."""
        self.config, self.device, self.sinks = config, device, sinks

    def plan(self, batch: StepBatch, block_size: int) -> ReferencePlan:
        lengths = [end - start for start, end in pairwise(batch.query_starts)]
        # Longest first: the sequences that still have keys in a later chunk are then the first ones.
        decode = sorted((b for b, length in enumerate(lengths) if length == 1), key=lambda b: -batch.context_lens[b])
        groups = [decode] if decode else []
        groups += [[b] for b, length in enumerate(lengths) if length > 1]
        tables = [torch.tensor(table, dtype=torch.int64) for table in batch.block_tables]
        return ReferencePlan(
            self.config,
            batch.slot_mapping.to(self.device),
            {
                window: [self._plan_group(batch, members, tables, block_size, window) for members in groups]
                for window in dict.fromkeys(self.config.windows)
            },
            self.sinks,
        )

    def _plan_group(
        self, batch: StepBatch, members: list[int], tables: list[Tensor], block_size: int, window: int | None
    ) -> Group:
        """Group `members`, sequences with equally many queries, longest context first."""
        num_queries = batch.query_starts[members[0] + 1] - batch.query_starts[members[0]]
        contexts = torch.tensor([batch.context_lens[b] for b in members])
        positions = contexts[:, None] - num_queries + torch.arange(num_queries)  # [num_seqs, num_queries]
        lowest = int(positions.min())
        first = 0 if window is None else _first_seen(lowest, window, chunked=self.config.chunked) // CHUNK_KEYS
        chunks = []
        for start in range(first * CHUNK_KEYS, int(contexts[0]), CHUNK_KEYS):
            keys = torch.arange(start, start + CHUNK_KEYS)
            present = members[: int((contexts > start).sum())]
            slots = torch.stack(
                [_slots(tables[b], keys.clamp(max=batch.context_lens[b] - 1), block_size, batch.tails.get(b)) for b in present]
            )
            mask = _mask(positions[: len(present)], keys, window, chunked=self.config.chunked)
            chunks.append(KeyChunk(len(present), self._rows(slots).flatten().to(self.device), mask.to(self.device)))
        tokens = torch.cat([torch.arange(batch.query_starts[b], batch.query_starts[b + 1]) for b in members])
        return Group(tokens.to(self.device), len(members), num_queries, tuple(chunks))

    def _rows(self, slots: Tensor) -> Tensor:
        """slots [num_seqs, CHUNK_KEYS] -> [num_seqs, num_kv_heads, CHUNK_KEYS]: the row of each head's key, see KeyChunk."""
        return slots[:, None, :] * self.config.pool_heads + torch.arange(self.config.pool_heads)[:, None]


@dataclass(frozen=True)
class KeyChunk:
    """One chunk of keys for the group's first `num_seqs` sequences."""

    num_seqs: int
    rows: Tensor  # [num_seqs * num_kv_heads * CHUNK_KEYS] int64: rows of the pool seen as [num_slots * num_kv_heads, head_dim]
    mask: Tensor  # [num_seqs, 1, num_queries, 1, CHUNK_KEYS] float32: 0 where the query sees the key, else -inf


@dataclass(frozen=True)
class Group:
    """Sequences with equally many queries in this step."""

    tokens: Tensor  # [num_seqs * num_queries] int64: rows of the step's tokens
    num_seqs: int
    num_queries: int
    chunks: tuple[KeyChunk, ...]


@dataclass(frozen=True)
class ReferencePlan:
    config: ModelConfig
    slots: Tensor  # [T] int64
    groups: dict[int | None, list[Group]]  # by sliding window
    sinks: Sequence[Tensor] = ()  # [num_heads] for each layer, of a model that has them

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kv: Tensor) -> Tensor:
        """See `AttentionPlan.run`."""
        keys, values = kv[layer, 0], kv[layer, 1]
        keys.flatten(0, 1).index_copy_(0, self.slots, key)
        values.flatten(0, 1).index_copy_(0, self.slots, value)
        return self._attended(layer, query, keys, values)

    def _attended(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        latent, sinks = self.config.latent, self.sinks[layer] if self.sinks else None
        result = query.new_empty((*query.shape[:2], latent.kv_rank)) if latent else torch.empty_like(query)
        for group in self.groups[self.config.windows[layer]]:
            attended = _attend(group, query[group.tokens], keys.flatten(0, 2), values.flatten(0, 2), self.config, sinks)
            result[group.tokens] = attended.to(query.dtype)
        return result


def _attend(
    group: Group, query: Tensor, keys: Tensor, values: Tensor, config: ModelConfig, sinks: Tensor | None = None
) -> Tensor:
    """query [num_seqs * num_queries, num_heads, head_dim]; keys, values [num_slots * num_kv_heads, head_dim].

    Returns the same shape as query (of a latent: as wide as its values), float32. In the products a row is one query of one
    head of one group; the batch is sequences x key/value heads.
    """
    heads, queries = config.pool_heads, group.num_queries
    rows = queries * (config.num_heads // heads)
    packed = _pack_queries(group, query, config)  # [num_seqs, heads, rows padded, dim], scaled
    width = config.latent.kv_rank if config.latent else config.head_dim
    peak = packed.new_full((*packed.shape[:3], 1), LOWEST_MAX)
    total, acc = torch.zeros_like(peak), packed.new_zeros((*packed.shape[:3], width))
    if sinks is not None:  # a key that every query sees, with a value of zeros
        own = sinks.float().view(heads, 1, -1).expand(heads, queries, -1).reshape(heads, rows, 1)
        peak[:, :, :rows], total[:, :, :rows] = own, 1.0
    for chunk in group.chunks:
        n, shape = chunk.num_seqs, (chunk.num_seqs * heads, CHUNK_KEYS, config.pool_dim)
        k = keys.index_select(0, chunk.rows).view(shape).float()
        v = values.index_select(0, chunk.rows).view(shape).float()
        if config.latent:  # the pool holds its halves; values are a part of the keys
            k = torch.cat((k, v), dim=2)
            v = k[:, :, :width].contiguous()
        scores = torch.bmm(packed[:n].flatten(0, 1), k.transpose(1, 2)).view(n, heads, -1, CHUNK_KEYS)
        if config.attention_softcap:
            scores = (scores / config.attention_softcap).tanh_().mul_(config.attention_softcap)
        scores[:, :, :rows].view(n, heads, queries, -1, CHUNK_KEYS).add_(chunk.mask)
        new_peak = torch.maximum(peak[:n], scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_peak).exp_()
        decay = (peak[:n] - new_peak).exp_()
        total[:n] = total[:n] * decay + weights.sum(-1, keepdim=True)
        acc[:n] = acc[:n] * decay + torch.bmm(weights.flatten(0, 1), v).view(n, heads, -1, width)
        peak[:n] = new_peak
    attended = (acc / total)[:, :, :rows].view(group.num_seqs, heads, queries, -1, width)
    return attended.transpose(1, 2).reshape(*query.shape[:2], width)


def _pack_queries(group: Group, query: Tensor, config: ModelConfig) -> Tensor:
    """[num_seqs * num_queries, num_heads, dim] -> [num_seqs, num_kv_heads, rows, dim] float32, scaled; rows a multiple of 4."""
    seqs, queries, heads, dim = group.num_seqs, group.num_queries, config.pool_heads, query.shape[2]
    groups = config.num_heads // heads
    rows = queries * groups
    packed = query.new_zeros((seqs, heads, rows + -rows % ROW_MULTIPLE, dim), dtype=torch.float32)
    split = query.view(seqs, queries, heads, groups, dim).transpose(1, 2)
    packed[:, :, :rows].view(split.shape).copy_(split)
    return packed.mul_(config.scale)


def _slots(table: Tensor, positions: Tensor, block_size: int, tail: Tail | None) -> Tensor:
    """Slots of key positions, which ascend. Callers clamp positions to the context: what is masked is then read from the
    sequence's own keys, not from a slot that may hold anything (0 * NaN is NaN)."""
    if tail is not None and positions[-1] >= tail.first:
        before, behind = positions[positions < tail.first], positions[positions >= tail.first]
        return torch.cat((_slots(table, before, block_size, None), torch.tensor(tail.slots)[behind - tail.first]))
    return table[positions // block_size] * block_size + positions % block_size


def _first_seen(position: int, window: int, *, chunked: bool) -> int:
    """Return the first position that a query sees: of the last `window`, or of its chunk."""
    return position // window * window if chunked else max(position - window + 1, 0)


def _mask(queries: Tensor, keys: Tensor, window: int | None, *, chunked: bool = False) -> Tensor:
    """queries [B, Q], keys [K] positions -> [B, 1, Q, 1, K]: a query sees itself and the positions before it, within the window
    or its chunk."""
    distance = queries[:, :, None] - keys
    reach = queries[:, :, None] % window + 1 if window is not None and chunked else window
    hidden = distance < 0 if reach is None else (distance < 0) | (distance >= reach)
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, :, None, :]


class AttentionPlan(Protocol):
    """Compute the attention of one step, and of that step only."""

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kv: Tensor) -> Tensor:
        """Write the step's keys and values to the pool, then attend.

        query [T, num_heads, head_dim]; key, value [T, num_kv_heads, head_dim]; kv the pool (`KVPool.tensor`).
        Returns [T, num_heads, head_dim] in query's dtype. Of latent attention, query is [T, num_heads, width], key and value are
        the latent's halves [T, 1, width / 2], and the result [T, num_heads, kv_rank].
        """


class AttentionBackend(Protocol):
    name: str  # part of the numeric mode

    def plan(self, batch: StepBatch, block_size: int) -> AttentionPlan: ...


def _triton(config: ModelConfig, device: str) -> AttentionBackend:
    from pdmesh.engine.kernels.triton.attention import TritonAttention  # triton is not installed everywhere

    return TritonAttention(config, device)


BACKENDS: dict[str, Callable[[ModelConfig, str], AttentionBackend]] = {
    "reference": ReferenceAttention,
    "triton": _triton,
}


def make_attention(name: str, config: ModelConfig, device: str, sinks: Sequence[Tensor] = ()) -> AttentionBackend:
    """Return the registered backend; only the reference computes attention sinks. Raises ValueError for a name that is not
    registered."""
    if sinks:
        return ReferenceAttention(config, device, sinks)
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is not known; there are {', '.join(BACKENDS)}")
    return BACKENDS[name](config, device)
