"""Attention over the paged pool in two kernels, flash-decoding and flash prefill (attention_kernels.py draws their tiles).

- split (Dao et al., Flash-Decoding, 2023): sequences with few queries in the step: decode, verification, short chunks. Keys are
  split over programs, the parts merged by a second kernel; a query with one split needs no merge.
- walk (Dao, FlashAttention-2, 2023, algorithm 1): sequences with more. A program holds a tile of queries and walks all keys that
  they see, by position, with what is in the pool already before its own.

Each step decides how many queries are few (split_kv.py): as many as walking would have too few programs for.

Bits: a query's result depends on its own keys alone. Where its keys are split follows from its position (split_kv.py); tiles of
keys lie at multiples of their size; what a query may not see changes no bit; splits are folded in order. The grid,
the batch and the place of blocks decide only which program computes what. Both kernels are written with the same operations in
the same order. So prefill, chunks, verification and decode of a token agree where the matrix product of a tile adds up alike for
either's number of rows. Tests show it in the interpreter (float32 and float16, one shape of heads, splits of 64 keys), and on a
Hopper (float16 and bfloat16, heads of 64, 128 and 256). `invariant=True` gives both kernels the rows and warps of the split
kernel, should a processor differ, at the cost of half the reuse of keys in prefill.

Limits: a decode step reads context * num_kv_heads * head_dim * 2 * itemsize bytes of each sequence and layer, and reads and
writes parts of num_heads * (head_dim + 2) * 4 bytes for each split: at 64 k tokens with 8 key/value heads of 128 and 32 query
heads in bfloat16, 268 MB and 2 MB, so 56 us at 4.8 TB/s. Prefill of n tokens behind m computes 4 * num_heads * head_dim * n *
(m + n / 2) operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.attention_kernels import merge_kernel, split_kernel, walk_kernel
from pdmesh.engine.kernels.triton.kv import check_kv, store_kv
from pdmesh.engine.kernels.triton.latent.attention import LatentCall
from pdmesh.engine.kernels.triton.launching import overlap
from pdmesh.engine.kernels.triton.metadata import Capacity, StepMetadata
from pdmesh.engine.kernels.triton.split_kv import SPLITS, SplitBounds, Splits
from pdmesh.engine.kernels.triton.tiles import Tiles, choose_tiles, padded_dim, shared_bytes
from pdmesh.engine.models.config import LatentConfig, ModelConfig
from pdmesh.engine.runner.batch import StepBatch

# The launches of one step's attention: their arguments are put together once for all layers


TARGET_PROGRAMS = 4096
"""Programs of a split grid: enough that uneven sequences even out over 132 multiprocessors, few enough that those without work
(some 0.1 us each, 132 at a time) cost 3 us."""
MERGE_UNROLL = 8
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def prepared(
    query: Tensor, kv: Tensor, meta: StepMetadata, window: int | None, scores: Scores, kv_scales: Tensor | None, out: Tensor,
    workspace: Workspace, splits: Splits, invariant: bool,
) -> AttentionCall:  # fmt: skip
    """Return the call. Raises ValueError as paged_attention does. `kv` is of any layer, as layers differ only in their
    address."""
    _check(query, kv, meta, kv_scales, window)
    _check_out(out, query)
    if meta.splits_any:
        _check_workspace(workspace, meta, query)
    tiles = _tiles(query, splits, invariant)
    return AttentionCall(query, kv, meta, window, scores, kv_scales is not None, out, workspace, splits, tiles)


@dataclass(frozen=True)
class Scores:
    """Say what becomes of a query's products with keys: `scale` times them, no more than `softcap` either way where it is not 0,
    beside a sink where there are `has_sinks`."""

    scale: float
    softcap: float = 0.0
    has_sinks: bool = False

    @property
    def scale2(self) -> float:
        """Return the scale for scores that are powers of 2, not of e: the hardware's exponential has base 2. With a softcap it is
        of the hyperbolic tangent."""
        return (self.softcap or self.scale) * math.log2(math.e)

    @property
    def cap(self) -> float:
        """Return the factor of products within the hyperbolic tangent."""
        return self.scale / self.softcap if self.softcap else 0.0


class _Launch(NamedTuple):
    """A kernel with its grid, and its arguments except keys, values, their scales and sinks, which differ from layer to layer."""

    start: Callable[..., object]
    behind: tuple[object, ...]
    options: dict[str, object]


@dataclass(frozen=True)
class AttentionCall:
    """Attention of one step, for layers that differ in keys and values alone. The arguments are put together once, because that
    takes Python longer than the launches themselves."""

    query: Tensor
    kv: Tensor
    meta: StepMetadata
    window: int | None
    scores: Scores
    has_scales: bool
    out: Tensor
    workspace: Workspace
    splits: Splits
    tiles: Tiles

    def run(self, keys: Tensor, values: Tensor, kv_scales: Tensor | None, sinks: Tensor | None = None) -> None:
        """Attend to keys, values [num_blocks, block_size, num_kv_heads, head_dim] of a layer. sinks [num_heads]."""
        scales = self.query if kv_scales is None else kv_scales  # a pointer is needed even where nothing is read from it
        sinks = self.query if sinks is None else sinks
        for launch in self._walks:
            launch.start(self.query, keys, values, scales, sinks, *launch.behind, **launch.options)
        for launch in self._merges:
            launch.start(self.workspace.acc, self.workspace.stats, scales, sinks, *launch.behind, **launch.options)

    @cached_property
    def _walks(self) -> tuple[_Launch, ...]:
        """Return the launches that read keys."""
        meta = self.meta
        launches = (self._split if self._splits else None, self._walk if meta.walks_any else None)
        return tuple(launch for launch in launches if launch is not None)

    @cached_property
    def _merges(self) -> tuple[_Launch, ...]:
        return (self._merge,) if self._splits and self._num_parts > 1 else ()

    @property
    def _splits(self) -> bool:
        return self.meta.splits_any and self.meta.num_seqs > 0 and self.meta.max_query_len > 0

    @property
    def _split(self) -> _Launch:
        meta, tiles, workspace = self.meta, self.tiles, self.workspace
        has_tiles = self._max_queries * self._group > tiles.split_rows
        rows = meta.num_seqs + has_tiles * (meta.num_split_tokens * self._group // tiles.split_rows)
        programs = max(1, min(self._num_parts, TARGET_PROGRAMS // max(1, rows * self._num_kv_heads)))
        behind = (
            self.out, workspace.acc, workspace.stats, meta.query_starts, meta.split_starts, *self._contexts, *self._strides,
            self.query.shape[1], self._num_parts, self.window or 0, self.scores.scale2, self.scores.cap, meta.num_seqs,
            meta.max_split_len, int(has_tiles), programs,
        )  # fmt: skip
        tile = {"BLOCK_M": tiles.split_rows, "BLOCK_N": tiles.keys}
        warps = {"num_warps": tiles.split_warps, "num_stages": tiles.split_stages}
        return _Launch(split_kernel[(rows, self._num_kv_heads, programs)], behind, {**tile, **self._switches, **warps})

    @property
    def _merge(self) -> _Launch:
        meta, num_heads, has_more = self.meta, self.query.shape[1], self._max_queries > 1
        behind = (
            self.out, meta.query_starts, meta.split_starts, meta.context_lens, self.out.stride(0), self.out.stride(1),
            num_heads, self._num_parts, self.window or 0, meta.num_seqs, meta.max_split_len, int(has_more),
        )  # fmt: skip
        switches = {name: self._switches[name] for name in _MERGE_SWITCHES} | overlap()
        options = {"UNROLL": MERGE_UNROLL, **switches, "num_warps": 1}
        return _Launch(merge_kernel[(meta.num_seqs + has_more * meta.num_split_tokens, num_heads)], behind, options)

    @property
    def _walk(self) -> _Launch:
        meta, tiles = self.meta, self.tiles
        programs = meta.num_tokens * self._group // tiles.walk_rows + meta.num_seqs
        behind = (
            self.out, meta.query_starts, *self._contexts, *self._strides, meta.num_seqs, meta.max_split_len, self.window or 0,
            self.scores.scale2, self.scores.cap,
        )  # fmt: skip
        tile = {"BLOCK_M": tiles.walk_rows, "BLOCK_N": tiles.keys}
        warps = {"num_warps": tiles.walk_warps, "num_stages": tiles.walk_stages}
        return _Launch(walk_kernel[(programs, self._num_kv_heads)], behind, {**tile, **self._switches, **warps})

    @property
    def _num_kv_heads(self) -> int:
        return self.kv.shape[3]

    @property
    def _group(self) -> int:
        return self.query.shape[1] // self._num_kv_heads

    @property
    def _num_parts(self) -> int:
        return self.workspace.acc.shape[2]

    @property
    def _max_queries(self) -> int:
        """Return the most queries of a sequence that is split."""
        return min(self.meta.max_query_len, self.meta.max_split_len)

    @property
    def _contexts(self) -> tuple[Tensor, ...]:
        meta = self.meta
        return meta.context_lens, meta.block_tables, meta.tail_firsts, meta.tail_slots

    @property
    def _strides(self) -> tuple[int, ...]:
        meta, query, out, kv = self.meta, self.query, self.out, self.kv
        own = (query.stride(0), query.stride(1), out.stride(0), out.stride(1))
        return (*own, kv.stride(2), kv.stride(3), meta.block_tables.stride(0), meta.tail_slots.stride(0))

    @property
    def _switches(self) -> dict[str, object]:
        head_dim = self.query.shape[2]
        return {
            "MIN_KEYS": self.splits.min_keys,
            "MOST": self.splits.most,
            "GROUP": self._group,
            "BLOCK_SIZE": self.kv.shape[2],
            "DIM": head_dim,
            "DIM_PAD": padded_dim(head_dim),
            "HAS_WINDOW": self.window is not None,
            "HAS_TAILS": self.meta.tail_slots.shape[1] > 0,
            "HAS_SCALES": self.has_scales,
            "HAS_CAP": self.scores.softcap != 0.0,
            "HAS_SINKS": self.scores.has_sinks,
            **overlap(),
        }


_MERGE_SWITCHES = ("MIN_KEYS", "MOST", "DIM", "DIM_PAD", "HAS_WINDOW", "HAS_SCALES", "HAS_SINKS")


def _tiles(query: Tensor, splits: Splits, invariant: bool) -> Tiles:
    tiles = choose_tiles(query.shape[2], query.dtype.itemsize, shared_bytes(query.device))
    tiles = replace(tiles, keys=min(tiles.keys, splits.min_keys))
    if not invariant:
        return tiles
    return replace(tiles, walk_rows=tiles.split_rows, walk_warps=tiles.split_warps, walk_stages=tiles.split_stages)


def _check(query: Tensor, kv: Tensor, meta: StepMetadata, kv_scales: Tensor | None, window: int | None) -> None:
    if query.dim() != 3 or query.stride(2) != 1 or query.dtype not in _DTYPES:
        raise ValueError(f"query: {query.dtype} {tuple(query.shape)}, expected [tokens, heads, head_dim] of 16 or 32 bits")
    if query.shape[0] < meta.num_tokens:
        raise ValueError(f"query: {query.shape[0]} rows for {meta.num_tokens} tokens")
    if window is not None and window < 1:
        raise ValueError(f"window: {window} is not a number of keys")
    check_kv(kv, query.shape[2], query.dtype, kv_scales)
    if query.shape[1] % kv.shape[3]:
        raise ValueError(f"query: {query.shape[1]} heads are not a multiple of {kv.shape[3]} key/value heads")
    padded_dim(query.shape[2])


def _check_sinks(sinks: Tensor | None, num_heads: int) -> None:
    if sinks is not None and (sinks.shape != (num_heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks: {tuple(sinks.shape)}, expected [{num_heads}]")


def _check_out(out: Tensor, query: Tensor) -> None:
    if out.shape != query.shape or out.dtype != query.dtype or out.stride(2) != 1:
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)}, expected {query.dtype} {tuple(query.shape)}")


def _check_workspace(workspace: Workspace, meta: StepMetadata, query: Tensor) -> None:
    rows, heads, _, dim = workspace.acc.shape
    if rows < meta.num_split_tokens or (heads, dim) != query.shape[1:] or workspace.stats.shape != (*workspace.acc.shape[:3], 2):
        raise ValueError(
            f"workspace: {tuple(workspace.acc.shape)} for {meta.num_split_tokens} split queries of {tuple(query.shape[1:])}"
        )


@dataclass(frozen=True)
class Workspace:
    """Hold parts of split queries, float32. It may be kept and used again; contents do not matter."""

    acc: Tensor  # [rows, num_heads, num_parts, head_dim]: sums of weighted values, not yet divided
    stats: Tensor  # [rows, num_heads, num_parts, 2]: maximum (base 2) and sum, which is their log-sum-exp without the logarithm

    @classmethod
    def of(cls, meta: StepMetadata, num_heads: int, head_dim: int, splits: Splits = SPLITS) -> Workspace:
        shape = (meta.num_split_tokens, num_heads, splits.bound(meta.max_context))
        device = meta.buffer.device
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty((*shape, 2), dtype=torch.float32, device=device),
        )


def paged_attention(
    query: Tensor,
    kv: Tensor,
    meta: StepMetadata,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    splits: Splits = SPLITS,
    invariant: bool = False,
) -> Tensor:
    """Attend with each query to the keys of its sequence up to its own position, which must be in the pool.

    query [T, num_heads, head_dim] float32, float16 or bfloat16, of any strides but the last; kv [2, num_blocks, block_size,
    num_kv_heads, head_dim], one layer of the pool, in query's dtype or float8_e4m3fn with `kv_scales` [2] float32 (of keys, of
    values; multiplied with what is stored). `window`: a query sees so many keys, its own included. `scale` of the scores,
    head_dim ** -0.5 by default; with a `softcap` that many times the hyperbolic tangent of their share of it. sinks [num_heads]:
    logits of keys without values, which every query sees. `out` and `workspace`: where a graph needs its results. Returns [T,
    num_heads, head_dim] in query's dtype; rows behind the last sequence are not written. Never synchronizes. Raises ValueError
    naming what does not fit.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    workspace = workspace or Workspace.of(meta, query.shape[1], query.shape[2], splits)
    _check_sinks(sinks, query.shape[1])
    scores = Scores(scale or query.shape[2] ** -0.5, softcap, sinks is not None)
    call = prepared(query, kv, meta, window, scores, kv_scales, out, workspace, splits, invariant)
    call.run(kv[0], kv[1], kv_scales, sinks)
    return out


