"""One request on this decode worker: its attempt, its output that is not sent yet, and its spans."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvtransfer.kv_sources import NOTHING, Brought
from kvtransfer.reservation import Mode, ReservationState, State
from pdmesh.engine.interface import ReservedBlocks
from pdmesh.engine.outputs import FinishReason, PrefillTiming, RequestStarted, SequenceUpdate, TokenLogprobs
from pdmesh.engine.request import EngineRequest
from pdmesh.runtime.errors import MeshError
from pdmesh.runtime.telemetry.propagation import SpanContext, SubmitContext
from pdmesh.runtime.telemetry.spans import Kind, Span, StepLog, Value, chunk_events, finish_word, problem_of
from pdmesh.runtime.telemetry.tracing import OFF, Tracing
from pdmesh.v1 import common_pb2, decode_pb2, prefill_pb2

# Spans of decode for a request: `submit` below the router's call, the rest below its attempt.
#
#     submit                     receipt of Submit to its response; LOCAL: until the engine has the prompt, which may be before
#                                the response
#     decode ─┬─ prefill.queue, prefill.compute      LOCAL: from then on
#             └─ decode.queue                        REMOTE: from the commit to the first step
#
# No span is recorded per token; `pdmesh/worker/step_dispatcher.py` makes spans of many steps and links them to the `decode`
# spans of their requests.

MAX_ENDED = 64


@dataclass(eq=False)
class DecodeSpan:
    """Hold the span of an attempt that decodes here, or computes its prompt here."""

    span: Span
    first_step: int = 0
    has_finished: bool = False  # finished in its first step, whose `started` event has not come yet


@dataclass(eq=False)
class DecodeSpans:
    """Record the spans of one worker. A request whose Submit carried no trace context has none."""

    tracing: Tracing = OFF
    num_steps: Callable[[], int] = lambda: 0  # the engine's steps so far
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
        """Record the response to Submit, at `ended_ns` or now."""
        if context is None:
            return
        span = self.tracing.begin("submit", context.call, start_ns=received_ns, kind=Kind.SERVER, attributes=attributes)
        if error is not None:
            span.fail(*problem_of(error))
        span.end(ended_ns)

    def begin(self, record: DecodeRequest, started_ns: int) -> None:
        """Begin the `decode` span: the KV was committed, or the engine computes the prompt here."""
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
        """Record the first token, or the first step, which came with the latest step. That step ended at `ended_ns`."""
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
        """End the `decode` span. `reason`: why it ended, unless the request has finished; `failure`: the error that its router
        gets."""
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
        """Return the open `decode` spans, and those that ended since the last call."""
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
    """Return the numbers of the engine's steps in which the request took part; `decode.step` spans have the same numbers."""
    if not span.first_step:
        return {}
    return {
        "pdmesh.first_step": span.first_step,
        "pdmesh.last_step": last,
        "pdmesh.steps": last - span.first_step + 1,
    }


# The output of a request, kept until its router has it.
#
# The same store serves ordinary frames and a router that reattaches: a frame takes the tokens from `num_sent` on, a resume point
# moves `num_sent` back. Frames for a slow router merge by themselves, because nothing is taken before a frame can be sent.
#
#     token_ids   [ t0 t1 t2 | t3 t4 ]
#     output index  first_index        num_sent = 3: the next frame starts at first_index + 3

_FINISH_REASONS: dict[FinishReason | None, common_pb2.FinishReason.ValueType] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


@dataclass
class ChoiceOutput:
    """Hold one choice's tokens from output index `first_index` on."""

    choice: int
    first_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.Logprobs] = field(default_factory=list)  # one per token, or none at all
    prompt_logprobs: list[common_pb2.Logprobs] = field(default_factory=list)  # sent with its first token
    finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
    num_sent: int = 0
    finish_sent: bool = False
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED

    def append(self, update: SequenceUpdate) -> None:
        """Append a step's tokens. Raises ValueError when they do not continue the choice, which is a bug of the engine."""
        expected = self.first_index + len(self.token_ids)
        if update.index != expected:
            raise ValueError(f"{update.request_id}, choice {self.choice}: the engine drew index {update.index}, not {expected}")
        self.token_ids.extend(update.token_ids)
        if update.logprobs:
            self.logprobs.extend(map(wire_logprobs, update.logprobs))
        if update.prompt_logprobs:
            self.prompt_logprobs.extend(map(wire_logprobs, update.prompt_logprobs))
        if update.num_drafted:
            self.num_drafted += update.num_drafted
            self.num_accepted += update.num_accepted
        if update.finish_reason is not None:
            self.finish_reason = _FINISH_REASONS[update.finish_reason]

    def append_committed(self, token_id: int, finish_reason: common_pb2.FinishReason.ValueType, *, wants_logprobs: bool) -> None:
        """Append the token that came with the commit. Its log-probability stayed on the prefill worker, so it is NaN here."""
        self.token_ids.append(token_id)
        if wants_logprobs:
            self.logprobs.append(common_pb2.Logprobs(chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=math.nan)))
        self.finish_reason = finish_reason

    def take(self, request_id: str) -> decode_pb2.SequenceOutput | None:
        """Return the unsent output, and count it as sent; None: there is none. Draft counts are totals, so a message that is lost
        or repeated changes no sum."""
        start, end = self.num_sent, len(self.token_ids)
        if start == end and (self.finish_sent or not self.finished):
            return None
        self.num_sent, self.finish_sent = end, self.finished
        return decode_pb2.SequenceOutput(
            request_id=request_id,
            choice=self.choice,
            first_index=self.first_index + start,
            token_ids=self.token_ids[start:],
            logprobs=self.logprobs[start:],
            finish_reason=self.finish_reason,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            prompt_logprobs=() if start else self.prompt_logprobs,
        )

    def rewind(self, next_index: int) -> None:
        """Send again from `next_index` on. Tokens before `first_index` were generated elsewhere and cannot be sent."""
        self.num_sent = min(max(next_index - self.first_index, 0), len(self.token_ids))
        self.finish_sent = False


