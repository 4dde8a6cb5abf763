"""Forecasters by the name that settings give them. Another one: its file and a line here."""

from autoscaler.forecast import Forecaster, LastValue
from autoscaler.holt_winters import HoltWinters
from autoscaler.kalman import Kalman
from autoscaler.settings import AutoscalerSettings


def forecaster_of(settings: AutoscalerSettings) -> Forecaster:
    """A new one."""
    if settings.forecast == "holt-winters":
        return HoltWinters(settings.season_s)
    return LastValue() if settings.forecast == "last" else Kalman()
