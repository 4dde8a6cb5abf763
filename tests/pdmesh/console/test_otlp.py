"""OTLP in and on: what is no span is refused, what is one is kept, and everything reaches the next collector as it came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from pdmesh.console.otlp import METRICS, TRACES
from pdmesh.console.otlp import OtlpReceiver as Receiver
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.telemetry.received import MAX_SPAN_BYTES, Unreadable, read_export
from tests.pdmesh.console.conftest import Running, running_console
from tests.pdmesh.console.made import Script, exports, made_router, send, spans_of
from tests.pdmesh.console.test_store import MADE
from tests.support.otlp_receiver import OtlpReceiver

Change = Callable[[trace_pb2.Span], object]


def damaged(change: Change) -> bytes:
    """A router's call, one of whose spans is changed."""
    request = trace_service_pb2.ExportTraceServiceRequest.FromString(exports(MADE)[-1])
    change(request.resource_spans[0].scope_spans[0].spans[0])
    return request.SerializeToString()


WRONG: dict[str, Change] = {
    "trace_id": lambda span: setattr(span, "trace_id", b"short"),
    "zero": lambda span: setattr(span, "trace_id", bytes(16)),
    "span_id": lambda span: setattr(span, "span_id", b""),
    "parent": lambda span: setattr(span, "parent_span_id", b"odd"),
    "own parent": lambda span: setattr(span, "parent_span_id", span.span_id),
    "name": lambda span: setattr(span, "name", ""),
    "long name": lambda span: setattr(span, "name", "n" * 5000),
    "no time": lambda span: setattr(span, "start_time_unix_nano", 0),
    "backwards": lambda span: setattr(span, "end_time_unix_nano", 1),
    "large": lambda span: span.attributes.add(key="k").value.__setattr__("string_value", "x" * MAX_SPAN_BYTES),
}


async def test_nobody_shares_the_port_unless_it_is_held_for_them() -> None:
    def ignore(*_: object) -> None:
        pass

    first = Receiver("127.0.0.1", 0, ignore, ignore)
    address = await first.start()
    try:
        second = Receiver("127.0.0.1", int(address.rpartition(":")[2]), ignore, ignore)
        with pytest.raises(ConfigError, match="--otlp-port: cannot listen on"):
            await second.start()
    finally:
        await first.stop()


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_span_is_refused_and_the_others_are_taken(wrong: str) -> None:
    whole, export = read_export(exports(MADE)[-1]), read_export(damaged(WRONG[wrong]))
    assert export.num_refused == 1 and len(export.spans) == len(whole.spans) - 1 and ":" in export.refusal
    answer = trace_service_pb2.ExportTraceServiceResponse.FromString(export.answer())
    assert answer.partial_success.rejected_spans == 1 and answer.partial_success.error_message == export.refusal


def test_all_kinds_of_attributes_are_read() -> None:
    def change(span: trace_pb2.Span) -> None:
        for key, field, value in (
            ("t", "string_value", "x"),
            ("b", "bool_value", True),
            ("i", "int_value", 7),
            ("d", "double_value", 0.5),
        ):
            setattr(span.attributes.add(key=key).value, field, value)
        span.attributes.add(key="a").value.array_value.values.add().string_value = "y"
        span.attributes.add(key="none")
        span.status.code = trace_pb2.Status.STATUS_CODE_ERROR
        span.status.message = "broken"
        span.events.add(name="chunk", time_unix_nano=5)

    (details,) = [d for span in read_export(damaged(change)).spans if (d := span.read()).is_failed]
    assert {key: details.attributes[key] for key in ("t", "b", "i", "d", "a", "none")} == {
        "t": "x", "b": True, "i": 7, "d": 0.5, "a": ["y"], "none": None,
    }  # fmt: skip
    assert details.problem == "broken" and [(event.name, event.at_ns) for event in details.events] == [("chunk", 5)]


def test_what_is_no_otlp_is_said_to_be_none() -> None:
    with pytest.raises(Unreadable):
        read_export(b"\xff\xff nothing of the kind")


async def call(address: str, method: str, body: bytes) -> bytes:
    async with grpc.aio.insecure_channel(address) as channel:
        unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
        return await unary(body, timeout=10)


async def test_calls_are_answered_as_otlp_wants_it(console: Running) -> None:
    (answer,) = await send(console.otlp, damaged(WRONG["zero"]))
    assert trace_service_pb2.ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans == 1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await send(console.otlp, b"\xff\xff nothing of the kind")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await send(console.otlp, bytes(9 << 20))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await call(console.otlp, METRICS, metrics_service_pb2.ExportMetricsServiceRequest().SerializeToString()) == b""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(console.otlp, "/some.Other/Export", b"")
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_everything_reaches_the_next_collector_also_when_it_comes_late() -> None:
    with OtlpReceiver() as collector:
        port = collector.port
    script, count = Script(), sum(len(spans) for spans in spans_of(MADE).values())
    async with made_router(script) as router, running_console(router, script, forward_otlp=f"127.0.0.1:{port}") as console:
        await console.take(MADE)
        with OtlpReceiver(port=port) as collector:
            spans = await asyncio.to_thread(collector.wait, lambda spans: len(spans) == count)
            names = {(span.name, span.process) for span in spans}
            assert {("prefill.compute", "prefill-0"), (f"generate {MADE.model}", "router-0"), ("decode", "decode-0")} <= names
            await console.take(MADE)
            await asyncio.to_thread(collector.wait, lambda spans: len(spans) == 2 * count)


def test_the_methods_are_those_of_opentelemetry() -> None:
    service = trace_service_pb2.DESCRIPTOR.services_by_name["TraceService"]
    assert f"/{service.full_name}/{service.methods[0].name}" == TRACES
    service = metrics_service_pb2.DESCRIPTOR.services_by_name["MetricsService"]
    assert f"/{service.full_name}/{service.methods[0].name}" == METRICS
