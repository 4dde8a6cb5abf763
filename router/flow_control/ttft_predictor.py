"""Forecasts for flow control: what the best placement there is now would give a request."""

import time

from pdmesh.planning.objectives import Bounds
from pdmesh.v1 import common_pb2
from router.context import RouterContext
from router.fleet.circuit_breaker import Role
from router.flow_control.slo_admission import FlowItem, Forecast, nothing_known
from router.routing.filters import NoPlacement, RoutingRequest, free_elsewhere
from router.routing.routing_request import choose, kind_of_resumed, routing_request_of
from router.tokenization.prepared_request import PreparedRequest

IDLE_FOR_S, MAX_IDLE, CONTEXT_STEP = 1.0, 256, 256


class TtftPredictor:
    """Implement `Forecaster` with the router's own policy and fleet. It changes neither."""

    def __init__(self, core: RouterContext) -> None:
        self._core = core
        self._idle: dict[tuple[object, ...], float | None] = {}
        self._idle_until = 0.0

    def forecast(self, prepared: PreparedRequest) -> Forecast | None:
        """Return the forecast; None while nothing is known: no worker could take the request, none of them reports its speed, or
        the policy does not predict."""
        fleet_snapshot, health_recorder = self._core.fleet.fleet_snapshot, self._core.health_recorder
        routing_request = routing_request_of(
            self._core,
            prepared,
            prepared.emitted,
            kind_of_resumed(self._core, prepared),
            excluded_decode=health_recorder.left_out(fleet_snapshot, Role.DECODE),
            excluded_prefill=health_recorder.left_out(fleet_snapshot, Role.PREFILL),
        )
        choice, routing_request = choose(self._core, prepared, routing_request, time.monotonic())
        if isinstance(choice, NoPlacement):
            return None
        best = choice.chosen
        if best is None or best.prediction is None:
            return None
        computing = best.prefill or best.decode
        if computing.latency is None and best.decode.latency is None:
            return None
        predicted = best.prediction
        slow = routing_request.tpot_goal_s is not None and predicted.tpot_s > routing_request.tpot_goal_s
        idle_tpot_s = self._idle_tpot_s(routing_request) if slow else None
        elsewhere = free_elsewhere(choice, routing_request)
        return Forecast(predicted.ttft_s, predicted.tpot_s, best.has_room, predicted.ahead_s, idle_tpot_s, elsewhere)

    def _idle_tpot_s(self, routing_request: RoutingRequest) -> float | None:
        """Return the TPOT of the fastest worker with no other load; None while some worker does not report its speed. The value
        is cached for IDLE_FOR_S, because all workers are asked."""
        now, context = time.monotonic(), round(routing_request.num_choices * routing_request.num_tokens)
        if now >= self._idle_until or len(self._idle) > MAX_IDLE:
            self._idle, self._idle_until = {}, now + IDLE_FOR_S
        routed = (routing_request.model, routing_request.kind, routing_request.revision)
        key = (*routed, routing_request.num_choices, context // CONTEXT_STEP)
        if key not in self._idle:
            self._idle[key] = self._look_for_idle(routing_request, context)
        return self._idle[key]

    def _look_for_idle(self, routing_request: RoutingRequest, context: int) -> float | None:
        pools = self._core.fleet.fleet_snapshot.pools(routing_request.model, routing_request.kind, routing_request.revision)
        views = [estimate.view for pool in pools for estimate in pool.estimates.values() if estimate.view.decode]
        speeds = [view.idle_tpot_s(routing_request.num_choices, context) for view in views]
        told = [tpot_s for tpot_s in speeds if tpot_s is not None]
        return min(told) if told and len(told) == len(views) else None


# From a prepared request to what flow control knows of it: its cost, its objectives, the memory that it holds while it waits.

HELD_BYTES_PER_TOKEN = 44
"""Memory for one prompt token of a waiting request: an int, its slot in the tuple, and its text in the client's message."""


def flow_item_of(core: RouterContext, prepared: PreparedRequest) -> FlowItem:
    """Return the request as flow control sees it. Its own objectives win over those of its model and priority."""
    promised, guarded = _bounds(core, prepared, prepared.priority), _bounds(core, prepared, common_pb2.PRIORITY_STANDARD)
    emitted = num_emitted(prepared)
    max_tokens = max(1, prepared.sampling.max_tokens - emitted // prepared.num_choices)
    forecaster = core.forecaster
    return FlowItem(
        tenant=prepared.tenant,
        priority=prepared.priority,
        started=emitted > 0,
        prompt_tokens=len(prepared.prompt) + emitted,
        output_tokens=round(
            prepared.num_choices * core.output_lengths.expected(prepared.model.name, prepared.tenant, max_tokens)
        ),
        num_bytes=HELD_BYTES_PER_TOKEN * (len(prepared.prompt) + emitted) + prepared.sampling.ByteSize(),
        lane=prepared.model.name,
        ttft_s=None if emitted else _seconds(prepared.slo_ttft_ms or promised.ttft_ms),  # its first token is out already
        tpot_s=_seconds(prepared.slo_tpot_ms or promised.tpot_ms),
        guard_ttft_s=_seconds(guarded.ttft_ms),
        guard_tpot_s=_seconds(guarded.tpot_ms),
        deadline=prepared.deadline,
        hint=prepared.priority_hint,
        foresee=nothing_known if forecaster is None else lambda: forecaster.forecast(prepared),
    )


def num_emitted(prepared: PreparedRequest) -> int:
    """Return the tokens of all choices that the client has already: the mesh computes them as if they were prompt."""
    return sum(len(choice.token_ids) for choice in prepared.emitted)


def _bounds(core: RouterContext, prepared: PreparedRequest, priority: int) -> Bounds:
    objective = core.objectives.get(prepared.model.name)
    return Bounds(None, None) if objective is None else objective.bounds(priority)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
