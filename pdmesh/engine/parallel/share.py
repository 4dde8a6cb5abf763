"""What one rank computes of the model, and which heads of a pool it computes on.

A share is a DecoderModel or one on the Triton kernels, whose weights are the rank's own and whose sums meet the others'
(`collectives.py`). Either takes the pool as `pool_of` shows it. All ranks are told the same steps in the same order, so all of
them make the same launches: what one records as a graph, with the exchanges in it, every other one records at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdmesh.engine.attention.base import ReferenceAttention, ReferencePlan
from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.models.config import ModelConfig
from pdmesh.engine.models.decoder import DecoderModel
from pdmesh.engine.runner.batch import StepBatch

if TYPE_CHECKING:
    from pdmesh.engine.kernels.triton.model import TritonModel


@dataclass(frozen=True)
class Share:
    """`heads`: those of the pool that `model` is to see; None: it finds its own (`share.py`), or the pool has no others."""

    model: DecoderModel | TritonModel
    heads: range | None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_layers(self) -> int:
        return self.model.config.num_layers

    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None = None, hidden: Tensor | None = None) -> Tensor:
        """See DecoderModel.forward; `kv` as `tp_worker.py` and the engine open it. Of no use on ranks other than 0."""
        return self.model.forward(batch, self.pool_of(kv), signal, hidden)

    def prepare_steps(self, kv: Tensor) -> None:
        """See TritonModel. Every rank at the same time: what is recorded has exchanges in it."""
        if not isinstance(self.model, DecoderModel):
            self.model.prepare_steps(self.pool_of(kv))

    def prepare_draws(self) -> None:
        """See TritonModel. Rank 0 alone draws."""
        if not isinstance(self.model, DecoderModel):
            self.model.prepare_draws()

    def pool_of(self, kv: Tensor) -> Tensor:
        """[..., heads of the pool, head_dim] -> [..., this rank's, head_dim], a view."""
        return kv if self.heads is None else kv.narrow(4, self.heads.start, len(self.heads))


# Attention of one rank on a pool that all ranks share: its heads lie among the others'.
#
# a slot of the pool    [ head 0 | head 1 | head 2 | head 3 ]        rank 1 of 2 reads and writes heads 2 and 3


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
