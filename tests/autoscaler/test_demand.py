"""Demand: what chance, lumps and queues make of a rate; and what a pool does about a trifle."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from pdmesh.autoscaler.forecasting.forecast import Expected
from pdmesh.autoscaler.forecasting.kalman import Kalman
from pdmesh.autoscaler.forecasting.registry import forecaster_of
from pdmesh.autoscaler.policy.policy import Policy
from pdmesh.autoscaler.policy.sizing import LUMP_SIGMAS, LUMPY_COOL_DOWNS, USUAL_NOISE, demand
from pdmesh.autoscaler.settings import AutoscalerSettings
from tests.autoscaler.scenes import DECODE, GOALS, PREFILL, SETTINGS, Told, need, policy, snapshot, traffic, view


def fed(rates: list[float], period_s: float = 5.0, window_s: float = 15.0) -> Kalman:
    """What it makes of rates that are counted over windows which overlap."""
    kalman, num = Kalman(window_s), round(window_s / period_s)
    for number in range(num, len(rates) + 1):
        kalman.observe(number * period_s, sum(rates[number - num : number]) / num)
    return kalman


def poisson(rate: float, seconds: float, rng: random.Random) -> float:
    return sum(rng.random() < rate * seconds / 10_000 for _ in range(10_000)) / seconds


def test_independent_arrivals_have_a_noise_of_one_also_on_a_slope() -> None:
    rng = random.Random(3)
    steady = [poisson(20.0, 5.0, rng) for _ in range(300)]
    rising = [rate + 0.2 * number for number, rate in enumerate(steady)]
    assert fed(steady).at(1500.0).noise == pytest.approx(1.0, abs=0.5)
    assert fed(rising).at(1500.0).noise == pytest.approx(1.0, abs=0.5)


def test_lumps_are_noise_and_a_burst_is_none() -> None:
    rng = random.Random(5)
    salvos = [60.0 if rng.random() < 0.3 else 3.0 for _ in range(300)]
    burst = [20.0] * 100 + [20.0 + 40 * step / 12 for step in range(12)] + [60.0] * 60
    assert fed(salvos).at(1500.0).noise > 50
    assert fed(burst).at(len(burst) * 5.0).noise < USUAL_NOISE


@pytest.mark.parametrize("seed", range(5))
def test_bursts_that_come_again_are_none_either_where_the_window_is_known(seed: int) -> None:
    """Seconds of 7 requests, then of 0.8, counted over six of them. Taken for windows of fifteen their edges were bends."""
    rng = random.Random(seed)
    seconds = [poisson(rate, 1.0, rng) for rate in ([7.0] * 30 + [0.8] * 60) * 3]
    settings = AutoscalerSettings(cool_down_s=8.0)
    told, mistaken = (forecaster_of(settings, window_s) for window_s in (6.0, 15.0))
    for number in range(6, len(seconds) + 1):
        for kalman in (told, mistaken):
            kalman.observe(float(number), sum(seconds[number - 6 : number]) / 6)
    assert told.at(len(seconds)).noise < USUAL_NOISE < mistaken.at(len(seconds)).noise


def test_a_pool_bears_most_lumps_at_any_time_but_those_that_a_queue_evens_out() -> None:
    settings = AutoscalerSettings(forecast_sigmas=0.0)
    lumpy = Told(20.0)
    lumpy.expected = Expected(20.0, 0.0, noise=100.0)
    seen = traffic(20.0, window_s=15.0)
    strict = demand(0.0, seen, lumpy, settings, 60.0, ttft_s=1.0)
    assert strict.expected == pytest.approx(20.0 + LUMP_SIGMAS * math.sqrt(96 * 20 / 15))
    patient = demand(0.0, seen, lumpy, settings, 60.0, ttft_s=30.0)
    assert patient.expected - 20.0 == pytest.approx((strict.expected - 20.0) / 2)
    assert strict.least == 0.0  # what is observed may be a lump: nothing moves for it


def bursty(mean: float) -> Told:
    told = Told(mean)
    told.expected = Expected(mean, 0.0, noise=100.0)
    return told


def test_beside_bursts_a_rate_counts_from_four_standard_deviations_on() -> None:
    seen = traffic(200.0, window_s=15.0)
    calm = demand(0.0, seen, Told(20.0), SETTINGS, 60.0, ttft_s=1.0)
    assert calm.least == pytest.approx(200.0 - 2 * math.sqrt(200 / 15))
    assert demand(0.0, seen, bursty(20.0), SETTINGS, 60.0, ttft_s=1.0).least == pytest.approx(
        200.0 - 4 * math.sqrt(100 * 200 / 15)
    )


def test_a_queue_that_a_usual_burst_leaves_is_no_backlog() -> None:
    usual = 0.25 * 20 + 1 + LUMP_SIGMAS * math.sqrt(96 * 20 * 15)
    for more, backlog in ((-1, 0.0), (60, 60 / SETTINGS.drain_s)):
        waiting = traffic(20.0, window_s=15.0, num_queued=usual + more)
        assert demand(0.0, waiting, bursty(20.0), SETTINGS, 60.0, ttft_s=1.0).backlog == pytest.approx(backlog)
        assert demand(0.0, waiting, Told(20.0), SETTINGS, 60.0, ttft_s=1.0).backlog > backlog


def test_beside_bursts_a_pool_shrinks_after_a_longer_cool_down() -> None:
    prefill, decode = need(60.0)

    def shrinks_at(told: Told) -> float:
        scaler = Policy(SETTINGS, GOALS, told)
        seconds = range(0, 600, 10)
        return next(at_s for at_s in seconds if scaler.decide(snapshot(at_s, 20.0, prefill, decode)).replicas(PREFILL) < prefill)

    assert shrinks_at(Told(20.0)) == SETTINGS.cool_down_s
    assert shrinks_at(bursty(20.0)) == LUMPY_COOL_DOWNS * SETTINGS.cool_down_s


@pytest.mark.parametrize(("noise", "headroom"), [(USUAL_NOISE, 0.1), (USUAL_NOISE + 1, 0.2)])
def test_a_pool_keeps_twice_the_headroom_where_arrivals_are_uneven(noise: float, headroom: float) -> None:
    told = Told(200.0)
    told.expected = Expected(200.0, 0.0, noise)
    scaler, (prefill, decode) = Policy(replace(SETTINGS, headroom=0.1), GOALS, told), need(400.0)
    for second in range(0, 140, 10):
        last = scaler.decide(snapshot(second, 200.0, prefill, decode))
    enough, _ = need(200.0 * (1 + headroom))
    assert last.replicas(PREFILL) == enough < prefill and f"with {headroom:.0%} to spare" in last.reason


def test_a_queue_of_a_quarter_of_the_objective_is_no_backlog() -> None:
    told = Told(10.0)
    waiting = traffic(10.0, num_queued=26)
    assert demand(0.0, waiting, told, SETTINGS, 60.0, ttft_s=10.0).backlog == 0.0
    assert demand(0.0, waiting, told, SETTINGS, 60.0, ttft_s=1.0).backlog > 0.0


def test_after_it_shrank_it_does_not_grow_for_a_trifle() -> None:
    """Two of twenty more are within the headroom, five are not; and after the cool-down one is enough."""
    prefill, decode = need(200.0)
    scaler = policy()
    for second in range(0, 200, 10):
        last = scaler.decide(snapshot(second, 150.0, prefill, decode))
    less = last.replicas(PREFILL)
    assert less < prefill
    little = next(rate for rate in range(150, 300) if need(rate)[0] == less + 1)
    held = scaler.decide(snapshot(210, little, less, last.replicas(DECODE)))
    assert held.replicas(PREFILL) == less and "that is hardly more" in held.reason
    assert scaler.decide(snapshot(215, 1.3 * little, less, last.replicas(DECODE))).replicas(PREFILL) > less + 1


@pytest.mark.parametrize(("rise_s", "shrinks"), [(400.0, False), (1e9, True)])
def test_a_pool_does_not_shrink_before_a_rise_that_is_foreseen(rise_s: float, shrinks: bool) -> None:
    class Rising(Told):
        def at(self, time_s: float) -> Expected:
            return Expected(60.0 if time_s >= rise_s else 20.0, 0.0)

    prefill, decode = need(60.0)
    scaler = Policy(SETTINGS, GOALS, Rising(20.0))
    for second in range(0, 240, 10):
        decision = scaler.decide(snapshot(second, 20.0, prefill, decode))
    assert (decision.replicas(PREFILL) < prefill) is shrinks


def test_kv_that_waits_for_prompts_tells_nothing_about_decode() -> None:
    prefill, decode = need(20.0)
    full = view(DECODE, decode, kv_occupancy=0.97)
    assert policy().decide(snapshot(0, 20.0, prefill, full)).replicas(DECODE) > decode
    starting = replace(view(PREFILL, prefill), starting_ages_s=(5.0,))
    assert policy().decide(snapshot(0, 20.0, starting, full)).replicas(DECODE) == decode


def test_only_who_was_idle_for_half_a_cool_down_is_lent() -> None:
    settings = replace(SETTINGS, flips=True)
    prefill, decode = need(20.0)
    scaler = policy(settings=settings, goals=GOALS)
    for second in range(0, 130, 10):
        busy = scaler.decide(snapshot(second, 20.0, prefill, decode))
    assert not busy.flips
    more = snapshot(130, 20.0, prefill, view(DECODE, decode, kv_occupancy=0.97))
    short = scaler.decide(more)
    assert not short.flips and short.replicas(DECODE) > decode  # nobody of prefill is idle
    scaler = policy(settings=settings, goals=GOALS)
    for second in range(0, 130, 10):
        scaler.decide(snapshot(second, 20.0, prefill + 2, decode))
    assert [flip.num for flip in scaler.decide(replace(more, pools=(view(PREFILL, prefill + 2), more.pools[1]))).flips] == [1]
