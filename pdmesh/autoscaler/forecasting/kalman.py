"""Forecasts a series with a random-walk level and slope: a Kalman filter that learns the noise of the observations. Pure.

Local linear trend (Harvey, "Forecasting, Structural Time Series Models and the Kalman Filter", 1989, §2.3). Observations may be
unevenly spaced. Their noise is estimated from the distance of each to the line through its neighbours. An extreme outlier (a
burst) is not noise: the filter then resets its confidence in level and slope, follows within one or two observations, and sees
the slope of a rise while it lasts. Where bursts are usual, it takes a far greater one, or a minute of smaller ones on one side:
bursts are over by then. The slope fades with the horizon.
"""

import math
from collections import deque

from pdmesh.autoscaler.forecasting.forecast import Expected, State, number

LEVEL_NOISE = 0.001  # root of the level's drift per second, relative to the level
SLOPE_NOISE = 1e-5  # root of the slope's drift per second, relative to the level per second
SURPRISE, LUMPY_SURPRISE = 6.0, 20.0  # standard deviations beyond which an observation signals a change; where bursts are usual
LASTING, LASTING_WINDOWS = 1.5, 4.0  # standard deviations that signal a change, too, if all of so many windows are off by them
LUMPY_NOISE = 25.0  # times that of independent arrivals: from here on they are
FADE_S = 90.0  # time after which a slope counts for a third
MOST_NOISE = 400.0  # times that of independent arrivals: an hour of code completions shows 70 to 160
LEAST_LEVEL = 0.05
WINDOW_S = 15.0
NOISE_S = 1440.0  # averaging time of the noise, by default
LEAST_NOISE_WINDOWS = 2.0  # least averaging time: with less, each observation would stand for all of them
_FIELDS = ("time_s", "level", "slope", "var_level", "covar", "var_slope", "noise")


