"""What is to come, from what came: the interface, the plainest forecaster, and the choice by name. Pure: the time is passed in.

A forecaster's state is a plain dictionary, so that a new leader goes on where the last one ended.
"""

from typing import NamedTuple, Protocol

State = dict[str, object]


class Expected(NamedTuple):
    """At one moment. `spread`: one standard deviation of what `mean` may be off by, without the noise of a single observation.
    `noise`: the variance of an observation, times what independent arrivals would have."""

    mean: float
    spread: float
    noise: float = 1.0


class Forecaster(Protocol):
    """Of one series that is never negative."""

    def observe(self, time_s: float, value: float) -> None:
        """Times never go back; one that does is left out. Gaps are allowed."""

    def at(self, time_s: float) -> Expected:
        """At that time, which is no earlier than the last observation; 0 with no spread before the first."""

    def save(self) -> State:
        """What `restore` of a new one takes; empty before the first observation."""

    def restore(self, state: State) -> None:
        """Goes on from there. Raises ValueError naming what is missing."""


class LastValue:
    """It stays as it is. The spread is what it changed by, on average, from one observation to the next."""

    def __init__(self) -> None:
        self._time_s = float("-inf")
        self._value = 0.0
        self._change = 0.0

    def observe(self, time_s: float, value: float) -> None:
        if time_s <= self._time_s:
            return
        if self._time_s > float("-inf"):
            self._change += 0.1 * (abs(value - self._value) - self._change)
        self._time_s, self._value = time_s, value

    def at(self, time_s: float) -> Expected:
        return Expected(self._value, self._change)

    def save(self) -> State:
        return {} if self._time_s == float("-inf") else {"time_s": self._time_s, "value": self._value, "change": self._change}

    def restore(self, state: State) -> None:
        if state:
            self._time_s, self._value, self._change = (number(state, name) for name in ("time_s", "value", "change"))


def number(state: State, name: str) -> float:
    """A number of a saved state. Raises ValueError."""
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: a saved state holds a number there, not {value!r}")
    return float(value)
