"""Creates forecasters by the name in the settings. A new one is its file and a line here."""

from pdmesh.autoscaler.forecasting.forecast import Forecaster, LastValue
from pdmesh.autoscaler.forecasting.holt_winters import HoltWinters
from pdmesh.autoscaler.forecasting.kalman import WINDOW_S, Kalman
from pdmesh.autoscaler.settings import AutoscalerSettings

NOISE_COOL_DOWNS = 12.0
"""Cool-downs over which noise is averaged: as bursts come minutes apart, the noise of fewer would come and go with each of them,
and pods with it."""


def forecaster_of(settings: AutoscalerSettings, window_s: float = WINDOW_S) -> Forecaster:
    """Return a new forecaster for rates that are counted over `window_s`."""
    if settings.forecast == "holt-winters":
        return HoltWinters(settings.season_s)
    return LastValue() if settings.forecast == "last" else Kalman(window_s, NOISE_COOL_DOWNS * settings.cool_down_s)
