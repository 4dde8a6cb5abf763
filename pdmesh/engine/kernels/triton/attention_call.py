"""The launches of one step's attention: what the kernels are given, put together once for all layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.attention_kernels import merge_kernel, split_kernel, walk_kernel
from pdmesh.engine.kernels.triton.kv import check_kv
from pdmesh.engine.kernels.triton.metadata import StepMetadata
from pdmesh.engine.kernels.triton.room import shared_bytes
from pdmesh.engine.kernels.triton.split_kv import Splits
from pdmesh.engine.kernels.triton.tiles import Tiles, choose_tiles, padded_dim

if TYPE_CHECKING:
    from pdmesh.engine.kernels.triton.attention import Workspace

TARGET_PROGRAMS = 4096
"""Programs of a split grid: enough that uneven sequences even out over 132 multiprocessors, few enough that those without work
(some 0.1 us each, 132 at a time) cost 3 us."""
MERGE_UNROLL = 8
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def prepared(
    query: Tensor, kv: Tensor, meta: StepMetadata, window: int | None, scale: float | None, kv_scales: Tensor | None, out: Tensor,
    workspace: Workspace, splits: Splits, invariant: bool,
) -> AttentionCall:  # fmt: skip
    """Raises ValueError as paged_attention does. `kv`: of any layer, the others differ in where they begin alone."""
    _check(query, kv, meta, kv_scales, window)
    _check_out(out, query)
    if meta.splits_any:
        _check_workspace(workspace, meta, query)
    tiles = _tiles(query, splits, invariant)
    return AttentionCall(
        query, kv, meta, window, scale or query.shape[2] ** -0.5, kv_scales is not None, out, workspace, splits, tiles
    )


class _Launch(NamedTuple):
    """A kernel with its grid, and what it is given beside keys, values and their scales, which differ from layer to layer."""

    start: Callable[..., object]
    behind: tuple[object, ...]
    options: dict[str, object]


@dataclass(frozen=True)
class AttentionCall:
    """Attention of one step, for layers that differ in keys and values alone. What the kernels are given is put together once:
    Python takes longer for it than for the launches themselves."""

    query: Tensor
    kv: Tensor
    meta: StepMetadata
    window: int | None
    scale: float
    has_scales: bool
    out: Tensor
    workspace: Workspace
    splits: Splits
    tiles: Tiles

    def run(self, keys: Tensor, values: Tensor, kv_scales: Tensor | None) -> None:
        """keys, values [num_blocks, block_size, num_kv_heads, head_dim] of a layer."""
        scales = self.query if kv_scales is None else kv_scales  # a pointer is wanted even where nothing is read by it
        for launch in self._walks:
            launch.start(self.query, keys, values, scales, *launch.behind, **launch.options)
        for launch in self._merges:
            launch.start(self.workspace.acc, self.workspace.stats, scales, *launch.behind, **launch.options)

    @cached_property
    def _walks(self) -> tuple[_Launch, ...]:
        """Those that read keys."""
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
            self.query.shape[1], self._num_parts, self.window or 0, self._scale2, meta.num_seqs, meta.max_split_len,
            int(has_tiles), programs,
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
        switches = {name: self._switches[name] for name in _MERGE_SWITCHES}
        options = {"UNROLL": MERGE_UNROLL, **switches, "num_warps": 1}
        return _Launch(merge_kernel[(meta.num_seqs + has_more * meta.num_split_tokens, num_heads)], behind, options)

    @property
    def _walk(self) -> _Launch:
        meta, tiles = self.meta, self.tiles
        programs = meta.num_tokens * self._group // tiles.walk_rows + meta.num_seqs
        behind = (
            self.out, meta.query_starts, *self._contexts, *self._strides, meta.num_seqs, meta.max_split_len, self.window or 0,
            self._scale2,
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
        """Of a sequence that is split."""
        return min(self.meta.max_query_len, self.meta.max_split_len)

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
        }


_MERGE_SWITCHES = ("MIN_KEYS", "MOST", "DIM", "DIM_PAD", "HAS_WINDOW", "HAS_SCALES")


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
