"""What drafts cost besides the forward pass is measured, and stops drafts that would bring less than that."""

from __future__ import annotations

from pytest import approx

from pdmesh.engine.speculation.cost_curve import HANDLING_FIRST, HANDLING_MOST, CostCurve, HandlingCost, StepSort
from pdmesh.engine.speculation.draft import NOTHING, Draft
from pdmesh.engine.speculation.policy import Load, choose, may_pay

PLAIN_S = 0.004


def seen(*steps: tuple[bool, float], num_decoding: int = 4) -> HandlingCost:
    handling = HandlingCost()
    for has_drafts, more_s in steps:
        handling.saw(num_decoding, more_s, PLAIN_S, has_drafts=has_drafts)
    return handling


def of(handling: HandlingCost, num_decoding: int = 4, *, has_prompts: bool = False) -> float:
    return handling.of_drafting(num_decoding, PLAIN_S, has_prompts=has_prompts)


def test_until_it_is_seen_a_share_of_a_step_is_assumed() -> None:
    assert of(HandlingCost()) == HANDLING_FIRST * PLAIN_S
    assert of(seen(*[(True, 0.001)] * 100)) == approx(0.001, rel=0.02), "no step without drafts to compare with: none takes more"


def test_it_is_what_the_step_and_the_one_behind_take_more() -> None:
    handling = seen(*[(False, 0.0001), (True, 0.0006), (False, 0.0003), (False, 0.0001)] * 100)
    assert of(handling) == approx(0.0005 + 0.0002, rel=0.02)
    assert of(handling, has_prompts=True) == approx(0.0003, rel=0.02), "beside prompts no step keeps its input in any case"


def test_behind_drafts_more_of_them_put_off_the_step_that_begins_anew() -> None:
    steps = [(False, 0.0001), (True, 0.0006), (False, 0.0003), (False, 0.0001), (True, 0.0006)]
    assert of(seen(*steps * 100)) == approx(0.0005, rel=0.02)


def test_batches_of_other_sizes_are_apart() -> None:
    handling = seen(*[(False, 0.0), (True, 0.001)] * 100)
    assert of(handling, 5) == approx(0.001, rel=0.02)
    assert of(handling, 32) == HANDLING_FIRST * PLAIN_S


def test_a_first_step_that_was_held_up_is_soon_forgotten() -> None:
    held_up = seen((False, 0.0), (True, 0.02))
    assert of(held_up) <= (HANDLING_FIRST + HANDLING_MOST / 3) * PLAIN_S
    for _ in range(12):
        held_up.saw(4, 0.0002, PLAIN_S, has_drafts=True)
    assert of(held_up) < 0.1 * PLAIN_S


def test_it_is_never_negative() -> None:
    assert of(seen(*[(False, 0.001), (True, -0.001)] * 10)) == 0.0


def test_sorts_follow_one_another() -> None:
    handling = HandlingCost()
    sorts = []
    for has_drafts in (False, True, True, False, False):
        sorts.append(handling.sort_of_next(has_drafts=has_drafts))
        handling.passed(has_drafts=has_drafts)
    assert sorts == [StepSort.PLAIN, StepSort.DRAFTED, StepSort.DRAFTED, StepSort.BEHIND, StepSort.PLAIN]


def test_the_policy_reckons_with_it() -> None:
    curve = CostCurve((1, 8), (0.010, 0.0101))
    draft = Draft.chain((1, 2), (0.5, 0.5), "some")
    assert choose([draft], [100], Load(1, 0, 0.0), curve, 8).drafts == [draft]
    dear = Load(1, 0, 0.0, handling_s=0.009)
    assert choose([draft], [100], dear, curve, 8).drafts == [NOTHING]
    assert may_pay(dear, curve, 2, 0.97) and not may_pay(dear, curve, 1, 0.5)
    assert dear.drafted_s(curve, 0) == dear.plain_s(curve)