class RequestOutput:
    """Hold the choices of one request that are generated here."""

    def __init__(self, request_id: str, first_indexes: Mapping[int, int]) -> None:
        """Create empty outputs. `first_indexes`: for each unfinished choice, the output index of its next token."""
        self._request_id = request_id
        self.choices = {choice: ChoiceOutput(choice, index) for choice, index in first_indexes.items()}

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices.values())

    def take(self) -> list[decode_pb2.SequenceOutput]:
        """Return the new output of all choices, and count it as sent."""
        taken = (choice.take(self._request_id) for choice in self.choices.values())
        return [output for output in taken if output is not None]

    def rewind(self, next_indexes: Mapping[int, int]) -> None:
        """Send again from a router's resume points (choice → next output index). A choice without a resume point starts over."""
        for choice in self.choices.values():
            choice.rewind(next_indexes.get(choice.choice, 0))


def wire_logprobs(logprobs: TokenLogprobs) -> common_pb2.Logprobs:
    """Return the engine's log-probabilities of one position as a message."""
    chosen, value = logprobs.chosen
    return common_pb2.Logprobs(
        chosen=common_pb2.TokenLogprob(token_id=chosen, logprob=value),
        top=[common_pb2.TokenLogprob(token_id=token, logprob=top) for token, top in logprobs.top],
    )


@dataclass(frozen=True)
class Submission:
    """Hold a validated SubmitRequest. `received_ns` is monotonic; `deadline` is monotonic seconds, None: no deadline."""

    request_id: str
    router_id: str
    attempt: int
    mode: Mode
    request: EngineRequest
    deadline: float | None
    received_ns: int
    holder: prefill_pb2.KVHolder | None = None  # LOCAL: has KV that may be fetched
    trace: SubmitContext | None = None

    @property
    def next_indexes(self) -> dict[int, int]:
        """Return the output index of the next token, for each unfinished choice."""
        request = self.request
        emitted = request.emitted or ((),) * request.sampling.n
        finished = request.finished or (False,) * request.sampling.n
        return {choice: len(tokens) for choice, tokens in enumerate(emitted) if not finished[choice]}


@dataclass(frozen=True)
class Handoff:
    """Describe how the KV came here; empty for a request that was prefilled here."""

    kv_bytes: int = 0
    transport: str = ""


@dataclass(frozen=True)
class CommittedTokens:
    """Hold what a hand-off's commit carries for each choice: its first token and, for drafting, the hidden state that it was
    drawn from. `is_exact`: the KV neither is rounded nor was computed from rounded KV."""

    tokens: Mapping[int, int]
    draft_states: Mapping[int, bytes]
    is_exact: bool = True


class RouterEvents(Protocol):
    """Collect the events of requests for their router (`token_stream.TokenStream`)."""

    router_id: str
    records: dict[str, DecodeRequest]

    def mark(self, record: DecodeRequest) -> None: ...
    def mark_started(self, record: DecodeRequest) -> None: ...
    def post(self, event: decode_pb2.RequestEvent) -> None: ...
    def forget(self, record: DecodeRequest) -> None: ...


