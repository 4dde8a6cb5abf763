"""Known series, gaps, restarts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.autoscaler.forecasting.forecast import Forecaster, LastValue
from pdmesh.autoscaler.forecasting.holt_winters import NUM_BINS, HoltWinters
from pdmesh.autoscaler.forecasting.kalman import Kalman
from pdmesh.autoscaler.forecasting.registry import forecaster_of
from pdmesh.autoscaler.settings import AutoscalerSettings

DAY_S = 9600.0  # a short one
MAKES: list[Callable[[], Forecaster]] = [LastValue, Kalman, lambda: HoltWinters(DAY_S)]


def counted(rng: random.Random, rate: float, window_s: float = 15.0) -> float:
    """What a window shows of independent arrivals."""
    return max(0.0, rng.gauss(rate, math.sqrt(rate / window_s)))


def day(time_s: float) -> float:
    return 20 - 10 * math.cos(2 * math.pi * time_s / DAY_S)


@pytest.mark.parametrize("make", MAKES)
def test_what_stays_is_expected_to_stay(make: Callable[[], Forecaster]) -> None:
    forecaster = make()
    assert forecaster.at(5.0)[:2] == (0.0, 0.0)
    for number in range(3000):
        forecaster.observe(number * 10.0, 7.0)
    mean, spread, _ = forecaster.at(30_060.0)
    assert mean == pytest.approx(7.0, rel=0.01)
    assert spread < 0.7


def test_the_level_is_told_from_the_noise() -> None:
    """Observed counts are off by 1.15; the level, once it is known, by a third of that."""
    rng, kalman = random.Random(1), Kalman()
    errors = []
    for number in range(2000):
        kalman.observe(number * 15.0, counted(rng, 20.0))
        if number > 100:
            errors.append(kalman.at(number * 15.0 + 60).mean - 20.0)
    rms = math.sqrt(sum(error * error for error in errors) / len(errors))
    assert rms < 0.6
    assert kalman.at(2000 * 15.0 + 60).spread == pytest.approx(rms, rel=0.8)


def test_a_burst_is_followed_within_two_observations_and_its_slope_is_seen() -> None:
    rng, kalman = random.Random(2), Kalman()
    for number in range(200):
        kalman.observe(number * 15.0, counted(rng, 20.0))
    rise = [20.0 + 10 * step for step in range(1, 5)]  # to 60 within a minute
    ahead = []
    for step, rate in enumerate(rise):
        kalman.observe(3000.0 + 15 * step, counted(rng, rate))
        ahead.append(kalman.at(3060.0 + 15 * step).mean)
    assert kalman.at(3045.0).mean == pytest.approx(60, rel=0.12)
    assert ahead[-1] > 62  # it goes on for a while
    for number in range(20):
        kalman.observe(3060.0 + 15 * number, counted(rng, 60.0))
    assert kalman.at(3420.0).mean == pytest.approx(60, rel=0.1)


def test_among_bursts_one_is_not_followed_and_a_minute_of_them_is() -> None:
    rng, kalman = random.Random(4), Kalman()
    for number in range(400):
        kalman.observe(number * 15.0, 60.0 if rng.random() < 0.3 else 3.0)
    assert kalman.at(6000.0).noise > 50
    usual = kalman.at(6000.0).mean
    seen = []
    for number, rate in enumerate([150.0, 3.0, 3.0, *[150.0] * 8]):
        kalman.observe(6000.0 + 15 * number, rate)
        seen.append(kalman.at(6000.0 + 15 * number).mean)
    assert max(seen[:7]) < 2 * usual, "three windows may be a burst"
    assert seen[7] > 100 and seen[-1] == pytest.approx(150.0, rel=0.1)


def test_a_day_is_learned_from_the_first_and_foreseen_in_the_second() -> None:
    rng, winters = random.Random(3), HoltWinters(DAY_S)
    errors, lazy = [], []
    for number in range(int(3 * DAY_S / 15)):
        time_s = number * 15.0
        winters.observe(time_s, counted(rng, day(time_s)))
        if time_s > 2 * DAY_S:
            errors.append(abs(winters.at(time_s + 1200).mean - day(time_s + 1200)))
            lazy.append(abs(day(time_s) - day(time_s + 1200)))
    assert sum(errors) / len(errors) < 0.25 * sum(lazy) / len(lazy)


def test_a_day_of_another_size_moves_the_level() -> None:
    winters = HoltWinters(DAY_S)
    for number in range(int(3 * DAY_S / 15)):
        time_s = number * 15.0
        winters.observe(time_s, day(time_s) * (1 if time_s < 2 * DAY_S else 1.5))
    now_s = 3 * DAY_S
    assert winters.at(now_s + 60).mean == pytest.approx(1.5 * day(now_s), rel=0.15)


@pytest.mark.parametrize("make", MAKES)
def test_a_gap_is_survived(make: Callable[[], Forecaster]) -> None:
    forecaster = make()
    for number in range(2000):
        forecaster.observe(number * 15.0, 20.0)
    before = forecaster.at(2000 * 15.0)
    for number in range(2000, 2010):
        forecaster.observe(number * 15.0 + 7 * DAY_S, 20.0)
    assert forecaster.at(2010 * 15.0 + 7 * DAY_S).mean == pytest.approx(before.mean, rel=0.05)


def test_the_longer_nothing_is_seen_the_less_is_known() -> None:
    kalman = Kalman()
    for number in range(100):
        kalman.observe(number * 15.0, 20.0)
    spreads = [kalman.at(1500.0 + ahead_s).spread for ahead_s in (0, 60, 600, 3600)]
    assert spreads == sorted(spreads) and spreads[0] < spreads[-1] / 2


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("num_before", [0, 1, 50, 700])
def test_a_restart_changes_nothing(make: Callable[[], Forecaster], num_before: int) -> None:
    rng = random.Random(4)
    series = [(number * 15.0, counted(rng, day(number * 15.0))) for number in range(num_before + 50)]
    one, first, second = make(), make(), make()
    for time_s, value in series:
        one.observe(time_s, value)
    for time_s, value in series[:num_before]:
        first.observe(time_s, value)
    second.restore(json.loads(json.dumps(first.save(), allow_nan=False)))
    for time_s, value in series[num_before:]:
        second.observe(time_s, value)
    assert second.at(series[-1][0] + 60) == one.at(series[-1][0] + 60)


@pytest.mark.parametrize("make", MAKES)
def test_a_broken_state_is_refused(make: Callable[[], Forecaster]) -> None:
    forecaster = make()
    forecaster.observe(0.0, 1.0)
    with pytest.raises(ValueError, match=r"^time_s: a saved state"):
        make().restore(forecaster.save() | {"time_s": "late"})


@pytest.mark.parametrize("make", MAKES)
def test_time_that_goes_back_is_left_out(make: Callable[[], Forecaster]) -> None:
    forecaster = make()
    forecaster.observe(10.0, 5.0)
    forecaster.observe(10.0, 500.0)
    forecaster.observe(3.0, 500.0)
    assert forecaster.at(10.0).mean == pytest.approx(5.0)


@settings(max_examples=50, deadline=None)
@given(
    kind=st.integers(0, 2), steps=st.lists(st.tuples(st.floats(0.1, 1e5), st.floats(0, 1e4)), min_size=1, max_size=2 * NUM_BINS)
)
def test_whatever_comes_a_forecast_is_a_number_from_zero_up(kind: int, steps: list[tuple[float, float]]) -> None:
    forecaster, time_s = MAKES[kind](), 0.0
    for after_s, value in steps:
        time_s += after_s
        forecaster.observe(time_s, value)
        for ahead_s in (0.0, 60.0, 1e6):
            mean, spread, _ = forecaster.at(time_s + ahead_s)
            assert math.isfinite(mean) and mean >= 0 and math.isfinite(spread) and spread >= 0


def test_settings_name_the_forecaster() -> None:
    assert isinstance(forecaster_of(AutoscalerSettings(forecast="last")), LastValue)
    assert isinstance(forecaster_of(AutoscalerSettings(forecast="kalman")), Kalman)
    assert isinstance(forecaster_of(AutoscalerSettings(forecast="holt-winters")), HoltWinters)


def test_noise_is_remembered_for_some_cool_downs() -> None:
    """The default's are what the filter takes by itself; a shorter one's end sooner, but not within two windows."""
    rng = random.Random(6)
    salvos = [(number * 5.0, 60.0 if rng.random() < 0.3 else 3.0) for number in range(200)]
    calm = [(1000.0 + number * 5.0, 20.0) for number in range(24)]

    def noise(forecaster: Forecaster, *, after_calm: bool) -> float:
        for time_s, value in [*salvos, *calm] if after_calm else salvos:
            forecaster.observe(time_s, value)
        return forecaster.at(2000.0).noise

    assert noise(forecaster_of(AutoscalerSettings()), after_calm=True) == noise(Kalman(), after_calm=True)
    short, none = AutoscalerSettings(cool_down_s=3.0), AutoscalerSettings(cool_down_s=0.0)
    assert noise(forecaster_of(short), after_calm=False) > 10
    assert noise(forecaster_of(short), after_calm=True) < 0.2 * noise(Kalman(), after_calm=True)
    assert noise(forecaster_of(none), after_calm=True) == noise(Kalman(noise_s=2 * 15.0), after_calm=True)