class Kalman:
    """Forecast by level and slope. `window_s`: the window over which each observed rate was counted; independent arrivals in it
    give the initial noise. `noise_s`: the averaging time of the noise, and so how long a burst (its end is not a line either)
    makes arrivals look noisy."""

    def __init__(self, window_s: float = WINDOW_S, noise_s: float = NOISE_S) -> None:
        self._window_s = window_s
        self._noise_s = max(noise_s, LEAST_NOISE_WINDOWS * window_s)
        self._time_s = float("-inf")
        self._level = self._slope = 0.0
        self._var_level = self._covar = self._var_slope = 0.0
        self._recent: deque[tuple[float, float]] = deque()
        self._noise = 1.0  # times that of independent arrivals
        self._off_s: float | None = None  # since when all observations are off, on the side of this error
        self._off = 0.0

    def observe(self, time_s: float, value: float) -> None:
        if time_s <= self._time_s:
            return
        if self._time_s == float("-inf"):
            self._begin(time_s, value)
            return
        seconds = time_s - self._time_s
        self._advance(seconds)
        self._time_s = time_s
        self._learn_noise(time_s, value, seconds)
        error, noise = value - self._level, self._noise_at(max(self._level, LEAST_LEVEL))
        expected = self._var_level + noise
        if self._is_change(time_s, error, expected):
            self._forget(error)
        self._learn(error, noise)

    def at(self, time_s: float) -> Expected:
        ahead_s = max(0.0, time_s - self._time_s) if self._time_s > float("-inf") else 0.0
        reach_s = FADE_S * (1 - math.exp(-ahead_s / FADE_S))
        level, slope_noise = max(self._level, LEAST_LEVEL), (SLOPE_NOISE * max(self._level, LEAST_LEVEL)) ** 2
        variance = self._var_level + 2 * reach_s * self._covar + reach_s**2 * self._var_slope
        variance += (LEVEL_NOISE * level) ** 2 * ahead_s + slope_noise * reach_s**3 / 3
        spread = math.sqrt(max(0.0, variance)) if self._time_s > float("-inf") else 0.0
        return Expected(max(0.0, self._level + self._slope * reach_s), spread, self._noise)

    def save(self) -> State:
        if self._time_s == float("-inf"):
            return {}
        return {name: getattr(self, f"_{name}") for name in _FIELDS} | {"recent": [list(pair) for pair in self._recent]}

    def restore(self, state: State) -> None:
        numbers = {name: number(state, name) for name in _FIELDS} if state else {}
        self._recent = _pairs(state.get("recent", []))
        for name, value in numbers.items():
            setattr(self, f"_{name}", value)

    def _begin(self, time_s: float, value: float) -> None:
        self._time_s, self._level = time_s, value
        self._var_level = self._noise_at(max(value, LEAST_LEVEL))
        self._var_slope = (SLOPE_NOISE * max(value, LEAST_LEVEL)) ** 2

    def _noise_at(self, level: float) -> float:
        return self._noise * level / self._window_s

    def _advance(self, seconds: float) -> None:
        """Advance the state: the level moves by the slope, which fades over a gap; both become less certain."""
        reach_s, level = FADE_S * (1 - math.exp(-seconds / FADE_S)), max(self._level, LEAST_LEVEL)
        slope_noise = (SLOPE_NOISE * level) ** 2
        self._level = max(0.0, self._level + self._slope * reach_s)
        self._slope *= math.exp(-seconds / FADE_S)
        self._var_level += 2 * reach_s * self._covar + reach_s**2 * self._var_slope
        self._var_level += (LEVEL_NOISE * level) ** 2 * seconds + slope_noise * reach_s**3 / 3
        self._covar += reach_s * self._var_slope + slope_noise * reach_s**2 / 2
        self._var_slope += slope_noise * seconds

    def _is_change(self, time_s: float, error: float, expected: float) -> bool:
        """Return whether an error says that the level is another one, given its `expected` square."""
        if self._noise <= LUMPY_NOISE:
            self._off_s = None
            return error * error > SURPRISE**2 * expected
        if error * error <= LASTING**2 * expected:
            self._off_s = None
        elif self._off_s is None or error * self._off < 0:
            self._off_s, self._off = time_s, error
        elif time_s - self._off_s >= LASTING_WINDOWS * self._window_s:
            self._off_s = None
            return True
        return error * error > LUMPY_SURPRISE**2 * expected

    def _forget(self, error: float) -> None:
        self._var_level += error * error
        self._var_slope += (error / 60.0) ** 2
        self._covar = 0.0

    def _learn_noise(self, time_s: float, value: float, seconds: float) -> None:
        """Learn the noise from how far the middle of three observations, windows apart, lies from the line through the others: a
        rise is not noise, however steep, and a step counts only once."""
        recent = self._recent
        recent.append((time_s, value))
        while len(recent) > 1 and recent[1][0] <= time_s - 2 * self._window_s:
            recent.popleft()
        middle = next((known for at_s, known in reversed(recent) if at_s <= time_s - self._window_s), None)
        if middle is None or recent[0][0] > time_s - 2 * self._window_s:
            return
        bend, mean = value - 2 * middle + recent[0][1], (value + middle + recent[0][1]) / 3
        seen = bend * bend / 6 / (max(mean, LEAST_LEVEL) / self._window_s)
        weight = 1 - math.exp(-min(seconds, self._window_s) / self._noise_s)
        self._noise = min(MOST_NOISE, max(0.5, self._noise + weight * (seen - self._noise)))

    def _learn(self, error: float, noise: float) -> None:
        total = self._var_level + noise
        gain_level, gain_slope = self._var_level / total, self._covar / total
        self._level = max(0.0, self._level + gain_level * error)
        self._slope += gain_slope * error
        self._var_slope = max(0.0, self._var_slope - gain_slope * self._covar)
        self._covar *= 1 - gain_level
        self._var_level *= 1 - gain_level


def _pairs(saved: object) -> deque[tuple[float, float]]:
    if not isinstance(saved, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in saved):
        raise ValueError(f"recent: a saved state holds pairs of numbers there, not {saved!r}")
    return deque((number({"recent": at_s}, "recent"), number({"recent": value}, "recent")) for at_s, value in saved)
