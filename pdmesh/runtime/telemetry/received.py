"""Reads OTLP traces as they arrive at our collector, and validates their spans.

A span is kept as its bytes and read in full only on demand: most never are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

MAX_SPAN_BYTES = 64 << 10
MAX_NAME_CHARS = 256
MAX_LINKED = 128
_TRACE_ID_BYTES, _SPAN_ID_BYTES = 16, 8
_OBJECT_BYTES, _LINK_BYTES = 700, 120  # overhead of Python objects, around the received bytes
_MAX_TEXT_CHARS = 4096

Value = str | bool | int | float | list["Value"] | None


class Unreadable(ValueError):
    """Raised for bytes that are not OTLP."""


@dataclass(frozen=True, slots=True)
class Process:
    """Identify the sending process: `service` such as pdmesh-worker, `instance` its name."""

    service: str
    instance: str


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """Hold a span. Ids are hexadecimal; `parent_id` "" is a root. Times are wall clock nanoseconds. `linked`: ids of traces that
    it names."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    process: Process
    linked: frozenset[str]
    encoded: bytes

    @property
    def num_bytes(self) -> int:
        """Return the approximate number of bytes that it takes to keep."""
        return len(self.encoded) + _OBJECT_BYTES + _LINK_BYTES * len(self.linked)

    def read(self) -> Details:
        """Read the span in full."""
        span = trace_pb2.Span.FromString(self.encoded)
        return Details(
            kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower() if span.kind in _KINDS else "",
            attributes=_attributes(span.attributes),
            events=tuple(Event(e.name[:MAX_NAME_CHARS], e.time_unix_nano, _attributes(e.attributes)) for e in span.events),
            is_failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
            problem=span.status.message[:_MAX_TEXT_CHARS],
        )


@dataclass(frozen=True, slots=True)
class Event:
    """Describe an event within a span, at wall clock nanoseconds."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Details:
    """Hold a span's content beyond its name and times."""

    kind: str
    attributes: Mapping[str, Value]
    events: tuple[Event, ...]
    is_failed: bool
    problem: str


@dataclass(frozen=True, slots=True)
class Export:
    """Hold the spans of one call. `num_refused` of its spans are invalid; `refusal` says why the first one is."""

    spans: tuple[ReceivedSpan, ...]
    num_refused: int = 0
    refusal: str = ""

    def answer(self) -> bytes:
        """Return an ExportTraceServiceResponse."""
        response = trace_service_pb2.ExportTraceServiceResponse()
        if self.num_refused:
            response.partial_success.rejected_spans = self.num_refused
            response.partial_success.error_message = self.refusal
        return response.SerializeToString()


def read_export(encoded: bytes) -> Export:
    """Read an ExportTraceServiceRequest. Raises Unreadable."""
    try:
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(encoded)
    except DecodeError:
        raise Unreadable("this is no ExportTraceServiceRequest") from None
    spans, problems = list[ReceivedSpan](), list[str]()
    for resource_spans in request.resource_spans:
        process = _process(resource_spans.resource.attributes)
        for span in (span for scope in resource_spans.scope_spans for span in scope.spans):
            problem = _problem(span)
            if problem:
                problems.append(problem)
            else:
                spans.append(_received(span, process))
    return Export(tuple(spans), len(problems), problems[0] if problems else "")


_KINDS = frozenset(trace_pb2.Span.SpanKind.values())


def _problem(span: trace_pb2.Span) -> str:
    """Return why the span is invalid; "" if it is valid."""
    if len(span.trace_id) != _TRACE_ID_BYTES or not any(span.trace_id):
        return "trace_id: must be 16 bytes that are not all 0"
    if len(span.span_id) != _SPAN_ID_BYTES or not any(span.span_id):
        return "span_id: must be 8 bytes that are not all 0"
    if len(span.parent_span_id) not in (0, _SPAN_ID_BYTES) or span.parent_span_id == span.span_id:
        return "parent_span_id: must be empty or 8 bytes of another span"
    if not 0 < len(span.name) <= MAX_NAME_CHARS:
        return f"name: must have 1 to {MAX_NAME_CHARS} characters"
    if not 0 < span.start_time_unix_nano <= span.end_time_unix_nano:
        return "end_time_unix_nano: must not be before start_time_unix_nano, which must be set"
    if span.ByteSize() > MAX_SPAN_BYTES:
        return f"span: is larger than {MAX_SPAN_BYTES} bytes"
    return ""


def _received(span: trace_pb2.Span, process: Process) -> ReceivedSpan:
    return ReceivedSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() if any(span.parent_span_id) else "",
        name=span.name,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        process=process,
        linked=frozenset(link.trace_id.hex() for link in span.links[:MAX_LINKED]),
        encoded=span.SerializeToString(),
    )


def _process(attributes: Iterable[common_pb2.KeyValue]) -> Process:
    named = {each.key: each.value.string_value[:MAX_NAME_CHARS] for each in attributes if each.key.startswith("service.")}
    return Process(named.get("service.name", ""), named.get("service.instance.id", ""))


def _attributes(attributes: Iterable[common_pb2.KeyValue]) -> dict[str, Value]:
    return {each.key[:MAX_NAME_CHARS]: _value(each.value) for each in attributes}


def _value(value: common_pb2.AnyValue) -> Value:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value[:_MAX_TEXT_CHARS]
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "array_value":
            return [_value(item) for item in value.array_value.values if item.WhichOneof("value") != "array_value"]
    return None
