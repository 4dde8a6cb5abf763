"""Encodes spans as OTLP and sends them to a collector in batches, on a thread.

They are encoded here and not by OpenTelemetry's SDK: from our spans it takes half the time, which a busy process would miss.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.telemetry.config import Endpoint
from pdmesh.runtime.telemetry.propagation import SpanContext
from pdmesh.runtime.telemetry.spans import Attributes, Event, Span, Value

# The thread that sends spans, so that no request waits for a collector.
#
#     put ─► queue, bounded ─► thread: gather for a moment, encode, send ─┬─ accepted
#                 └─ full: dropped, counted                               ├─ rejected: dropped, counted
#                                                                         └─ no answer: the batch is tried again after a pause
#
# A call costs both ends as much as dozens of spans. So it is made once a second, except that a single span does not wait that
# long.


MAX_QUEUED = 8192
BATCH = 128
"""Encoding a batch holds the interpreter for a few milliseconds, during which an event loop waits."""
MANY = 4 * BATCH
"""With this many spans the second is not awaited."""
GATHER_S = 0.2
PERIOD_S = 1.0
CALL_TIMEOUT_S = 3.0
PAUSE_S = 2.0
_YIELD_S = 0.002

logger = logging.getLogger(__name__)


class Answer(Enum):
    """Tell the outcome of a batch."""

    TAKEN = "taken"
    REFUSED = "refused"
    MISSING = "missing"


class Exporter(Protocol):
    """Send to a collector. Used by one thread, except for `close`."""

    def send(self, spans: Sequence[Span], timeout_s: float) -> tuple[Answer, str]:
        """Send and wait up to `timeout_s` for the answer; return it with the collector's or the connection's message. Never
        raises."""

    def close(self) -> None:
        """Close; a running call ends."""


class Sender:
    """Queue spans for a thread, which starts with the first span."""

    def __init__(
        self, exporter: Exporter, *, max_queued: int = MAX_QUEUED, gather_s: float = GATHER_S, period_s: float = PERIOD_S
    ) -> None:
        """Create the queue. `gather_s`: wait after the first span. `period_s`: from one call to the next."""
        self.num_sent = 0
        self.num_dropped = 0
        self._exporter = exporter
        self._max_queued = max_queued
        self._many = min(MANY, max_queued // 2)
        self._gather_s, self._period_s = gather_s, period_s
        self._queue: deque[Span] = deque()
        self._filled, self._hurry, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._close_at = 0.0
        self._is_reachable = True
        self._thread: threading.Thread | None = None

    def put(self, span: Span) -> None:
        """Queue a span. Called on one thread."""
        if len(self._queue) >= self._max_queued or self._closing.is_set():
            self.num_dropped += 1
            return
        self._queue.append(span)
        if len(self._queue) >= self._many and not self._hurry.is_set():
            self._hurry.set()
        if not self._filled.is_set():
            self._filled.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
                self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Send the rest for at most `timeout_s` seconds; drop what is left then."""
        if self._closing.is_set():
            return
        self._close_at = time.monotonic() + timeout_s
        self._closing.set()
        self._filled.set()
        self._hurry.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._exporter.close()
        self.num_dropped += len(self._queue)
        if self.num_dropped:
            logger.warning("%d spans of %d were never sent", self.num_dropped, self.num_dropped + self.num_sent)

    def _run(self) -> None:
        called_at = float("-inf")
        while self._filled.wait():
            self._hurry.wait(max(self._gather_s, called_at + self._period_s - time.monotonic()))
            self._hurry.clear()
            self._filled.clear()  # before the queue is read: later spans set it again
            is_last, left = self._closing.is_set(), len(self._queue)
            while left and not self._is_over():  # spans that come meanwhile wait for the next call
                batch = [self._queue.popleft() for _ in range(min(BATCH, left))]
                left -= len(batch)
                self._send(batch)
                called_at = time.monotonic()
                time.sleep(_YIELD_S)
            if is_last:
                return

    def _is_over(self) -> bool:
        return self._closing.is_set() and time.monotonic() >= self._close_at

    def _send(self, batch: list[Span]) -> None:
        """Send until the batch is accepted or rejected. While closing, a batch without an answer is dropped."""
        while True:
            answer, words = self._exporter.send(batch, self._patience_s())
            self._note(answer, words)
            if answer is Answer.TAKEN:
                self.num_sent += len(batch)
                return
            if answer is Answer.REFUSED or self._closing.wait(PAUSE_S):
                self.num_dropped += len(batch)
                return

    def _patience_s(self) -> float:
        if not self._closing.is_set():
            return CALL_TIMEOUT_S
        return max(0.01, min(CALL_TIMEOUT_S, self._close_at - time.monotonic()))

    def _note(self, answer: Answer, words: str) -> None:
        """Log one line when failures begin and one when they end: an unreachable collector must not fill the log."""
        is_reachable = answer is Answer.TAKEN
        if is_reachable != self._is_reachable:
            self._is_reachable = is_reachable
            if is_reachable:
                logger.info("the collector takes spans again; %d were dropped so far", self.num_dropped)
            else:
                logger.warning("the collector does not take spans: %s; requests go on, their traces may be lost", words)


