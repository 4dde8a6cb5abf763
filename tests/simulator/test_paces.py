"""The pace of many rows at once: the tightest of all objectives, and what is forgiven."""

import pytest

from pdmesh.planning.latency_model import LatencyModel
from pdmesh.simulator.workers.batch import Paces
from pdmesh.simulator.workers.kv_room import Sequence
from pdmesh.step_sharing import BEHIND_TARGET, FORGIVEN, LEAST_TOKENS, PACE_TARGET, SPREAD
from tests.simulator.test_kv_room import Nobody

GOAL_S = 0.01
PACE_S = PACE_TARGET * GOAL_S


def row(goal_s: float) -> Sequence:
    return Sequence(Nobody(), None, 10, 10, goal_s=goal_s)


def slack_s(paces: Paces, step: int, now: float) -> float:
    pace = paces.tightest(1e-3, step, now)
    assert pace is not None
    return pace.slack_s


def test_who_is_too_far_behind_is_forgiven_for_good() -> None:
    paces = Paces()
    paces.enter(row(GOAL_S), 0, 0.0)
    assert slack_s(paces, 1, 0.005) == pytest.approx(PACE_S - 0.005)
    assert slack_s(paces, 2, 10.0) == pytest.approx(-FORGIVEN * PACE_S)
    assert slack_s(paces, 12, 10.0) == pytest.approx((10 - FORGIVEN) * PACE_S)


def test_the_row_with_the_least_room_counts_until_it_leaves() -> None:
    paces, early, late = Paces(), row(GOAL_S), row(GOAL_S)
    paces.enter(early, 0, 0.0)
    paces.enter(late, 10, 0.2)
    assert slack_s(paces, 10, 0.2) == pytest.approx(10 * PACE_S - 0.2)
    paces.leave(early)
    assert slack_s(paces, 10, 0.2) == pytest.approx(0.0)
    paces.leave(late)
    assert paces.tightest(1e-3, 10, 0.2) is None


def test_an_objective_that_no_step_keeps_does_not_count() -> None:
    paces = Paces()
    paces.enter(row(GOAL_S), 0, 0.0)
    paces.enter(row(0.1), 0, 0.0)
    tight, loose = paces.tightest(0.5 * GOAL_S, 0, 0.0), paces.tightest(1.5 * GOAL_S, 0, 0.0)
    assert tight is not None
    assert loose is not None
    assert (tight.pace_s, loose.pace_s) == (PACE_S, PACE_TARGET * 0.1)


DECODE_S = 1e-3
SPEED = LatencyModel(DECODE_S, 1e-3, 0.0, 0.0, 0.0)


def test_prompts_wait_for_steps_that_have_saved_up_for_them() -> None:
    paces, prompt = Paces(), Sequence(Nobody(), None, 100, 10)
    paces.enter(row(4e-3), 0, 0.0)  # a pace of 3.6 ms leaves 2.6: two tokens
    given = [paces.prompt_tokens(prompt, SPEED, DECODE_S, step, 3.6e-3 * step) for step in range(4)]
    assert given == [0, 0, 0, LEAST_TOKENS]
    assert paces.prompt_tokens(prompt, SPEED, DECODE_S, 4, 4 * 3.6e-3) == 0  # from the beginning


def test_the_rest_of_a_prompt_need_not_wait_and_none_waits_for_long() -> None:
    paces, short, long = Paces(), Sequence(Nobody(), None, 2, 10), Sequence(Nobody(), None, 100, 10)
    paces.enter(row(4e-3), 0, 0.0)
    assert paces.prompt_tokens(short, SPEED, DECODE_S, 0, 0.0) == LEAST_TOKENS
    late = [paces.prompt_tokens(long, SPEED, DECODE_S, step, 4e-3 * step + 0.2) for step in range(SPREAD)]
    assert late == [0] * (SPREAD - 1) + [LEAST_TOKENS]


def test_who_is_behind_the_objective_itself_leaves_less() -> None:
    paces, late = Paces(), row(0.1)
    paces.enter(late, 0, 0.0)
    pace = paces.tightest(DECODE_S, 10, BEHIND_TARGET)
    assert pace is not None
    assert pace.slack_s == pytest.approx(PACE_TARGET - BEHIND_TARGET)
    assert pace.spare_s(DECODE_S) == pytest.approx(0.1 * BEHIND_TARGET - DECODE_S)
    pace = paces.tightest(DECODE_S, 10, BEHIND_TARGET + 0.08)
    assert pace is not None
    assert pace.spare_s(DECODE_S) == pytest.approx(0.1 * BEHIND_TARGET - DECODE_S - 0.08 / SPREAD)
