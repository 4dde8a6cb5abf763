"""The time of one request, as timings and as spans: each part of TTFT is measured by itself, and the parts add up.

    received ─ route ─ admission_queue ─ route ─┬─ reserve ─ prefill_queue ─ prefill_compute ─ first_token_return ─► to gRPC
                                                └─ retry: from the Submit of an attempt that failed until the next one begins

REMOTE  the Submit call, then, from its answer on, the Prefill call. Of the latter the worker measures queue, compute, return and
        the whole (service); call duration − service is the wire, which belongs to first_token_return, like the router's own time
        until the hand-over.
LOCAL   one call's worth: the worker measures from the receipt of Submit on, reserve until its engine has the prompt, then queue,
        compute and return. The prompt waits for no answer to Submit, which may even come behind its first token.
All values are monotonic nanoseconds of this router; durations of workers travel as durations. What is counted here is told to
`spans` with the same two clock readings, so that the spans of a trace have the durations of the timings.

The stages of a request (`router/lifecycle/stages.py`) record what they do, by name; nothing here decides or calls back:

    validate, tokenize   routed, at arrival                       prefill   prefilling, prefilled; failed, withdrawn (a hedge)
    admit                queued                                   decode    prefilled (LOCAL), first_token; failed (a lost worker)
    place                routed, queued (no worker had room)      stream    handed, message
    reserve              submitting, submitted; failed
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdmesh.runtime.telemetry.propagation import Metadata, submit_metadata
from pdmesh.runtime.telemetry.spans import Attributes, Kind, Span
from pdmesh.runtime.telemetry.tracing import Tracing
from pdmesh.v1 import common_pb2, mesh_pb2

if TYPE_CHECKING:
    from router.fleet.worker import Worker


# What `RequestTimings` measures, as spans: one placement after another, until a decode worker has the KV.
#
#     generate ─┬─ route, admission          with the clock readings of the timings
#               ├─ attempt ─┬─ reserve       the Submit call, which also carries the attempt's context for later spans of decode
#               │           └─ prefill       the Prefill call, until its outcome
#               ├─ retry                     beside an attempt that failed before the first token
#               └─ migrate ─── the same      a move to another worker while the request runs
#
# `Spans` itself does nothing: where traces are off, every request has that one.


MAX_PARTS = 64
"""Bounds the `route` and `admission` spans: a request that waits for room tries again and again."""


class Spans:
    """Record nothing. Times are monotonic nanoseconds."""

    is_on = False
    trace_name = ""  # the trace's id for logs

    def routed(self, started_ns: int, ended_ns: int) -> None:
        """Validation, tokenization or a choice of workers took this time."""

    def queued(self, started_ns: int, ended_ns: int) -> None:
        """Record a wait for admission or for room on workers."""

    def submitting(self, at_ns: int, attributes: Attributes) -> None:
        """An attempt begins. One that is under way stays in force until this one is `submitted`."""

    def submitted(self, at_ns: int, attributes: Attributes) -> None:
        """Record the response to Submit: now the attempt is in force, and the one before is over."""

    def withdrawn(self, at_ns: int, problem: str) -> None:
        """Record that Submit was refused, and the attempt before goes on."""

    def superseded(self, since_ns: int | None, at_ns: int, reason: str) -> None:
        """Record that the present attempt ends if the next one is `submitted`. `since_ns`: from when on its time counts as
        retry."""

    def failed(self, since_ns: int | None, at_ns: int, reason: str) -> None:
        """Record that the present attempt has failed. `since_ns`: see `superseded`."""

    def prefilling(self, at_ns: int, worker_id: str) -> None:
        """Record that the Prefill call is being sent."""

    def prefilled(self, attributes: Attributes, problem: str | None) -> None:
        """Record the end of the Prefill call; `problem` None: it succeeded."""

    def first_token(self, at_ns: int) -> None:
        """Record the first token, which ends the attempt successfully."""

    def filled(self) -> None:
        """Record that the decode worker has the KV."""

    def returned(self, started_ns: int, ended_ns: int) -> None:
        """Record the way of the first token to the client's stream."""

    def moving(self, at_ns: int, worker_id: str, reason: str) -> Spans:
        """Return spans of the next decode session, while the one on `worker_id` goes on."""
        return self

    def moved(self, worker_id: str | None) -> None:
        """The move of these spans has ended on that worker; None: it came to nothing."""

    def took_part(self, worker: Worker) -> None:
        """Record that the worker holds spans of this trace."""

    @property
    def submit_metadata(self) -> Metadata | None:
        """Return the metadata of the Submit call."""
        return None

    @property
    def prefill_metadata(self) -> Metadata | None:
        """Return the metadata of the Prefill call."""
        return None


