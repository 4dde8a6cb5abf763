"""The plan is the same for the same seed, balanced in every part, and meets the quotas that were asked for."""

from collections import Counter

from tests.chaos.plan import (
    ANY_MOMENT,
    BASE_KINDS,
    DISK_KINDS,
    LIMIT_KINDS,
    MOMENTS,
    NETWORK_KINDS,
    ROLES,
    ROUTER_KINDS,
    TIER_KINDS,
    TIER_STATES,
    Kind,
    cells,
    make_plan,
    role_of,
)
from tests.chaos.report import MIN_TIER_FAULTS, OWN_GOALS, VLLM_GOALS
from tests.chaos.run import (
    HOST_FAULTS,
    LIMIT_FAULTS,
    PAIR_FAULTS,
    REAL_FAULTS,
    TIER_FAULTS,
    TINY_FAULTS,
    VLLM_REAL_FAULTS,
    VLLM_TINY_FAULTS,
)


def test_the_same_seed_gives_the_same_plan() -> None:
    assert make_plan(3, 500) == make_plan(3, 500)
    assert make_plan(3, 500) != make_plan(4, 500)


def test_a_longer_plan_begins_like_a_shorter_one() -> None:
    assert make_plan(3, 500)[:120] == make_plan(3, 120)


def test_the_default_plan_meets_the_quotas() -> None:
    plan = make_plan(1, TINY_FAULTS)
    dealt = Counter((fault.kind, fault.state) for fault in plan)
    assert len(plan) + REAL_FAULTS >= OWN_GOALS.faults
    assert OWN_GOALS.on_real_model <= REAL_FAULTS
    assert set(dealt) == set(cells(BASE_KINDS))
    assert min(dealt.values()) >= OWN_GOALS.of_cell
    assert min(Counter(fault.kind for fault in plan).values()) >= OWN_GOALS.of_kind


def test_the_plan_for_vllm_meets_its_quotas() -> None:
    dealt = Counter((fault.kind, fault.state) for fault in make_plan(1, VLLM_TINY_FAULTS))
    assert VLLM_GOALS.faults <= VLLM_TINY_FAULTS + VLLM_REAL_FAULTS and VLLM_GOALS.on_real_model <= VLLM_REAL_FAULTS
    assert min(dealt.values()) >= VLLM_GOALS.of_cell


def test_every_part_is_balanced() -> None:
    dealt = Counter((fault.kind, fault.state) for fault in make_plan(1, 300))
    assert max(dealt.values()) - min(dealt.values()) <= 1


def test_a_fault_strikes_who_passes_through_its_state() -> None:
    for fault in make_plan(2, 400):
        assert fault.role in ROLES
        assert fault.state == ANY_MOMENT or fault.role == role_of(fault.state)
        assert 0 <= fault.pick < 1 and 0 <= fault.hold_s <= 6


def test_routers_are_struck_with_what_can_strike_them() -> None:
    struck = [fault for fault in make_plan(2, 400) if fault.role == "router"]
    assert {fault.kind for fault in struck} == set(ROUTER_KINDS) & set(BASE_KINDS)
    assert any(fault.at_state for fault in struck) and not all(fault.at_state for fault in struck)


def test_only_the_kinds_that_were_asked_for() -> None:
    assert {fault.kind for fault in make_plan(1, 100, [Kind.KILL, Kind.CLOCK])} == {Kind.KILL, Kind.CLOCK}


def test_what_a_mesh_on_one_host_cannot_be_struck_with_has_plans_of_its_own() -> None:
    of_hosts = Counter((fault.kind, fault.state) for fault in make_plan(1, HOST_FAULTS, NETWORK_KINDS))
    assert set(of_hosts) == {(kind, state) for kind in NETWORK_KINDS for state in MOMENTS} and min(of_hosts.values()) >= 50
    limits = make_plan(1, LIMIT_FAULTS, LIMIT_KINDS)
    assert set(cells(LIMIT_KINDS)) == {(fault.kind, fault.state) for fault in limits}
    assert {fault.role for fault in limits} == set(ROLES)
    assert cells((Kind.RANK_KILL,)) == [(Kind.RANK_KILL, ANY_MOMENT)] and PAIR_FAULTS >= 200
    assert set(Kind) == {*BASE_KINDS, *LIMIT_KINDS, *NETWORK_KINDS, *DISK_KINDS, Kind.RANK_KILL, Kind.LOG_STANDS}


def test_workers_with_tiers_are_struck_at_states_of_their_own() -> None:
    states = (ANY_MOMENT, *TIER_STATES)
    dealt = Counter((fault.kind, fault.state) for fault in make_plan(1, TIER_FAULTS, TIER_KINDS, states))
    assert set(dealt) == {(kind, state) for kind in TIER_KINDS for state in states} and min(dealt.values()) >= 9
    assert TIER_FAULTS >= MIN_TIER_FAULTS and set(DISK_KINDS) < set(TIER_KINDS)
