"""Whoever guesses, whatever the machine and however wrongly it was measured: hardly a token per second less than without."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from pdmesh.engine.speculation.cost_curve import CostCurve, rising
from tests.engine.speculation.simulated import Liar, Machine

LOSS = 0.02
STEP_S = 0.01
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MACHINES: dict[str, Callable[[int], float]] = {
    "memory bound": lambda rows: STEP_S * (1 + 0.03 * (rows - 1)),
    "steep": lambda rows: STEP_S * (0.3 + 0.7 * rows),
    "in tiles": lambda rows: STEP_S * (0.5 + 0.5 * math.ceil(rows / 16)),
}
STEPS = {1: 2000, 4: 1500, 16: 800, 32: 400, 96: 200}  # by sequences
SETTLING = 400  # steps, which are not counted


def measured(true_s: Callable[[int], float], seed: int | None = None) -> CostCurve:
    """As it is; with a seed, three times too much at some points and a third at others."""
    chance = random.Random(seed)
    seconds = [true_s(rows) * (1 if seed is None else chance.choice([1, 1 / 3, 3])) for rows in ROWS]
    return CostCurve(ROWS, rising(seconds, len(seconds) - 1))


def gain(liar: Liar, machine: str, num_sequences: int, seed: int | None = None) -> float:
    """Tokens per second, by those without speculation."""
    true_s = MACHINES[machine]
    simulated = Machine([liar], measured(true_s, seed), true_s, num_sequences)
    simulated.run(SETTLING)
    return simulated.run(STEPS[num_sequences]) / simulated.plain()


@pytest.mark.parametrize("num_sequences", STEPS)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("price", [None, 0.2, 2.0])
def test_wrong_guesses(price: float | None, machine: str, num_sequences: int) -> None:
    """Though it swears that they are right. `price`: of asking, in steps; None: free."""
    step_s = MACHINES[machine](num_sequences)
    liar = Liar(0.0, 0.9, price_s=step_s * (price or 0.0), is_free=price is None)
    assert gain(liar, machine, num_sequences, seed=num_sequences) > 1 - LOSS


@pytest.mark.parametrize("machine", MACHINES)
def test_a_slow_one_that_calls_itself_free(machine: str) -> None:
    assert gain(Liar(0.0, 0.9, price_s=0.1 * STEP_S), machine, 1) > 1 - LOSS


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("claimed", [0.5, 0.9])
def test_guesses_that_are_right_half_the_time(claimed: float, machine: str, seed: int | None) -> None:
    assert gain(Liar(0.5, claimed), machine, 4, seed) > 1 - LOSS


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize(("machine", "least"), [("memory bound", 3.5), ("in tiles", 4.0)])
def test_what_pays_is_found_however_wrong_the_curve_was(machine: str, least: float, seed: int | None) -> None:
    """Eight tokens, each right nine times of ten: 5.7 tokens in a step."""
    assert gain(Liar(0.9, 0.9), machine, 1, seed) > least


@pytest.mark.parametrize("dear", [3, 30])
def test_a_curve_that_was_measured_far_too_dear_is_tried_again(dear: float) -> None:
    """Nobody would verify anything, and so nobody would see it."""
    true_s = MACHINES["memory bound"]
    curve = measured(true_s)
    curve = CostCurve(ROWS, (curve.seconds[0], *(dear * seconds for seconds in curve.seconds[1:])))
    simulated = Machine([Liar(0.9, 0.9)], curve, true_s, 1)
    simulated.run(4000)
    assert simulated.run(500) > 3.5 * simulated.plain()


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_drafts_that_bring_less_than_they_take_besides_are_left(num_sequences: int) -> None:
    """Their rows are cheap, so the passes alone would pay."""
    true_s = MACHINES["memory bound"]
    handling_s = 0.6 * true_s(num_sequences)
    liar = Liar(0.3, 0.3)
    simulated = Machine([liar], measured(true_s), true_s, num_sequences, handling_s=handling_s)
    simulated.run(400)
    assert simulated.run(4000) > 0.98 * simulated.plain()
    assert liar.num_calls > 10, "but they are tried again"


def test_drafts_that_bring_more_than_they_take_besides_are_verified() -> None:
    true_s = MACHINES["memory bound"]
    simulated = Machine([Liar(0.9, 0.9)], measured(true_s), true_s, 1, handling_s=0.3 * true_s(1))
    simulated.run(400)
    assert simulated.run(1000) > 2.5 * simulated.plain()


def test_the_machine_becomes_slower_for_good() -> None:
    true_s = MACHINES["memory bound"]
    simulated = Machine([Liar(0.5, 0.9)], measured(true_s), true_s, 4)
    simulated.run(500)
    simulated.true_s = lambda rows: 4 * true_s(rows)
    simulated.run(500)
    assert simulated.speculator.curve.step_s(4) == pytest.approx(4 * true_s(4), rel=0.15)
    assert simulated.run(1000) > simulated.plain()


@pytest.mark.parametrize("price", [0.05, 0.12, 0.2])
def test_a_dear_one_that_pays_is_asked(price: float) -> None:
    """Though a few drafts in a row are wrong now and then. Of four tokens 0.78 are kept on average."""
    liar = Liar(0.45, 0.45, price_s=price * STEP_S, is_free=False, depth=4)
    assert gain(liar, "memory bound", 1) > 0.96 * 1.78 / (1.12 + price)
