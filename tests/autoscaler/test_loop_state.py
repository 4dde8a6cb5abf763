"""What one leader leaves for the next: clocks that differ, gaps, and states that nobody can use."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from pdmesh.autoscaler.forecasting.forecast import State
from pdmesh.autoscaler.loop import StateError, resumed, saved
from pdmesh.autoscaler.policy.policy import Policy
from pdmesh.autoscaler.settings import AutoscalerSettings
from tests.autoscaler.scenes import DECODE, GOALS, PREFILL, snapshot

NOW_S = 1e6
SETTINGS = AutoscalerSettings(flips=False)
STALE_S = SETTINGS.stale_after_s


def _led(settings: AutoscalerSettings, began_s: float, rate: float = 6.0, replicas: int = 4) -> tuple[Policy, float]:
    """A policy that has led for some minutes, and the time by its clock."""
    policy, now_s = Policy(settings, GOALS), began_s
    for _ in range(150):
        policy.decide(snapshot(now_s, rate, replicas, replicas, window_s=16.0))
        now_s += 2.0
    return policy, now_s - 2.0


def _over_the_wire(state: State) -> State:
    found: State = json.loads(json.dumps(state, allow_nan=False))
    return found


def _sizes(policy: Policy, now_s: float, rate: float, rounds: int, replicas: tuple[int, int]) -> list[tuple[int, int]]:
    sizes = [replicas]
    for number in range(rounds):
        decision = policy.decide(snapshot(now_s + 2.0 * number, rate, *sizes[-1], window_s=16.0))
        sizes.append((decision.replicas(PREFILL), decision.replicas(DECODE)))
    return sizes


@pytest.mark.parametrize("forecast", ["kalman", "holt-winters", "last"])
def test_every_time_of_a_clock_that_was_ahead_is_moved_back(forecast: str) -> None:
    """And none is forgotten: what is resumed is what a leader with the right time would have left."""
    settings = replace(SETTINGS, forecast=forecast, season_s=960.0)  # type: ignore[arg-type]
    right, now_s = _led(settings, NOW_S)
    ahead, _ = _led(settings, NOW_S + 3600)
    found = resumed(Policy(settings, GOALS), _over_the_wire(saved(ahead)), now_s, watched_s=math.inf)
    assert _over_the_wire(found.save()) == _over_the_wire(right.save())


@pytest.mark.parametrize("ahead_s", [0.0, 60.0, 3600.0])
def test_the_next_leader_follows_the_load_whatever_the_clock_of_the_former_said(ahead_s: float) -> None:
    former, there_s = _led(SETTINGS, NOW_S + ahead_s, rate=20.0)
    policy = resumed(Policy(SETTINGS, GOALS), _over_the_wire(saved(former)), there_s - ahead_s, STALE_S)
    sizes = _sizes(policy, there_s - ahead_s + 2.0, 1.0, 300, (4, 4))
    assert sizes[-1] == (1, 1), "it shrinks"
    assert _sizes(policy, there_s - ahead_s + 602.0, 60.0, 60, sizes[-1])[-1] > (2, 1), "and grows"


def test_what_was_left_long_ago_says_nothing_of_what_was_enough_since() -> None:
    """So a pool does not shrink at once: nobody has watched it for a cool-down."""
    former, there_s = _led(SETTINGS, NOW_S, rate=1.0)
    for gap_s, shrinks in ((10.0, True), (-10.0, True), (3600.0, False), (-3600.0, False)):
        policy = resumed(Policy(SETTINGS, GOALS), _over_the_wire(saved(former)), there_s + gap_s, STALE_S)
        sizes = _sizes(policy, there_s + gap_s, 1.0, 90, (9, 9))
        assert (sizes[1] < (9, 9)) is shrinks
        assert sizes[-1] == (1, 1)


def _change(path: str, value: object) -> Callable[[State], None]:
    def change(state: State) -> None:
        *folders, name = path.split("/")
        table = state
        for folder in folders:
            table = table[folder]  # type: ignore[assignment]
        table[name] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _change("format", 99),
        _change("policy", []),
        _change("policy/pools/prefill/changes", [[1e6, float("inf")]]),
        _change("policy/pools/decode/changes", [[1e6]]),
        _change("policy/pools/decode/enough", [["now", 1]]),
        _change("policy/pools/decode/enough", {}),
        _change("policy/pools/decode/idle_since_s", "long ago"),
        _change("policy/forecast/kalman/level", float("nan")),
        _change("policy/forecast/kalman/time_s", None),
        _change("policy/lengths/output_squared", "many"),
        _change("policy/lengths/input_tokens", -1),
        _change("policy/ttft", {"factor": 1e400}),
        _change("policy/more", json.loads("[" * 900 + "]" * 900)),
    ],
)
def test_a_state_that_cannot_be_used_is_refused_as_a_whole(change: Callable[[State], None]) -> None:
    """With one error, and nothing of it is taken over."""
    former, now_s = _led(SETTINGS, NOW_S, rate=20.0)
    state = _over_the_wire(saved(former))
    change(state)
    policy, _ = _led(SETTINGS, NOW_S, rate=1.0)
    before = copy.deepcopy(policy.save())
    try:
        found = resumed(policy, state, now_s, STALE_S)
    except StateError as error:
        assert str(error)
    else:
        assert "more" in state["policy"], "what nobody reads may be there"  # type: ignore[operator]
        assert found is not policy
    assert policy.save() == before


def test_a_season_of_rubbish_is_refused() -> None:
    settings = replace(SETTINGS, forecast="holt-winters")
    state = _over_the_wire(saved(_led(settings, NOW_S)[0]))
    _change("policy/forecast/holt-winters/bins", ["x"] * 96)(state)
    with pytest.raises(StateError, match=r"^bins: "):
        resumed(Policy(settings, GOALS), state, NOW_S, STALE_S)
