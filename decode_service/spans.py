"""What decode does for a request, as spans: `submit` below the router's call, the rest below its attempt.

    submit                     receipt of Submit to its answer; LOCAL: until the engine has the prompt, which waits for no answer
    decode ─┬─ prefill.queue, prefill.compute      LOCAL: from then on
            └─ decode.queue                        REMOTE: from the commit to the first step

Nothing is done for a token; `pdmesh/worker/step_dispatcher.py` makes spans of many steps and links them to the `decode` spans in
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdmesh.engine.outputs import RequestStarted
from pdmesh.runtime.errors import MeshError
from pdmesh.runtime.telemetry.propagation import SpanContext, SubmitContext
from pdmesh.runtime.telemetry.spans import Kind, Span, StepLog, Value, chunk_events, finish_word, problem_of
from pdmesh.runtime.telemetry.tracing import OFF, Tracing

if TYPE_CHECKING:
    from decode_service.request import DecodeRequest

MAX_ENDED = 64


@dataclass(eq=False)
class DecodeSpan:
    """One stay that is being filled by decode itself, or decodes."""

    span: Span
    first_step: int = 0
    has_finished: bool = False  # in the step that started it, of which more is to be told


@dataclass(eq=False)
class DecodeSpans:
    """Those of one worker. Records whose Submit came without a context have none."""

    tracing: Tracing = OFF
    num_steps: Callable[[], int] = lambda: 0  # of the engine, so far
    steps: StepLog = field(default_factory=StepLog)
    _running: dict[str, SpanContext] = field(default_factory=dict)
    _ended: list[SpanContext] = field(default_factory=list)

    def submitted(
        self,
        context: SubmitContext | None,
        received_ns: int,
        attributes: Mapping[str, Value],
        error: BaseException | None,
        ended_ns: int | None = None,
    ) -> None:
        """Submit was answered, just now if not at `ended_ns`."""
        if context is None:
            return
        span = self.tracing.begin("submit", context.call, start_ns=received_ns, kind=Kind.SERVER, attributes=attributes)
        if error is not None:
            span.fail(*problem_of(error))
        span.end(ended_ns)

    def begin(self, record: DecodeRequest, started_ns: int) -> None:
        """The record's stay begins: it was committed, or prefills here."""
        context = record.submission.trace
        if context is None:
            return
        self.end(record, "another attempt began")
        attributes: dict[str, Value] = {
            "pdmesh.mode": record.submission.mode.name.lower(),
            "pdmesh.attempt": record.submission.attempt,
        }
        span = self.tracing.begin("decode", context.attempt, start_ns=started_ns, attributes=attributes)
        record.span = DecodeSpan(span)
        self._running[record.engine_id] = span.context

    def started(self, record: DecodeRequest, started: RequestStarted, ended_ns: int) -> None:
        """Its first token, or its first step, came with the latest step, which ended at `ended_ns`."""
        if record.span is None:
            return
        step = record.span.first_step = self.num_steps()
        if started.timing is None:
            self._record_decode_queue(record.span.span, started.decode_queue_ns, step, ended_ns)
        else:
            self._record_prefill(record, record.span.span, started, ended_ns)
        if record.span.has_finished:
            self.end(record)

    def end(self, record: DecodeRequest, reason: str = "", failure: MeshError | None = None) -> None:
        """Its stay is over; `reason`: why, unless it has finished; `failure`: what its router is told of it."""
        open_span = record.span
        if open_span is None:
            return
        if record.started is None and not reason:
            open_span.has_finished = True
            return
        record.span, span = None, open_span.span
        span.set({**_outcome(record), **_steps(open_span, self.num_steps())})
        if reason:
            span.set({"pdmesh.reason": reason})
        if failure is not None:
            span.fail(*problem_of(failure))
        if record.handoff.kv_bytes:
            span.set({"pdmesh.kv.bytes": record.handoff.kv_bytes, "pdmesh.kv.transport": record.handoff.transport})
        span.end()
        self._running.pop(record.engine_id, None)
        if len(self._ended) < MAX_ENDED:
            self._ended.append(span.context)

    def take_served(self) -> list[SpanContext]:
        """The `decode` spans that live, and those that ended since the last call."""
        ended, self._ended = self._ended, []
        return [*self._running.values(), *ended]

    def _record_decode_queue(self, span: Span, queue_ns: int, number: int, ended_ns: int) -> None:
        step = self.steps.of(number)
        first_step_ns = ended_ns if step is None else step.started_ns
        self.tracing.record("decode.queue", span.context, first_step_ns - queue_ns, first_step_ns)

    def _record_prefill(self, record: DecodeRequest, span: Span, started: RequestStarted, ended_ns: int) -> None:
        timing = started.timing
        assert timing is not None, "it was prefilled here"
        self.tracing.record("prefill.queue", span.context, timing.opened_ns, timing.opened_ns + timing.queue_ns)
        attributes: dict[str, Value] = {
            "pdmesh.cached_tokens": timing.num_cached_tokens,
            "pdmesh.tokens": timing.num_computed_tokens,
            "pdmesh.steps": timing.num_steps,
        }
        events = chunk_events(self.steps.between(timing.opened_ns, ended_ns)[-timing.num_steps :])
        began_ns = ended_ns - timing.compute_ns
        self.tracing.record("prefill.compute", span.context, began_ns, ended_ns, attributes=attributes, events=events)


def _outcome(record: DecodeRequest) -> dict[str, Value]:
    choices = record.output.choices.values()
    attributes: dict[str, Value] = {
        "pdmesh.cached_tokens": record.blocks.num_cached_tokens if record.blocks else 0,
        "gen_ai.usage.output_tokens": sum(len(choice.token_ids) for choice in choices),
        "gen_ai.response.finish_reasons": [finish_word(choice.finish_reason) for choice in choices],
    }
    if any(choice.num_drafted for choice in choices):
        attributes["pdmesh.drafted_tokens"] = sum(choice.num_drafted for choice in choices)
        attributes["pdmesh.accepted_tokens"] = sum(choice.num_accepted for choice in choices)
    return attributes


def _steps(span: DecodeSpan, last: int) -> dict[str, Value]:
    """The engine's steps that it took part in, to be found in `decode.step`."""
    if not span.first_step:
        return {}
    return {
        "pdmesh.first_step": span.first_step,
        "pdmesh.last_step": last,
        "pdmesh.steps": last - span.first_step + 1,
    }
