"""Settings, correction, memory and the division of a budget by themselves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.autoscaler.policy.policy import Claim, cost, divide
from pdmesh.autoscaler.policy.pool_plan import PoolMemory
from pdmesh.autoscaler.policy.sizing import LEAST, MOST, Correction, SmoothedLengths
from pdmesh.autoscaler.settings import AutoscalerSettings, PoolSettings
from pdmesh.autoscaler.views import Measured, Traffic
from pdmesh.planning.capacity_load import Lengths
from pdmesh.runtime.config import ConfigError, load
from tests.autoscaler.scenes import DECODE, PREFILL


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (AutoscalerSettings(prefill=PoolSettings(min_replicas=0)), "prefill_min_replicas"),
        (AutoscalerSettings(decode=PoolSettings(min_replicas=3, max_replicas=2)), "decode_max_replicas"),
        (AutoscalerSettings(both=PoolSettings(gpus_per_replica=0)), "both_gpus_per_replica"),
        (AutoscalerSettings(decode=PoolSettings(start_s=float("nan"))), "decode_start_s"),
        (AutoscalerSettings(max_gpus=0), "max_gpus"),
        (AutoscalerSettings(cool_down_s=-1), "cool_down_s"),
        (AutoscalerSettings(headroom=-0.1), "headroom"),
        (AutoscalerSettings(max_kv_occupancy=1.1), "max_kv_occupancy"),
        (AutoscalerSettings(max_step_up=0), "max_step_up"),
        (AutoscalerSettings(zero_after_s=10), "zero_after_s"),
    ],
)
def test_a_wrong_setting_is_named_with_what_to_do(settings: AutoscalerSettings, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: .+; .+") as raised:
        settings.validate()
    assert raised.value.field == field


def test_settings_are_flags() -> None:
    settings = load(
        AutoscalerSettings, ["--prefill-max-replicas", "7", "--forecast", "last", "--no-flips"], {}, prog="autoscaler"
    )
    assert settings == AutoscalerSettings(prefill=PoolSettings(max_replicas=7), forecast="last", flips=False)


def test_correction_is_slow_and_bounded() -> None:
    correction = Correction()
    for number in range(30):
        correction.observe(number * 10.0, Measured(observed_s=0.9, predicted_s=0.1), goal_s=0.5)
    assert 1.3 < correction.factor < MOST
    for number in range(30, 3000):
        correction.observe(number * 10.0, Measured(observed_s=0.9, predicted_s=0.1), goal_s=0.5)
    assert correction.factor == pytest.approx(MOST, rel=1e-3)
    for number in range(3000, 6000):
        correction.observe(number * 10.0, Measured(observed_s=0.01, predicted_s=0.1), goal_s=0.5)
    assert correction.factor == pytest.approx(LEAST, rel=1e-3)


def test_correction_takes_no_more_workers_for_latencies_that_keep_their_objective() -> None:
    """Observed twice what was predicted, and still half the objective: no worker more would help anybody."""
    correction = Correction()
    for step in range(100):
        correction.observe(step * 10.0, Measured(observed_s=2.0, predicted_s=1.0), goal_s=4.0)
    assert correction.factor == 1.0
    for step in range(100, 200):
        correction.observe(step * 10.0, Measured(observed_s=3.9, predicted_s=2.0), goal_s=4.0)
    assert 1.5 < correction.factor < 2.0
    for step in range(200, 1000):
        correction.observe(step * 10.0, Measured(observed_s=2.0, predicted_s=1.0), goal_s=4.0)
    assert correction.factor == pytest.approx(1.0, abs=1e-3)


def test_correction_learns_nothing_from_nothing_and_little_from_one_figure_after_a_gap() -> None:
    correction = Correction()
    correction.observe(0.0, Measured(observed_s=2.0, predicted_s=1.0), goal_s=0.5)
    correction.observe(1e6, Measured(), goal_s=0.5)
    assert correction.factor == 1.0
    correction.observe(2e6, Measured(observed_s=2.0, predicted_s=1.0), goal_s=0.5)
    assert 1.0 < correction.factor < 1.2
    again = Correction()
    again.restore(correction.save())
    assert again.factor == correction.factor


def test_a_burst_is_forgotten_while_nobody_comes() -> None:
    """Else a pool that is sized for its clumps would stay as large as it was for ever."""
    smoothed = SmoothedLengths()
    smoothed.observe(0.0, Traffic(1.0, Lengths(100, 10_000, 10), burstiness=100.0))
    assert smoothed.burstiness == 100.0
    for now_s in range(10, 610, 10):
        smoothed.observe(now_s, Traffic(0.0, Lengths(100, 10_000, 10), burstiness=1.0))
    assert 1.0 < smoothed.burstiness < 1.01


def test_lengths_are_smoothed_and_stay_while_nobody_comes() -> None:
    smoothed = SmoothedLengths()
    smoothed.observe(0.0, Traffic(0.0, None))
    assert smoothed.latest is None and smoothed.save() == {}
    smoothed.observe(10.0, Traffic(1.0, Lengths(100, 10_000, 10, output_squared=100)))
    smoothed.observe(70.0, Traffic(1.0, Lengths(300, 90_000, 10, 0.5, output_squared=100), burstiness=3.0))
    smoothed.observe(80.0, Traffic(0.0, Lengths(900, 810_000, 10)))
    share = 1 - math.exp(-1)
    assert smoothed.latest is not None and smoothed.latest.input_tokens == pytest.approx(100 + 200 * share)
    assert smoothed.latest.input_squared == pytest.approx(10_000 + 80_000 * share)
    assert smoothed.latest.cached_share == pytest.approx(0.5 * share)
    assert smoothed.burstiness == pytest.approx(1 + 2 * share * math.exp(-10 / 60))  # and ten seconds of silence
    again = SmoothedLengths()
    again.restore(json.loads(json.dumps(smoothed.save())))
    assert again.latest == smoothed.latest and again.save() == smoothed.save()


def test_memory_spans_the_cool_down() -> None:
    memory = PoolMemory()
    for now_s, num in ((0, 9), (50, 3), (100, 4), (120, 2)):
        memory.remember(now_s, num, 100, 15)
    assert memory.most_enough(120, 100) == 9  # what was true at 0 held until 50
    memory.remember(151, 2, 100, 15)
    assert memory.most_enough(151, 100) == 4
    memory.interrupt()
    assert memory.most_enough(151, 100) is None


def claims(rates: tuple[float, float], gpus: tuple[int, int] = (1, 1), least: tuple[int, int] = (1, 1)) -> list[Claim]:
    """A replica bears 1 request/s."""
    return [
        Claim(name, kept, 1, max(kept, round(rate)), each, 0, lambda num, rate=rate: min(1.0, num / rate))  # type: ignore[misc]
        for name, rate, each, kept in zip((PREFILL, DECODE), rates, gpus, least, strict=True)
    ]


@given(st.tuples(st.integers(1, 12), st.integers(1, 12)), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.integers(6, 30))
def test_no_division_bears_more(wanted: tuple[int, int], gpus: tuple[int, int], max_gpus: int) -> None:
    asked = claims((float(wanted[0]), float(wanted[1])), gpus)
    given_ = divide(asked, max_gpus, may_move=False)
    assert cost(asked, given_) <= max_gpus

    def borne(prefill: int, decode: int) -> float:
        return min(asked[0].share(prefill), asked[1].share(decode))

    best = max(
        borne(prefill, decode)
        for prefill, decode in product(range(1, wanted[0] + 1), range(1, wanted[1] + 1))
        if prefill * gpus[0] + decode * gpus[1] <= max_gpus
    )
    assert borne(given_[PREFILL], given_[DECODE]) == pytest.approx(best)


def test_replicas_move_only_for_a_clear_gain() -> None:
    asked = claims((10.0, 10.0), least=(8, 2))
    assert divide(asked, 10, may_move=False) == {PREFILL: 8, DECODE: 2}
    assert divide(asked, 10, may_move=True) == {PREFILL: 5, DECODE: 5}
    nearly = claims((10.0, 10.0), least=(6, 4))
    assert divide([replace(claim, wanted=10) for claim in nearly], 10, may_move=True) == {PREFILL: 5, DECODE: 5}
    even = claims((100.0, 100.0), least=(52, 48))
    assert divide(even, 100, may_move=True) == {PREFILL: 52, DECODE: 48}