SCOPE = "pdmesh"
HEADERS_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
CA_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE")
_SAMPLED_FLAG = 0x01
_MISSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 5000))


def open_outbox(endpoint: Endpoint, service: str, resource: Attributes, env: Mapping[str, str]) -> Sender:
    """Return a sender to the collector at `endpoint`. Raises ConfigError for certificates that cannot be read."""
    return Sender(OtlpExporter(endpoint, encode_resource(service, resource, env), env))


class OtlpExporter:
    """Call `TraceService/Export`."""

    def __init__(self, endpoint: Endpoint, resource: resource_pb2.Resource, env: Mapping[str, str]) -> None:
        self._resource = resource
        self._clock_ns = time.time_ns() - time.monotonic_ns()  # read once: spans of a process keep their distances
        self._headers = tuple(headers(env))
        self._channel = open_channel(endpoint, env)
        self._stub = trace_service_pb2_grpc.TraceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def send(self, spans: Sequence[Span], timeout_s: float) -> tuple[Answer, str]:
        """Make one call."""
        request = encode_request(spans, self._resource, self._clock_ns)
        try:
            answer = self._stub.Export(request, timeout=timeout_s, metadata=self._headers)
        except grpc.RpcError as error:
            code = error.code()
            words = f"{code.name}: {error.details()}"
            return (Answer.MISSING if code in _MISSING else Answer.REFUSED), words
        except ValueError:  # the channel was closed meanwhile
            return Answer.MISSING, "closed"
        if answer.partial_success.rejected_spans:
            return Answer.REFUSED, answer.partial_success.error_message
        return Answer.TAKEN, ""

    def close(self) -> None:
        """End a running call."""
        self._channel.close()


def encode_resource(service: str, resource: Attributes, env: Mapping[str, str]) -> resource_pb2.Resource:
    """Return the resource: OTEL_RESOURCE_ATTRIBUTES, overridden by our attributes."""
    given: dict[str, Value] = dict(_pairs(env.get("OTEL_RESOURCE_ATTRIBUTES", "")))
    all_of_them = {**given, **resource, "service.name": service, "process.pid": os.getpid(), "telemetry.sdk.language": "python"}
    return resource_pb2.Resource(attributes=_attributes(all_of_them))


def encode_request(
    spans: Sequence[Span], resource: resource_pb2.Resource, clock_ns: int
) -> trace_service_pb2.ExportTraceServiceRequest:
    """Encode the spans. `clock_ns`: offset of the wall clock from the monotonic one."""
    scope = trace_pb2.ScopeSpans(
        scope=common_pb2.InstrumentationScope(name=SCOPE), spans=[encode_span(span, clock_ns) for span in spans]
    )
    return trace_service_pb2.ExportTraceServiceRequest(
        resource_spans=[trace_pb2.ResourceSpans(resource=resource, scope_spans=[scope])]
    )


