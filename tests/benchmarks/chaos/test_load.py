"""Jobs whose answers hang on no bit: the lead of each token over the next candidate, from transformers' own logits."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.load import Job, Sizes, lead, make_jobs
from tests.support.tiny_models import make_tiny_model

SIZES = Sizes(prompt=(8, 16), output=(4, 8), first_id=1, last_id=250)
MIN_LEAD = 0.02  # about one job of two has it
LEAST = 1e-9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("jobs") / "tiny")


def test_only_jobs_with_the_lead_are_chosen(model: Path) -> None:
    chosen = make_jobs(model, SIZES, seed=1, count=12, min_lead=MIN_LEAD)
    every = make_jobs(model, SIZES, seed=1, count=48, min_lead=LEAST)
    assert [job for job in every if lead(model, job) >= MIN_LEAD][:12] == chosen
    assert any(lead(model, job) < MIN_LEAD for job in every)
    assert any(job.sampling.temperature for job in chosen) and any(job.sampling.n == 2 for job in chosen)


def test_an_answer_with_another_token_is_led_by_the_right_one(model: Path) -> None:
    job = make_jobs(model, SIZES, seed=2, count=1, min_lead=LEAST)[0]
    first = job.expected[0]
    wrong = replace(job, expected=((*first[:-1], (first[-1] + 1) % 250), *job.expected[1:]))
    assert lead(model, job) > 0 > lead(model, wrong)


def test_draws_of_another_seed_are_not_the_answer(model: Path) -> None:
    job = next(job for job in make_jobs(model, SIZES, seed=3, count=16, min_lead=LEAST) if job.sampling.temperature == 1.0)
    other = Job(job.prompt, replace(job.sampling, seed=(job.sampling.seed or 0) + 1), job.expected)
    assert lead(model, job) > 0 > lead(model, other)
