"""One request's trace at the router: the `generate` span, its attributes of the GenAI conventions and of pdmesh, and whether it
is exported.

A trace that is not sampled is still exported when its request failed or missed an objective: this process is told, and so are the
workers that took part (router/context.py). No attribute holds a prompt or an output.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdmesh.runtime.telemetry.propagation import SpanContext
from pdmesh.runtime.telemetry.spans import Kind, Span, Value, finish_word, is_departure, problem_of
from pdmesh.runtime.telemetry.tracing import Tracing
from pdmesh.v1 import common_pb2, mesh_pb2
from router.routing.routing_request import goals_ms
from router.telemetry.metrics import mesh_error_of, verdict
from router.telemetry.timings import NO_SPANS, LiveSpans, RequestTimings, Spans
from router.tokenization.prepared_request import PreparedRequest

if TYPE_CHECKING:
    from router.context import RouterContext
    from router.fleet.worker import Worker

logger = logging.getLogger(__name__)
PROVIDER = "pdmesh"
CHAT, COMPLETION, EMBEDDINGS = "chat", "text_completion", "embeddings"
_PRIORITIES = {
    common_pb2.PRIORITY_INTERACTIVE: "interactive",
    common_pb2.PRIORITY_STANDARD: "standard",
    common_pb2.PRIORITY_BATCH: "batch",
}
_MODES = {mesh_pb2.PREFILL_MODE_LOCAL: "local", mesh_pb2.PREFILL_MODE_REMOTE: "remote"}


@dataclass(frozen=True)
class Yield:
    """Hold the output of a request at its end. `finish_reasons`: one for each choice."""

    num_tokens: int
    finish_reasons: tuple[common_pb2.FinishReason.ValueType, ...]
    num_drafted: int
    num_accepted: int


class RequestTrace:
    """Receive the events of a request, and do nothing."""

    spans: Spans = NO_SPANS

    def admitted(self, prepared: PreparedRequest) -> None:
        """Record that the request was found valid."""

    def ended(self, timings: RequestTimings, brought: Yield | None, error: BaseException | None) -> None:
        """Record the end: the last message was handed over, or `error` ended the stream; `brought` None: the request was not
        valid."""

    @property
    def sent_as(self) -> str:
        """Return the trace's id if it is exported, for exemplars. Known once the request has ended."""
        return ""


OFF = RequestTrace()


def open_trace(core: RouterContext, operation: str, caller: SpanContext | None, received_ns: int) -> RequestTrace:
    """Return the trace of a request that came at `received_ns`; `caller`: the caller's context, if there is one."""
    return LiveTrace(core, operation, caller, received_ns) if core.tracing.is_on else OFF


class LiveTrace(RequestTrace):
    """Trace a request from its arrival to its end."""

    def __init__(self, core: RouterContext, operation: str, caller: SpanContext | None, received_ns: int) -> None:
        self._core = core
        self._tracing: Tracing = core.tracing
        self._received_ns = received_ns
        self._goals = (0, 0)
        self._workers: set[Worker] = set()
        self._is_kept = False
        attributes: dict[str, Value] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER}
        self._root = self._tracing.begin("generate", caller, start_ns=received_ns, kind=Kind.SERVER, attributes=attributes)
        self.live = self.spans = LiveSpans(self._tracing, self._root, self._workers)

    @property
    def root(self) -> Span:
        """Return the `generate` span."""
        return self._root

    @property
    def sent_as(self) -> str:
        context = self._root.context
        return context.trace_name if context.is_sampled or self._is_kept else ""

    def admitted(self, prepared: PreparedRequest) -> None:
        self._goals = goals_ms(self._core, prepared)
        self._root.name = f"generate {prepared.model.name}"
        self._root.set({**_request_attributes(prepared), **_goal_attributes(self._goals)})

    def ended(self, timings: RequestTimings, brought: Yield | None, error: BaseException | None) -> None:
        try:
            self._end(timings, brought, error)
        except Exception:  # a bug in the trace must not end the request
            logger.exception("the trace of a request is incomplete")

    def _end(self, timings: RequestTimings, brought: Yield | None, error: BaseException | None) -> None:
        parts = timings.parts if timings.parts.total_ns else timings.message()
        if timings.first_handed_ns is not None:
            self.spans.returned(timings.first_handed_ns - parts.first_token_return_ns, timings.first_handed_ns)
        self._root.set({**_timing_attributes(parts), **_brought_attributes(brought)})
        error_type, words = ("", "") if error is None else problem_of(error)
        has_left = is_departure(error_type)
        is_met = verdict(parts, self._goals, None if error is None else mesh_error_of(error)).overall
        if is_met is not None:
            self._root.set({"pdmesh.slo.met": is_met})
        if has_left:
            self._root.set({"error.type": error_type})
        elif error is not None:
            self._root.fail(error_type, words)
        self.live.close(self._received_ns + parts.total_ns)
        if is_met is False or (error is not None and not has_left):
            self._keep()

    def _keep(self) -> None:
        context = self._root.context
        if not context.is_sampled:
            self._is_kept = True
            self._tracing.keep((context.trace_id,))
            self._core.trace_keeper.keep(context.trace_id, self._workers)


