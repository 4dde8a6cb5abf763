"""How many requests a second each pool has to be ready for. Pure.

sure      = observed less what chance may have added to it       moves a pool up at once
expected  = forecast for when a pod asked for now would serve    is the floor
later     = forecast for a cool-down after that                  is what a pool must not shrink below
backlog   = what waits beyond the usual, over the time to be rid of it

Arrivals that come in lumps (completions for editors come in salvos of seconds) are met by a pool that bears most lumps all the
time: a pod that is asked for when one comes serves when it is over. How lumpy they are the forecaster learns.
"""

import math
from dataclasses import dataclass

from pdmesh.autoscaler.forecasting.forecast import Expected, Forecaster
from pdmesh.autoscaler.settings import AutoscalerSettings
from pdmesh.autoscaler.views import Traffic

SURE_SIGMAS = 2.0
"""Of arrivals, by which the observed rate may be too high by chance."""

USUAL_QUEUE_S, USUAL_SHARE = 0.25, 0.25
"""Arrivals of so long wait at routers at any time, or of so much of a TTFT objective: they give workers no more work in advance
than that (router/prediction.py)."""

USUAL_NOISE, LUMP_SIGMAS = 4.0, 2.5
"""Of arrivals with more noise than this (1: independent ones), so much is to be borne at any time."""

ABSORBED = 2.0
"""Times the TTFT objective, over which a queue evens lumps out."""


@dataclass(frozen=True)
class Demand:
    """In requests a second. `backlog`: to be had on top of everything else until it is gone."""

    observed: float
    expected: float
    least: float
    backlog: float
    later: float = 0.0

    @property
    def needed(self) -> float:
        """What a pool has to bear."""
        return max(self.least, self.expected) + self.backlog


def demand(
    now_s: float, traffic: Traffic, forecaster: Forecaster, settings: AutoscalerSettings, start_s: float, ttft_s: float | None
) -> Demand:
    """`start_s`: until a pod that is asked for now serves; `ttft_s`: the objective. What is expected is the most of now and then:
    a pool must not shrink for a night that begins only after that."""
    rate, window_s = traffic.rate_per_s, max(traffic.window_s, 1e-3)
    evened_s = max(window_s, ABSORBED * (ttft_s or 0.0))
    moments = [forecaster.at(now_s + start_s * share) for share in (0.0, 0.5, 1.0)]
    expected = max([moment.mean + settings.forecast_sigmas * moment.spread + _lumps(moment, evened_s) for moment in moments])
    after = forecaster.at(now_s + start_s + settings.cool_down_s)
    later = after.mean + _lumps(after, evened_s)
    sure = max(0.0, rate - SURE_SIGMAS * math.sqrt(max(1.0, after.noise) * rate / window_s))
    unusual = max(0.0, traffic.num_queued - max(USUAL_QUEUE_S, USUAL_SHARE * (ttft_s or 0.0)) * rate - 1)
    return Demand(rate, expected, sure, unusual / settings.drain_s, later)


def _lumps(moment: Expected, evened_s: float) -> float:
    return LUMP_SIGMAS * math.sqrt(max(0.0, moment.noise - USUAL_NOISE) * moment.mean / evened_s)
