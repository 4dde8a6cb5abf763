"""What a router counts and measures: the catalogue. Names and buckets of `gen_ai.*` are OpenTelemetry's conventions.

A class of requests is its model, tenant and priority. Whatever grows with clients (tenants, models that are asked for) is bounded
by `runtime/telemetry/metrics_registry.py`.
"""

from pdmesh.runtime.telemetry.metrics import counter, gauge, histogram

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
TPOT = histogram("gen_ai.server.time_per_output_token", "Of each token behind the first", _TPOT_S, _OF_REQUEST, unit="s")
TOKEN_USAGE = histogram(
    "gen_ai.client.token.usage",
    "Tokens of a request",
    _TOKENS,
    (OPERATION, PROVIDER, MODEL, "gen_ai.token.type"),
    unit="{token}",
)

REQUESTS = counter(
    "pdmesh.requests",
    "Requests that have ended; ttft_met and tpot_met: true, false, or none where nothing was promised or measured",
    (*CLASS, "mode", "error.type", "ttft_met", "tpot_met"),
)
TOKENS = counter("pdmesh.tokens", "Tokens of requests that have ended: input, output, and cached of the input", (*CLASS, "type"))
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
    "pdmesh.prediction.error", "Predicted less measured, of requests without trouble", _ERROR_S, ("what",), unit="s"
)
PREDICTION_MISS = histogram(
    "pdmesh.prediction.deviation", "The same without its sign, as a share of what was measured", _ERROR_SHARE, ("what",), unit="1"
)
DECISION_TIME = histogram("pdmesh.policy.decision", "What a choice of workers takes", _DECISION_S, ("policy",), unit="s")

DECISIONS = counter("pdmesh.policy.decisions", "Choices of workers", ("policy", "mode"))
MIGRATIONS = counter("pdmesh.migrations", "Requests that moved to another decode worker while they ran")
HEDGES = counter("pdmesh.hedges", "Prompts that were given to another worker because the first was late")
MISMATCHES = counter("pdmesh.token.mismatches", "Repeated tokens that differed: a bug if there are any")
ARRIVALS = counter("pdmesh.arrivals", "Valid requests that came, each once however often it was tried", (MODEL,))
ADMITTED = counter("pdmesh.admission.admitted", "Requests that got a place", ("tenant", "priority"))
WAITED = counter("pdmesh.admission.waited", "Requests that had to wait for an answer of admission", ("tenant", "priority"))
REFUSED = counter("pdmesh.admission.refused", "Requests that admission refused", ("tenant", "priority", "reason"))
INFLIGHT = gauge("pdmesh.admission.inflight", "Requests that hold a place", ("tenant", "priority"))
QUEUED = gauge("pdmesh.admission.queued", "Requests that wait for a place", ("tenant", "priority"))
MAX_INFLIGHT = gauge("pdmesh.admission.max_inflight", "Places of this router")
MAX_QUEUED = gauge("pdmesh.admission.max_queued", "Requests that may wait here")
UNPLACED = gauge("pdmesh.unplaced.requests", "Requests that wait for a worker, with or without a place", (MODEL,))
UNPLACED_AGE = gauge(
    "pdmesh.unplaced.age", "For how long the first of them has waited that was promised something", (MODEL,), "s"
)
OBJECTIVE = gauge("pdmesh.objective", "What is promised", (MODEL, "priority", "what"), unit="s")
OBJECTIVE_SHARE = gauge("pdmesh.objective.share", "Share of requests that are to meet it", (MODEL,))
WORKERS = gauge("pdmesh.router.workers", "Workers that this router knows", ("role", "state"))
REPORT_AGE = gauge("pdmesh.router.worker.report.age", "Since the latest report of a worker that lives", ("worker",), unit="s")
BREAKER_OPEN = gauge("pdmesh.breaker.open", "1: this router leaves the worker out", ("worker", "role"))
EJECTIONS = counter("pdmesh.breaker.ejections", "Times that this router left the worker out", ("worker", "role"))
REGISTRY = gauge("pdmesh.registry.connected", "1: the registry answers")
PREFIX_BLOCKS = gauge("pdmesh.prefix.index.blocks", "Prompt blocks known of workers; one on two counts twice")

PER_REQUEST = (
    DURATION, TTFT, TPOT, TOKEN_USAGE, REQUESTS, TOKENS, TTFT_PART, HANDOFF_PART, RETRIES, RESUBMISSIONS, PREDICTION_ERROR,
    PREDICTION_MISS, DECISION_TIME,
)  # fmt: skip
AT_SCRAPE = (
    DECISIONS, MIGRATIONS, HEDGES, MISMATCHES, ARRIVALS, ADMITTED, WAITED, REFUSED, INFLIGHT, QUEUED, MAX_INFLIGHT, MAX_QUEUED,
    UNPLACED, UNPLACED_AGE, OBJECTIVE, OBJECTIVE_SHARE, WORKERS, REPORT_AGE, BREAKER_OPEN, EJECTIONS, REGISTRY, PREFIX_BLOCKS,
)  # fmt: skip
ALL = (*PER_REQUEST, *AT_SCRAPE)
