"""The mock model as one that decodes ahead: it keeps what was drawn, as a device would, and takes tokens from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pdmesh.engine.kv_cache.events import LayerReadiness
from pdmesh.engine.runner.batch import StepBatch
from pdmesh.engine.sampling.sampler import SampledToken, Sampler, SampleRow, Unseen
from tests.support.mock_engine import MockModel


class Drawn:
    """Draws of which the host has seen nothing before `finish`."""

    def __init__(self, tokens: list[SampledToken]) -> None:
        self._tokens = tokens
        self.tokens = torch.tensor([token.token_id for token in tokens], dtype=torch.int32)

    def finish(self) -> list[SampledToken]:
        return self._tokens


class AheadSampler(Sampler):
    """Draws at once, as a device does that is never late."""

    def start(self, logits: Tensor, rows: Sequence[SampleRow], unseen: Unseen | None = None) -> Drawn:
        if unseen is not None:
            before = [int(unseen.tokens[place]) for place in unseen.places]
            rows = [replace(row, output=[*row.output, token]) for row, token in zip(rows, before, strict=True)]
        return Drawn(self.sample(logits, rows))


class AheadMock(MockModel):
    """`max_rows`: wider steps are none that tokens can be kept for."""

    def __init__(self, max_rows: int = 6) -> None:
        self.max_rows = max_rows
        self.num_unseen = 0  # steps of tokens that the host had not seen
        self._drawn = torch.zeros(0, dtype=torch.int32)

    def forward(self, batch: StepBatch, kv: Tensor, signal: LayerReadiness | None = None, hidden: Tensor | None = None) -> Tensor:
        tokens = batch.token_ids.tolist()
        if any(token < 0 for token in tokens):
            assert self.is_graph_step(batch, kv)
            self.num_unseen += 1
            known = [int(self._drawn[-1 - token]) if token < 0 else token for token in tokens]
            batch = replace(batch, token_ids=torch.tensor(known))
        self._drawn = torch.zeros(0, dtype=torch.int32)  # who has another step between loses them
        return super().forward(batch, kv, signal, hidden)

    def is_graph_step(self, batch: StepBatch, kv: Tensor) -> bool:
        return batch.num_tokens == batch.num_seqs == len(batch.logits_rows) <= self.max_rows

    def keep_drawn(self, tokens: Tensor) -> None:
        self._drawn = tokens

    def sampler(self) -> AheadSampler:
        return AheadSampler()