NO_SPANS = Spans()


@dataclass
class _AttemptSpan:
    """Hold the spans of one attempt, and how it ended if the next one is accepted."""

    span: Span
    reserve: Span
    prefill: Span | None = None
    retry_since_ns: int | None = None
    ended_ns: int = 0
    reason: str = ""


class LiveSpans(Spans):
    """Write spans below `root`, which is a request's `generate` span, or the `migrate` span of a move."""

    is_on = True

    def __init__(self, tracing: Tracing, root: Span, workers: set[Worker]) -> None:
        """Create it. Workers that take part are added to `workers`."""
        self.trace_name = root.context.trace_name
        self.workers = workers
        self._tracing = tracing
        self._root = root
        self._attempt: _AttemptSpan | None = None
        self._former: _AttemptSpan | None = None
        self._num_parts = 0

    def routed(self, started_ns: int, ended_ns: int) -> None:
        self._part("route", started_ns, ended_ns)

    def queued(self, started_ns: int, ended_ns: int) -> None:
        self._part("admission", started_ns, ended_ns)

    def _part(self, name: str, started_ns: int, ended_ns: int) -> None:
        self._num_parts += 1
        if self._num_parts <= MAX_PARTS:
            self._tracing.record(name, self._root.context, started_ns, ended_ns)
        else:
            self._root.set({"pdmesh.dropped_parts": self._num_parts - MAX_PARTS})

    def submitting(self, at_ns: int, attributes: Attributes) -> None:
        span = self._tracing.begin("attempt", self._root.context, start_ns=at_ns, attributes=attributes)
        reserve = self._tracing.begin("reserve", span.context, start_ns=at_ns, kind=Kind.CLIENT, attributes=attributes)
        self._attempt = _AttemptSpan(span, reserve)

    def submitted(self, at_ns: int, attributes: Attributes) -> None:
        self._bury_former()
        if self._attempt is not None:
            self._attempt.reserve.set(attributes)
            self._attempt.reserve.end(at_ns)

    def withdrawn(self, at_ns: int, problem: str) -> None:
        if self._attempt is not None and self._former is not None:
            refused, self._attempt, self._former = self._attempt, self._former, None
            refused.retry_since_ns = None
            self._bury(refused, at_ns, problem)

    def superseded(self, since_ns: int | None, at_ns: int, reason: str) -> None:
        if self._attempt is not None:
            self._former, self._attempt = self._attempt, None
            self._former.retry_since_ns, self._former.ended_ns, self._former.reason = since_ns, at_ns, reason

    def failed(self, since_ns: int | None, at_ns: int, reason: str) -> None:
        self._bury_former()
        if self._attempt is not None:
            failed, self._attempt = self._attempt, None
            failed.retry_since_ns = since_ns
            self._bury(failed, at_ns, reason)

    def prefilling(self, at_ns: int, worker_id: str) -> None:
        if self._attempt is not None:
            attributes = {"pdmesh.prefill.worker": worker_id}
            self._attempt.span.set(attributes)
            self._attempt.prefill = self._tracing.begin(
                "prefill", self._attempt.span.context, start_ns=at_ns, kind=Kind.CLIENT, attributes=attributes
            )

    def prefilled(self, attributes: Attributes, problem: str | None) -> None:
        prefill = None if self._attempt is None else self._attempt.prefill
        if prefill is not None and prefill.is_open:
            prefill.set(attributes)
            if problem is not None:
                prefill.fail("prefill_failed", problem)
            prefill.end()

    def first_token(self, at_ns: int) -> None:
        for attempt in (self._former, self._attempt):
            if attempt is not None:  # during a hedge's Submit the token comes from the attempt before it
                attempt.span.end(at_ns)
                return

    def filled(self) -> None:
        if self._attempt is not None:
            self._attempt.span.end()

    def returned(self, started_ns: int, ended_ns: int) -> None:
        self._tracing.record("first_token_return", self._root.context, started_ns, ended_ns)

    def moving(self, at_ns: int, worker_id: str, reason: str) -> Spans:
        attributes = {"pdmesh.from.worker": worker_id, "pdmesh.reason": reason}
        root = self._tracing.begin("migrate", self._root.context, start_ns=at_ns, attributes=attributes)
        return LiveSpans(self._tracing, root, self.workers)

    def moved(self, worker_id: str | None) -> None:
        self._root.set({"pdmesh.moved": False} if worker_id is None else {"pdmesh.moved": True, "pdmesh.to.worker": worker_id})
        self.close()

    def close(self, at_ns: int | None = None) -> None:
        """End all open spans, at `at_ns` or now."""
        self._bury_former()
        if self._attempt is not None:
            for span in (self._attempt.reserve, self._attempt.prefill, self._attempt.span):
                if span is not None:
                    span.end(at_ns)
        self._root.end(at_ns)

    def took_part(self, worker: Worker) -> None:
        self.workers.add(worker)

    @property
    def submit_metadata(self) -> Metadata | None:
        return None if self._attempt is None else submit_metadata(self._attempt.reserve.context, self._attempt.span.context)

    @property
    def prefill_metadata(self) -> Metadata | None:
        return None if self._attempt is None else self._tracing.inject(self._attempt.prefill)

    def _bury_former(self) -> None:
        if self._former is not None:
            former, self._former = self._former, None
            self._bury(former, former.ended_ns, former.reason)

    def _bury(self, attempt: _AttemptSpan, at_ns: int, reason: str) -> None:
        """End the attempt as failed, unless it had its first token before."""
        has_failed = attempt.span.is_open
        for span in (attempt.reserve, attempt.prefill, attempt.span):
            if span is not None and span.is_open:
                span.fail("attempt_failed", reason)
                span.end(at_ns)
        if attempt.retry_since_ns is not None and has_failed:
            attributes = {"pdmesh.reason": reason}
            self._tracing.record("retry", self._root.context, attempt.retry_since_ns, at_ns, attributes=attributes)


