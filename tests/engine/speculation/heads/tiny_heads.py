"""Draft heads of random numbers, and sequences to draft for."""

from __future__ import annotations

import torch

from pdmesh.engine.request import EngineRequest
from pdmesh.engine.scheduler.sequence import Phase, Sequence, SequenceGroup
from pdmesh.engine.speculation.draft_heads.weights import Block, DraftHeads
from pdmesh.sampling_params import SamplingParams

HIDDEN, WIDTH, VOCAB = 32, 48, 50


def make_heads(
    kind: str = "recurrent",
    *,
    depth: int = 4,
    hidden_size: int = HIDDEN,
    vocab_size: int = VOCAB,
    width: int = WIDTH,
    seed: int = 0,
) -> DraftHeads:
    """A reduced vocabulary of every token but each fifth."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).div_(shape[-1] ** 0.5)

    ids = torch.tensor([token for token in range(vocab_size) if token % 5])
    blocks = tuple(
        Block(
            random(hidden_size, 2 * hidden_size),
            random(width, 2 * hidden_size),
            random(width, 2 * hidden_size),
            random(hidden_size, width),
        )
        for _ in range(1 if kind == "recurrent" else depth)
    )
    norm = 1.0 + 0.1 * torch.randn(hidden_size, generator=generator)
    return DraftHeads(kind, hidden_size, depth, "tiny", ids, norm, 4 * random(len(ids), hidden_size), blocks)


def make_embedding(vocab_size: int = VOCAB, hidden_size: int = HIDDEN, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((vocab_size, hidden_size), generator=torch.Generator().manual_seed(1)).to(dtype)


def make_sequence(output: list[int], **sampling: object) -> Sequence:
    """Decoding behind these tokens; greedy unless `sampling` says otherwise."""
    params = SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    [sequence] = SequenceGroup(EngineRequest("r", (7, 8, 9), params), 0, Phase.ACTIVE).sequences
    sequence.output[:] = output
    return sequence
