"""A series with a level and a slope, both of which wander: a Kalman filter that learns how noisy the observations are. Pure.

Local linear trend (Harvey, "Forecasting, Structural Time Series Models and the Kalman Filter", 1989, §2.3). Observations may come
at any distance. One that is out of all proportion (a burst) is no noise: the filter then forgets how sure it was of level and
slope, follows within an observation or two, and sees the slope of a rise while it lasts. Looking ahead, the slope fades.
"""

import math

from autoscaler.forecast import Expected, State, number

LEVEL_NOISE = 0.001  # of the level, by which it wanders in a second (its root)
SLOPE_NOISE = 1e-5  # of the level in a second, by which the slope wanders in a second (its root)
SURPRISE = 4.0  # standard deviations beyond which an observation tells of a change
FADE_S = 90.0  # after which a slope counts for a third
LEAST_LEVEL = 0.05
_LEARN = 0.05  # of an observation, in the mean of noise
_FIELDS = ("time_s", "level", "slope", "var_level", "covar", "var_slope", "noise")


class Kalman:
    """`window_s`: over which each observed rate was counted; independent arrivals in it make the noise that it begins with."""

    def __init__(self, window_s: float = 15.0) -> None:
        self._window_s = window_s
        self._time_s = float("-inf")
        self._level = self._slope = 0.0
        self._var_level = self._covar = self._var_slope = 0.0
        self._noise = 1.0  # times what independent arrivals would have

    def observe(self, time_s: float, value: float) -> None:
        if time_s <= self._time_s:
            return
        if self._time_s == float("-inf"):
            self._begin(time_s, value)
            return
        self._advance(time_s - self._time_s)
        self._time_s = time_s
        error, noise = value - self._level, self._noise_at(max(self._level, LEAST_LEVEL))
        expected = self._var_level + noise
        if error * error > SURPRISE**2 * expected:
            self._forget(error)
        else:
            excess = max(0.0, error * error - self._var_level) / (noise / self._noise)
            self._noise = min(4.0, max(0.5, self._noise + _LEARN * (excess - self._noise)))
        self._learn(error, noise)

    def at(self, time_s: float) -> Expected:
        ahead_s = max(0.0, time_s - self._time_s) if self._time_s > float("-inf") else 0.0
        reach_s = FADE_S * (1 - math.exp(-ahead_s / FADE_S))
        level, slope_noise = max(self._level, LEAST_LEVEL), (SLOPE_NOISE * max(self._level, LEAST_LEVEL)) ** 2
        variance = self._var_level + 2 * reach_s * self._covar + reach_s**2 * self._var_slope
        variance += (LEVEL_NOISE * level) ** 2 * ahead_s + slope_noise * reach_s**3 / 3
        spread = math.sqrt(max(0.0, variance)) if self._time_s > float("-inf") else 0.0
        return Expected(max(0.0, self._level + self._slope * reach_s), spread)

    def save(self) -> State:
        return {} if self._time_s == float("-inf") else {name: getattr(self, f"_{name}") for name in _FIELDS}

    def restore(self, state: State) -> None:
        numbers = {name: number(state, name) for name in _FIELDS} if state else {}
        for name, value in numbers.items():
            setattr(self, f"_{name}", value)

    def _begin(self, time_s: float, value: float) -> None:
        self._time_s, self._level = time_s, value
        self._var_level = self._noise_at(max(value, LEAST_LEVEL))
        self._var_slope = (SLOPE_NOISE * max(value, LEAST_LEVEL)) ** 2

    def _noise_at(self, level: float) -> float:
        return self._noise * level / self._window_s

    def _advance(self, seconds: float) -> None:
        """The level moves by the slope, which fades over a gap; both become less sure."""
        reach_s, level = FADE_S * (1 - math.exp(-seconds / FADE_S)), max(self._level, LEAST_LEVEL)
        slope_noise = (SLOPE_NOISE * level) ** 2
        self._level = max(0.0, self._level + self._slope * reach_s)
        self._slope *= math.exp(-seconds / FADE_S)
        self._var_level += 2 * reach_s * self._covar + reach_s**2 * self._var_slope
        self._var_level += (LEVEL_NOISE * level) ** 2 * seconds + slope_noise * reach_s**3 / 3
        self._covar += reach_s * self._var_slope + slope_noise * reach_s**2 / 2
        self._var_slope += slope_noise * seconds

    def _forget(self, error: float) -> None:
        self._var_level += error * error
        self._var_slope += (error / 60.0) ** 2
        self._covar = 0.0

    def _learn(self, error: float, noise: float) -> None:
        total = self._var_level + noise
        gain_level, gain_slope = self._var_level / total, self._covar / total
        self._level = max(0.0, self._level + gain_level * error)
        self._slope += gain_slope * error
        self._var_slope = max(0.0, self._var_slope - gain_slope * self._covar)
        self._covar *= 1 - gain_level
        self._var_level *= 1 - gain_level
