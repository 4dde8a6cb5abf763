"""A rank's share of the model, and the heads of a pool that it computes on.

A share is a DecoderModel or one on the Triton kernels, with the rank's own weights, whose sums are exchanged with the others
(`collectives.py`). Either takes the pool as `pool_of` shows it. All ranks get the same steps in the same order, so all of
them make the same launches: when one records a graph, with the exchanges in it, every other rank records it at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """One rank's model. `heads`: those of the pool that `model` sees; None: it selects them itself, or the pool has no others."""

    model: DecoderModel | TritonModel
    heads: range | None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_layers(self) -> int:
        return self.model.config.num_layers

    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None = None, hidden: Tensor | None = None) -> Tensor:
        """See DecoderModel.forward; `kv` as `tp_worker.py` and the engine open it. The result is of no use on ranks other than
        0."""
        return self.model.forward(batch, self.pool_of(kv), signal, hidden)

    def prepare_steps(self, kv: Tensor) -> None:
        """See TritonModel. Every rank calls it at the same time: the graphs contain exchanges."""
        if not isinstance(self.model, DecoderModel):
            self.model.prepare_steps(self.pool_of(kv))

    def prepare_draws(self) -> None:
        """See TritonModel. Only rank 0 samples."""
        if not isinstance(self.model, DecoderModel):
            self.model.prepare_draws()

    def pool_of(self, kv: Tensor) -> Tensor:
        """View [..., heads of the pool, head_dim] as [..., this rank's, head_dim]."""
        return kv if self.heads is None else kv.narrow(4, self.heads.start, len(self.heads))


# Attention of one rank on a pool that all ranks share: its heads lie among the others'
#
# a slot of the pool    [ head 0 | head 1 | head 2 | head 3 ]        rank 1 of 2 reads and writes heads 2 and 3


class SharedPoolAttention(ReferenceAttention):
    """Compute the reference attention on `heads` of the pool's `num_pool_heads`; `config` is the rank's own."""

    def __init__(self, config: ModelConfig, device: str, heads: range, num_pool_heads: int, sinks: Sequence[Tensor] = ()) -> None:
        super().__init__(config, device, sinks)
        self._heads, self._num_pool_heads = heads, num_pool_heads

    def plan(self, batch: StepBatch, block_size: int) -> SharedPoolPlan:
        plan = super().plan(batch, block_size)
        return SharedPoolPlan(plan.config, plan.slots, plan.groups, plan.sinks, heads=self._heads)

    def _rows(self, slots: Tensor) -> Tensor:
        return slots[:, None, :] * self._num_pool_heads + torch.tensor(self._heads)[:, None]


@dataclass(frozen=True)
class SharedPoolPlan(ReferencePlan):
    heads: range = range(0)

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kv: Tensor) -> Tensor:
        """See `AttentionPlan.run`; `kv` is the pool with all heads, `key` and `value` are of ours."""
        keys, values = kv[layer, 0], kv[layer, 1]
        for plane, numbers in ((keys, key), (values, value)):
            plane.flatten(0, 1).narrow(1, self.heads.start, len(self.heads)).index_copy_(0, self.slots, numbers)
        return self._attended(layer, query, keys, values)