@dataclass(eq=False)
class DecodeRequest:
    """Hold one request. `reservation` is the value of the state machine; `submission` belongs to the newest accepted attempt."""

    submission: Submission
    reservation_id: str
    engine_id: str  # unique for each set of blocks, so that late updates for a released set are dropped
    reservation: ReservationState
    token: bytes
    token_stream: RouterEvents
    stream_generation: int
    on_finished: Callable[[DecodeRequest], None]
    on_not_finite: Callable[[DecodeRequest], None]
    spans: DecodeSpans
    output: RequestOutput = field(init=False)
    blocks: ReservedBlocks | None = None
    handoff: Handoff = Handoff()
    engine_entered_ns: int = 0  # LOCAL: when the engine got the prompt
    brought: Brought = NOTHING  # LOCAL: what came into the prefix cache before
    bringing: asyncio.Future[Brought] | None = None  # LOCAL: while that comes
    is_cancelled: bool = False  # while it came
    started: RequestStarted | None = None
    first_token_ns: int = 0
    span: DecodeSpan | None = None
    is_ending: bool = False

    def __post_init__(self) -> None:
        self.restart(self.submission)

    def restart(self, submission: Submission) -> None:
        """Replace the submission by that of a newer attempt, and drop the output."""
        self.submission = submission
        self.output = RequestOutput(submission.request_id, submission.next_indexes)

    @property
    def request_id(self) -> str:
        return self.submission.request_id

    @property
    def trace_name(self) -> str:
        """Return the trace id for logs; empty without a trace."""
        return "" if self.submission.trace is None else self.submission.trace.call.trace_name

    def is_at(self, submission: Submission) -> bool:
        """Return whether `submission` repeats the present attempt and that has not failed."""
        known = self.submission
        same = (submission.attempt, submission.mode) == (known.attempt, known.mode)
        return same and self.reservation.attempt == known.attempt

    @property
    def is_released(self) -> bool:
        return self.reservation.state is State.RELEASED

    @property
    def engine_request(self) -> EngineRequest:
        return self.submission.request

    @property
    def named_request(self) -> EngineRequest:
        """Return the engine's request with the id by which the engine knows it."""
        return replace(self.engine_request, request_id=self.engine_id)

    def renew_lease(self, now: float) -> None:
        """Renew the lease, because the router still follows the request. While blocks are written, only the writer's own progress
        renews it; after a failed attempt, only the next attempt does, because the router may not know that prefill stalled."""
        if self.reservation.state is State.RESERVED and self.reservation.attempt == self.submission.attempt:
            self.reservation = replace(self.reservation, lease_deadline=now + self.reservation.lease_s)

    def on_update(self, update: SequenceUpdate) -> None:
        """Take new tokens from the engine (the per-token path: keep it short)."""
        if update.finish_reason is FinishReason.ERROR:
            self.on_not_finite(self)
            return
        self.output.choices[update.choice].append(update)
        self.token_stream.mark(self)
        if update.finish_reason is not None and self.output.finished:
            self.on_finished(self)

    def on_started(self, started: RequestStarted, ended_ns: int) -> None:
        self.started = started
        self.first_token_ns = ended_ns
        if self.span is not None:
            self.spans.started(self, started, ended_ns)
        self.token_stream.mark_started(self)

    def resume(self, next_indexes: Mapping[int, int]) -> None:
        """Send again from the indexes that the router needs next."""
        self.output.rewind(next_indexes)
        if self.started is not None:
            self.token_stream.mark_started(self)
        self.token_stream.mark(self)

    def started_event(self, now_ns: int) -> decode_pb2.RequestEvent:
        """Return the event STARTED with its timings; `now_ns`: the time of the hand-over to gRPC. Call it only once `started` is
        set."""
        assert self.started is not None, f"{self.request_id} has not started"
        event = decode_pb2.RequestEvent(
            request_id=self.request_id,
            attempt=self.submission.attempt,
            kind=decode_pb2.REQUEST_EVENT_KIND_STARTED,
            kv_bytes=self.handoff.kv_bytes,
            transport=self.handoff.transport,
            decode_queue_ns=self.started.decode_queue_ns,
            num_cached_tokens=self.blocks.num_cached_tokens if self.blocks else 0,
            num_rounded_tokens=self.blocks.num_rounded_tokens if self.blocks else 0,
        )
        if self.started.timing is not None:
            event.local_prefill.CopyFrom(self._prefill_timings(self.started.timing, now_ns))
        return event

    def _prefill_timings(self, timing: PrefillTiming, now_ns: int) -> common_pb2.PrefillTimings:
        timings = common_pb2.PrefillTimings(
            reserve_ns=timing.opened_ns - self.submission.received_ns,
            prefill_queue_ns=timing.queue_ns,
            prefill_compute_ns=timing.compute_ns,
            return_ns=max(now_ns - self.first_token_ns, 0),
            service_ns=max(now_ns - self.submission.received_ns, 0),
            num_cached_tokens=timing.num_cached_tokens,
            num_computed_tokens=timing.num_computed_tokens,
            num_steps=timing.num_steps,
            num_rounded_tokens=timing.num_rounded_tokens,
        )
        self.brought.put(timings)
        return timings


def failed_event(request_id: str, attempt: int, failure: MeshError) -> decode_pb2.RequestEvent:
    """Return the event FAILED, which is the last one of a request."""
    return decode_pb2.RequestEvent(
        request_id=request_id,
        attempt=attempt,
        kind=decode_pb2.REQUEST_EVENT_KIND_FAILED,
        code=failure.code.value[0],
        message=failure.message,
    )


def monotonic_ns() -> int:
    """Return the time in nanoseconds on the clock of all timings here, which the engine uses too."""
    return time.monotonic_ns()
