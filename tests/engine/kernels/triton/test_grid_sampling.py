"""Fused sampling draws the host's tokens wherever two of its settings meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pdmesh.engine.kernels.triton.sampling.sampler import DeviceSampler
from pdmesh.engine.sampling.sampler import Sampler, SampleRow
from tests.engine.kernels.triton.grid import pairwise
from tests.engine.kernels.triton.test_sampling import CHUNK, DEVICE, logits_of, row

ROWS = pairwise(
    top_k=[0, 1, 5, 1000],
    top_p=[1.0, 0.6, 0.05],
    min_p=[0.0, 0.3],
    temperature=[3.0, 0.7, 0.0],
    repetition_penalty=[1.0, 1.4, 0.5],
    presence_penalty=[0.0, -1.0, 2.0],
    frequency_penalty=[0.0, 0.9],
    min_tokens=[0, 9],
    grammar=[False, True],
    history=["none", "prompt", "both"],
)


def sample_row(settings: dict[str, Any], vocab: int, place: int) -> SampleRow:
    settings = dict(settings)
    grammar, history = settings.pop("grammar"), settings.pop("history")
    prompt = () if history == "none" else (1, 2, 2, vocab - 1)
    output = (2, 4, 4, 0) if history == "both" else ()
    allowed = _bits(vocab, place) if grammar else None
    return row(choice=place % 3, index=len(output), prompt=prompt, output=output, allowed=allowed, seed=2**63 + place, **settings)


def _bits(vocab: int, place: int) -> NDArray[np.uint32]:
    """Two of three tokens."""
    bits = np.zeros(-(-vocab // 32) * 32, bool)
    bits[:vocab] = (np.arange(vocab) + place) % 3 > 0
    return np.packbits(bits, bitorder="little").view(np.uint32)


@pytest.mark.parametrize(("vocab", "grain"), [(2 * CHUNK, 0.0), (70, 1.0)])
def test_sampling(vocab: int, grain: float) -> None:
    """A vocabulary of whole chunks, and one that ends within a chunk and a word of a mask, with ties."""
    rows = [sample_row(settings, vocab, place) for place, settings in enumerate(ROWS)]
    logits = logits_of(len(rows), vocab, 5, grain)
    expected = [token.token_id for token in Sampler().sample(logits, rows)]
    found = [token.token_id for token in DeviceSampler(CHUNK).sample(logits.to(DEVICE), rows)]
    wrong = [(ROWS[place], found[place], token) for place, token in enumerate(expected) if found[place] != token]
    assert not wrong
    assert torch.unique(torch.tensor(expected)).numel() > len(rows) // 4
