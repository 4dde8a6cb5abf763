"""What a leader leaves for the next one, and what that one makes of it. Pure.

Times in it are readings of the former leader's clock, and no two machines' clocks agree. Where they lie ahead of the new one's,
all are moved back here by the same, so that the latest is of now: a policy drops what is older than what it knows, and would
neither learn nor shrink until that time has come. Nothing else has to think of it.
"""

import copy
import json
from collections.abc import Iterator

from pdmesh.autoscaler.forecasting.forecast import State, number
from pdmesh.autoscaler.policy.policy import Policy

_FORMAT = 1
_TIMES = ("time_s", "started_s", "idle_since_s")
_TIMED = ("changes", "enough", "recent")
"""Lists of pairs; the first of each is a time."""


class StateError(ValueError):
    """What was saved cannot be used; says why."""


def saved(policy: Policy) -> State:
    """JSON of what `resumed` takes."""
    return {"format": _FORMAT, "policy": policy.save()}


def resumed(policy: Policy, state: State, now_s: float, watched_s: float) -> Policy:
    """A copy of `policy` that goes on from there; `policy` itself stays as it is. What was left more than `watched_s` ago, or
    by a clock that is off by more, nobody may have watched since. Raises StateError, whatever it is that was saved: it must keep
    nobody from leading."""
    try:
        json.dumps(state, allow_nan=False)  # no number but finite ones, nor more depth than can be gone through
        own = _policy_state(state)
        latest_s = max(_times(own), default=now_s)
        fresh = copy.deepcopy(policy)
        fresh.restore(_earlier(own, max(0.0, latest_s - now_s)))
        fresh.save()
    except Exception as error:
        raise StateError(str(error) or type(error).__name__) from error
    if abs(now_s - latest_s) > watched_s:
        fresh.interrupt()
    return fresh


def _policy_state(state: State) -> State:
    own = state.get("policy")
    if state.get("format") != _FORMAT or not isinstance(own, dict):
        raise ValueError(f"format: {state.get('format')!r} is not {_FORMAT}")
    return own


def _times(state: State) -> Iterator[float]:
    """Of everything in it."""
    for name, value in state.items():
        if isinstance(value, dict):
            yield from _times(value)
        elif name in _TIMED:
            yield from (float(time_s) for time_s, _ in _pairs(name, value))
        elif name in _TIMES and value is not None:
            yield number(state, name)


def _earlier(state: State, by_s: float) -> State:
    """The same, so many seconds ago."""
    return {name: _value_earlier(name, value, by_s) for name, value in state.items()}


def _value_earlier(name: str, value: object, by_s: float) -> object:
    if isinstance(value, dict):
        return _earlier(value, by_s)
    if name in _TIMED:
        return [[time_s - by_s, what] for time_s, what in _pairs(name, value)]
    if name in _TIMES and isinstance(value, int | float):
        return value - by_s
    return value


def _pairs(name: str, value: object) -> list[tuple[float, float]]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: a saved state holds a list there, not {value!r}")
    return value
