"""Attention over the paged pool in two kernels, flash-decoding and flash prefill (attention_kernels.py draws their tiles).

- split (Dao et al., Flash-Decoding, 2023): sequences with few queries in the step: decode, verification, short chunks. Keys are
  split over programs, the parts merged by a second kernel; a query with one split needs no merge.
- walk (Dao, FlashAttention-2, 2023, algorithm 1): sequences with more. A program holds a tile of queries and walks all keys that
  they see, by position, with what is in the pool already before its own.

How many queries are few is for each step to say (split_bounds.py): as many as walking would have too few programs for.

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

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.attention_call import AttentionCall, prepared
from pdmesh.engine.kernels.triton.kv import store_kv
from pdmesh.engine.kernels.triton.metadata import Capacity, StepMetadata
from pdmesh.engine.kernels.triton.split_bounds import SplitBounds
from pdmesh.engine.kernels.triton.split_kv import SPLITS, Splits
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.runner.batch import StepBatch


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
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    workspace = workspace or Workspace.of(meta, query.shape[1], query.shape[2], splits)
    call = prepared(query, kv, meta, window, scale, kv_scales, out, workspace, splits, invariant)
    call.run(kv[0], kv[1], kv_scales)
    return out


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
        capacity = Capacity.of(batch, SplitBounds.of(self.config.num_heads))
        return self.plan_of(StepMetadata.of(batch, self.device, capacity))

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
    calls: dict[int | None, AttentionCall] = field(default_factory=dict)  # by window: the last ones

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kv: Tensor) -> Tensor:
        """See `AttentionPlan.run`."""
        store_kv(key, value, kv[layer], self.meta.slots, kv_scales=self._scales(layer))
        return self.attend(layer, query, kv)

    def attend(self, layer: int, query: Tensor, kv: Tensor, out: Tensor | None = None) -> Tensor:
        """Where keys and values have been written, as by kv_store.py. Layers that share query and out are cheaper."""
        backend, scales = self.backend, self._scales(layer)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
        window, of_layer = backend.config.windows[layer], kv[layer]
        call = self.calls.get(window)
        if call is None or call.query is not query or call.out is not out:
            call = prepared(
                query, of_layer, self.meta, window, None, scales, out, self.workspace, backend.splits, backend.invariant
            )
            self.calls[window] = call
        call.run(of_layer[0], of_layer[1], scales)
        return out

    def _scales(self, layer: int) -> Tensor | None:
        return None if self.backend.kv_scales is None else self.backend.kv_scales[layer]
