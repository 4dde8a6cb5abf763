"""The client library within its caller's trace: OpenTelemetry's real SDK on the caller's side, or none at all."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanKind, StatusCode, TraceFlags

from pdmesh.client.client import AsyncClient, Client, Delta
from pdmesh.errors import MeshError
from pdmesh.runtime.errors import InvalidArgument, Unavailable
from pdmesh.runtime.telemetry.propagation import SpanContext
from tests.pdmesh.fake_mesh import NUM_TOKENS, FakeRouter, Script, start_router


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    router = await start_router(Script())
    yield router
    await router.stop()


class Caller:
    """A program with OpenTelemetry's SDK."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("caller")

    @property
    def request(self) -> ReadableSpan:
        """The only span of the client library's."""
        (span,) = [span for span in self.exporter.get_finished_spans() if span.name.startswith("generate")]
        return span


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> Caller:
    caller = Caller()
    monkeypatch.setattr(trace, "get_tracer", caller.provider.get_tracer)  # a global provider could never be taken back
    return caller


def seen(router: FakeRouter) -> list[tuple[int, int] | None]:
    return [None if context is None else (context.trace_id, context.span_id) for context in router.script.callers]


async def test_the_router_goes_on_below_the_callers_span(router: FakeRouter, caller: Caller) -> None:
    with caller.tracer.start_as_current_span("mine") as mine:
        async with AsyncClient(router.address) as client:
            await client.generate("hello", model="fake")
    span = caller.request
    assert (span.name, span.kind) == ("generate fake", SpanKind.CLIENT)
    assert span.parent is not None and span.parent.span_id == mine.get_span_context().span_id
    assert span.context is not None and seen(router) == [(span.context.trace_id, span.context.span_id)]
    attributes = dict(span.attributes or {})
    assert (attributes["gen_ai.operation.name"], attributes["gen_ai.usage.output_tokens"]) == ("text_completion", NUM_TOKENS)
    assert span.status.status_code is StatusCode.UNSET


async def test_so_it_does_for_the_blocking_client(router: FakeRouter, caller: Caller) -> None:
    def call() -> None:
        with Client(router.address) as client:
            client.chat([("user", "hi")])

    await asyncio.to_thread(call)
    span = caller.request
    assert span.parent is None and span.context is not None
    assert seen(router) == [(span.context.trace_id, span.context.span_id)]
    assert dict(span.attributes or {})["gen_ai.operation.name"] == "chat"


async def test_a_lost_router_is_the_same_request(caller: Caller) -> None:
    script = Script(fail_after=3, failure=Unavailable("the router is gone"))
    router = await start_router(script)
    async with AsyncClient(router.address) as client:
        await client.generate("hello")
    await router.stop()
    assert len(set(seen(router))) == 1 and len(seen(router)) == 2
    assert caller.request.status.status_code is StatusCode.UNSET


async def test_an_error_is_the_spans_too(caller: Caller) -> None:
    router = await start_router(Script(fail_after=0, failure=InvalidArgument("text", "text: no")))
    async with AsyncClient(router.address) as client:
        with pytest.raises(MeshError):
            await client.generate("hello")
    await router.stop()
    assert caller.request.status.status_code is StatusCode.ERROR
    assert dict(caller.request.attributes or {})["error.type"] == "INVALID_ARGUMENT"


async def test_who_leaves_ends_the_span(caller: Caller) -> None:
    router = await start_router(Script(hang_after=2))
    async with AsyncClient(router.address) as client, client.generate_stream("hello") as stream:
        async for event in stream:
            if isinstance(event, Delta):
                break
    await router.stop()
    assert dict(caller.request.attributes or {})["error.type"] == "CANCELLED"


async def test_a_caller_without_an_sdk_is_not_in_the_way(router: FakeRouter) -> None:
    async with AsyncClient(router.address) as client:
        await client.generate("hello")
    assert seen(router) == [None]


async def test_a_context_of_somebody_else_is_handed_on(router: FakeRouter) -> None:
    """Such as a service that got it from its own caller, and has the API alone."""
    given = trace.SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(0))
    with trace.use_span(NonRecordingSpan(given)):
        async with AsyncClient(router.address) as client:
            await client.generate("hello")
    assert router.script.callers == [SpanContext(0xABC, 0xDEF, False)]


def test_the_library_imports_no_opentelemetry() -> None:
    program = "import sys, pdmesh.client\nprint([name for name in sys.modules if name.startswith('opentelemetry')])"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"
