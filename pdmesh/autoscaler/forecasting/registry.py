"""Forecasters by the name that settings give them. Another one: its file and a line here."""

from pdmesh.autoscaler.forecasting.forecast import Forecaster, LastValue
from pdmesh.autoscaler.forecasting.holt_winters import HoltWinters
from pdmesh.autoscaler.forecasting.kalman import WINDOW_S, Kalman
from pdmesh.autoscaler.settings import AutoscalerSettings

NOISE_COOL_DOWNS = 2.5
"""Over so many of them noise is averaged: who lets a pool shrink within seconds wants a burst forgotten within minutes."""


def forecaster_of(settings: AutoscalerSettings, window_s: float = WINDOW_S) -> Forecaster:
    """A new one, for rates that are counted over `window_s`."""
    if settings.forecast == "holt-winters":
        return HoltWinters(settings.season_s)
    return LastValue() if settings.forecast == "last" else Kalman(window_s, NOISE_COOL_DOWNS * settings.cool_down_s)
