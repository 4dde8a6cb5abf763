"""Situations in which pools share: GPUs that are too few for both, workers that take the other's role."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.autoscaler.settings import PoolSettings
from pdmesh.autoscaler.views import Hold
from tests.autoscaler.scenes import DECODE, PREFILL, SETTINGS, need, policy, snapshot, view


def test_an_exhausted_budget_goes_where_most_is_borne() -> None:
    prefill, decode = need(60.0)
    budget = (prefill + decode) // 2
    decision = policy(settings=replace(SETTINGS, max_gpus=budget)).decide(snapshot(0, 60.0, 1, 1))
    assert decision.replicas(PREFILL) + decision.replicas(DECODE) == budget
    assert abs(decision.replicas(PREFILL) / prefill - decision.replicas(DECODE) / decode) < 0.35
    assert f"all pools together want {prefill + decode} GPUs of {budget}" in decision.reason
    assert decision.pools[0].held == "budget"


def test_draining_pods_and_big_replicas_count_against_the_budget() -> None:
    big = replace(SETTINGS, max_gpus=20, prefill=PoolSettings(gpus_per_replica=4))
    decision = policy(settings=big).decide(snapshot(0, 60.0, 1, view(DECODE, 1, num_draining=6)))
    assert 4 * decision.replicas(PREFILL) + decision.replicas(DECODE) + 6 <= 20


def test_a_budget_that_was_lowered_is_kept_at_once_but_not_against_a_person() -> None:
    lowered = replace(SETTINGS, max_gpus=4)
    decision = policy(settings=lowered).decide(snapshot(0, 5.0, 5, 5))
    assert decision.replicas(PREFILL) + decision.replicas(DECODE) == 4
    held = policy(settings=lowered).decide(snapshot(0, 5.0, view(PREFILL, 5, hold=Hold("ana", 1e9)), 5))
    assert (held.replicas(PREFILL), held.replicas(DECODE)) == (5, 5)


def test_nobody_gets_replicas_that_bear_nothing_more() -> None:
    """Prefill cannot grow: what decode would add has no prompts to follow."""
    stuck = replace(SETTINGS, max_gpus=100, prefill=PoolSettings(gpus_per_replica=90))
    decision = policy(settings=stuck).decide(snapshot(0, 60.0, 1, 1))
    assert decision.replicas(PREFILL) == 1
    assert decision.replicas(DECODE) <= need(15.0)[1] + 1


FLIPS = replace(SETTINGS, flips=True)


def test_idle_workers_take_the_other_role_before_pods_are_asked_for() -> None:
    prefill, decode = need(60.0)
    idle = need(60.0 * 1.1)[1] + 3
    decision = policy(settings=FLIPS).decide(snapshot(0, 60.0, prefill - 2, idle))
    assert [str(each) for each in decision.flips] == ["2 of decode become prefill"]
    assert decision.replicas(PREFILL) == prefill and decision.replicas(DECODE) == idle - 2
    assert "2 idle take this role at once, so no pod is asked for" in decision.reason
    some = policy(settings=FLIPS).decide(snapshot(0, 60.0, prefill - 5, idle))
    assert some.flips[0].num == 3 and "so 2 pods instead of 5 are asked for" in some.reason
    assert not policy(settings=FLIPS).decide(snapshot(0, 60.0, prefill - 2, decode)).flips


@pytest.mark.parametrize("why", ["held", "grew", "other machines", "off"])
def test_nobody_changes_sides_who_should_not(why: str) -> None:
    settings = replace(FLIPS, flips=why != "off", decode=PoolSettings(gpus_per_replica=2 if why == "other machines" else 1))
    scaler, idle = policy(settings=settings), need(60.0 * 1.1)[1] + 3
    hold = Hold("ana", 1e9) if why == "held" else None
    if why == "grew":
        scaler.decide(snapshot(0, 60.0, need(60.0)[0], 1))
    assert not scaler.decide(snapshot(10, 60.0, 1, view(DECODE, idle, hold=hold))).flips


def test_borrowed_workers_go_back() -> None:
    scaler = policy(settings=FLIPS)
    prefill, decode = need(5.0 * (1 + SETTINGS.headroom))
    for now_s in range(0, 130, 10):
        decision = scaler.decide(snapshot(now_s, 5.0, view(PREFILL, prefill + 2, num_borrowed=1), decode))
    assert decision.replicas(PREFILL) == prefill and decision.replicas(DECODE) == decode + 1
    assert [str(each) for each in decision.flips] == ["1 of prefill become decode"]
