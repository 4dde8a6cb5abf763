"""A collector as small as can be: takes traces by OTLP over gRPC and remembers them, for tests and measurements."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

Value = str | bool | int | float | tuple[object, ...] | None


@dataclass(frozen=True)
class ReceivedEvent:
    """Of a span."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value]


@dataclass(frozen=True)
class Received:
    """A span as it arrived. Ids are hexadecimal; `parent_id` "" is a root; `process` is its service.instance.id."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    events: tuple[ReceivedEvent, ...]
    links: tuple[tuple[str, str], ...]
    is_failed: bool
    problem: str
    resource: Mapping[str, Value]

    @property
    def process(self) -> str:
        return str(self.resource.get("service.instance.id", ""))

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on loopback inside `with`. `answer_after_s`: how long it lets a caller wait; `metrics`: who takes them on the same
    port."""

    def __init__(
        self,
        *,
        answer_after_s: float = 0.0,
        port: int = 0,
        metrics: metrics_service_pb2_grpc.MetricsServiceServicer | None = None,
    ) -> None:
        self.answer_after_s = answer_after_s
        self.num_calls = 0
        self.metadata: list[Mapping[str, str | bytes]] = []
        self._spans: list[Received] = []
        self._changed = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        if metrics is not None:
            metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(metrics, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.endpoint = f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Takes nothing more; idempotent."""
        self._server.stop(None).wait()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._changed:
            self.num_calls += 1
            self.metadata.append(dict(context.invocation_metadata()))
        time.sleep(self.answer_after_s)
        with self._changed:
            self._spans.extend(read(request))
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Received]:
        """All so far, in the order of their arrival."""
        with self._changed:
            return list(self._spans)

    def trace(self, trace_id: str) -> list[Received]:
        """Of one trace, by time."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start_ns)

    def wait(self, enough: Callable[[list[Received]], bool], timeout_s: float = 20.0) -> list[Received]:
        """Until the spans are `enough`; returns them. Blocks: from an event loop, in a thread. AssertionError after the time."""
        with self._changed:
            if not self._changed.wait_for(lambda: enough(self._spans), timeout_s):
                names = sorted({f"{span.name}@{span.process}" for span in self._spans})
                raise AssertionError(f"after {timeout_s} s there are {len(self._spans)} spans: {', '.join(names)}")
            return list(self._spans)


def read(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterable[Received]:
    """All spans of one call."""
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield _received(span, resource)


def _received(span: trace_pb2.Span, resource: Mapping[str, Value]) -> Received:
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple(ReceivedEvent(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        is_failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        problem=span.status.message,
        resource=resource,
    )


def _attributes(attributes: Iterable[common_pb2.KeyValue]) -> dict[str, Value]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: common_pb2.AnyValue) -> Value:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "array_value":
            return tuple(_value(item) for item in value.array_value.values)
    return None
