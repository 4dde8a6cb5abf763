"""What admission asks before it lets a request wait: what the best placement there is now would give it."""

import time

from router.candidates import NoPlacement
from router.core import Core
from router.demands import demand_of
from router.forecast import Forecast
from router.job import Job


class PolicyForecaster:
    """`Forecaster` on the router's own policy and fleet; looks, and changes nothing."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def forecast(self, job: Job) -> Forecast | None:
        """None while nothing is known: no worker that could take it, none of them says how fast it is, or a policy that predicts
        nothing."""
        choice = self._core.policy.choose(self._core.fleet.roster, demand_of(self._core, job, job.emitted), time.monotonic())
        best = None if isinstance(choice, NoPlacement) else choice.chosen
        if best is None or best.prediction is None:
            return None
        computing = best.prefill or best.decode
        if computing.latency is None and best.decode.latency is None:
            return None
        predicted = best.prediction
        return Forecast(predicted.ttft_s, predicted.tpot_s, best.has_room, predicted.ahead_s)
