"""The plan is the same for the same seed, balanced in every part, and meets the quotas that were asked for."""

from collections import Counter

from tests.chaos.plan import ANY_MOMENT, ROLES, STATES, Kind, make_plan, role_of
from tests.chaos.report import VLLM_GOALS
from tests.chaos.run import REAL_FAULTS, TINY_FAULTS, VLLM_REAL_FAULTS, VLLM_TINY_FAULTS


def test_the_same_seed_gives_the_same_plan() -> None:
    assert make_plan(3, 500) == make_plan(3, 500)
    assert make_plan(3, 500) != make_plan(4, 500)


def test_a_longer_plan_begins_like_a_shorter_one() -> None:
    assert make_plan(3, 500)[:120] == make_plan(3, 120)


def test_the_default_plan_meets_the_quotas() -> None:
    plan = make_plan(1, TINY_FAULTS)
    cells = Counter((fault.kind, fault.state) for fault in plan)
    assert len(plan) + REAL_FAULTS >= 2000
    assert REAL_FAULTS >= 200
    assert set(cells) == {(kind, state) for kind in Kind for state in STATES}
    assert min(cells.values()) >= 20
    assert min(Counter(fault.kind for fault in plan).values()) >= 100


def test_the_plan_for_vllm_meets_its_quotas() -> None:
    cells = Counter((fault.kind, fault.state) for fault in make_plan(1, VLLM_TINY_FAULTS))
    assert VLLM_GOALS.faults <= VLLM_TINY_FAULTS + VLLM_REAL_FAULTS and VLLM_GOALS.on_real_model <= VLLM_REAL_FAULTS
    assert min(cells.values()) >= VLLM_GOALS.of_cell


def test_every_part_is_balanced() -> None:
    cells = Counter((fault.kind, fault.state) for fault in make_plan(1, 300))
    assert max(cells.values()) - min(cells.values()) <= 1


def test_a_fault_strikes_who_passes_through_its_state() -> None:
    for fault in make_plan(2, 400):
        assert fault.role in ROLES
        assert fault.state == ANY_MOMENT or fault.role == role_of(fault.state)
        assert 0 <= fault.pick < 1 and 0 <= fault.hold_s <= 6


def test_only_the_kinds_that_were_asked_for() -> None:
    assert {fault.kind for fault in make_plan(1, 100, [Kind.KILL, Kind.CLOCK])} == {Kind.KILL, Kind.CLOCK}
