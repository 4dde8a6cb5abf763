"""How many requests a second each pool has to be ready for. Pure.

sure      = observed less what chance may have added to it       moves a pool up at once
expected  = forecast for when a pod asked for now would serve    is the floor
backlog   = what waits beyond the usual, over the time to be rid of it
"""

import math
from dataclasses import dataclass

from autoscaler.forecast import Forecaster
from autoscaler.settings import AutoscalerSettings
from autoscaler.views import Traffic

SURE_SIGMAS = 2.0
"""Of independent arrivals, by which the observed rate may be too high by chance."""

USUAL_QUEUE_S = 0.25
"""Arrivals of so long wait at routers at any time: they give workers no more work in advance than that (router/prediction.py)."""


@dataclass(frozen=True)
class Demand:
    """In requests a second. `backlog`: to be had on top of everything else until it is gone."""

    observed: float
    expected: float
    least: float
    backlog: float

    @property
    def needed(self) -> float:
        """What a pool has to bear."""
        return max(self.least, self.expected) + self.backlog


def demand(now_s: float, traffic: Traffic, forecaster: Forecaster, settings: AutoscalerSettings, start_s: float) -> Demand:
    """`start_s`: until a pod that is asked for now serves. What is expected is the most of now and then: a pool must not
    shrink for a night that begins only after that."""
    rate = traffic.rate_per_s
    sure = max(0.0, rate - SURE_SIGMAS * math.sqrt(rate / max(traffic.window_s, 1e-3)))
    moments = [forecaster.at(now_s + start_s * share) for share in (0.0, 0.5, 1.0)]
    expected = max([moment.mean + settings.forecast_sigmas * moment.spread for moment in moments])
    unusual = max(0.0, traffic.num_queued - USUAL_QUEUE_S * rate - 1)
    return Demand(rate, expected, sure, unusual / settings.drain_s)
