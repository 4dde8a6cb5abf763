"""What admission asks before it lets a request wait: what the best placement there is now would give it."""

import time

from router.context import Core
from router.fleet.circuit_breaker import Role
from router.flow_control.forecast import Forecast
from router.routing.filters import Demand, NoPlacement
from router.routing.routing_request import demand_of
from router.tokenization.prepared_request import Job

IDLE_FOR_S, MAX_IDLE, CONTEXT_STEP = 1.0, 256, 256


class PolicyForecaster:
    """`Forecaster` on the router's own policy and fleet; looks, and changes nothing."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._idle: dict[tuple[object, ...], float | None] = {}
        self._idle_until = 0.0

    def forecast(self, job: Job) -> Forecast | None:
        """None while nothing is known: no worker that could take it, none of them says how fast it is, or a policy that predicts
        nothing."""
        roster, judge = self._core.fleet.roster, self._core.judge
        demand = demand_of(
            self._core,
            job,
            job.emitted,
            excluded_decode=judge.ejected(roster, Role.DECODE),
            excluded_prefill=judge.ejected(roster, Role.PREFILL),
        )
        choice = self._core.policy.choose(roster, demand, time.monotonic())
        best = None if isinstance(choice, NoPlacement) else choice.chosen
        if best is None or best.prediction is None:
            return None
        computing = best.prefill or best.decode
        if computing.latency is None and best.decode.latency is None:
            return None
        predicted = best.prediction
        slow = demand.tpot_goal_s is not None and predicted.tpot_s > demand.tpot_goal_s
        idle_tpot_s = self._idle_tpot_s(demand) if slow else None
        return Forecast(predicted.ttft_s, predicted.tpot_s, best.has_room, predicted.ahead_s, idle_tpot_s)

    def _idle_tpot_s(self, demand: Demand) -> float | None:
        """Of the fastest worker; None as long as one of them does not say how fast it is. Remembered for IDLE_FOR_S: it takes a
        look at all of them."""
        now, context = time.monotonic(), round(demand.num_choices * demand.num_tokens)
        if now >= self._idle_until or len(self._idle) > MAX_IDLE:
            self._idle, self._idle_until = {}, now + IDLE_FOR_S
        key = (demand.model, demand.kind, demand.num_choices, context // CONTEXT_STEP)
        if key not in self._idle:
            self._idle[key] = self._look_for_idle(demand, context)
        return self._idle[key]

    def _look_for_idle(self, demand: Demand, context: int) -> float | None:
        groups = self._core.fleet.roster.groups(demand.model, demand.kind)
        views = [engine.view for group in groups for engine in group.engines.values() if engine.view.decode]
        speeds = [view.idle_tpot_s(demand.num_choices, context) for view in views]
        told = [tpot_s for tpot_s in speeds if tpot_s is not None]
        return min(told) if told and len(told) == len(views) else None
