"""The smallest loop over a mixed batch: each prompt with an adapter's slot, or -1 for the base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from pdmesh.engine.loader.loader import LoadedModel
from tests.engine.paged_loop import Chunk, PagedLoop, make_batch


@dataclass
class MixedLoop(PagedLoop):
    """Compute all steps with these slots, one for each sequence; empty: a batch that knows no adapters."""

    slots: Sequence[int] = ()

    def step(self, chunks: Sequence[Chunk]) -> Tensor:
        batch = replace(make_batch(chunks, self.block_size), adapter_slots=tuple(self.slots))
        return self.loaded.model.forward(batch, self.pool.tensor)


def generate(loaded: LoadedModel, prompts: Sequence[list[int]], slots: Sequence[int], num_tokens: int) -> list[list[int]]:
    """Return greedy tokens of all prompts, computed in one batch."""
    return MixedLoop(loaded, slots=slots).generate(prompts, num_tokens)