def encode_span(span: Span, clock_ns: int) -> trace_pb2.Span:
    """Encode one span."""
    context = span.context
    encoded = trace_pb2.Span(
        trace_id=context.trace_id.to_bytes(16, "big"),
        span_id=context.span_id.to_bytes(8, "big"),
        parent_span_id=span.parent_id.to_bytes(8, "big") if span.parent_id else b"",
        name=span.name,
        kind=span.kind.value,  # type: ignore[arg-type]  # numbered alike
        flags=_SAMPLED_FLAG if context.is_sampled else 0,
        trace_state=context.state,
        start_time_unix_nano=span.start_ns + clock_ns,
        end_time_unix_nano=span.end_ns + clock_ns,
        attributes=_attributes(span.attributes),
        events=[_event(event, clock_ns) for event in span.events],
        links=[_link(link) for link in span.links],
        dropped_events_count=span.num_dropped_events,
    )
    if span.is_failed:
        encoded.status.code = trace_pb2.Status.STATUS_CODE_ERROR
        encoded.status.message = span.problem
    return encoded


def headers(env: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the headers that the environment names, such as a key of the collector's."""
    text = next((env[name] for name in HEADERS_VARIABLES if env.get(name)), "")
    return [(key.lower(), value) for key, value in _pairs(text)]


def _pairs(text: str) -> list[tuple[str, str]]:
    """Parse `key=value,key=value`, percent-encoded; invalid pairs are left out, as OpenTelemetry does."""
    pairs = (part.partition("=") for part in text.split(","))
    return [(key.strip(), unquote(value.strip())) for key, separator, value in pairs if separator and key.strip()]


def _attributes(attributes: Attributes) -> list[common_pb2.KeyValue]:
    return [common_pb2.KeyValue(key=key, value=_value(value)) for key, value in attributes.items()]


def _value(value: Value) -> common_pb2.AnyValue:
    match value:
        case str():
            return common_pb2.AnyValue(string_value=value)
        case bool():
            return common_pb2.AnyValue(bool_value=value)
        case int():
            return common_pb2.AnyValue(int_value=value)
        case float():
            return common_pb2.AnyValue(double_value=value)
        case _:
            return common_pb2.AnyValue(array_value=common_pb2.ArrayValue(values=[_value(item) for item in value]))


def _event(event: Event, clock_ns: int) -> trace_pb2.Span.Event:
    return trace_pb2.Span.Event(name=event.name, time_unix_nano=event.at_ns + clock_ns, attributes=_attributes(event.attributes))


def _link(context: SpanContext) -> trace_pb2.Span.Link:
    return trace_pb2.Span.Link(trace_id=context.trace_id.to_bytes(16, "big"), span_id=context.span_id.to_bytes(8, "big"))


def open_channel(endpoint: Endpoint, env: Mapping[str, str]) -> grpc.Channel:
    """Open a channel, encrypted or not. Raises ConfigError for certificates that cannot be read."""
    if not endpoint.encrypted:
        return grpc.insecure_channel(endpoint.target, options=_OPTIONS)
    return grpc.secure_channel(endpoint.target, grpc.ssl_channel_credentials(read_ca(env)), options=_OPTIONS)


def read_ca(env: Mapping[str, str]) -> bytes | None:
    """Return the CA that signs the collector's certificate; None: the CAs of this machine."""
    for name in CA_VARIABLES:
        if env.get(name):
            with contextlib.suppress(OSError):
                return Path(env[name]).read_bytes()
            raise ConfigError(name, f"{env[name]} cannot be read", "name a PEM file with the collector's CA")
    return None
