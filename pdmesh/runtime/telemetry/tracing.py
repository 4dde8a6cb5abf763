"""Makes the spans of a process, and passes ended ones to the sender.

    tracing = open_tracing(config, "pdmesh-router", {"service.instance.id": router_id}, os.environ)
    parent = tracing.extract(context.invocation_metadata())
    span = tracing.begin("generate tiny", parent, kind=Kind.SERVER, attributes={"gen_ai.request.model": "tiny"})
    stub.Submit(request, metadata=tracing.inject(span))
    span.end()
    tracing.close()

Without a collector there is `OFF`: the same methods, which do nothing; OpenTelemetry is not even imported.
"""

from __future__ import annotations

import logging
import os
import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.telemetry import propagation
from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.runtime.telemetry.propagation import Metadata, SpanContext
from pdmesh.runtime.telemetry.spans import MAX_LINKS, Attributes, Event, Kind, Span

# Sampling: a share of the traces by their ids, decided at the start; and at the end those of requests that went badly.
#
#   sampled at the start ─► sent as its spans end
#   not sampled ─► held, the oldest traces give way ─┬─ kept: held spans are sent, and those that follow
#                                                    └─ else forgotten


MAX_KEPT = 4096  # traces of which spans may still come
_RANGE = 1 << 64


def is_sampled(trace_id: int, share: float) -> bool:
    """Return whether the trace is sampled, the same wherever it is asked: by the lower 64 bits of the id, as OpenTelemetry's
    samplers do."""
    return trace_id % _RANGE < round(share * _RANGE)


class Held:
    """Hold spans of traces that are not sampled, at most `max_spans`."""

    def __init__(self, max_spans: int) -> None:
        self._max_spans = max_spans
        self._traces: OrderedDict[int, list[Span]] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()
        self.num_spans = 0

    def hold(self, span: Span) -> bool:
        """Hold the span; False if its trace is kept: send it."""
        trace_id = span.context.trace_id
        if trace_id in self._kept:
            return False
        self._traces.setdefault(trace_id, []).append(span)
        self.num_spans += 1
        while self.num_spans > self._max_spans:
            self.num_spans -= len(self._traces.popitem(last=False)[1])
        return True

    def keep(self, trace_id: int) -> list[Span]:
        """Return the held spans of a trace, to be sent; its later spans are not held any more."""
        self._kept[trace_id] = None
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        spans = self._traces.pop(trace_id, [])
        self.num_spans -= len(spans)
        return spans


logger = logging.getLogger(__name__)


class Outbox(Protocol):
    """Receive spans to be sent. Never blocks, never raises."""

    def put(self, span: Span) -> None:
        """Send the span soon, or drop and count it."""

    def close(self, timeout_s: float) -> None:
        """Send the rest within `timeout_s` seconds; idempotent."""


class Tracing:
    """Make the spans of one process. On one thread (except that `outbox` sends on its own)."""

    is_on = True

    def __init__(self, outbox: Outbox, *, share: float = 1.0, max_held_spans: int = 8192) -> None:
        """Create it. A `share` of the traces that begin here are sent as they come."""
        self._outbox = outbox
        self._share = share
        self._held = Held(max_held_spans)
        self._random = random.Random()

    def extract(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> SpanContext | None:
        """Return the caller's context; None without one."""
        return propagation.extract(metadata or ())

    def inject(self, span: Span | None) -> Metadata | None:
        """Return the metadata of a call that `span` stands for; None: nothing to add."""
        return None if span is None else propagation.inject(span.context)

    def begin(
        self,
        name: str,
        parent: SpanContext | None,
        *,
        start_ns: int,
        kind: Kind = Kind.INTERNAL,
        attributes: Attributes | None = None,
    ) -> Span:
        """Return a span that lives until its `end`; without a `parent` it is the root of a new trace."""
        context = self._new_trace() if parent is None else self._child_of(parent)
        return Span(name, context, 0 if parent is None else parent.span_id, kind, start_ns, attributes or {}, self._emit)

    def record(
        self,
        name: str,
        parent: SpanContext | None,
        start_ns: int,
        end_ns: int,
        *,
        kind: Kind = Kind.INTERNAL,
        attributes: Attributes | None = None,
        events: Sequence[Event] = (),
        links: Sequence[SpanContext] = (),
    ) -> None:
        """Record a span that is over already."""
        span = self.begin(name, parent, start_ns=start_ns, kind=kind, attributes=attributes)
        span.events.extend(events)
        span.links = links[:MAX_LINKS]
        span.end(end_ns)

    def keep(self, trace_ids: Iterable[int]) -> None:
        """Send these traces after all: their held spans, and those that follow."""
        for trace_id in trace_ids:
            for span in self._held.keep(trace_id):
                self._outbox.put(span)

    def close(self, timeout_s: float = 1.0) -> None:
        """Send the rest, for at most `timeout_s` seconds; blocks that long."""
        self._outbox.close(timeout_s)

    def _emit(self, span: Span) -> None:
        if span.context.is_sampled or not self._held.hold(span):
            self._outbox.put(span)

    def _new_trace(self) -> SpanContext:
        trace_id = self._random.getrandbits(128) or 1
        return SpanContext(trace_id, self._new_span_id(), is_sampled(trace_id, self._share))

    def _child_of(self, parent: SpanContext) -> SpanContext:
        return SpanContext(parent.trace_id, self._new_span_id(), parent.is_sampled, parent.state)

    def _new_span_id(self) -> int:
        return self._random.getrandbits(64) or 1


class _Nowhere:
    def put(self, span: Span) -> None:
        """Do nothing."""

    def close(self, timeout_s: float) -> None:
        """Do nothing."""


class _NoTracing(Tracing):
    """Send nothing. `begin` returns a span for callers that do not check `is_on`; busy paths do."""

    is_on = False

    def extract(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> SpanContext | None:
        return None

    def inject(self, span: Span | None) -> Metadata | None:
        return None

    def _emit(self, span: Span) -> None:
        """Do nothing."""


OFF: Tracing = _NoTracing(_Nowhere(), max_held_spans=0)


def open_tracing(config: TelemetryConfig, service: str, resource: Attributes, env: Mapping[str, str] | None = None) -> Tracing:
    """Return the tracing, `OFF` unless there is a collector and traces are wanted. A collector that does not answer costs nothing
    but the spans.

    `service` is the name of this kind of process; `resource` identifies the instance. `env`: this process's unless given. Raises
    ConfigError."""
    env = os.environ if env is None else env
    try:
        endpoint = config.endpoint(env) if config.trace_requests else None
    except ValueError as error:
        name, _, problem = str(error).partition(": ")
        raise ConfigError(name, problem) from error
    if endpoint is None:
        return OFF
    try:
        from pdmesh.runtime.telemetry.otlp import open_outbox  # imports OpenTelemetry, which is useless without a collector
    except ImportError as error:
        remedy = "pip install 'pdmesh[services]'"
        raise ConfigError("otlp_endpoint", f"a package is missing that sends traces ({error.name})", remedy) from error
    logger.info("traces go to %s", endpoint.target)
    outbox = open_outbox(endpoint, service, resource, env)
    return Tracing(outbox, share=config.trace_share, max_held_spans=config.trace_held_spans)
