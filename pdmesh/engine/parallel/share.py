"""What one rank computes of the model, and which heads of a pool it computes on.

A share is a DecoderModel or one on the Triton kernels, whose weights are the rank's own and whose sums meet the others'
(`layers.py`). Either takes the pool as `pool_of` shows it. All ranks are told the same steps in the same order, so all of them
make the same launches: what one records as a graph, with the exchanges in it, every other one records at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdmesh.engine.kv_cache.events import LayerSignal
from pdmesh.engine.models.decoder import DecoderModel
from pdmesh.engine.runner.batch import StepBatch

if TYPE_CHECKING:
    from pdmesh.engine.kernels.triton.model import TritonModel  # triton is not everywhere


@dataclass(frozen=True)
class Share:
    """`heads`: those of the pool that `model` is to see; None: it finds its own (`attention.py`), or the pool has no others."""

    model: DecoderModel | TritonModel
    heads: range | None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_layers(self) -> int:
        return self.model.config.num_layers

    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerSignal | None = None, hidden: Tensor | None = None) -> Tensor:
        """See DecoderModel.forward; `kv` as `follower.py` and the engine open it. Of no use on ranks other than 0."""
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
