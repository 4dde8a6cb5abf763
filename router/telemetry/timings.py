"""Where one request's time went: each part of TTFT is measured by itself, and they add up.

    received ─ route ─ admission_queue ─ route ─┬─ reserve ─ prefill_queue ─ prefill_compute ─ first_token_return ─► to gRPC
                                                └─ retry: from the Submit of an attempt that failed until the next one begins

REMOTE  the Submit call, then, from its answer on, the Prefill call. Of the latter the worker measures queue, compute, return and
        the whole (service); call duration − service is the wire, which belongs to first_token_return, like the router's own time
        until the hand-over.
LOCAL   one call's worth: the worker measures from the receipt of Submit on, reserve until its engine has the prompt, then queue,
        compute and return. The prompt waits for no answer to Submit, which may even come behind its first token.
All values are monotonic nanoseconds of this router; durations of workers travel as durations. What is counted here is told to
`spans` with the same two clock readings, so that the spans of a trace have the durations of the timings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdmesh.runtime.telemetry.spans import Attributes
from pdmesh.v1 import common_pb2, mesh_pb2
from router.telemetry.spans import NO_SPANS, Spans

if TYPE_CHECKING:
    from router.routing.decisions import Decision

now_ns = time.monotonic_ns


@dataclass(slots=True)
class _ChoicePace:
    first_ns: int
    last_ns: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What is known of the attempt before a hedge: it may stay in force."""

    attempt_ns: int
    submit_ns: int
    call_ns: int
    first_local: bool
    retry_ns: int


@dataclass(slots=True)
class RequestTimings:
    """Collects while the request lives; `message` sums up. Before the first token a failed attempt starts the parts anew.

    `decision`: the latest that placed the request."""

    received_ns: int
    parts: mesh_pb2.Timings = field(default_factory=mesh_pb2.Timings)
    attempt_ns: int | None = None
    submit_ns: int = 0
    call_ns: int = 0
    first_local: bool = False
    first_received_ns: int | None = None
    first_handed_ns: int | None = None
    prefill: common_pb2.PrefillTimings | None = None
    on_submitting: Callable[[], None] | None = None
    paces: dict[int, _ChoicePace] = field(default_factory=dict)
    decision: Decision | None = None
    spans: Spans = NO_SPANS
    route_since_ns: int | None = None
    _before: _Attempt | None = None

    def routed(self, started_ns: int) -> None:
        """Since `started_ns` it has been the router's turn: validation, tokenization, a choice of workers. Until it waits in a
        line or an attempt begins: between its parts nothing is left out, whoever took the processor meanwhile."""
        if self.route_since_ns is None:
            self.route_since_ns = started_ns

    def queued(self, started_ns: int) -> None:
        """The request waited for a place or for room from `started_ns` until now; then it is the router's turn."""
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
        if self.on_submitting is not None:
            self.on_submitting()
            self.on_submitting = None
        now = now_ns()
        self._end_route(now)
        self._supersede(now, reason)
        if self.first_received_ns is None:
            self.attempt_ns = self.call_ns = now
        self.spans.submitting(now, attributes or {})

    def withdrawn(self, problem: str) -> None:
        """Submit was refused, and the attempt that was to be superseded goes on."""
        self._go_back()
        self.spans.withdrawn(now_ns(), problem)

    def _go_back(self) -> None:
        """To the figures of the attempt that a hedge was to supersede."""
        before, self._before = self._before, None
        if before is not None:
            self.attempt_ns, self.submit_ns, self.call_ns = before.attempt_ns, before.submit_ns, before.call_ns
            self.first_local, self.parts.retry_ns = before.first_local, before.retry_ns

    def submitted(self, mode: mesh_pb2.PrefillMode.ValueType, decode_worker: str, num_cached_tokens: int) -> None:
        """Submit was answered. LOCAL: the prompt is being computed already."""
        now = now_ns()
        if self.first_received_ns is not None and self._before is not None:
            self._go_back()  # the token came from the attempt before, while this one was being asked for
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
        """The Prefill call is being sent."""
        self.parts.prefill_worker = prefill_worker
        self.spans.prefilling(now_ns(), prefill_worker)

    def failed(self, reason: str = "") -> None:
        """The current attempt, if any, is given up; before the first token its time is retry time."""
        now = now_ns()
        self.spans.failed(self._count_retry(now), now, reason)
        self._before = None
        self.route_since_ns = now

    def _supersede(self, now: int, reason: str) -> None:
        """As `failed`, but `withdrawn` takes it back."""
        if self.attempt_ns is not None:
            self._before = _Attempt(self.attempt_ns, self.submit_ns, self.call_ns, self.first_local, self.parts.retry_ns)
        self.spans.superseded(self._count_retry(now), now, reason)

    def _count_retry(self, now: int) -> int | None:
        """Since when the attempt's time counts as retry; None: it does not."""
        since_ns, self.attempt_ns = self.attempt_ns, None
        if since_ns is None or self.first_received_ns is not None:
            return None
        self.parts.retry_ns += now - since_ns
        return since_ns

    def first_token(self) -> None:
        """A token has reached this router; only the first call counts."""
        if self.first_received_ns is None:
            self.first_received_ns = now_ns()
            self.spans.first_token(self.first_received_ns)

    def prefilled(self, timings: common_pb2.PrefillTimings) -> None:
        """What the worker that computed the prompt measured; the first one counts."""
        if self.prefill is None:
            self.prefill = timings
            self.parts.prefill_cached_tokens = timings.num_cached_tokens

    def handed(self, choice: int, num_tokens: int) -> None:
        """A delta with `num_tokens` tokens of `choice` is handed to gRPC (per-token path)."""
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
        """The sum-up, at completion."""
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