now_ns = time.monotonic_ns


@dataclass(slots=True)
class _ChoicePace:
    first_ns: int
    last_ns: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Hold the state of the attempt before a hedge, which may stay in force."""

    attempt_ns: int
    submit_ns: int
    call_ns: int
    first_local: bool
    retry_ns: int


@dataclass(slots=True)
class RequestTimings:
    """Collects while the request lives; `message` sums up. Before the first token a failed attempt starts the parts anew."""

    received_ns: int
    parts: mesh_pb2.Timings = field(default_factory=mesh_pb2.Timings)
    attempt_ns: int | None = None
    submit_ns: int = 0
    call_ns: int = 0
    first_local: bool = False
    first_received_ns: int | None = None
    first_handed_ns: int | None = None
    prefill: common_pb2.PrefillTimings | None = None
    paces: dict[int, _ChoicePace] = field(default_factory=dict)
    spans: Spans = NO_SPANS
    route_since_ns: int | None = None
    _before: _Attempt | None = None

    def routed(self, started_ns: int) -> None:
        """Since `started_ns` it has been the router's turn: validation, tokenization, a choice of workers. That lasts until the
        request waits in a queue or an attempt begins: nothing between the parts is left out, whatever took the processor."""
        if self.route_since_ns is None:
            self.route_since_ns = started_ns

    def queued(self, started_ns: int) -> None:
        """Record that the request waited for admission or for room from `started_ns` until now; then the router works on it
        again."""
        self._end_route(started_ns)
        now = now_ns()
        if self.first_received_ns is None:
            self.parts.admission_queue_ns += now - started_ns
        self.spans.queued(started_ns, now)
        self.route_since_ns = now

    def _end_route(self, at_ns: int) -> None:
        since_ns, self.route_since_ns = self.route_since_ns, None
        if since_ns is None or at_ns <= since_ns:
            return
        if self.first_received_ns is None:
            self.parts.route_ns += at_ns - since_ns
        self.spans.routed(since_ns, at_ns)

    def submitting(self, attributes: Attributes | None = None, reason: str = "") -> None:
        """An attempt begins: Submit is being sent. What an earlier one took counts as retry; `reason` is what speaks against it.
        `attributes` say where the new one goes."""
        now = now_ns()
        self._end_route(now)
        self._supersede(now, reason)
        if self.first_received_ns is None:
            self.attempt_ns = self.call_ns = now
        self.spans.submitting(now, attributes or {})

    def withdrawn(self, problem: str) -> None:
        """Record that Submit was refused, and the attempt that was to be superseded goes on."""
        self._go_back()
        self.spans.withdrawn(now_ns(), problem)

    def _go_back(self) -> None:
        """Restore the figures of the attempt that a hedge was to supersede."""
        before, self._before = self._before, None
        if before is not None:
            self.attempt_ns, self.submit_ns, self.call_ns = before.attempt_ns, before.submit_ns, before.call_ns
            self.first_local, self.parts.retry_ns = before.first_local, before.retry_ns

    def submitted(self, mode: mesh_pb2.PrefillMode.ValueType, decode_worker: str, num_cached_tokens: int) -> None:
        """Record the response to Submit. LOCAL: the prompt is being computed already."""
        now = now_ns()
        if self.first_received_ns is not None and self._before is not None:
            self._go_back()  # the token came from the attempt before, during this one's Submit
        elif self.attempt_ns is not None:
            self.submit_ns = now - self.attempt_ns
            self.first_local = mode == mesh_pb2.PREFILL_MODE_LOCAL
            self.call_ns = self.call_ns if self.first_local else now
        self._before = None
        self.spans.submitted(now, {"pdmesh.cached_tokens": num_cached_tokens})
        self.parts.mode = mode
        self.parts.decode_worker = decode_worker
        self.parts.decode_cached_tokens = num_cached_tokens

    def prefilling(self, prefill_worker: str) -> None:
        """Record that the Prefill call is being sent."""
        self.parts.prefill_worker = prefill_worker
        self.spans.prefilling(now_ns(), prefill_worker)

    def failed(self, reason: str = "") -> None:
        """Give the present attempt up, if there is one; before the first token its time is retry time."""
        now = now_ns()
        self.spans.failed(self._count_retry(now), now, reason)
        self._before = None
        self.route_since_ns = now

    def _supersede(self, now: int, reason: str) -> None:
        """End an attempt as `failed` does, but so that `withdrawn` can restore it."""
        if self.attempt_ns is not None:
            self._before = _Attempt(self.attempt_ns, self.submit_ns, self.call_ns, self.first_local, self.parts.retry_ns)
        self.spans.superseded(self._count_retry(now), now, reason)

    def _count_retry(self, now: int) -> int | None:
        """Return since when the attempt's time counts as retry; None: it does not."""
        since_ns, self.attempt_ns = self.attempt_ns, None
        if since_ns is None or self.first_received_ns is not None:
            return None
        self.parts.retry_ns += now - since_ns
        return since_ns

    def first_token(self) -> None:
        """Record that a token has reached this router; only the first call counts."""
        if self.first_received_ns is None:
            self.first_received_ns = now_ns()
            self.spans.first_token(self.first_received_ns)

    def prefilled(self, timings: common_pb2.PrefillTimings) -> None:
        """Record what the worker measured that computed the prompt; only the first call counts."""
        if self.prefill is None:
            self.prefill = timings
            self.parts.prefill_cached_tokens = timings.num_cached_tokens
            self.parts.fetched_tokens = timings.num_fetched_tokens
            self.parts.restored_tokens = timings.num_restored_tokens
            self.rounded(timings.num_rounded_tokens)

    def rounded(self, num_tokens: int) -> None:
        """Record that a worker has used rounded KV of so many of the prompt's tokens."""
        self.parts.rounded_tokens = max(self.parts.rounded_tokens, num_tokens)

    def handed(self, choice: int, num_tokens: int) -> None:
        """Record that a delta with `num_tokens` tokens of `choice` is handed to gRPC (per-token path)."""
        now = now_ns()
        if self.first_handed_ns is None and num_tokens:
            self.first_handed_ns = now
        pace = self.paces.get(choice)
        if pace is None:
            self.paces[choice] = _ChoicePace(now, now, num_tokens)
        elif num_tokens:
            pace.last_ns = now
            pace.num_tokens += num_tokens

    def message(self) -> mesh_pb2.Timings:
        """Return the sum-up, at completion."""
        now = now_ns()
        self._end_route(now if self.first_received_ns is None else 0)
        self.parts.total_ns = now - self.received_ns
        self.parts.tpot_ns = max((_tpot_ns(pace) for pace in self.paces.values()), default=0)
        if self.first_handed_ns is not None and self.first_received_ns is not None:
            self.parts.ttft_ns = self.first_handed_ns - self.received_ns
            self._add_first_token_parts(self.first_received_ns, self.first_handed_ns)
        return self.parts

    def _add_first_token_parts(self, received_ns: int, handed_ns: int) -> None:
        worker = self.prefill or common_pb2.PrefillTimings()
        wire_ns = max(0, received_ns - self.call_ns - worker.service_ns)
        self.parts.reserve_ns = worker.reserve_ns if self.first_local else self.submit_ns
        self.parts.prefill_queue_ns = worker.prefill_queue_ns
        self.parts.prefill_compute_ns = worker.prefill_compute_ns
        self.parts.first_token_return_ns = worker.return_ns + wire_ns + handed_ns - received_ns


def _tpot_ns(pace: _ChoicePace) -> int:
    return (pace.last_ns - pace.first_ns) // (pace.num_tokens - 1) if pace.num_tokens > 1 else 0
