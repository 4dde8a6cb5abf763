"""The linear maps behind which ranks meet. Both are `pdmesh.engine.models.layers.Linear`s: a model does not know that it is shared.

`inner`: the map over the rank's own weights.
"""

from __future__ import annotations

from torch import Tensor

from pdmesh.engine.models.layers import Linear
from pdmesh.engine.parallel.collectives import Group


class SummedLinear:
    """Each rank has some of the inputs: the outputs are added up."""

    def __init__(self, linear: Linear, group: Group) -> None:
        self.kind, self.inner, self._group = linear.kind, linear, group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.sum(self.inner(x))


class GatheredHead:
    """Each rank has some of the vocabulary: rank 0 has all logits [M, vocab_size], the others something of no use."""

    def __init__(self, linear: Linear, vocab_size: int, group: Group) -> None:
        self.kind, self.inner, self._vocab_size, self._group = linear.kind, linear, vocab_size, group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.gather(self.inner(x))[:, : self._vocab_size].contiguous()
