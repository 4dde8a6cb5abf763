"""The metrics of a router, and what a request adds to them when it ends: once for each request; nothing is counted per token."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from pdmesh.planning.objectives import PRIORITIES
from pdmesh.runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    MeshError,
    NotFound,
    ResourceExhausted,
    as_mesh_error,
)
from pdmesh.runtime.telemetry.metrics import OFF, Metrics, counter, gauge, histogram
from pdmesh.v1 import mesh_pb2
from router.flow_control.capacity import OTHERS
from router.routing.decisions import Decision
from router.telemetry.timings import RequestTimings
from router.tokenization.prepared_request import PreparedRequest

# The list of metrics. Names and buckets of `gen_ai.*` are OpenTelemetry's conventions.
#
# A class of requests is its model, tenant and priority. `pdmesh/runtime/telemetry/metrics_registry.py` bounds the label values
# that clients choose (tenants, models).

MODEL, PROVIDER, OPERATION = "gen_ai.request.model", "gen_ai.provider.name", "gen_ai.operation.name"
CLASS = (MODEL, "tenant", "priority")
_OF_REQUEST = (OPERATION, PROVIDER, *CLASS, "mode")

_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(float(4**power) for power in range(14))
_PART_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_DECISION_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
_ERROR_S = (-5.0, -1.0, -0.5, -0.1, -0.05, -0.01, 0.0, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
_ERROR_SHARE = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)

DURATION = histogram(
    "gen_ai.server.request.duration", "From receipt to the last message", _DURATION_S, (*_OF_REQUEST, "error.type"), unit="s"
)
TTFT = histogram("gen_ai.server.time_to_first_token", "From receipt to the first token", _TTFT_S, _OF_REQUEST, unit="s")
TPOT = histogram("gen_ai.server.time_per_output_token", "Time per output token after the first", _TPOT_S, _OF_REQUEST, unit="s")
TOKEN_USAGE = histogram(
    "gen_ai.client.token.usage",
    "Tokens of a request",
    _TOKENS,
    (OPERATION, PROVIDER, MODEL, "gen_ai.token.type"),
    unit="{token}",
)

REQUESTS = counter(
    "pdmesh.requests",
    "Requests that have ended; ttft_met and tpot_met: true, false, or none without an objective or a measurement",
    (*CLASS, "mode", "error.type", "ttft_met", "tpot_met"),
)
TOKENS = counter(
    "pdmesh.tokens",
    "Tokens of requests that have ended: input, output, cached of the input, of those fetched, restored, and in rounded KV",
    (*CLASS, "type"),
)
TTFT_PART = histogram(
    "pdmesh.ttft.part", "Parts of the time to the first token; they add up", _PART_S, (MODEL, "priority", "part"), unit="s"
)
HANDOFF_PART = histogram(
    "pdmesh.handoff.part",
    "What a hand-off adds between the first token and the second: kv_exposed and decode_queue",
    _PART_S,
    (MODEL, "part"),
    unit="s",
)
RETRIES = counter("pdmesh.request.retries", "Prefills that were tried again", (MODEL,))
RESUBMISSIONS = counter("pdmesh.request.resubmissions", "Losses of a decode worker that requests survived", (MODEL,))
PREDICTION_ERROR = histogram(
    "pdmesh.prediction.error", "Predicted less measured, of requests without retries", _ERROR_S, ("what",), unit="s"
)
PREDICTION_MISS = histogram(
    "pdmesh.prediction.deviation",
    "Absolute error of the prediction, as a share of the measured value",
    _ERROR_SHARE,
    ("what",),
    unit="1",
)
DECISION_TIME = histogram("pdmesh.policy.decision", "Duration of a placement decision", _DECISION_S, ("policy",), unit="s")

REVISION_REQUESTS = counter(
    "pdmesh.revision.requests",
    "Requests that have ended, by the revision on whose workers they were placed; of workers that name one",
    (MODEL, "revision", "error.type"),
)
REVISION_TTFT = histogram("pdmesh.revision.ttft", "Their time to the first token", _TTFT_S, (MODEL, "revision"), unit="s")
REVISION_TPOT = histogram("pdmesh.revision.tpot", "Their time per output token", _TPOT_S, (MODEL, "revision"), unit="s")

DECISIONS = counter("pdmesh.policy.decisions", "Placement decisions", ("policy", "mode"))
MIGRATIONS = counter("pdmesh.migrations", "Requests that moved to another decode worker while they ran")
HEDGES = counter("pdmesh.hedges", "Prompts that were given to another worker because the first was late")
MISMATCHES = counter("pdmesh.token.mismatches", "Repeated tokens that differed: a bug if there are any")
REDRAWN = counter("pdmesh.token.redrawn", "Repeated tokens that differed where an engine may draw others: no fault")
ARRIVALS = counter("pdmesh.arrivals", "Valid requests that came, each once however often it was tried", (MODEL,))
ADMITTED = counter("pdmesh.admission.admitted", "Requests that were admitted", ("tenant", "priority"))
WAITED = counter("pdmesh.admission.waited", "Requests that waited in the request queue", ("tenant", "priority"))
REFUSED = counter("pdmesh.admission.refused", "Requests that admission refused", ("tenant", "priority", "reason"))
INFLIGHT = gauge("pdmesh.admission.inflight", "Admitted requests that have not ended", ("tenant", "priority"))
QUEUED = gauge("pdmesh.admission.queued", "Requests in the request queue", ("tenant", "priority"))
MAX_INFLIGHT = gauge("pdmesh.admission.max_inflight", "Most requests that this router admits at once")
MAX_QUEUED = gauge("pdmesh.admission.max_queued", "Most requests in the request queue")
UNPLACED = gauge("pdmesh.unplaced.requests", "Requests that wait for a worker, admitted or not", (MODEL,))
UNPLACED_AGE = gauge("pdmesh.unplaced.age", "How long the first of them with an objective has waited", (MODEL,), "s")
OBJECTIVE = gauge("pdmesh.objective", "Latency objectives", (MODEL, "priority", "what"), unit="s")
OBJECTIVE_SHARE = gauge("pdmesh.objective.share", "Share of requests that are to meet the objective", (MODEL,))
WORKERS = gauge("pdmesh.router.workers", "Workers that this router knows", ("role", "state"))
REPORT_AGE = gauge("pdmesh.router.worker.report.age", "Time since the latest heartbeat of a live worker", ("worker",), unit="s")
BREAKER_OPEN = gauge("pdmesh.breaker.open", "1: this router ejects the worker", ("worker", "role"))
EJECTIONS = counter("pdmesh.breaker.ejections", "Ejections of the worker by this router", ("worker", "role"))
REGISTRY = gauge("pdmesh.registry.connected", "1: the registry answers")
PREFIX_BLOCKS = gauge("pdmesh.prefix.index.blocks", "Prompt blocks in the prefix index; a block on two workers counts twice")
TIER_BLOCKS = gauge("pdmesh.prefix.index.tier.blocks", "The same of workers' tiers, beneath their block pools")

PER_REQUEST = (
    DURATION, TTFT, TPOT, TOKEN_USAGE, REQUESTS, TOKENS, TTFT_PART, HANDOFF_PART, RETRIES, RESUBMISSIONS, PREDICTION_ERROR,
    PREDICTION_MISS, DECISION_TIME, REVISION_REQUESTS, REVISION_TTFT, REVISION_TPOT,
)  # fmt: skip
AT_SCRAPE = (
    DECISIONS, MIGRATIONS, HEDGES, MISMATCHES, REDRAWN, ARRIVALS, ADMITTED, WAITED, REFUSED, INFLIGHT, QUEUED, MAX_INFLIGHT,
    MAX_QUEUED, UNPLACED, UNPLACED_AGE, OBJECTIVE, OBJECTIVE_SHARE, WORKERS, REPORT_AGE, BREAKER_OPEN, EJECTIONS, REGISTRY,
    PREFIX_BLOCKS, TIER_BLOCKS,
)  # fmt: skip
ALL = (*PER_REQUEST, *AT_SCRAPE)


# SLO attainment: whether a request met its objectives. Metrics, traces and the console share this rule.
#
# A token that never came counts as missed, also where there was no room for the request, and where the client left when it was
# already late: many clients leave because no token comes. A request whose client left earlier, that was invalid, that exceeded
# its tenant's rate, or whose deadline was impossible is judged only by the tokens that came.

OVER_ITS_RATE = "rate"
"""The `Refusal.reason` of a tenant that has used its rate up, which does not depend on the speed of the mesh."""

IMPOSSIBLE_DEADLINE = "deadline"
"""The `Refusal.reason` of DEADLINE_EXCEEDED where not even an idle mesh would have met the deadline."""


class Verdict(NamedTuple):
    """Say for each objective whether it was met; None: not judged. `overall`: all were met, and the response is complete."""

    ttft: bool | None
    tpot: bool | None
    overall: bool | None


def verdict(parts: mesh_pb2.Timings, goals_ms: tuple[int, int], problem: MeshError | None) -> Verdict:
    """Return the verdict on a request with these objectives (TTFT and TPOT, 0: none). `problem`: the error that ended it; None:
    it was completed."""
    ttft, tpot = _ttft_met(parts, goals_ms[0], problem), _met(parts.tpot_ns, goals_ms[1], problem)
    if not any(goals_ms):
        overall = None
    elif False in (ttft, tpot):
        overall = False
    elif problem is None:
        overall = True
    else:
        overall = None if _is_the_callers(problem) else False
    return Verdict(ttft, tpot, overall)


def mesh_error_of(error: BaseException) -> MeshError:
    """Return the error of a stream; one that is closed or cancelled before its end is one whose client has left."""
    if isinstance(error, (GeneratorExit, asyncio.CancelledError)):
        return Cancelled("the client left")
    return error if isinstance(error, MeshError) else as_mesh_error(error)


def _ttft_met(parts: mesh_pb2.Timings, goal_ms: int, problem: MeshError | None) -> bool | None:
    has_waited = isinstance(problem, Cancelled) and not parts.ttft_ns and parts.total_ns > goal_ms * 1e6
    return False if goal_ms and has_waited else _met(parts.ttft_ns, goal_ms, problem)


def _met(took_ns: int, goal_ms: int, problem: MeshError | None) -> bool | None:
    if not goal_ms:
        return None
    if took_ns:
        return took_ns <= goal_ms * 1e6
    return None if problem is None or _is_the_callers(problem) else False


def _is_the_callers(problem: MeshError) -> bool:
    if isinstance(problem, ResourceExhausted):
        return problem.reason == OVER_ITS_RATE
    if isinstance(problem, DeadlineExceeded):
        return problem.reason == IMPOSSIBLE_DEADLINE
    return isinstance(problem, (Cancelled, InvalidArgument, NotFound))


PROVIDER_NAME = "pdmesh"
NO_TENANT = "(default)"
OTHER = "other"
_PRIORITIES = {number: name for name, number in PRIORITIES.items()}
_MODES = {mesh_pb2.PREFILL_MODE_LOCAL: "local", mesh_pb2.PREFILL_MODE_REMOTE: "remote"}
TTFT_PARTS = (
    "route", "admission_queue", "reserve", "prefill_queue", "prefill_compute", "first_token_return", "retry",
)  # fmt: skip
HANDOFF_PARTS = ("kv_exposed", "decode_queue")

logger = logging.getLogger(__name__)
Goals = tuple[int, int]
"""TTFT and TPOT in milliseconds, 0: none."""


class RequestMetrics:
    """Update the metrics of one router when requests end."""

    def __init__(self, metrics: Metrics = OFF) -> None:
        self.metrics = metrics
        """Set before the first request."""

    def ended(
        self,
        prepared: PreparedRequest | None,
        goals: Goals,
        num_output_tokens: int,
        timings: RequestTimings,
        error: BaseException | None,
        *,
        decision: Decision | None = None,
        trace: str = "",
    ) -> None:
        """Add a request that has ended. `prepared` None: it was not valid. `error` None: its last message was made. `decision`:
        the latest that placed it. `trace`: its id, if it is sent."""
        if not self.metrics.is_on:
            return
        try:
            self._note(prepared, goals, num_output_tokens, timings, error, decision, trace)
        except Exception:  # a bug in what is counted of a request must not end it
            logger.exception("a request is not in the metrics")

    def _note(
        self,
        prepared: PreparedRequest | None,
        goals: Goals,
        num_output_tokens: int,
        timings: RequestTimings,
        error: BaseException | None,
        decision: Decision | None,
        trace: str,
    ) -> None:
        parts = timings.parts if timings.parts.total_ns else timings.message()
        problem = None if error is None else mesh_error_of(error)
        error_type = "" if problem is None else problem.code.name
        if prepared is None:
            self.metrics.add(REQUESTS, 1, "", "", "", "", error_type, "none", "none")
            return
        self._measured(prepared, parts, error_type, trace)
        self._counted(prepared, parts, num_output_tokens)
        met = verdict(parts, goals, problem)
        labels = (*_class_of(prepared), _MODES.get(parts.mode, ""))
        self.metrics.add(REQUESTS, 1, *labels, error_type, _word(met.ttft), _word(met.tpot))
        if decision is not None and (revision := decision.placement.decode.revision):
            self._of_revision(prepared.model.name, revision, parts, error_type)
        if problem is None and decision is not None:
            self._predicted(prepared, parts, decision)

    def _of_revision(self, model: str, revision: str, parts: mesh_pb2.Timings, error_type: str) -> None:
        self.metrics.add(REVISION_REQUESTS, 1, model, revision, error_type)
        if parts.ttft_ns:
            self.metrics.observe(REVISION_TTFT, parts.ttft_ns / 1e9, model, revision)
        if parts.tpot_ns:
            self.metrics.observe(REVISION_TPOT, parts.tpot_ns / 1e9, model, revision)

    def _measured(self, prepared: PreparedRequest, parts: mesh_pb2.Timings, error_type: str, trace: str) -> None:
        observe = self.metrics.observe
        labels = (_operation(prepared), PROVIDER_NAME, *_class_of(prepared), _MODES.get(parts.mode, ""))
        observe(DURATION, parts.total_ns / 1e9, *labels, error_type, trace=trace)
        if parts.tpot_ns:
            observe(TPOT, parts.tpot_ns / 1e9, *labels, trace=trace)
        if not parts.ttft_ns:
            return
        observe(TTFT, parts.ttft_ns / 1e9, *labels, trace=trace)
        model, priority = prepared.model.name, labels[4]
        for part in TTFT_PARTS:
            observe(TTFT_PART, getattr(parts, f"{part}_ns") / 1e9, model, priority, part)
        if parts.mode == mesh_pb2.PREFILL_MODE_REMOTE and parts.kv_bytes:
            for part in HANDOFF_PARTS:
                observe(HANDOFF_PART, getattr(parts, f"{part}_ns") / 1e9, model, part)

    def _counted(self, prepared: PreparedRequest, parts: mesh_pb2.Timings, num_output_tokens: int) -> None:
        model, num_input = prepared.model.name, len(prepared.prompt)
        for kind, number in (("input", num_input), ("output", num_output_tokens)):
            self.metrics.observe(TOKEN_USAGE, number, _operation(prepared), PROVIDER_NAME, model, kind)
        cached = min(parts.prefill_cached_tokens, num_input)
        moved = (
            ("fetched", parts.fetched_tokens),
            ("restored", parts.restored_tokens),
            ("rounded", parts.rounded_tokens),
        )
        for kind, number in (("input", num_input), ("output", num_output_tokens), ("cached", cached), *moved):
            self.metrics.add(TOKENS, number, *_class_of(prepared), kind)
        self.metrics.add(RETRIES, parts.num_retries, model)
        self.metrics.add(RESUBMISSIONS, parts.num_resubmissions, model)

    def _predicted(self, prepared: PreparedRequest, parts: mesh_pb2.Timings, decision: Decision) -> None:
        """Record the error of the policy's prediction. Requests with retries or losses are left out, since they were not placed
        as predicted."""
        self.metrics.observe(DECISION_TIME, decision.decision_ns / 1e9, decision.policy)
        chosen = decision.placement.chosen
        if chosen is None or chosen.prediction is None or parts.num_retries or parts.num_resubmissions or prepared.emitted:
            return
        predicted = (chosen.prediction.ttft_s, chosen.prediction.tpot_s)
        measured = (decision.observed_ttft_s, decision.observed_tpot_s)
        for what, expected_s, seen_s in zip(("ttft", "tpot"), predicted, measured, strict=True):
            if seen_s:
                self.metrics.observe(PREDICTION_ERROR, expected_s - seen_s, what)
                self.metrics.observe(PREDICTION_MISS, abs(expected_s - seen_s) / seen_s, what)


def priority_name(priority: int) -> str:
    """Return the name of a priority as users write it."""
    return _PRIORITIES.get(priority, "")


def tenant_name(tenant: str) -> str:
    """Return a tenant's label. The default tenant gets a name, because an empty label is none; other tenants together get the
    name that is usual in the metrics."""
    return OTHER if tenant == OTHERS else tenant or NO_TENANT


def _class_of(prepared: PreparedRequest) -> tuple[str, str, str]:
    return prepared.model.name, tenant_name(prepared.tenant), priority_name(prepared.priority)


def _operation(prepared: PreparedRequest) -> str:
    return "chat" if prepared.is_chat else "text_completion"


def _word(met: bool | None) -> str:
    return {True: "true", False: "false", None: "none"}[met]
