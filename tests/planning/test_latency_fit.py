"""The fit finds the numbers that made the steps, whatever the order, the noise and the prior."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.planning.latency_fit import NUM_CELLS, LatencyFit, RunningMedian, WorkCells, solve_non_negative
from pdmesh.planning.latency_model import LatencyModel, Work, prefill_context

TRUTH = LatencyModel(5e-3, 2e-4, 5e-8, 6e-4, 4e-7)
PRIOR = LatencyModel(3e-3, 8e-5, 2e-8, 1e-4, 1e-7)
PROMPTS = [Work(512, prefill_context(0, 512)), Work(300, prefill_context(700, 1000)), Work(64, prefill_context(0, 64), 6, 3000)]
DECODES = [Work(0, 0, 1, 200), Work(0, 0, 8, 4000), Work(0, 0, 30, 9000), Work(0, 0, 4, 8000)]


class Machine:
    """Steps on a machine of which the truth is known."""

    def __init__(self, truth: LatencyModel = TRUTH, *, prior: LatencyModel = PRIOR, seed: int = 0, noise: float = 0.0) -> None:
        self.truth, self.noise = truth, noise
        self.fit = LatencyFit(prior)
        self.rng = random.Random(seed)
        self.now_s = 0.0

    def step(self, work: Work, delay_s: float = 0.0) -> float:
        """Does it and tells the fit; what the model was off by, as a share of the truth."""
        exact = self.truth.step_s(work)
        taken_s = exact * math.exp(self.rng.gauss(0.0, self.noise)) + delay_s
        self.now_s += taken_s
        error = self.model.step_s(work) / exact - 1
        self.fit.observe(work, taken_s)
        return error

    @property
    def model(self) -> LatencyModel:
        return self.fit.model(self.now_s)

    def run(self, works: Iterator[Work], num_steps: int, *, pause: Callable[[int], float] = lambda _: 0.0) -> list[float]:
        return [self.step(next(works), pause(number)) for number in range(num_steps)]


def mixed(rng: random.Random, prompts: float = 0.1) -> Iterator[Work]:
    """Decode rows whose number wanders, and now and then a chunk of a prompt among them."""
    rows = 4
    while True:
        rows = min(40, max(1, rows + rng.choice((-1, 0, 0, 1))))
        tokens = rng.randint(16, 500) if rng.random() < prompts else 0
        first = rng.choice((0, 0, 500, 1500)) if tokens else 0
        context = sum(rng.randint(50, 1500) for _ in range(rows)) if rows < 6 else rows * 600
        yield Work(tokens, prefill_context(first, first + tokens), rows, context)


def worst(model: LatencyModel, truth: LatencyModel, works: list[Work]) -> float:
    return max(abs(model.step_s(work) / truth.step_s(work) - 1) for work in works)


def test_before_the_first_step_it_is_the_prior() -> None:
    assert LatencyFit(PRIOR).model(0.0) == PRIOR


def test_finds_the_numbers_without_noise() -> None:
    machine = Machine()
    machine.run(mixed(random.Random(1)), 2000)
    model = machine.fit.model(machine.now_s + 1)
    assert astuple(model)[:5] == pytest.approx(astuple(TRUTH)[:5], rel=0.05)
    assert model.num_steps == 2000
    assert model.decode_error < 0.02
    assert model.prefill_error < 0.02


truths = st.builds(
    LatencyModel,
    st.floats(1e-4, 5e-2),
    st.floats(1e-6, 1e-3),
    st.floats(1e-10, 2e-7),
    st.floats(1e-6, 5e-3),
    st.floats(1e-9, 2e-6),
)


def error_through_noise_and_pauses(truth: LatencyModel, seed: int) -> float:
    """The median, when one step in fifty is held up for nine times as long as it takes."""
    machine = Machine(truth, seed=seed, noise=0.05)
    works = mixed(random.Random(seed))
    for number in range(1200):
        work = next(works)
        machine.step(work, 9 * truth.step_s(work) if number % 50 == 49 else 0.0)
    return statistics.median(abs(error) for error in machine.run(works, 200))


@settings(max_examples=12, deadline=None)
@given(truth=truths, seed=st.integers(0, 1000))
def test_predicts_any_machine_through_noise_and_pauses(truth: LatencyModel, seed: int) -> None:
    assert error_through_noise_and_pauses(truth, seed) < 0.1


def test_a_shape_that_the_prior_has_wrong_is_no_change_of_the_machine() -> None:
    """Its steps took longer than predicted for a while, but no longer than steps of their kind."""
    truth = LatencyModel(0.03125, 0.000653, 1.4e-07, 0.004993, 1.189e-06)
    assert error_through_noise_and_pauses(truth, 168) < 0.05


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 600), st.integers(0, 3000), st.integers(0, 64), st.integers(0, 2000), st.floats(0.0, 100.0)),
        min_size=1,
        max_size=60,
    )
)
def test_never_negative_whatever_comes(steps: list[tuple[int, int, int, int, float]]) -> None:
    fit = LatencyFit(PRIOR)
    for number, (tokens, first, rows, context, seconds) in enumerate(steps):
        fit.observe(Work(tokens, prefill_context(first, first + tokens), rows, rows * context), seconds)
        model = fit.model(2.0 * number)
        assert all(math.isfinite(value) and value >= 0 for value in astuple(model)), model
        assert model.num_steps == number + 1


@pytest.mark.parametrize("factor", [2.0, 0.5, 5.0])
def test_follows_a_machine_that_changes_its_speed(factor: float) -> None:
    """Within two hundred steps where it works, prompts included, though it has seen thousands at the old speed."""
    machine = Machine(noise=0.03)
    works = mixed(random.Random(3))
    machine.run(works, 4000)
    machine.truth = LatencyModel(*(factor * value for value in astuple(TRUTH)[:5]))
    machine.run(works, 200)
    assert statistics.median(map(abs, machine.run(works, 100))) < 0.1
    machine.run(works, 3000)
    assert worst(machine.fit.model(machine.now_s + 1), machine.truth, PROMPTS + DECODES) < 0.25


def test_the_same_step_for_ever_stays_predicted_and_harmless() -> None:
    machine = Machine(noise=0.05)
    errors = machine.run(iter(lambda: DECODES[1], None), 5000)
    assert max(map(abs, errors[100:])) < 0.1
    model = machine.fit.model(machine.now_s + 1)
    assert all(0 <= new <= 20 * old for new, old in zip(astuple(model)[:5], astuple(PRIOR)[:5], strict=True))
    assert all(TRUTH.step_s(work) / 6 < model.step_s(work) < 6 * TRUTH.step_s(work) for work in DECODES + PROMPTS)


def test_prompts_are_not_forgotten_while_thousands_of_tokens_are_decoded() -> None:
    machine = Machine(noise=0.02)
    machine.run(mixed(random.Random(5), prompts=0.5), 300)
    machine.run(mixed(random.Random(6), prompts=0.0), 20_000)
    assert worst(machine.fit.model(machine.now_s + 1), TRUTH, PROMPTS) < 0.1


def test_a_worker_that_only_prefills_is_learned() -> None:
    machine = Machine(noise=0.03)
    lengths = random.Random(7)
    works = (
        Work(n, prefill_context(f, f + n)) for n, f in iter(lambda: (lengths.randint(8, 512), lengths.choice((0, 512))), None)
    )
    machine.run(works, 400)
    assert statistics.median(map(abs, machine.run(works, 60))) < 0.05


def test_where_it_works_now_it_is_right_on_a_machine_that_is_not_linear() -> None:
    """Eight rows cost as much as four: kernels compute them in groups."""
    fit, now_s, errors = LatencyFit(PRIOR), 0.0, []
    for number in range(2400):
        rows = (3, 9, 17, 30, 5, 12)[number // 400]
        work = Work(0, 0, rows, rows * 500)
        seconds = 5e-3 + 2e-3 * -(-rows // 8)
        now_s += seconds
        errors.append(abs(fit.model(now_s).step_s(work) / seconds - 1))
        fit.observe(work, seconds)
        if number % 400 == 399:
            assert statistics.median(errors[-100:]) < 0.05


def test_errors_are_those_before_learning() -> None:
    """A model that nobody asks for stays the prior, and so do its errors."""
    fit = LatencyFit(replace(PRIOR, fixed_s=10.0))
    for _ in range(20):
        fit.observe(Work(0, 0, 1, 10), 5.0)
    assert fit.model(0.0).decode_error == pytest.approx(1.0, abs=0.01)
    assert fit.model(0.0).prefill_error == 0.0


def test_solves_only_when_enough_is_new() -> None:
    fit = LatencyFit(PRIOR)
    fit.observe(DECODES[0], 0.01)
    first = fit.model(0.0)
    for _ in range(20):
        fit.observe(DECODES[0], 0.01)
    assert fit.model(0.05) is first
    second = fit.model(0.11)
    assert second.num_steps == 21
    fit.observe(DECODES[0], 0.01)
    assert fit.model(0.5) is second
    assert fit.model(1.2).num_steps == 22


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(0, 10), min_size=4, max_size=4), min_size=1, max_size=12),
    seconds=st.floats(0.1, 10),
)
def test_least_squares_meets_its_conditions(rows: list[list[float]], seconds: float) -> None:
    """Karush, Kuhn, Tucker: no negative value, no slope that would help, none left where there is a value."""
    matrix = np.array(rows)
    gram = matrix.T @ matrix + 1e-3 * np.eye(4)
    moments = matrix.T @ np.linspace(-seconds, seconds, len(rows)) + 1e-3
    x = solve_non_negative(gram, moments)
    slope = gram @ x - moments
    scale = 1e-6 * (1 + np.abs(moments).max())
    assert (x >= 0).all()
    assert (slope >= -scale).all()
    assert np.abs(slope[x > 0]).max(initial=0) <= scale


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.integers(1, 9))
def test_running_median(values: list[float], size: int) -> None:
    median = RunningMedian(size)
    for value in values:
        median.add(value)
    assert median.value == statistics.median_high(values[-size:])


def test_cells_are_bounded_and_the_oldest_goes() -> None:
    cells = WorkCells()
    for rows in range(1, 3000):
        cells.add(Work(rows % 700, rows * 40, rows, rows * rows), 0.01 * rows)
    assert len(cells) <= NUM_CELLS
    work, seconds, weights = cells.observations()
    assert (work.shape, seconds.shape, weights.shape) == ((len(cells), 5), (len(cells),), (len(cells),))
    assert (weights > 0).all()
    assert seconds.max() > 0.01 * 2900
