"""The chance that a drafted token is drawn by a target whose logits differ from the draft's by standard Gumbel noise."""

from __future__ import annotations

import pytest
import torch

from pdmesh.engine.sampling.counter_rng import gumbel
from pdmesh.engine.sampling.sampler import Sampler, SampleRow
from pdmesh.engine.speculation.acceptance_rate import chances
from pdmesh.sampling_params import SamplingParams

VOCAB = 40
TRIALS = 20_000


def row(index: int = 0, **params: object) -> SampleRow:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "seed": 3, **params})  # type: ignore[arg-type]
    return SampleRow(sampling, 0, index, (1, 2), (), frozenset())


def chance(logits: torch.Tensor, sample_row: SampleRow) -> tuple[int, float]:
    [drawn] = Sampler().sample(logits[None], [sample_row])
    [likely] = chances(logits[None], [drawn.token_id], [sample_row])
    return drawn.token_id, likely


def logits_of(seed: int, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def test_greedy_is_the_softmax() -> None:
    logits = logits_of(1)
    token, likely = chance(logits, row())
    assert likely == pytest.approx(float(logits.softmax(-1)[token]), rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.8, 1.0, 1.7])
@pytest.mark.parametrize("index", range(4))
def test_it_is_how_often_a_target_with_noisier_logits_draws_the_same(temperature: float, index: int) -> None:
    logits, sample_row = logits_of(index), row(index, temperature=temperature)
    token, likely = chance(logits, sample_row)
    errors = -torch.log(-torch.log(torch.rand(TRIALS, VOCAB, generator=torch.Generator().manual_seed(5))))
    noise = gumbel(3, 0, index, torch.arange(VOCAB))
    same = ((logits + errors + temperature * noise).argmax(-1) == token).float().mean()
    assert likely == pytest.approx(float(same), abs=4 * 0.5 / TRIALS**0.5)


def test_with_a_sharp_draft_it_is_near_one_at_any_temperature() -> None:
    logits = torch.zeros(VOCAB)
    logits[7] = 30.0
    assert all(chance(logits, row(temperature=t))[1] > 0.99 for t in (0.0, 0.7, 1.0))


def test_a_likely_token_that_a_penalty_keeps_out_is_no_rival() -> None:
    logits = torch.zeros(VOCAB)
    logits[1], logits[9] = 20.0, 12.0  # token 1 stands in the prompt
    token, likely = chance(logits, row(repetition_penalty=4.0))
    assert token == 9
    assert likely > 0.99


def test_rows_are_independent() -> None:
    logits = torch.stack([logits_of(seed) for seed in range(6)])
    rows = [row(i, temperature=0.0 if i % 2 else 0.9) for i in range(6)]
    drawn = [token.token_id for token in Sampler().sample(logits, rows)]
    together = chances(logits, drawn, rows)
    assert together == [chances(logits[i : i + 1], drawn[i : i + 1], rows[i : i + 1])[0] for i in range(6)]