class TritonAttention:
    """The backend `triton` of pdmesh/engine/attention/base.py. `kv_scales` [num_layers, 2] float32 for a pool of
    float8_e4m3fn."""

    name = "triton"

    def __init__(
        self,
        config: ModelConfig,
        device: str,
        *,
        kv_scales: Tensor | None = None,
        splits: Splits = SPLITS,
        invariant: bool = False,
        sinks: Sequence[Tensor] = (),
    ) -> None:
        """`sinks`: the logits [num_heads] of each layer's, of a model that has attention sinks."""
        self.config, self.device, self.sinks = config, device, sinks
        self.kv_scales, self.splits, self.invariant = kv_scales, splits, invariant

    @property
    def scores(self) -> Scores:
        return Scores(self.config.scale, self.config.attention_softcap, bool(self.sinks))

    def plan(self, batch: StepBatch, block_size: int) -> TritonPlan:
        capacity = Capacity.of(batch, SplitBounds.of(self.config.num_heads))
        return self.plan_of(StepMetadata.of(batch, self.device, capacity))

    def plan_of(self, meta: StepMetadata) -> TritonPlan:
        """Return the plan for metadata that is on the device already, as in a graph."""
        latent = self.config.latent
        workspace = Workspace.of(meta, self.config.num_heads, latent.kv_rank if latent else self.config.head_dim, self.splits)
        return TritonPlan(self, meta, workspace)


