"""Attention over the paged pool in two kernels, flash-decoding and flash prefill (attention_kernels.py draws their tiles).

- split (Dao et al., Flash-Decoding, 2023): sequences with at most MAX_SPLIT_QUERIES queries in the step: decode, verification,
  ends of prompts. Keys are split over programs, the parts merged by a second kernel; a query with one split needs no merge.
- walk (Dao, FlashAttention-2, 2023, algorithm 1): sequences with more. A program holds a tile of queries and walks all keys that
  they see, by position, with what is in the pool already before its own.

Bits. A query's result depends on its own keys alone. Where its keys are split follows from its position (splits.py); tiles of
keys lie at multiples of their size; what a query may not see changes nothing, to the bit; splits are folded in order. The grid,
the batch and the place of blocks decide only who computes what. Both kernels are written with the same operations in the
same order. So prefill, chunks, verification and decode of a token agree where the matrix product of a tile adds up alike for
either's number of rows. Tests show it in the interpreter alone (float32 and float16, one shape of heads, splits of 64 keys). Of a
GPU it is not known: tests marked gpu ask, and have not run on one. `invariant=True` gives both kernels the rows and warps of the
split kernel, should a processor differ, at the cost of half the reuse of keys in prefill.

Limits. A decode step reads context * num_kv_heads * head_dim * 2 * itemsize bytes of each sequence and layer, and reads and
writes parts of num_heads * (head_dim + 2) * 4 bytes for each split: at 64 k tokens with 8 key/value heads of 128 and 32 query
heads in bfloat16, 268 MB and 2 MB, so 56 us at 4.8 TB/s. Prefill of n tokens behind m computes 4 * num_heads * head_dim * n *
(m + n / 2) operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.batch import StepBatch
from engine.kernels.triton.attention_kernels import merge_kernel, split_kernel, walk_kernel
from engine.kernels.triton.kv_store import check_kv, store_kv
from engine.kernels.triton.metadata import MAX_SPLIT_QUERIES, StepMetadata
from engine.kernels.triton.room import shared_bytes
from engine.kernels.triton.splits import SPLITS, Splits
from engine.kernels.triton.tiles import Tiles, choose_tiles, padded_dim
from engine.model_config import ModelConfig

TARGET_PROGRAMS = 4096
"""Programs of a split grid: enough that uneven sequences even out over 132 multiprocessors, few enough that those without work
(some 0.1 us each, 132 at a time) cost 3 us."""
MERGE_UNROLL = 8
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Workspace:
    """Parts of split queries, float32. May be kept and used again; contents do not matter."""

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
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    splits: Splits = SPLITS,
    invariant: bool = False,
) -> Tensor:
    """Each query over the keys of its sequence up to its own position, which must be in the pool.

    query [T, num_heads, head_dim] float32, float16 or bfloat16, of any strides but the last; kv [2, num_blocks, block_size,
    num_kv_heads, head_dim], one layer of the pool, in query's dtype or float8_e4m3fn with `kv_scales` [2] float32 (of keys, of
    values; multiplied with what is stored). `window`: a query sees so many keys, its own included. `scale` of the scores,
    head_dim ** -0.5 by default. `out` and `workspace`: where a graph wants its results. Returns [T, num_heads, head_dim] in
    query's dtype; rows behind the last sequence are not written. Never synchronizes. Raises ValueError naming what does not fit.
    """
    _check(query, kv, meta, kv_scales, window)
    head_dim, num_heads = query.shape[2], query.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    _check_out(out, query)
    call = _Call(query, kv, meta, window, scale or head_dim**-0.5, kv_scales, out, splits, _tiles(query, splits, invariant))
    if meta.num_split_tokens or meta.max_query_len <= MAX_SPLIT_QUERIES:
        workspace = workspace or Workspace.of(meta, num_heads, head_dim, splits)
        _check_workspace(workspace, meta, query)
        call.split(workspace)
    if meta.max_query_len > MAX_SPLIT_QUERIES:
        call.walk()
    return out


@dataclass(frozen=True)
class _Call:
    """What both kernels are given."""

    query: Tensor
    kv: Tensor
    meta: StepMetadata
    window: int | None
    scale: float
    kv_scales: Tensor | None
    out: Tensor
    splits: Splits
    tiles: Tiles

    @property
    def num_kv_heads(self) -> int:
        return self.kv.shape[3]

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.num_kv_heads

    def split(self, workspace: Workspace) -> None:
        meta, tiles, num_parts = self.meta, self.tiles, workspace.acc.shape[2]
        max_queries = min(meta.max_query_len, MAX_SPLIT_QUERIES)
        num_tiles = -(-max_queries * self.group // tiles.split_rows)
        rows = meta.num_seqs * num_tiles
        programs = max(1, min(num_parts, TARGET_PROGRAMS // max(1, rows * self.num_kv_heads)))
        if not rows:
            return
        split_kernel[(rows, self.num_kv_heads, programs)](
            self.query, self.kv[0], self.kv[1], self._scales, self.out, workspace.acc, workspace.stats,
            meta.query_starts, meta.split_starts, *self._contexts, *self._strides,
            self.query.shape[1], num_parts, self.window or 0, self._scale2, num_tiles, programs,
            BLOCK_M=tiles.split_rows, BLOCK_N=tiles.keys, **self._switches,
            num_warps=tiles.split_warps, num_stages=tiles.split_stages,
        )  # fmt: skip
        if num_parts > 1:
            self._merge(workspace, max_queries, num_parts)

    def _merge(self, workspace: Workspace, max_queries: int, num_parts: int) -> None:
        meta, num_heads = self.meta, self.query.shape[1]
        switches = {name: self._switches[name] for name in _MERGE_SWITCHES}
        merge_kernel[(meta.num_seqs * max_queries, num_heads)](
            workspace.acc, workspace.stats, self._scales, self.out, meta.query_starts, meta.split_starts, meta.context_lens,
            self.out.stride(0), self.out.stride(1), num_heads, num_parts, self.window or 0, max_queries,
            UNROLL=MERGE_UNROLL, **switches, num_warps=1,
        )  # fmt: skip

    def walk(self) -> None:
        meta, tiles = self.meta, self.tiles
        programs = meta.num_tokens * self.group // tiles.walk_rows + meta.num_seqs
        walk_kernel[(programs, self.num_kv_heads)](
            self.query, self.kv[0], self.kv[1], self._scales, self.out, meta.query_starts, *self._contexts, *self._strides,
            meta.num_seqs, self.window or 0, self._scale2, BLOCK_M=tiles.walk_rows, BLOCK_N=tiles.keys, **self._switches,
            num_warps=tiles.walk_warps, num_stages=tiles.walk_stages,
        )  # fmt: skip

    @property
    def _scales(self) -> Tensor:
        """A pointer is wanted even where nothing is read by it."""
        return self.query if self.kv_scales is None else self.kv_scales

    @property
    def _scale2(self) -> float:
        """Scores are powers of 2, not of e: that is the exponential that the hardware has."""
        return self.scale * math.log2(math.e)

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
    def _switches(self) -> dict[str, int | bool]:
        head_dim = self.query.shape[2]
        return {
            "MAX_QUERIES": MAX_SPLIT_QUERIES,
            "MIN_KEYS": self.splits.min_keys,
            "MOST": self.splits.most,
            "GROUP": self.group,
            "BLOCK_SIZE": self.kv.shape[2],
            "DIM": head_dim,
            "DIM_PAD": padded_dim(head_dim),
            "HAS_WINDOW": self.window is not None,
            "HAS_TAILS": self.meta.tail_slots.shape[1] > 0,
            "HAS_SCALES": self.kv_scales is not None,
        }


_MERGE_SWITCHES = ("MAX_QUERIES", "MIN_KEYS", "MOST", "DIM", "DIM_PAD", "HAS_WINDOW", "HAS_SCALES")


class TritonAttention:
    """The backend `triton` of engine/attention.py. `kv_scales` [num_layers, 2] float32 for a pool of float8_e4m3fn."""

    name = "triton"

    def __init__(
        self,
        config: ModelConfig,
        device: str,
        *,
        kv_scales: Tensor | None = None,
        splits: Splits = SPLITS,
        invariant: bool = False,
    ) -> None:
        self.config, self.device = config, device
        self.kv_scales, self.splits, self.invariant = kv_scales, splits, invariant

    def plan(self, batch: StepBatch, block_size: int) -> TritonPlan:
        return self.plan_of(StepMetadata.of(batch, self.device))

    def plan_of(self, meta: StepMetadata) -> TritonPlan:
        """For metadata that is on the device already, as in a graph."""
        workspace = Workspace.of(meta, self.config.num_heads, self.config.head_dim, self.splits)
        return TritonPlan(self, meta, workspace)


@dataclass(frozen=True)
class TritonPlan:
    """One step's attention: all layers share its metadata and its workspace."""

    backend: TritonAttention
    meta: StepMetadata
    workspace: Workspace

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kv: Tensor) -> Tensor:
        """See `AttentionPlan.run`."""
        store_kv(key, value, kv[layer], self.meta.slots, kv_scales=self._scales(layer))
        return self.attend(layer, query, kv)

    def attend(self, layer: int, query: Tensor, kv: Tensor, out: Tensor | None = None) -> Tensor:
        """Where keys and values have been written, as by kv_store.py."""
        backend = self.backend
        return paged_attention(
            query,
            kv[layer],
            self.meta,
            window=backend.config.windows[layer],
            kv_scales=self._scales(layer),
            out=out,
            workspace=self.workspace,
            splits=backend.splits,
            invariant=backend.invariant,
        )

    def _scales(self, layer: int) -> Tensor | None:
        return None if self.backend.kv_scales is None else self.backend.kv_scales[layer]


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


def _check_out(out: Tensor, query: Tensor) -> None:
    if out.shape != query.shape or out.dtype != query.dtype or out.stride(2) != 1:
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)}, expected {query.dtype} {tuple(query.shape)}")


def _check_workspace(workspace: Workspace, meta: StepMetadata, query: Tensor) -> None:
    rows, heads, _, dim = workspace.acc.shape
    if rows < meta.num_split_tokens or (heads, dim) != query.shape[1:] or workspace.stats.shape != (*workspace.acc.shape[:3], 2):
        raise ValueError(
            f"workspace: {tuple(workspace.acc.shape)} for {meta.num_split_tokens} split queries of {tuple(query.shape[1:])}"
        )
