"""Attention of one rank on a pool that all ranks share: its heads lie among the others'.

a slot of the pool    [ head 0 | head 1 | head 2 | head 3 ]        rank 1 of 2 reads and writes heads 2 and 3
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.engine.attention.paged_attention import ReferenceAttention, ReferencePlan
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.runner.batch import StepBatch


class SharedPoolAttention(ReferenceAttention):
    """The reference attention on `heads` of the pool's `num_pool_heads`; `config` is the rank's own."""

    def __init__(self, config: ModelConfig, device: str, heads: range, num_pool_heads: int) -> None:
        super().__init__(config, device)
        self._heads, self._num_pool_heads = heads, num_pool_heads

    def plan(self, batch: StepBatch, block_size: int) -> SharedPoolPlan:
        plan = super().plan(batch, block_size)
        return SharedPoolPlan(plan.config, plan.slots, plan.groups, self._heads)

    def _rows(self, slots: Tensor) -> Tensor:
        return slots[:, None, :] * self._num_pool_heads + torch.tensor(self._heads)[:, None]


@dataclass(frozen=True)
class SharedPoolPlan(ReferencePlan):
    heads: range

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kv: Tensor) -> Tensor:
        """See `AttentionPlan.run`; `kv` is the pool with all heads, `key` and `value` are of ours."""
        keys, values = kv[layer, 0], kv[layer, 1]
        for plane, numbers in ((keys, key), (values, value)):
            plane.flatten(0, 1).narrow(1, self.heads.start, len(self.heads)).index_copy_(0, self.slots, numbers)
        return self._attended(layer, query, keys, values)
