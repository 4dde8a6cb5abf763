"""Holds the interface of forecasters, the simplest one, and helpers for saved state. Pure: the time is passed in.

A forecaster's state is a plain dictionary, so that a new leader continues where the last one ended.
"""

from typing import NamedTuple, Protocol

State = dict[str, object]


class Expected(NamedTuple):
    """Hold the forecast for one moment. `spread`: one standard deviation of the error of `mean`, without the noise of a single
    observation. `noise`: the variance of an observation relative to independent arrivals."""

    mean: float
    spread: float
    noise: float = 1.0


class Forecaster(Protocol):
    """Forecast one non-negative series."""

    def observe(self, time_s: float, value: float) -> None:
        """Add an observation. One whose time is earlier than the latest is ignored. Gaps are allowed."""

    def at(self, time_s: float) -> Expected:
        """Return the forecast at `time_s`, no earlier than the last observation; 0 without spread before the first."""

    def save(self) -> State:
        """Return the state for `restore`; empty before the first observation."""

    def restore(self, state: State) -> None:
        """Continue from a saved state. Raises ValueError naming what is missing."""


class LastValue:
    """Forecast the last value. The spread is the average change between two observations."""

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
    """Return a number of a saved state. Raises ValueError."""
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: a saved state holds a number there, not {value!r}")
    return float(value)