def _request_attributes(prepared: PreparedRequest) -> dict[str, Value]:
    sampling = prepared.sampling
    return {
        "gen_ai.request.model": prepared.model.name,
        "gen_ai.response.model": prepared.model.name,
        "gen_ai.response.id": prepared.request_id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": str(sampling.seed),  # an unsigned 64-bit number, which OTLP's integers cannot hold
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.usage.input_tokens": len(prepared.prompt),
        "pdmesh.tenant": prepared.tenant,
        "pdmesh.priority": _PRIORITIES.get(prepared.priority, ""),
        "pdmesh.client_attempt": prepared.attempt,
        **({"session.id": prepared.session_id} if prepared.session_id else {}),
    }


def _goal_attributes(goals: tuple[int, int]) -> Mapping[str, Value]:
    named = zip(("pdmesh.slo.ttft_ms", "pdmesh.slo.tpot_ms"), goals, strict=True)
    return {name: goal for name, goal in named if goal}


def _brought_attributes(brought: Yield | None) -> Mapping[str, Value]:
    if brought is None:
        return {}
    attributes: dict[str, Value] = {
        "gen_ai.usage.output_tokens": brought.num_tokens,
        "gen_ai.response.finish_reasons": [finish_word(reason) for reason in brought.finish_reasons],
    }
    if brought.num_drafted:
        attributes.update({"pdmesh.drafted_tokens": brought.num_drafted, "pdmesh.accepted_tokens": brought.num_accepted})
    return attributes


def _timing_attributes(parts: mesh_pb2.Timings) -> Mapping[str, Value]:
    attributes: dict[str, Value] = {
        "pdmesh.timing.route_ms": parts.route_ns / 1e6,
        "pdmesh.timing.admission_queue_ms": parts.admission_queue_ns / 1e6,
        "pdmesh.timing.reserve_ms": parts.reserve_ns / 1e6,
        "pdmesh.timing.prefill_queue_ms": parts.prefill_queue_ns / 1e6,
        "pdmesh.timing.prefill_compute_ms": parts.prefill_compute_ns / 1e6,
        "pdmesh.timing.first_token_return_ms": parts.first_token_return_ns / 1e6,
        "pdmesh.timing.retry_ms": parts.retry_ns / 1e6,
        "pdmesh.timing.kv_exposed_ms": parts.kv_exposed_ns / 1e6,
        "pdmesh.timing.decode_queue_ms": parts.decode_queue_ns / 1e6,
        "pdmesh.mode": _MODES.get(parts.mode, ""),
        "pdmesh.decode.worker": parts.decode_worker,
        "pdmesh.prefill.worker": parts.prefill_worker,
        "pdmesh.cached_tokens": parts.prefill_cached_tokens,
        "pdmesh.fetched_tokens": parts.fetched_tokens,
        "pdmesh.restored_tokens": parts.restored_tokens,
        "pdmesh.rounded_tokens": parts.rounded_tokens,
        "pdmesh.kv.bytes": parts.kv_bytes,
        "pdmesh.kv.transport": parts.transport,
        "pdmesh.retries": parts.num_retries,
        "pdmesh.resubmissions": parts.num_resubmissions,
    }
    if parts.ttft_ns:
        attributes["pdmesh.ttft_ms"] = parts.ttft_ns / 1e6
        attributes["gen_ai.response.time_to_first_chunk"] = parts.ttft_ns / 1e9
    if parts.tpot_ns:
        attributes["pdmesh.tpot_ms"] = parts.tpot_ns / 1e6
    return attributes
