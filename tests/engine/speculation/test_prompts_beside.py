"""Guesses and prompts share a step: whoever waits for a first token is not kept waiting by guesses."""

from __future__ import annotations

import pytest

from pdmesh.engine.scheduler.scheduler import PROMPTS_PER_DRAFT
from pdmesh.engine.speculation.cost_curve import CostCurve
from tests.support.engine_requests import PROMPT, assert_answers, assert_whole, request
from tests.support.guesser import Guesser
from tests.support.mock_engine import Collector, make_engine


def steps_until_b_starts(budget: int, *, guessing: bool) -> int:
    guesser = [Guesser(1.0)] if guessing else []
    engine = make_engine(max_num_batched_tokens=budget, proposers=guesser, draft_length=5 if guessing else 0, num_blocks=32)
    collector = Collector()
    a, b = request("a", max_tokens=40), request("b", (4, *PROMPT), max_tokens=4)
    engine.add(a)
    while "a" not in collector.started:
        collector.take(engine.step())
    engine.add(b)
    steps = 0
    while "b" not in collector.started:
        collector.take(engine.step())
        steps += 1
    while (result := engine.step()) is not None:
        collector.take(result)
    assert_answers(collector, a, b)
    assert_whole(engine)
    return steps


@pytest.mark.parametrize("budget", [2, 3, 6])
def test_guesses_do_not_keep_a_prompt_waiting(budget: int) -> None:
    assert steps_until_b_starts(budget, guessing=True) == steps_until_b_starts(budget, guessing=False)


def test_beside_prompts_they_have_a_part_of_the_step() -> None:
    budget = 2 * PROMPTS_PER_DRAFT
    engine = make_engine(max_num_batched_tokens=budget, proposers=[Guesser(1.0)], draft_length=5, num_blocks=64)
    engine.add(request("a", max_tokens=40))
    engine.step()
    engine.add(request("b", PROMPT * 4, max_tokens=4))
    result = engine.step()
    assert result is not None
    assert result.work.prefill_tokens >= budget - 1 - budget // PROMPTS_PER_DRAFT


def test_steps_with_prompts_say_nothing_of_the_curve() -> None:
    """Not even the last of a prompt, which draws a token: it computes more rows than it draws from."""
    engine = make_engine(max_num_batched_tokens=64, proposers=[Guesser(1.0)])
    assert engine.speculator is not None
    engine.speculator.curve = CostCurve((1, 64), (0.001, 0.001))
    seen = []
    for name in ("a", "b"):
        engine.add(request(name, PROMPT, max_tokens=40))
        for _ in range(2):
            engine.step()
            seen.append(engine.speculator.curve.history.num_steps)
    assert seen == [0, 1, 1, 2]
