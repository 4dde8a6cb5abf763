"""Conversion of a prepared request to the policy's input: size, cached prefix by worker, expected output, objectives."""

import time
from collections.abc import Sequence

from pdmesh.planning.objectives import Bounds
from pdmesh.v1 import common_pb2
from router.context import RouterContext
from router.routing.filters import RoutingRequest
from router.routing.revisions import Choice, key_of, place
from router.routing.worker_reports import fingerprint_for, kind_of
from router.routing.worker_snapshot import Mode, WorkerKey
from router.tokenization.prepared_request import PreparedRequest

NO_WORKERS: frozenset[WorkerKey] = frozenset()


def routing_request_of(
    core: RouterContext,
    prepared: PreparedRequest,
    emitted: Sequence[common_pb2.EmittedChoice] = (),
    kind: tuple[object, ...] | None = None,
    *,
    excluded_decode: frozenset[WorkerKey] = NO_WORKERS,
    excluded_prefill: frozenset[WorkerKey] = NO_WORKERS,
) -> RoutingRequest:
    """Return the policy's input. `emitted` tokens were sent to the client already, from workers of `kind`."""
    several_under_way = prepared.num_choices > 1 and bool(emitted)
    objective = core.objectives.get(prepared.model.name)
    num_emitted = max((len(choice.token_ids) for choice in emitted), default=0)
    ttft_goal_ms, tpot_goal_ms = goals_ms(core, prepared)
    running_tpot_ms = objective.tpot_ms if objective is not None else 0
    held = core.prefixes.look_up(prepared)
    return RoutingRequest(
        model=prepared.model.name,
        num_tokens=len(prepared.prompt) + num_emitted,
        num_choices=prepared.num_choices,
        max_total_tokens=len(prepared.prompt) + prepared.sampling.max_tokens,
        cached_tokens=held.cached,
        mode=Mode.LOCAL if several_under_way else prepared.mode,
        kind=kind,
        excluded_decode=excluded_decode,
        excluded_prefill=excluded_prefill,
        expected_tokens=_expected(core, prepared, num_emitted),
        ttft_goal_s=_seconds(ttft_goal_ms),
        tpot_goal_s=_seconds(tpot_goal_ms),
        running_tpot_goal_s=_seconds(running_tpot_ms),
        adapter=prepared.adapter,
        session_workers=core.sessions.workers_of(prepared, core.fleet.is_gone) if prepared.session_id else (),
        restorable_tokens=held.restorable,
    )


def choose(
    core: RouterContext,
    prepared: PreparedRequest,
    routing_request: RoutingRequest,
    now: float,
    unfit: frozenset[WorkerKey] = NO_WORKERS,
) -> Choice:
    """Return the policy's choice, under the split of traffic between revisions where there is one. `unfit`: workers that have
    said that they can never compute the request."""
    weights, fleet_snapshot = core.rollouts.weights(prepared.model.name), core.fleet.fleet_snapshot
    if not weights:
        return core.policy.choose(fleet_snapshot, routing_request, now), routing_request
    return place(core.policy, fleet_snapshot, routing_request, weights, key_of(prepared), now, unfit)


def kind_of_resumed(core: RouterContext, prepared: PreparedRequest) -> tuple[object, ...] | None:
    """Return the kind with which a stream began that its client resumes; None where it does not say, and where no worker has been
    of that kind."""
    if not prepared.system_fingerprint or not prepared.emitted:
        return None
    known = (worker.current or worker.last for worker in core.fleet.workers.values())
    matching = (
        kind_of(each.info)
        for each in known
        if each is not None and fingerprint_for(each.described, prepared.adapter) == prepared.system_fingerprint
    )
    return next(matching, None)


def goals_ms(core: RouterContext, prepared: PreparedRequest) -> tuple[int, int]:
    """Return the TTFT and TPOT objectives: the request's own, else its model's for requests of its priority; 0: none."""
    objective = core.objectives.get(prepared.model.name)
    promised = Bounds(None, None) if objective is None else objective.bounds(prepared.priority)
    return prepared.slo_ttft_ms or promised.ttft_ms or 0, prepared.slo_tpot_ms or promised.tpot_ms or 0


def tpot_goal_ms(core: RouterContext, prepared: PreparedRequest) -> int:
    """Return the TPOT objective: the request's own, else its model's for requests of its priority; 0: none."""
    return goals_ms(core, prepared)[1]


def ttft_left_ms(core: RouterContext, prepared: PreparedRequest, received_ns: int) -> int:
    """Return the time that the TTFT objective leaves to a request that came at `received_ns`: 1 once it is over; 0: there is
    none."""
    goal_ms = goals_ms(core, prepared)[0]
    return max(1, goal_ms - (time.monotonic_ns() - received_ns) // 1_000_000) if goal_ms else 0


def _expected(core: RouterContext, prepared: PreparedRequest, num_emitted: int) -> float:
    expected = core.output_lengths.expected(prepared.model.name, prepared.tenant, prepared.sampling.max_tokens)
    return max(1.0, expected - num_emitted)


def _seconds(milliseconds: int | None) -> float | None:
    return milliseconds / 1e3 if milliseconds else None
