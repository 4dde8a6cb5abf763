"""Requests whose answers are known: drawn with a seed, answered once by an engine that nothing is separated from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdmesh.engine.request import SamplingParams
from tests.mesh import oracle

_BATCH = 8  # requests that the engine computes together: more would not fit into its pool


@dataclass(frozen=True)
class Sizes:
    """Bounds, inclusive: tokens of a prompt and of each choice; `first_id` and `last_id` of what prompts are made of."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    first_id: int
    last_id: int


@dataclass(frozen=True)
class Job:
    """A request, and the token ids of each choice of its answer."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    expected: tuple[tuple[int, ...], ...] = ()


def make_jobs(folder: Path, sizes: Sizes, seed: int, count: int) -> list[Job]:
    """`count` jobs for the model in `folder`; greedy ones, sampled ones, and some of two choices."""
    rng = random.Random(seed)
    jobs = [_draw(rng, sizes) for _ in range(count)]
    answers = [answer for start in range(0, count, _BATCH) for answer in _answers(folder, jobs[start : start + _BATCH])]
    return [replace(job, expected=tuple(map(tuple, answer))) for job, answer in zip(jobs, answers, strict=True)]


def _draw(rng: random.Random, sizes: Sizes) -> Job:
    prompt = tuple(rng.randint(sizes.first_id, sizes.last_id) for _ in range(rng.randint(*sizes.prompt)))
    sampling = SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.0)),
        seed=rng.randint(1, 2**32),
        max_tokens=rng.randint(*sizes.output),
        ignore_eos=True,
        n=rng.choice((1, 1, 1, 1, 1, 2)),
    )
    return Job(prompt, sampling)


def _answers(folder: Path, jobs: Sequence[Job]) -> list[list[list[int]]]:
    return oracle.answers(folder, [(job.prompt, job.sampling) for job in jobs])
