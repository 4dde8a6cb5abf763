"""What `RequestTimings` measures, as spans: one placement after another, until a worker decodes.

    generate ─┬─ route, admission          as they are counted, so durations are those of the timings
              ├─ attempt ─┬─ reserve       the Submit call; decode is told the attempt's context, too, for what it does later
              │           └─ prefill       the Prefill call, until its outcome
              ├─ retry                     beside an attempt that failed before the first token
              └─ migrate ─── the same      a move to another worker while it runs

`Spans` itself does nothing: where traces are off, everybody has that one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdmesh.runtime.telemetry.propagation import Metadata
from pdmesh.runtime.telemetry.spans import Attributes, Kind, Span
from pdmesh.runtime.telemetry.tracing import Tracing
from pdmesh.runtime.telemetry.worker_context import submit_metadata

if TYPE_CHECKING:
    from router.fleet.worker import Worker

MAX_PARTS = 64
"""Of `route` and `admission`: a request that waits for room tries again and again."""


class Spans:
    """Nobody is told. Times are monotonic nanoseconds."""

    is_on = False
    trace_name = ""  # the trace's id for logs

    def routed(self, started_ns: int, ended_ns: int) -> None:
        """Validation, tokenization or a choice of workers."""

    def queued(self, started_ns: int, ended_ns: int) -> None:
        """It waited for a place or for room."""

    def submitting(self, at_ns: int, attributes: Attributes) -> None:
        """An attempt begins. One that is under way stays so until this one is `reserved`."""

    def submitted(self, at_ns: int, attributes: Attributes) -> None:
        """Submit was answered: now the attempt is in force, and one before it is over."""

    def withdrawn(self, at_ns: int, problem: str) -> None:
        """Submit was refused, and the attempt before goes on."""

    def superseded(self, since_ns: int | None, at_ns: int, reason: str) -> None:
        """The attempt under way is over if the next one is `submitted`. `since_ns`: from when on its time counts as retry."""

    def failed(self, since_ns: int | None, at_ns: int, reason: str) -> None:
        """The attempt under way is over. `since_ns`: see `superseded`."""

    def prefilling(self, at_ns: int, worker_id: str) -> None:
        """The Prefill call is being sent."""

    def prefilled(self, attributes: Attributes, problem: str | None) -> None:
        """It has ended; `problem` None: as it should."""

    def first_token(self, at_ns: int) -> None:
        """The attempt has reached what it was for."""

    def filled(self) -> None:
        """Decode goes on by itself."""

    def returned(self, started_ns: int, ended_ns: int) -> None:
        """The first token came back."""

    def moving(self, at_ns: int, worker_id: str, reason: str) -> Spans:
        """Spans of the next stay, while the one on `worker_id` goes on."""
        return self

    def moved(self, worker_id: str | None) -> None:
        """The move of these spans has ended there; None: it came to nothing."""

    def took_part(self, worker: Worker) -> None:
        """It holds spans of this trace."""

    @property
    def submit_metadata(self) -> Metadata | None:
        """Of the Submit call."""
        return None

    @property
    def prefill_metadata(self) -> Metadata | None:
        """Of the Prefill call."""
        return None


NO_SPANS = Spans()


@dataclass
class _AttemptSpan:
    """One try: its spans, and how it ended if the next one is accepted."""

    span: Span
    reserve: Span
    prefill: Span | None = None
    retry_since_ns: int | None = None
    ended_ns: int = 0
    reason: str = ""


class LiveSpans(Spans):
    """Below `root`: a request's `generate` span, or the `migrate` span of a move."""

    is_on = True

    def __init__(self, tracing: Tracing, root: Span, workers: set[Worker]) -> None:
        """`workers` that take part are added."""
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
            if attempt is not None:  # while a hedge is being asked for, it is the attempt before it that has brought the token
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
        """All that is open ends, just now if not at `at_ns`."""
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
        """It has failed, unless it had its first token before."""
        has_failed = attempt.span.is_open
        for span in (attempt.reserve, attempt.prefill, attempt.span):
            if span is not None and span.is_open:
                span.fail("attempt_failed", reason)
                span.end(at_ns)
        if attempt.retry_since_ns is not None and has_failed:
            attributes = {"pdmesh.reason": reason}
            self._tracing.record("retry", self._root.context, attempt.retry_since_ns, at_ns, attributes=attributes)
