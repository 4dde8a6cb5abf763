"""How much of a draft is verified: as much as makes tokens per second the most, whatever the curve."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.engine.speculation.cost_curve import CostCurve
from pdmesh.engine.speculation.draft import NOTHING, Draft
from pdmesh.engine.speculation.policy import MARGIN, Choice, Load, choose, fixed, threshold

FLAT = CostCurve((1, 64), (0.010, 0.010))
STEEP = CostCurve((1, 2, 64), (0.010, 0.020, 0.640))
GENTLE = CostCurve((1, 2, 4, 8, 16), (0.010, 0.0104, 0.0112, 0.0128, 0.020))


def chain(*chances: float) -> Draft:
    return Draft.chain(range(len(chances)), chances, "test")


def one(draft: Draft, curve: CostCurve, *, num_decoding: int = 1, num_prompt_tokens: int = 0) -> Choice:
    return choose([draft], [100], Load(num_decoding, num_prompt_tokens, 0.0), curve, 64)


def test_what_costs_nothing_is_all_taken() -> None:
    draft = chain(0.9, 0.5, 0.1, 0.5)
    assert one(draft, FLAT).drafts == [draft]


def test_where_a_row_costs_a_step_nothing_is_taken() -> None:
    assert one(chain(0.99, 0.99), STEEP).drafts == [NOTHING]


def test_a_draft_ends_where_its_chance_no_longer_pays() -> None:
    choice = one(chain(0.9, 0.9, 0.9, 0.02, 0.9), GENTLE)
    assert choice.drafts == [chain(0.9, 0.9, 0.9)]
    assert choice.num_expected == 0.9 + 0.81 + 0.729


def test_a_gain_within_the_margin_is_left() -> None:
    curve = CostCurve((1, 2), (0.010, 0.0109))
    assert one(chain(0.10), curve).drafts == [NOTHING]
    assert one(chain(0.16), curve).drafts == [chain(0.16)]


def test_the_busier_the_step_the_dearer_a_row() -> None:
    curve = CostCurve((1, 8, 16, 32), (0.010, 0.011, 0.016, 0.032))
    assert one(chain(0.5), curve).drafts == [chain(0.5)]
    assert one(chain(0.5), curve, num_decoding=16).drafts == [NOTHING]


def test_a_prompt_beside_makes_no_guess_worth_more() -> None:
    """Its step is long, but what a kept token saves is a share of a later one."""
    curve = CostCurve((1, 2, 64), (0.010, 0.012, 0.136))
    for num_prompt_tokens in (0, 30, 60):
        assert one(chain(0.15), curve, num_prompt_tokens=num_prompt_tokens).drafts == [NOTHING]
        assert one(chain(0.27), curve, num_prompt_tokens=num_prompt_tokens).drafts == [chain(0.27)]


def test_beside_a_prompt_a_row_costs_what_it_adds() -> None:
    curve = CostCurve((1, 2, 16, 64), (0.010, 0.020, 0.050, 0.051))
    assert one(chain(0.5), curve).drafts == [NOTHING]
    assert one(chain(0.5), curve, num_prompt_tokens=20).drafts == [chain(0.5)]


def test_a_long_context_makes_rows_dearer() -> None:
    curve = CostCurve((1, 64), (0.010, 0.010), context_s=0.0, row_context_s=1e-6)
    drafts = [chain(0.2), chain(0.2)]
    choice = choose(drafts, [100, 100_000], Load(2, 0, 0.0), curve, 64)
    assert choice.drafts == [drafts[0], NOTHING]


def test_no_more_tokens_than_the_step_has_room_for() -> None:
    drafts = [chain(0.9, 0.8), chain(0.7, 0.6)]
    assert choose(drafts, [1, 1], Load(2, 0, 0.0), FLAT, 2).drafts == [drafts[0], NOTHING]
    assert choose(drafts, [1, 1], Load(2, 0, 0.0), FLAT, 3).drafts == [drafts[0], chain(0.7)]


def test_fixed_takes_the_first_branch() -> None:
    tree = Draft((1, 2, 3, 4), (-1, 0, 1, -1), (0.1,) * 4, "test")
    assert [len(draft) for draft in fixed([tree, NOTHING, chain(0.1)], 2).drafts] == [2, 0, 1]
    assert fixed([tree], 8).drafts == [tree.first(3)]


CHANCES = st.lists(st.floats(0.0, 1.0), max_size=3)
CURVES = st.lists(st.floats(0.0, 0.01), min_size=6, max_size=6)


@given(st.lists(CHANCES, min_size=1, max_size=3), CURVES, st.integers(0, 5))
def test_nothing_better_exists(chances: list[list[float]], more_s: list[float], num_prompt_tokens: int) -> None:
    """Against all ways to cut the chains."""
    seconds = [0.01]
    for extra_s in more_s:
        seconds.append(seconds[-1] + extra_s)
    curve = CostCurve(tuple(range(1, 8)), tuple(seconds))
    drafts, load = [chain(*each) for each in chances], Load(len(chances), num_prompt_tokens, 0.0)

    def rate(lengths: tuple[int, ...]) -> float:
        expected = sum(sum(draft.first(n).cumulative) for draft, n in zip(drafts, lengths, strict=True))
        more_s = curve.step_s(load.num_rows + sum(lengths)) - curve.step_s(load.num_rows)
        return (load.num_decoding + expected) / (curve.step_s(load.num_decoding) + more_s)

    best = max(rate(lengths) for lengths in product(*(range(len(draft) + 1) for draft in drafts)))
    plain = rate((0,) * len(drafts))
    choice = choose(drafts, [0] * len(drafts), load, curve, 64)
    got = rate(tuple(map(len, choice.drafts)))
    assert got == plain or got > (1 + MARGIN) * plain * (1 - 1e-9)
    assert got >= best * (1 - 1e-9) or best <= (1 + MARGIN) * plain * (1 + 1e-9)
    assert all(c >= threshold(plain, load.num_rows, curve) for draft in choice.drafts for c in draft.cumulative)
