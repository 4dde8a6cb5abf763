"""Latent attention of a step: the launches over the pool.

Bits: as in kernels/triton/attention.py, for splits and walks alike.

Limits: a decode step reads context * width * itemsize bytes of each sequence and layer, once for every 64 rows (queries times
heads); 576 numbers and 128 heads are 242 operations a byte of bfloat16, about where an H100 is balanced. A prompt of n tokens
computes heads * (2 width + 2 rank) * n^2 / 2 operations, 3.4 times those of expanded heads. Counted, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from pdmesh.engine.kernels.triton.attention_kernels import merge_kernel
from pdmesh.engine.kernels.triton.latent.kernels import latent_kernel
from pdmesh.engine.kernels.triton.launching import overlap
from pdmesh.engine.kernels.triton.metadata import StepMetadata
from pdmesh.engine.kernels.triton.split_kv import Splits
from pdmesh.engine.kernels.triton.tiles import LatentTiles, shared_bytes
from pdmesh.engine.models.config import LatentConfig

TARGET_PROGRAMS = 4096
MERGE_UNROLL = 8


@dataclass(frozen=True)
class LatentCall:
    """Attention of one step over latents, for layers that differ in the pool alone. `acc` [rows, num_heads, parts, kv_rank] and
    `stats` [rows, num_heads, parts, 2]: parts of split queries."""

    latent: LatentConfig
    scale2: float  # of scores that are powers of 2
    splits: Splits
    meta: StepMetadata
    acc: Tensor
    stats: Tensor

    def run(self, query: Tensor, kv: Tensor, kv_scales: Tensor | None, out: Tensor) -> None:
        """Attend with query [T, num_heads, width] over kv [2, blocks, block_size, 1, width / 2]; write out [T, num_heads,
        kv_rank]."""
        meta, num_heads, num_parts = self.meta, query.shape[1], self.acc.shape[2]
        tiles = LatentTiles.of(self.latent.width, query.dtype.itemsize, shared_bytes(query.device))
        if meta.splits_any and meta.num_seqs and meta.max_query_len:
            rows = meta.num_seqs + meta.num_split_tokens * num_heads // tiles.split_rows
            programs = max(1, min(num_parts, TARGET_PROGRAMS // max(1, rows)))
            self._launch(tiles, query, kv, kv_scales, out, (rows, programs), meta.split_starts, is_parted=True)
        if meta.walks_any:
            rows = meta.num_seqs + meta.num_tokens * num_heads // tiles.walk_rows
            self._launch(tiles, query, kv, kv_scales, out, (rows, 1), meta.query_starts, is_parted=False)
        if meta.splits_any and meta.num_seqs and meta.max_query_len and num_parts > 1:
            self._merge(out)

    def _launch(
        self, tiles: LatentTiles, query: Tensor, kv: Tensor, kv_scales: Tensor | None, out: Tensor, grid: tuple[int, int],
        tile_starts: Tensor, *, is_parted: bool,
    ) -> None:  # fmt: skip
        meta, half = self.meta, self.latent.width // 2
        latent_kernel[grid](
            query, kv[0], kv[1], query if kv_scales is None else kv_scales, out, self.acc, self.stats,
            meta.query_starts, tile_starts, meta.context_lens, meta.block_tables, meta.tail_firsts, meta.tail_slots,
            query.stride(0), query.stride(1), out.stride(0), out.stride(1), kv.stride(2), meta.block_tables.stride(0),
            meta.tail_slots.stride(0), self.acc.shape[2], self.scale2, meta.num_seqs, meta.max_split_len, grid[1],
            MIN_KEYS=self.splits.min_keys, MOST=self.splits.most, HEADS=query.shape[1],
            BLOCK_M=tiles.split_rows if is_parted else tiles.walk_rows, BLOCK_N=min(tiles.keys, self.splits.min_keys),
            BLOCK_SIZE=kv.shape[2], HALF=half, RANK=self.latent.kv_rank, A=tiles.main, B=tiles.rest, PARTED=is_parted,
            HAS_TAILS=meta.tail_slots.shape[1] > 0, HAS_SCALES=kv_scales is not None,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip

    def _merge(self, out: Tensor) -> None:
        meta, rank, has_more = self.meta, self.latent.kv_rank, min(self.meta.max_query_len, self.meta.max_split_len) > 1
        grid = (meta.num_seqs + has_more * meta.num_split_tokens, out.shape[1])
        merge_kernel[grid](
            self.acc, self.stats, out, out, out, meta.query_starts, meta.split_starts, meta.context_lens, out.stride(0),
            out.stride(1), out.shape[1], self.acc.shape[2], 0, meta.num_seqs, meta.max_split_len, int(has_more),
            MIN_KEYS=self.splits.min_keys, MOST=self.splits.most, UNROLL=MERGE_UNROLL, DIM=rank,
            DIM_PAD=triton.next_power_of_2(rank), HAS_WINDOW=False, HAS_SCALES=False, HAS_SINKS=False, num_warps=4, **overlap(),
        )  # fmt: skip
