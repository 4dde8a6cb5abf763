"""What a request that has ended adds to the metrics. Once for each request; nothing is counted per token."""

from __future__ import annotations

import logging

from pdmesh.planning.objectives import PRIORITIES
from pdmesh.runtime.telemetry.metrics import OFF, Metrics
from pdmesh.v1 import mesh_pb2
from router.flow_control.admission_counts import OTHERS
from router.routing.decisions import Decision
from router.telemetry import instruments
from router.telemetry.attainment import mesh_error_of, verdict
from router.telemetry.timings import RequestTimings
from router.tokenization.prepared_request import Job

PROVIDER_NAME = "pdmesh"
NO_TENANT = "(default)"
OTHER = "other"
_PRIORITIES = {number: name for name, number in PRIORITIES.items()}
_MODES = {mesh_pb2.PREFILL_MODE_LOCAL: "local", mesh_pb2.PREFILL_MODE_REMOTE: "remote"}
_TTFT_PARTS = (
    "route", "admission_queue", "reserve", "prefill_queue", "prefill_compute", "first_token_return", "retry",
)  # fmt: skip
_HANDOFF_PARTS = ("kv_exposed", "decode_queue")

logger = logging.getLogger(__name__)
Goals = tuple[int, int]
"""TTFT and TPOT in milliseconds, 0: none."""


class RequestMetrics:
    """Of one router."""

    def __init__(self, metrics: Metrics = OFF) -> None:
        self.metrics = metrics
        """Set before the first request."""

    def ended(
        self,
        job: Job | None,
        goals: Goals,
        num_output_tokens: int,
        timings: RequestTimings,
        error: BaseException | None,
        *,
        trace: str = "",
    ) -> None:
        """`job` None: the request was not valid. `error` None: its last message was made. `trace`: its id, if it is sent."""
        if not self.metrics.is_on:
            return
        try:
            self._note(job, goals, num_output_tokens, timings, error, trace)
        except Exception:  # a bug in what is counted of a request must not end it
            logger.exception("a request is not in the metrics")

    def _note(
        self,
        job: Job | None,
        goals: Goals,
        num_output_tokens: int,
        timings: RequestTimings,
        error: BaseException | None,
        trace: str,
    ) -> None:
        parts = timings.parts if timings.parts.total_ns else timings.message()
        problem = None if error is None else mesh_error_of(error)
        error_type = "" if problem is None else problem.code.name
        if job is None:
            self.metrics.add(instruments.REQUESTS, 1, "", "", "", "", error_type, "none", "none")
            return
        self._measured(job, parts, error_type, trace)
        self._counted(job, parts, num_output_tokens)
        met = verdict(parts, goals, problem)
        who = (*_class_of(job), _MODES.get(parts.mode, ""))
        self.metrics.add(instruments.REQUESTS, 1, *who, error_type, _word(met.ttft), _word(met.tpot))
        if problem is None and timings.decision is not None:
            self._predicted(job, parts, timings.decision)

    def _measured(self, job: Job, parts: mesh_pb2.Timings, error_type: str, trace: str) -> None:
        observe = self.metrics.observe
        who = (_operation(job), PROVIDER_NAME, *_class_of(job), _MODES.get(parts.mode, ""))
        observe(instruments.DURATION, parts.total_ns / 1e9, *who, error_type, trace=trace)
        if parts.tpot_ns:
            observe(instruments.TPOT, parts.tpot_ns / 1e9, *who, trace=trace)
        if not parts.ttft_ns:
            return
        observe(instruments.TTFT, parts.ttft_ns / 1e9, *who, trace=trace)
        model, priority = job.model.name, who[4]
        for part in _TTFT_PARTS:
            observe(instruments.TTFT_PART, getattr(parts, f"{part}_ns") / 1e9, model, priority, part)
        if parts.mode == mesh_pb2.PREFILL_MODE_REMOTE and parts.kv_bytes:
            for part in _HANDOFF_PARTS:
                observe(instruments.HANDOFF_PART, getattr(parts, f"{part}_ns") / 1e9, model, part)

    def _counted(self, job: Job, parts: mesh_pb2.Timings, num_output_tokens: int) -> None:
        model, num_input = job.model.name, len(job.prompt)
        for kind, number in (("input", num_input), ("output", num_output_tokens)):
            self.metrics.observe(instruments.TOKEN_USAGE, number, _operation(job), PROVIDER_NAME, model, kind)
        cached = min(parts.prefill_cached_tokens, num_input)
        for kind, number in (("input", num_input), ("output", num_output_tokens), ("cached", cached)):
            self.metrics.add(instruments.TOKENS, number, *_class_of(job), kind)
        self.metrics.add(instruments.RETRIES, parts.num_retries, model)
        self.metrics.add(instruments.RESUBMISSIONS, parts.num_resubmissions, model)

    def _predicted(self, job: Job, parts: mesh_pb2.Timings, decision: Decision) -> None:
        """How far the policy was off; of a request that was tried again or lost, it was not asked about what came."""
        self.metrics.observe(instruments.DECISION_TIME, decision.decision_ns / 1e9, decision.policy)
        chosen = decision.placement.chosen
        if chosen is None or chosen.prediction is None or parts.num_retries or parts.num_resubmissions or job.emitted:
            return
        predicted = (chosen.prediction.ttft_s, chosen.prediction.tpot_s)
        measured = (decision.observed_ttft_s, decision.observed_tpot_s)
        for what, expected_s, seen_s in zip(("ttft", "tpot"), predicted, measured, strict=True):
            if seen_s:
                self.metrics.observe(instruments.PREDICTION_ERROR, expected_s - seen_s, what)
                self.metrics.observe(instruments.PREDICTION_MISS, abs(expected_s - seen_s) / seen_s, what)


def priority_name(priority: int) -> str:
    """As people write it."""
    return _PRIORITIES.get(priority, "")


def tenant_name(tenant: str) -> str:
    """Who names none has one, too: an empty label is none. Others together are called as everywhere in the metrics."""
    return OTHER if tenant == OTHERS else tenant or NO_TENANT


def _class_of(job: Job) -> tuple[str, str, str]:
    return job.model.name, tenant_name(job.tenant), priority_name(job.priority)


def _operation(job: Job) -> str:
    return "chat" if job.is_chat else "text_completion"


def _word(met: bool | None) -> str:
    return {True: "true", False: "false", None: "none"}[met]
