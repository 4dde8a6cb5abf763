"""Spans on their way to a collector: a real one over gRPC, one that is away, one that is slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from pdmesh.runtime.ports import reserve
from pdmesh.runtime.telemetry.config import Endpoint, TelemetryConfig
from pdmesh.runtime.telemetry.otlp import Answer, Sender
from pdmesh.runtime.telemetry.propagation import SpanContext
from pdmesh.runtime.telemetry.spans import Event, Kind, Span, Value
from pdmesh.runtime.telemetry.tracing import Tracing, open_tracing
from tests.support.otlp_receiver import OtlpReceiver

SERVER_KIND = 2


class Gate:
    """An exporter that answers when it is told to."""

    def __init__(self) -> None:
        self.may_answer, self.asked = threading.Event(), threading.Event()
        self.answers: list[Answer] = []
        self.taken: list[str] = []
        self.sizes: list[int] = []  # of the calls

    def send(self, spans: Sequence[Span], timeout_s: float) -> tuple[Answer, str]:
        self.asked.set()
        self.sizes.append(len(spans))
        self.may_answer.wait()
        answer = self.answers.pop(0) if self.answers else Answer.TAKEN
        if answer is Answer.TAKEN:
            self.taken += [span.name for span in spans]
        return answer, "so it was"

    def close(self) -> None:
        self.may_answer.set()


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


def tracing_to(endpoint: str, **env: str) -> Tracing:
    return open_tracing(TelemetryConfig(otlp_endpoint=endpoint), "pdmesh-router", {"service.instance.id": "r1"}, env)


def test_a_span_arrives_as_it_was(receiver: OtlpReceiver) -> None:
    tracing = tracing_to(receiver.endpoint, OTEL_RESOURCE_ATTRIBUTES="deployment.environment=a%20b,service.name=not-me")
    began_at, now_ns = time.time_ns(), time.monotonic_ns()
    caller, other = SpanContext(0xABC, 0xDEF, True, "v=1"), SpanContext(5, 6)
    attributes: dict[str, Value] = {"text": "x", "yes": True, "number": 3, "share": 0.5, "names": ["stop", "length"]}
    event = Event("chunk", now_ns + 10, {"tokens": 7})
    tracing.record(
        "generate tiny", caller, now_ns, now_ns + 50, kind=Kind.SERVER, attributes=attributes, events=[event], links=[other]
    )
    failing = tracing.begin("attempt", caller, start_ns=now_ns)
    failing.fail("UNAVAILABLE", "it fell silent")
    failing.end()
    tracing.close()
    span, failed = receiver.wait(lambda spans: len(spans) == 2)
    assert (span.name, span.trace_id, span.parent_id, span.kind) == (
        "generate tiny",
        f"{0xABC:032x}",
        f"{0xDEF:016x}",
        SERVER_KIND,
    )
    assert span.attributes == {**attributes, "names": ("stop", "length")}
    assert span.duration_ns == 50 and abs(span.start_ns - began_at) < 1e9
    assert [(each.name, each.at_ns - span.start_ns, each.attributes) for each in span.events] == [("chunk", 10, {"tokens": 7})]
    assert span.links == ((f"{5:032x}", f"{6:016x}"),)
    assert span.process == "r1" and span.resource["service.name"] == "pdmesh-router"
    assert span.resource["deployment.environment"] == "a b"
    assert failed.is_failed and failed.problem == "it fell silent" and failed.attributes["error.type"] == "UNAVAILABLE"


def test_headers_of_the_environment_are_sent_along(receiver: OtlpReceiver) -> None:
    tracing = tracing_to(receiver.endpoint, OTEL_EXPORTER_OTLP_HEADERS="Api-Key=a%2Cb, nothing")
    tracing.record("x", None, 0, 1)
    tracing.close()
    receiver.wait(lambda spans: bool(spans))
    assert receiver.metadata[0]["api-key"] == "a,b"


def test_a_collector_that_is_away_costs_nobody_anything() -> None:
    """Spans are dropped beyond the bound; closing takes as long as it may, not longer."""
    with reserve("127.0.0.1", 0, "--port") as held:
        endpoint = f"127.0.0.1:{held.getsockname()[1]}"  # taken, and nobody listens
        tracing = tracing_to(endpoint)
        for number in range(20_000):
            tracing.record("x", None, number, number + 1)
        began = time.monotonic()
        tracing.close(0.5)
        assert time.monotonic() - began < 5
    sender = tracing._outbox
    assert isinstance(sender, Sender)
    assert sender.num_sent == 0 and sender.num_dropped >= 20_000 - 8192


def test_a_collector_that_comes_back_gets_what_waited() -> None:
    gate = Gate()
    gate.answers = [Answer.MISSING, Answer.TAKEN]
    gate.may_answer.set()
    sender = Sender(gate, gather_s=0.0)
    tracing = Tracing(sender)
    tracing.record("a", None, 0, 1)
    assert gate.asked.wait(10)
    sender._closing.wait(0.0)
    _until(lambda: sender.num_sent == 1)
    assert gate.taken == ["a"] and sender.num_dropped == 0
    tracing.close()


def test_what_is_refused_is_not_sent_again() -> None:
    gate = Gate()
    gate.answers = [Answer.REFUSED]
    gate.may_answer.set()
    sender = Sender(gate, gather_s=0.0)
    tracing = Tracing(sender)
    tracing.record("a", None, 0, 1)
    _until(lambda: sender.num_dropped == 1)
    tracing.record("b", None, 0, 1)
    tracing.close()
    assert gate.taken == ["b"] and sender.num_dropped == 1


def test_while_a_collector_hangs_the_queue_is_bounded() -> None:
    gate = Gate()
    sender = Sender(gate, max_queued=10, gather_s=0.0)
    tracing = Tracing(sender)
    tracing.record("first", None, 0, 1)
    assert gate.asked.wait(10)  # the thread has it, and hangs
    for _ in range(25):
        tracing.record("x", None, 0, 1)
    assert sender.num_dropped == 15
    gate.may_answer.set()
    tracing.close(10)
    assert len(gate.taken) == 11 and sender.num_dropped == 15
    tracing.record("late", None, 0, 1)
    assert sender.num_dropped == 16


def test_a_call_is_made_once_in_a_while_or_when_many_wait() -> None:
    gate = Gate()
    gate.may_answer.set()
    sender = Sender(gate, max_queued=400, gather_s=0.0, period_s=600.0)  # half of it is many
    tracing = Tracing(sender)
    tracing.record("first", None, 0, 1)
    _until(lambda: sender.num_sent == 1)
    for _ in range(30):
        tracing.record("x", None, 0, 1)
        time.sleep(0.004)  # in which each could be sent by itself
    for _ in range(200):
        tracing.record("x", None, 0, 1)
    _until(lambda: sender.num_sent >= 200)
    tracing.close(10)
    assert sender.num_sent == 231 and len(gate.sizes) < 10


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_encrypted_endpoint_names_the_file_that_it_cannot_read() -> None:
    from pdmesh.runtime.config import ConfigError
    from pdmesh.runtime.telemetry.otlp import OtlpExporter, encode_resource

    env = {"OTEL_EXPORTER_OTLP_CERTIFICATE": "/does/not/exist"}
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_CERTIFICATE"):
        OtlpExporter(Endpoint("here:1", True), encode_resource("x", {}, {}), env)
