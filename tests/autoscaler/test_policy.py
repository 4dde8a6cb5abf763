"""Situations, decisions and their words."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from pdmesh.autoscaler.settings import AutoscalerSettings, PoolSettings
from pdmesh.autoscaler.views import Hold, Measured, PoolName, PoolView, Snapshot
from pdmesh.planning.capacity import DecodePool, SharedPool, fewest
from pdmesh.planning.capacity_load import Load, Worker
from pdmesh.planning.latency_model import Drafts
from tests.autoscaler.scenes import (
    BOTH,
    DECODE,
    GOALS,
    LENGTHS,
    LIMITS,
    MODEL,
    PREFILL,
    SETTINGS,
    need,
    policy,
    snapshot,
    traffic,
    view,
)

WORKER = Worker(MODEL, LIMITS)


def test_it_grows_at_once_to_what_is_observed_and_says_why() -> None:
    prefill, decode = need(60.0)
    decision = policy().decide(snapshot(0, 60.0, 1, 1))
    assert (decision.replicas(PREFILL), decision.replicas(DECODE)) == (prefill, decode)
    assert f"prefill 1 → {prefill}: 60 requests/s observed (60/s came) need {prefill} for TTFT 500 ms of 95%" in decision.reason
    assert f"decode 1 → {decode}" in decision.reason and "TPOT 30 ms" in decision.reason
    assert decision.held is None


def test_a_pool_that_speculates_needs_fewer_and_says_so() -> None:
    drafts, goals = Drafts(1.5, 2.0), replace(GOALS, tpot_s=0.012)
    least = fewest(DecodePool(replace(WORKER, drafts=drafts), goals), Load(60.0, LENGTHS), 999)
    plain = policy(goals=goals).decide(snapshot(0, 60.0, view(PREFILL, 1, drafts=drafts), 1))
    drafting = policy(goals=goals).decide(snapshot(0, 60.0, 1, view(DECODE, 1, drafts=drafts)))
    assert least is not None and drafting.replicas(DECODE) == least < plain.replicas(DECODE)
    assert "TPOT 12 ms of 95% with up to 1.50 tokens a step by speculation" in drafting.reason
    assert "speculation" not in plain.reason


def test_the_forecast_is_the_floor() -> None:
    decision = policy(60.0).decide(snapshot(0, 5.0, 1, 1))
    assert (decision.replicas(PREFILL), decision.replicas(DECODE)) == need(60.0)
    assert "60 requests/s expected (5/s came)" in decision.reason


def test_chance_alone_moves_nothing() -> None:
    """In a window of 10 s, 60/s may be 50/s that were lucky."""
    few = policy(50.0).decide(snapshot(0, 54.0, 1, 1, window_s=10.0))
    assert (few.replicas(PREFILL), few.replicas(DECODE)) == need(50.0)


def test_starting_pods_count_and_draining_ones_do_not() -> None:
    prefill, decode = need(60.0)
    starting = view(PREFILL, prefill - 2, starting_ages_s=(10.0, 3.0))
    draining = view(DECODE, decode - 1, num_draining=4)
    decision = policy().decide(snapshot(0, 60.0, starting, draining))
    assert decision.replicas(PREFILL) == prefill
    assert decision.replicas(DECODE) == decode


def test_pods_that_never_start_are_made_up_for() -> None:
    prefill, decode = need(60.0)
    stuck = view(PREFILL, prefill - 2, starting_ages_s=(400.0, 3.0))
    decision = policy().decide(snapshot(0, 60.0, stuck, decode))
    assert decision.replicas(PREFILL) == prefill + 1
    assert "1 have been starting for more than 300 s" in decision.reason


def test_a_backlog_is_drained_within_the_time_that_is_stated() -> None:
    calm, behind = (policy().decide(snapshot(0, 40.0, 1, 1, num_queued=num)) for num in (5, 2411))
    assert (calm.replicas(PREFILL), calm.replicas(DECODE)) == need(40.0)
    assert (behind.replicas(PREFILL), behind.replicas(DECODE)) == need(60.0)
    assert "20/s of it to drain the backlog" in behind.reason


@pytest.mark.parametrize(("occupancy", "name"), [(0.2, PREFILL), (0.85, DECODE)])
def test_requests_that_wait_although_all_should_do_get_one_more(occupancy: float, name: PoolName) -> None:
    """Of the pool that they wait for; and another one only when the first has had its time."""
    scaler = policy()
    sizes = {PREFILL: need(60.0)[0], DECODE: need(60.0)[1] + 1}
    for now_s in range(0, 130, 10):
        views = [view(each, num, kv_occupancy=occupancy) for each, num in sizes.items()]
        decision = scaler.decide(snapshot(now_s, 60.0, views[0], views[1], queue_wait_s=0.4))
        grown = {each: decision.replicas(each) - num for each, num in sizes.items()}
        assert grown == {each: int(each is name and now_s in (0, 120)) for each in sizes}
        sizes = {each: decision.replicas(each) for each in sizes}
        if now_s == 0:
            assert f"requests wait for 0.4 s at routers, although {sizes[name] - 1} should do" in decision.reason


def test_full_kv_makes_decode_grow() -> None:
    decision = policy().decide(snapshot(0, 1.0, 1, view(DECODE, 6, kv_occupancy=0.99)))
    assert decision.replicas(DECODE) == 7
    assert "99% of the KV is in use, more than 90%" in decision.reason


def test_it_shrinks_only_when_less_was_enough_with_headroom_for_the_cool_down() -> None:
    scaler = policy()
    prefill, decode = need(60.0 * (1 + SETTINGS.headroom))
    for now_s in range(0, 120, 10):
        decision = scaler.decide(snapshot(now_s, 60.0, prefill + 3, decode))
        assert decision.replicas(PREFILL) == prefill + 3
        assert "but not for 120 s yet" in decision.reason
    decision = scaler.decide(snapshot(120, 60.0, prefill + 3, decode))
    assert decision.replicas(PREFILL) == prefill
    assert f"{prefill} have been enough for 120 s with {SETTINGS.headroom:.0%} to spare" in decision.reason
    assert decision.replicas(DECODE) == decode


def test_one_busy_moment_keeps_a_pool_for_another_cool_down() -> None:
    scaler = policy()
    sizes = [
        scaler.decide(snapshot(now_s, 60.0 if now_s == 100 else 5.0, 20, 30)).replicas(PREFILL) for now_s in range(0, 230, 10)
    ]
    assert sizes[21] >= need(60.0)[0] and sizes[22] >= need(60.0)[0]
    assert scaler.decide(snapshot(230, 5.0, 20, 30)).replicas(PREFILL) == need(5.0 * (1 + SETTINGS.headroom))[0]


def test_it_does_not_shrink_soon_after_it_grew() -> None:
    scaler = policy()
    grown = scaler.decide(snapshot(0, 60.0, 1, 1))
    for now_s in range(10, 120, 10):
        decision = scaler.decide(snapshot(now_s, 5.0, grown.replicas(PREFILL), grown.replicas(DECODE)))
        assert decision.replicas(PREFILL) == grown.replicas(PREFILL)
        assert f"it grew {now_s} s ago" in decision.reason


@pytest.mark.parametrize("what", ["traffic", "prefill", "decode"])
def test_nothing_changes_on_stale_figures(what: str) -> None:
    scaler = policy()
    pools = {name: view(name, 5, age_s=31.0 if what == name else 0.0) for name in (PREFILL, DECODE)}
    decision = scaler.decide(snapshot(0, 500.0, pools[PREFILL], pools[DECODE], age_s=31.0 if what == "traffic" else 0.0))
    assert (decision.replicas(PREFILL), decision.replicas(DECODE)) == (5, 5)
    assert decision.held is not None and what in decision.held and "31 s old, more than 30 s" in decision.held
    assert all(pool.held == "stale" for pool in decision.pools)


def test_nothing_changes_while_workers_are_paused_or_asleep() -> None:
    """Requests queue up then, and a worker that was started for them would serve what somebody has stopped."""
    scaler = policy()
    decision = scaler.decide(snapshot(0, 500.0, view(PREFILL, 5, num_stopped=1), view(DECODE, 5), num_queued=1000))
    assert (decision.replicas(PREFILL), decision.replicas(DECODE)) == (5, 5)
    assert decision.held_by == "stopped" and decision.held is not None and "1 workers are paused" in decision.held
    assert scaler.decide(snapshot(10, 500.0, 5, 5)).held is None


def test_silence_is_no_idleness() -> None:
    """Less has to be enough for the whole cool-down in fresh figures."""
    scaler = policy()
    for now_s in range(0, 100, 10):
        scaler.decide(snapshot(now_s, 1.0, 20, 20))
    scaler.decide(snapshot(100, 0.0, 20, 20, age_s=60.0))
    assert all(scaler.decide(snapshot(now_s, 1.0, 20, 20)).replicas(PREFILL) == 20 for now_s in range(110, 230, 10))
    assert scaler.decide(snapshot(230, 1.0, 20, 20)).replicas(PREFILL) < 20


def test_what_a_person_sets_stays() -> None:
    held = view(PREFILL, 2, hold=Hold("ana", 100.0))
    decision = policy().decide(snapshot(0, 60.0, held, 1))
    assert decision.replicas(PREFILL) == 2 and decision.replicas(DECODE) == need(60.0)[1]
    assert f"prefill stays at 2: set by ana, which holds for 100 s more; {need(60.0)[0]} would be right" in decision.reason
    assert policy().decide(snapshot(100, 60.0, held, 1)).replicas(PREFILL) == need(60.0)[0]


def test_a_step_is_bounded() -> None:
    scaler = policy(settings=replace(SETTINGS, max_step_up=2, max_step_down=1))
    first = scaler.decide(snapshot(0, 60.0, 1, 1))
    assert first.replicas(PREFILL) == 3 and "a step is at most 2 in 15 s" in first.reason
    again = scaler.decide(snapshot(5, 60.0, view(PREFILL, 1, starting_ages_s=(5.0, 5.0)), 3))
    assert again.replicas(PREFILL) == 3
    assert scaler.decide(snapshot(16, 60.0, view(PREFILL, 1, starting_ages_s=(5.0, 5.0)), 3)).replicas(PREFILL) > 3


def test_bounds_are_kept_and_said() -> None:
    bounded = replace(SETTINGS, prefill=PoolSettings(min_replicas=2, max_replicas=3))
    busy = policy(settings=bounded).decide(snapshot(0, 500.0, 1, 1))
    assert busy.replicas(PREFILL) == 3 and "more than 3 replicas bear" in busy.reason
    assert policy(settings=bounded).decide(snapshot(0, 0.0, 1, 1)).replicas(PREFILL) == 2
    lowered = policy(settings=bounded).decide(snapshot(0, 500.0, 9, 1))
    assert lowered.replicas(PREFILL) == 3 and "no more than 3 are allowed" in lowered.reason


def test_objectives_that_no_number_keeps_ask_for_no_more_than_the_load_does() -> None:
    """And it says so."""
    decision = policy(goals=replace(GOALS, ttft_s=0.03, tpot_s=0.005)).decide(snapshot(0, 60.0, 1, 1))
    assert "a lone sequence's step takes longer than 5 ms: that TPOT is out of reach" in decision.reason
    assert re.search(r"prefill .*; \d+% of prompts take longer than 30 ms even alone; decode", decision.reason)
    assert decision.replicas(PREFILL) <= 2 * need(60.0)[0] and decision.replicas(DECODE) <= need(60.0)[1]


ZERO = replace(SETTINGS, prefill=PoolSettings(allow_zero=True), decode=PoolSettings(start_s=45.0))


def test_an_idle_pool_goes_to_zero_only_where_that_is_allowed() -> None:
    scaler = policy(settings=ZERO)
    for now_s in range(0, 600, 20):
        assert scaler.decide(snapshot(now_s, 0.0, 1, 1)).replicas(PREFILL) == 1
    decision = scaler.decide(snapshot(600, 0.0, 1, 1))
    assert decision.replicas(PREFILL) == 0 and decision.replicas(DECODE) == 1
    assert "no request for 600 s; the first request will wait about 60 s" in decision.reason
    assert scaler.decide(snapshot(620, 0.0, 0, 1)).replicas(PREFILL) == 0


def test_a_pool_that_still_answers_does_not_go_to_zero() -> None:
    """However long an answer takes, or a request waits: no new ones arrive meanwhile, and none is queued."""
    scaler = policy(settings=ZERO)
    for now_s in range(0, 2000, 20):
        assert scaler.decide(snapshot(now_s, 0.0, 1, 1, num_open=1)).replicas(PREFILL) == 1
    for now_s in range(2000, 2600, 20):
        assert scaler.decide(snapshot(now_s, 0.0, 1, 1)).replicas(PREFILL) == 1, now_s
    assert scaler.decide(snapshot(2600, 0.0, 1, 1)).replicas(PREFILL) == 0


def test_the_first_request_wakes_it() -> None:
    unknown = PoolView(PREFILL, 0)
    asleep = policy(settings=ZERO)
    asleep.decide(snapshot(0, 0.0, unknown, 1))
    for asked in (snapshot(20, 0.1, unknown, 1), snapshot(20, 0.0, unknown, 1, num_queued=1)):
        decision = asleep.decide(asked)
        assert decision.replicas(PREFILL) == 1
        assert "it wakes from zero and serves in about 60 s" in decision.reason


def test_a_mesh_that_has_told_nothing_stays_as_it_is() -> None:
    decision = policy().decide(Snapshot(0, traffic(50.0, lengths=None), (PoolView(BOTH, 3),)))
    assert decision.replicas(BOTH) == 3
    assert "no worker has reported its speed, or no request has arrived yet" in decision.reason


def test_a_mesh_that_nobody_has_ever_asked_goes_down_to_its_least() -> None:
    """Once routers have said so for a cool-down: stale figures, or workers of whom nothing is known, are no idleness."""
    scaler, least = policy(settings=replace(SETTINGS, both=PoolSettings(min_replicas=2))), 2
    unasked, unknown = traffic(0.0, lengths=None), PoolView(BOTH, 4)
    for now_s in range(0, 240, 10):
        silent = replace(unasked, age_s=60.0) if now_s == 100 else unasked
        decision = scaler.decide(Snapshot(now_s, silent, (view(BOTH, 4),)))
        assert decision.replicas(BOTH) == (4 if now_s < 230 else least), now_s
    assert "2 have been enough for 120 s" in decision.reason and "there has been no request yet" in decision.reason
    untold = policy()
    assert all(untold.decide(Snapshot(now_s, unasked, (unknown,))).replicas(BOTH) == 4 for now_s in range(0, 400, 10))


def test_requests_that_nobody_has_answered_yet_are_no_idleness() -> None:
    scaler = policy()
    for now_s in range(0, 400, 10):
        asked = traffic(0.1 if now_s == 110 else 0.0, lengths=None, num_queued=int(now_s >= 110))
        assert scaler.decide(Snapshot(now_s, asked, (view(BOTH, 4),))).replicas(BOTH) == 4


def test_a_worker_that_looks_slow_for_a_moment_moves_nothing() -> None:
    """Every fourth report says that steps take twelve times as long."""
    prefill, decode = need(60.0)
    slow = replace(MODEL, fixed_s=12 * MODEL.fixed_s, num_steps=9)
    scaler = policy()
    for now_s in range(0, 200, 5):
        latency = slow if now_s % 20 == 10 else replace(MODEL, num_steps=9)
        pools = (view(PREFILL, prefill, latency=latency), view(DECODE, decode, latency=latency))
        decision = scaler.decide(snapshot(now_s, 60.0, *pools))
        assert (decision.replicas(PREFILL), decision.replicas(DECODE)) == (prefill, decode)
    for now_s in range(200, 300, 5):
        decision = scaler.decide(snapshot(now_s, 60.0, view(PREFILL, prefill, latency=slow), view(DECODE, decode, latency=slow)))
    assert decision.replicas(DECODE) > decode, "one that is slow for longer is slow"


def test_workers_with_both_roles_are_one_pool() -> None:
    decision = policy().decide(Snapshot(0, traffic(60.0), (view(BOTH, 1),)))
    assert decision.replicas(BOTH) == fewest(SharedPool(WORKER, GOALS), Load(60.0, LENGTHS), 999)
    assert "TTFT 500 ms and TPOT 30 ms" in decision.reason


def test_pools_that_make_no_mesh_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^pools: prefill; a mesh has"):
        Snapshot(0, traffic(1.0), (view(PREFILL, 1),))


def test_workers_slower_than_their_model_says_need_more() -> None:
    """Learned only while nobody comes or goes."""
    slow = Measured(observed_s=0.06, predicted_s=0.03)
    settled, unsettled = policy(), policy()
    prefill, decode = need(60.0)
    for now_s in range(0, 1200, 10):
        grown = settled.decide(snapshot(now_s, 60.0, prefill, decode, tpot=slow))
        same = unsettled.decide(snapshot(now_s, 60.0, view(PREFILL, prefill, num_draining=1), decode, tpot=slow))
        assert same.replicas(DECODE) == decode
        if grown.replicas(DECODE) > decode:
            break
    assert 10 < now_s < 600


def test_a_new_leader_goes_on() -> None:
    old, new = policy(settings=AutoscalerSettings()), policy(settings=AutoscalerSettings())
    for now_s in range(0, 120, 10):
        old.decide(snapshot(now_s, 5.0, 20, 20))
    new.restore(json.loads(json.dumps(old.save())))
    assert new.decide(snapshot(120, 5.0, 20, 20)) == old.decide(snapshot(120, 5.0, 20, 20))
    assert new.save() == old.save()


@pytest.mark.parametrize("field", ["format", "forecast", "ttft", "lengths", "pools"])
def test_a_broken_state_is_refused_by_name(field: str) -> None:
    state = policy().save()
    with pytest.raises(ValueError, match=f"^{field}: "):
        policy().restore(state | {field: "rubbish"})
