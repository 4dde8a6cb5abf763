"""Who is on the way, who has failed to come, and what a pool does meanwhile."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.autoscaler.collect.workers import Starts
from pdmesh.autoscaler.loop import FailedStarts, restrained
from pdmesh.autoscaler.policy.pool_plan import STUCK_STARTS
from pdmesh.autoscaler.settings import PoolSettings
from pdmesh.autoscaler.views import Decision, Flip, PoolDecision
from tests.autoscaler.scenes import DECODE, PREFILL, SETTINGS, need, policy, snapshot, view


def test_starts_are_awaited_given_up_and_forgotten() -> None:
    pool = Starts(60.0)
    pool.update(0.0, 3, 1)
    assert pool.ages_s(5.0) == (5.0, 5.0)
    pool.update(10.0, 3, 2)
    assert pool.ages_s(10.0) == (10.0,)
    pool.update(70.0, 4, 2)
    assert pool.ages_s(70.0) == (70.0, 0.0) and pool.num_failed(70.0) == 1 and not pool.is_hopeless
    pool.update(131.0, 4, 2)
    assert pool.num_failed(131.0) == 2 and pool.is_hopeless, "the one in its place has not come either"
    pool.update(132.0, 4, 3)
    assert not pool.is_hopeless, "somebody has come"
    pool.update(133.0, 3, 3)
    assert pool.ages_s(133.0) == ()


def test_who_is_asked_for_no_more_was_asked_for_last() -> None:
    pool = Starts(60.0)
    pool.update(0.0, 2, 1)
    pool.update(30.0, 3, 1)
    pool.update(40.0, 2, 1)
    assert pool.ages_s(40.0) == (40.0,)


def test_a_failure_lasts_until_somebody_comes_or_nobody_is_asked_for() -> None:
    pool = Starts(60.0)
    course: list[tuple[float, int, int, bool]] = [
        (0.0, 2, 1, False),
        (61.0, 2, 1, True),
        (62.0, 3, 1, True),  # another is asked for in its place
        (63.0, 1, 1, True),  # the pool swings
        (70.0, 2, 1, True),
        (71.0, 2, 2, False),  # it comes
        (72.0, 3, 2, False),
        (133.0, 3, 2, True),
        (134.0, 2, 2, True),
        (195.0, 2, 2, False),  # withdrawn for good
    ]
    for now_s, num_asked, num_serving, fails in course:
        pool.update(now_s, num_asked, num_serving)
        assert pool.is_failing(now_s) == fails, now_s


def test_one_that_dies_is_one_that_starts() -> None:
    pool = Starts(60.0)
    pool.update(0.0, 2, 2)
    pool.update(5.0, 2, 1)
    assert pool.ages_s(8.0) == (3.0,)


def test_one_that_is_asked_for_again_has_been_awaited_before() -> None:
    """A start takes 60 s to fail; the pool shrinks and grows every 10 s."""
    pool = Starts(60.0)
    for now_s in range(0, 140, 20):
        pool.update(now_s, 2, 1)
        pool.update(now_s + 10.0, 1, 1)
        assert pool.ages_s(now_s + 10.0) == ()
    pool.update(140.0, 2, 1)
    assert pool.ages_s(140.0) == (70.0,) and pool.num_failed(140.0) == 1
    pool.update(142.0, 3, 1)
    assert pool.ages_s(142.0) == (72.0, 0.0)
    pool.update(144.0, 1, 1)
    pool.update(150.0, 3, 1)
    assert pool.ages_s(150.0) == (74.0, 2.0), "the order stays"
    pool.update(152.0, 1, 1)
    pool.update(153.0, 2, 2)
    pool.update(154.0, 3, 2)
    assert pool.ages_s(154.0) == (0.0,), "since somebody has come, it begins afresh"


def test_one_that_was_withdrawn_long_ago_begins_afresh() -> None:
    pool = Starts(60.0)
    pool.update(0.0, 2, 1)
    pool.update(50.0, 1, 1)
    pool.update(150.0, 2, 1)
    assert pool.ages_s(150.0) == (0.0,)


def test_hopeless_pools_try_again_when_all_was_withdrawn() -> None:
    pool = Starts(60.0)
    pool.update(0.0, 2, 1)
    pool.update(61.0, 3, 1)
    pool.update(122.0, 3, 1)
    assert pool.is_hopeless
    pool.update(123.0, 2, 1)
    pool.update(250.0, 2, 1)
    assert pool.is_hopeless, "as long as one is awaited"
    pool.update(251.0, 1, 1)
    assert pool.is_hopeless
    pool.update(312.0, 1, 1)
    assert not pool.is_hopeless


def test_a_pool_whose_starts_fail_holds_whatever_the_demand_swings_to() -> None:
    """The cool-down is far shorter than the patience: pods that start are given up and asked for again."""
    settings = replace(SETTINGS, cool_down_s=8.0, headroom=0.0, decode=PoolSettings(start_s=6.0), step_period_s=4.0)
    rates = {num: next(rate for rate in range(1, 500) if need(float(rate))[1] == num) for num in (3, 4)}
    scaler, starts, asked = policy(settings=settings), Starts(STUCK_STARTS * 6.0), 3
    course: list[int] = []
    reasons: list[str] = []
    for now_s in range(0, 300, 2):
        starts.update(now_s, asked, 3)
        hopeless = {DECODE: FailedStarts(3, "replicas have not started")} if starts.is_hopeless else {}
        rate = rates[4 if now_s // 12 % 2 else 3]
        decode = view(DECODE, 3, starting_ages_s=starts.ages_s(now_s))
        decision = restrained(scaler.decide(snapshot(now_s, float(rate), view(PREFILL, 9), decode)), hopeless)
        asked = decision.replicas(DECODE)
        course.append(asked)
        reasons.append(next(pool.reason for pool in decision.pools if pool.name is DECODE))
    assert set(course[:20]) == {3, 4}, "the demand does swing"
    assert any("are not counted" in reason for reason in reasons)
    assert len(set(course[-60:])) == 1 and all("have not started" in reason for reason in reasons[-60:]), "it holds, and says why"


def test_one_is_awaited_unless_fewer_than_serve_would_do() -> None:
    failed = {DECODE: FailedStarts(3, "replicas have not started")}
    for wanted, kept in ((6, 5), (5, 5), (4, 4), (3, 4), (2, 2)):
        decision = restrained(Decision((PoolDecision(DECODE, 5, wanted, "so many come"),)), failed)
        assert decision.replicas(DECODE) == kept
        assert (decision.pools[0].held == "failed starts") == (kept == 5)


def test_pools_whose_replicas_do_not_start_do_not_grow() -> None:
    decision = Decision((PoolDecision(PREFILL, 2, 2, "enough"), PoolDecision(DECODE, 2, 5, "more come")))
    kept = restrained(decision, {DECODE: FailedStarts(2, "2 have not started")})
    assert kept.replicas(DECODE) == 2 and "more come; but 2 have not started" in kept.reason
    assert restrained(decision, {}) == decision
    shrinking = Decision((PoolDecision(DECODE, 5, 1, "fewer come"),))
    assert restrained(shrinking, {DECODE: FailedStarts(2, "2 have not started")}) == shrinking
    lending = Decision((PoolDecision(PREFILL, 1, 2, "more come"),), (Flip(DECODE, PREFILL, 1),))
    assert restrained(lending, {PREFILL: FailedStarts(1, "1 has not started")}) == lending, "who changes roles need not start"