@dataclass(frozen=True)
class TritonPlan:
    """One step's attention: all layers share its metadata and its workspace."""

    backend: TritonAttention
    meta: StepMetadata
    workspace: Workspace
    calls: dict[int | None, AttentionCall] = field(default_factory=dict)  # by window: those of the last layers

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kv: Tensor) -> Tensor:
        """See `AttentionPlan.run`."""
        store_kv(key, value, kv[layer], self.meta.slots, kv_scales=self._scales(layer))
        return self.attend(layer, query, kv)

    def attend(self, layer: int, query: Tensor, kv: Tensor, out: Tensor | None = None) -> Tensor:
        """Attend where keys and values have been written, as by kv.py. Layers that share query and out are cheaper."""
        backend, scales = self.backend, self._scales(layer)
        if backend.config.latent is not None:
            return self._attend_latents(backend.config.latent, query, kv[layer], scales, out)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
        window, of_layer = backend.config.windows[layer], kv[layer]
        call = self.calls.get(window)
        if call is None or call.query is not query or call.out is not out:
            call = prepared(
                query, of_layer, self.meta, window, backend.scores, scales, out, self.workspace, backend.splits, backend.invariant
            )
            self.calls[window] = call
        call.run(of_layer[0], of_layer[1], scales, backend.sinks[layer] if backend.sinks else None)
        return out

    def _attend_latents(
        self, latent: LatentConfig, query: Tensor, kv: Tensor, scales: Tensor | None, out: Tensor | None
    ) -> Tensor:
        backend, workspace = self.backend, self.workspace
        out = query.new_empty((*query.shape[:2], latent.kv_rank)) if out is None else out
        call = LatentCall(latent, backend.scores.scale2, backend.splits, self.meta, workspace.acc, workspace.stats)
        call.run(query, kv, scales, out)
        return out

    def _scales(self, layer: int) -> Tensor | None:
        return None if self.backend.kv_scales is None else self.backend.kv_scales[layer]
