"""The traces of late, within bounds: so many, so old, so large. Pure: time is passed in, wall clock seconds.

spans ─► traces, the oldest give way ─┬─ requests: a summary of each router's `generate`
                                      └─ engine steps, which are traces of their own, found by the traces that they name
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from pdmesh.console.summary import RequestSummary, is_request, summarize
from pdmesh.runtime.telemetry.received import ReceivedSpan

MAX_SPANS_PER_TRACE = 512
MAX_STEPS = 2048
STEP = "decode.step"
SUMMARY_BYTES = 1500
"""Of a request's summary, about."""


@dataclass(frozen=True)
class Bounds:
    """What is kept at most."""

    max_traces: int = 2000
    max_age_s: float = 900.0
    max_bytes: int = 128 << 20


@dataclass
class _Trace:
    """Spans by id."""

    since_s: float
    spans: dict[str, ReceivedSpan] = field(default_factory=dict)
    requests: dict[str, RequestSummary] = field(default_factory=dict)
    num_bytes: int = 0


class Store:
    """Owner of all spans that are kept."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.version = 0
        """Changes whenever what there is to see has."""
        self.num_bytes = 0
        self.num_dropped = 0  # spans for which their trace had no room
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self._steps: deque[ReceivedSpan] = deque()
        self._step_bytes = 0  # of num_bytes

    @property
    def num_traces(self) -> int:
        """That are kept."""
        return len(self._traces)

    def add(self, spans: Iterable[ReceivedSpan], now_s: float) -> None:
        """Spans as they came; one that comes twice counts once."""
        for span in spans:
            if span.name == STEP:
                self._add_step(span)
            else:
                self._add_span(span, now_s)
        self.prune(now_s)
        self.version += 1

    def _add_span(self, span: ReceivedSpan, now_s: float) -> None:
        trace = self._traces.setdefault(span.trace_id, _Trace(now_s))
        if span.span_id in trace.spans:
            return
        # A request's own span comes last, and is the one that is missed most: there is always room for it.
        if len(trace.spans) >= MAX_SPANS_PER_TRACE and (not is_request(span) or len(trace.requests) >= MAX_SPANS_PER_TRACE):
            self.num_dropped += 1
            return
        trace.spans[span.span_id] = span
        self._count(trace, span.num_bytes)
        if is_request(span):
            trace.requests[span.span_id] = summarize(span)
            self._count(trace, SUMMARY_BYTES)

    def _add_step(self, span: ReceivedSpan) -> None:
        self._steps.append(span)
        self.num_bytes += span.num_bytes
        self._step_bytes += span.num_bytes
        while len(self._steps) > MAX_STEPS:
            self._drop_step()

    def _drop_step(self) -> None:
        num_bytes = self._steps.popleft().num_bytes
        self.num_bytes -= num_bytes
        self._step_bytes -= num_bytes

    def _count(self, trace: _Trace, num_bytes: int) -> None:
        trace.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def prune(self, now_s: float) -> None:
        """What is too old, or too much: steps first, where they are more than half of it."""
        while self.num_bytes > self.bounds.max_bytes and self._step_bytes > self.bounds.max_bytes // 2:
            self._drop_step()
        while self._traces and self._is_beyond(next(iter(self._traces.values())), now_s):
            self.num_bytes -= self._traces.popitem(last=False)[1].num_bytes
            self.version += 1
        while self._steps and self.num_bytes > self.bounds.max_bytes:
            self._drop_step()

    def _is_beyond(self, oldest: _Trace, now_s: float) -> bool:
        is_too_much = len(self._traces) > self.bounds.max_traces or self.num_bytes > self.bounds.max_bytes
        return is_too_much or now_s - oldest.since_s > self.bounds.max_age_s

    def trace(self, trace_id: str) -> list[ReceivedSpan] | None:
        """Its spans by their beginnings; None: it is not known (any more)."""
        trace = self._traces.get(trace_id)
        return None if trace is None else sorted(trace.spans.values(), key=lambda span: (span.start_ns, -span.end_ns))

    def steps_of(self, trace_id: str, limit: int = 256) -> list[ReceivedSpan]:
        """Batches of engine steps that took part in it, oldest first; the last so many."""
        found = (span for span in reversed(self._steps) if trace_id in span.linked)
        return list(islice(found, limit))[::-1]

    def requests(self) -> Iterator[RequestSummary]:
        """Of all traces, those that came last first."""
        for trace in reversed(self._traces.values()):
            yield from reversed(trace.requests.values())
