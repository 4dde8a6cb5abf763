"""Stores recent traces within bounds of number, age and size. Pure: time is passed in, wall clock seconds.

spans ─► traces, the oldest are evicted ─┬─ requests: a summary of each router's `generate`
                                         └─ engine steps, which are traces of their own, linked to the traces that they name
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from pdmesh.runtime.telemetry.received import Details, ReceivedSpan, Value

# The summary of a request, from the attributes of its router's `generate` span.


SERVICE = "pdmesh-router"
TTFT_PARTS = ("route", "admission_queue", "reserve", "prefill_queue", "prefill_compute", "first_token_return", "retry")
"""The parts in the order in which they happen; together they are the time to the first token."""
LATER_PARTS = ("kv_exposed", "decode_queue")


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """Summarize one request. Times in milliseconds, None where there is none; `start_s` since 1970.

    `parts` of its TTFT and of what follows. `met`: whether it kept its objectives, None without any. `error` is a word, "" for
    none."""

    trace_id: str
    span_id: str
    request_id: str
    model: str
    router: str
    prefill_worker: str
    decode_worker: str
    mode: str
    start_s: float
    total_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    objective_ttft_ms: float | None
    objective_tpot_ms: float | None
    met: bool | None
    parts: Mapping[str, float]
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    kv_bytes: int
    error: str
    tenant: str
    priority: str

    @property
    def end_s(self) -> float:
        """Return the end, in seconds since 1970."""
        return self.start_s + self.total_ms / 1000

    def dominant(self) -> str:
        """Return the part that took most of the time to the first token; "" without one."""
        parts = {name: self.parts[name] for name in TTFT_PARTS if self.parts.get(name)}
        return max(parts, key=lambda name: parts[name]) if parts else ""


def is_request(span: ReceivedSpan) -> bool:
    """Return whether it is a router's `generate`: the caller's own span may be above it."""
    return span.process.service == SERVICE and (span.name == "generate" or span.name.startswith("generate "))


def summarize(span: ReceivedSpan) -> RequestSummary:
    """Return the summary of a request's span. Attributes that are missing or of another type are left out."""
    details = span.read()
    said = details.attributes
    return RequestSummary(
        trace_id=span.trace_id,
        span_id=span.span_id,
        request_id=_text(said, "gen_ai.response.id"),
        model=_text(said, "gen_ai.response.model") or _text(said, "gen_ai.request.model"),
        router=span.process.instance,
        prefill_worker=_text(said, "pdmesh.prefill.worker"),
        decode_worker=_text(said, "pdmesh.decode.worker"),
        mode=_text(said, "pdmesh.mode"),
        start_s=span.start_ns / 1e9,
        total_ms=(span.end_ns - span.start_ns) / 1e6,
        ttft_ms=_positive(said, "pdmesh.ttft_ms"),
        tpot_ms=_positive(said, "pdmesh.tpot_ms"),
        objective_ttft_ms=_positive(said, "pdmesh.slo.ttft_ms"),
        objective_tpot_ms=_positive(said, "pdmesh.slo.tpot_ms"),
        met=_flag(said, "pdmesh.slo.met"),
        parts={name: _number(said, f"pdmesh.timing.{name}_ms") or 0.0 for name in (*TTFT_PARTS, *LATER_PARTS)},
        input_tokens=_count(said, "gen_ai.usage.input_tokens"),
        output_tokens=_count(said, "gen_ai.usage.output_tokens"),
        cached_tokens=_count(said, "pdmesh.cached_tokens"),
        kv_bytes=_count(said, "pdmesh.kv.bytes"),
        error=_error(details),
        tenant=_text(said, "pdmesh.tenant"),
        priority=_text(said, "pdmesh.priority"),
    )


def _error(details: Details) -> str:
    return _text(details.attributes, "error.type") or ("ERROR" if details.is_failed else "")


def _text(said: Mapping[str, Value], name: str) -> str:
    value = said.get(name)
    return value[:200] if isinstance(value, str) else ""


def _number(said: Mapping[str, Value], name: str) -> float | None:
    value = said.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e12 else None  # type: ignore[arg-type, operator]


def _positive(said: Mapping[str, Value], name: str) -> float | None:
    return _number(said, name) or None


def _count(said: Mapping[str, Value], name: str) -> int:
    return int(_number(said, name) or 0)


def _flag(said: Mapping[str, Value], name: str) -> bool | None:
    value = said.get(name)
    return value if isinstance(value, bool) else None


MAX_SPANS_PER_TRACE = 512
MAX_STEPS = 2048
STEP = "decode.step"
SUMMARY_BYTES = 1500
"""Approximate size of a request's summary."""


@dataclass(frozen=True)
class Bounds:
    """Bound what is kept."""

    max_traces: int = 2000
    max_age_s: float = 900.0
    max_bytes: int = 128 << 20


@dataclass
class _Trace:
    """Hold spans by id."""

    since_s: float
    spans: dict[str, ReceivedSpan] = field(default_factory=dict)
    requests: dict[str, RequestSummary] = field(default_factory=dict)
    num_bytes: int = 0


class Store:
    """Own all spans that are kept."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.version = 0
        """Changes whenever the content does."""
        self.num_bytes = 0
        self.num_dropped = 0  # spans for which their trace had no space
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self._steps: deque[ReceivedSpan] = deque()
        self._step_bytes = 0  # part of num_bytes

    @property
    def num_traces(self) -> int:
        """Return the number of traces."""
        return len(self._traces)

    def add(self, spans: Iterable[ReceivedSpan], now_s: float) -> None:
        """Add spans; a duplicate counts once."""
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
        # A request's own span comes last and matters most: there is always space for it.
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
        """Evict what is too old or too much: steps first, where they are more than half of it."""
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
        """Return its spans by their start; None: it is not known (any more)."""
        trace = self._traces.get(trace_id)
        return None if trace is None else sorted(trace.spans.values(), key=lambda span: (span.start_ns, -span.end_ns))

    def steps_of(self, trace_id: str, limit: int = 256) -> list[ReceivedSpan]:
        """Return batches of engine steps that took part in it, oldest first; the last `limit`."""
        found = (span for span in reversed(self._steps) if trace_id in span.linked)
        return list(islice(found, limit))[::-1]

    def requests(self) -> Iterator[RequestSummary]:
        """Yield the requests of all traces, the latest first."""
        for trace in reversed(self._traces.values()):
            yield from reversed(trace.requests.values())
