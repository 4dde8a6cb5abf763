"""Forecasts a series that repeats, such as day and night, around a level with a damped trend. Pure.

Additive Holt-Winters with a damped trend (Hyndman and Athanasopoulos, "Forecasting: Principles and Practice", 3rd edition,
§8.2-8.3) over means of `season / NUM_BINS` each. The first whole season initializes level and season; until then the forecast is
the latest value. The current deviation from the model is expected to fade.
"""

import math

from pdmesh.autoscaler.forecasting.forecast import Expected, State, number

NUM_BINS = 96  # bins of a season: a quarter of an hour each for a day
LEVEL, TREND, SEASON = 0.2, 0.02, 0.3  # learning rates: shares of one bin's error
DAMPING = 0.9  # of the trend, per bin
OFF_S = 60.0  # smoothing time of the current deviation
OFF_FADE_S = 900.0  # time after which a third of the deviation is left
_LEARN = 0.1
_NUMBERS = ("time_s", "level", "trend", "off", "spread", "sum", "num")


class HoltWinters:
    """Forecast a series that repeats after `season_s` seconds."""

    def __init__(self, season_s: float = 86400.0) -> None:
        self._bin_s = season_s / NUM_BINS
        self._time_s = self._started_s = -math.inf
        self._level = self._trend = self._off = self._spread = 0.0
        self._sum, self._num = 0.0, 0.0
        self._bins: list[float | None] = [None] * NUM_BINS  # means of the first season, then deviations from the level
        self._is_known = False

    def observe(self, time_s: float, value: float) -> None:
        if time_s <= self._time_s:
            return
        if self._time_s == -math.inf:
            self._started_s, self._level = time_s, value
        else:
            before = self._mean(time_s)
            self._close(self._index(time_s) - self._index(self._time_s))
            # What a bin teaches explains a part of the current deviation: the sum of both does not jump.
            self._off += before - self._mean(time_s)
            weight = 1 - math.exp(-(time_s - self._time_s) / OFF_S)
            error = value - self._mean(time_s)
            self._off += weight * (error - self._off)
            self._spread += _LEARN * weight * (abs(error - self._off) - self._spread)
        self._sum, self._num, self._time_s = self._sum + value, self._num + 1, time_s

    def at(self, time_s: float) -> Expected:
        if self._time_s == -math.inf:
            return Expected(0.0, 0.0)
        fading = math.exp(-max(0.0, time_s - self._time_s) / OFF_FADE_S)
        return Expected(max(0.0, self._mean(time_s) + self._off * (fading if self._is_known else 1.0)), 1.25 * self._spread)

    def save(self) -> State:
        if self._time_s == -math.inf:
            return {}
        state: State = {name: getattr(self, f"_{name}") for name in (*_NUMBERS, "started_s")}
        return {**state, "bins": list(self._bins), "is_known": self._is_known}

    def restore(self, state: State) -> None:
        if not state:
            return
        numbers = {name: number(state, name) for name in (*_NUMBERS, "started_s")}
        bins = state.get("bins")
        if not isinstance(bins, list) or len(bins) != NUM_BINS:
            raise ValueError(f"bins: a saved state holds {NUM_BINS} of them")
        if not all(mean is None or isinstance(mean, int | float) for mean in bins):
            raise ValueError("bins: a saved state holds numbers there, or nothing")
        for name, value in numbers.items():
            setattr(self, f"_{name}", value)
        self._bins, self._is_known = list(bins), state.get("is_known") is True

    def _index(self, time_s: float) -> int:
        return math.floor((time_s - self._started_s) / self._bin_s)

    def _mean(self, time_s: float) -> float:
        """Return the mean without the current deviation: level, trend, and the season interpolated between the middles of two
        bins."""
        if not self._is_known:
            return self._level
        position = (time_s - self._started_s) / self._bin_s - 0.5
        first = math.floor(position)
        share = position - first
        season = (1 - share) * self._season(first) + share * self._season(first + 1)
        ahead = max(0.0, (time_s - self._time_s) / self._bin_s)
        return self._level + self._trend * DAMPING * (1 - float(DAMPING**ahead)) / (1 - DAMPING) + season

    def _season(self, index: int) -> float:
        return self._bins[index % NUM_BINS] or 0.0

    def _close(self, num_bins: int) -> None:
        """Close `num_bins` bins: the last observed one and those of a gap after it."""
        if num_bins <= 0:
            return
        index, mean = self._index(self._time_s), self._sum / max(1.0, self._num)
        if self._is_known:
            self._learn(index, mean)
        else:
            self._bins[index % NUM_BINS] = mean
            self._level = mean
            if index + num_bins >= NUM_BINS:
                self._begin()
        gap = num_bins - 1
        self._level += self._trend * DAMPING * (1 - DAMPING**gap) / (1 - DAMPING)
        self._trend *= DAMPING**gap
        self._sum = self._num = 0.0

    def _learn(self, index: int, mean: float) -> None:
        before, season = self._level + DAMPING * self._trend, self._season(index)
        error = mean - before - season
        self._level = before + LEVEL * error
        self._trend = DAMPING * self._trend + TREND * error
        self._bins[index % NUM_BINS] = season + SEASON * (1 - LEVEL) * error

    def _begin(self) -> None:
        """Initialize after the first season; a bin without observations takes the value of the previous one."""
        filled, last = [], next(mean for mean in self._bins if mean is not None)
        for mean in self._bins:
            last = last if mean is None else mean
            filled.append(last)
        self._level = sum(filled) / NUM_BINS
        self._bins = [mean - self._level for mean in filled]
        self._is_known, self._trend = True, 0.0
