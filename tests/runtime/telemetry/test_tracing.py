"""Spans of one process: parents, times, and what is sent of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.runtime.config import ConfigError, parse
from pdmesh.runtime.telemetry.config import TelemetryConfig
from pdmesh.runtime.telemetry.propagation import SpanContext
from pdmesh.runtime.telemetry.spans import MAX_EVENTS, Kind
from pdmesh.runtime.telemetry.tracing import OFF, Held, Tracing, is_sampled, open_tracing
from tests.runtime.telemetry.collected import Collected


def test_a_child_belongs_to_its_parent() -> None:
    outbox = Collected()
    tracing = Tracing(outbox)
    root = tracing.begin("root", None, start_ns=10, kind=Kind.SERVER)
    tracing.record("child", root.context, 11, 19, attributes={"a": 1})
    root.end(20)
    child, ended = outbox.spans
    assert (child.parent_id, child.context.trace_id) == (ended.context.span_id, ended.context.trace_id)
    assert (ended.parent_id, ended.start_ns, ended.end_ns) == (0, 10, 20)
    assert child.context.span_id != ended.context.span_id


def test_a_span_ends_once_and_never_before_it_began() -> None:
    outbox = Collected()
    span = Tracing(outbox).begin("x", None, start_ns=100)
    span.end(50)
    span.end(200)
    assert [(each.start_ns, each.end_ns) for each in outbox.spans] == [(100, 100)]


def test_a_callers_trace_goes_on_with_its_decision_and_its_state() -> None:
    outbox = Collected()
    tracing = Tracing(outbox, share=1.0)
    for is_wanted in (True, False):
        caller = SpanContext(7, 8, is_wanted, "vendor=1")
        tracing.record("x", caller, 0, 1)
    assert [(span.context.trace_id, span.parent_id, span.context.state) for span in outbox.spans] == [(7, 8, "vendor=1")]


def test_what_was_not_sampled_is_sent_when_it_is_wanted() -> None:
    outbox = Collected()
    tracing = Tracing(outbox, share=0.0)
    bad = tracing.begin("bad", None, start_ns=0)
    tracing.record("before", bad.context, 1, 2)
    tracing.record("other", None, 1, 2)
    assert outbox.names == []
    tracing.keep([bad.context.trace_id])
    bad.end(3)
    assert outbox.names == ["before", "bad"]


def test_very_many_events_are_counted_only() -> None:
    span = Tracing(Collected()).begin("x", None, start_ns=0)
    for number in range(MAX_EVENTS + 3):
        span.event("chunk", number)
    assert (len(span.events), span.num_dropped_events) == (MAX_EVENTS, 3)


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=60), st.integers(0, 8))
def test_held_spans_stay_within_their_bound(steps: list[tuple[int, bool]], bound: int) -> None:
    """The oldest traces give way; whatever happens, a span is held, given out or gone, never twice."""
    held, made, seen = Held(bound), Tracing(Collected()), list[int]()
    for trace_id, is_wanted in steps:
        if is_wanted:
            seen += [span.context.span_id for span in held.keep(trace_id)]
        else:
            span = made.begin("x", SpanContext(trace_id, 1), start_ns=0)
            if not held.hold(span):
                seen.append(span.context.span_id)
        assert 0 <= held.num_spans <= bound
    assert len(set(seen)) == len(seen)


@given(st.integers(0, 2**128 - 1))
def test_a_larger_share_takes_what_a_smaller_one_takes(trace_id: int) -> None:
    taken = [is_sampled(trace_id, share) for share in (0.0, 0.1, 0.5, 1.0)]
    assert taken == sorted(taken) and taken[0] is False and taken[-1] is True


def test_off_sends_nothing_and_imports_nothing() -> None:
    assert open_tracing(TelemetryConfig(), "pdmesh-router", {}, {}) is OFF
    assert OFF.extract([("traceparent", f"00-{1:032x}-{1:016x}-01")]) is None
    assert OFF.inject(OFF.begin("x", None, start_ns=0)) is None
    shows = "print([name for name in sys.modules if name.startswith('opentelemetry.proto')])"
    program = f"import sys, router.main, pdmesh.runtime.telemetry.tracing\n{shows}"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("flags", "env", "target", "encrypted"),
    [
        (["--otlp-endpoint", "here:4317"], {}, "here:4317", False),
        (["--otlp-endpoint", "https://here:1"], {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://there:2"}, "here:1", True),
        ([], {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://there:2/"}, "there:2", False),
        (
            [],
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:2", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://[::1]:3"},
            "[::1]:3",
            False,
        ),
    ],
)
def test_where_traces_go(flags: list[str], env: dict[str, str], target: str, encrypted: bool) -> None:
    found = parse(TelemetryConfig, flags, env, prog="x").endpoint(env)
    assert found is not None and (found.target, found.encrypted) == (target, encrypted)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://there:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://there:4317", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_what_is_meant_for_others_is_left_alone(env: dict[str, str]) -> None:
    assert TelemetryConfig().endpoint(env) is None


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--otlp-endpoint", "nowhere"], "--otlp-endpoint"),
        (["--otlp-endpoint", "http://x:1/v1/traces"], "--otlp-endpoint"),
        (["--trace-share", "1.1"], "--trace-share"),
        (["--trace-held-spans", "-1"], "--trace-held-spans"),
        (["--metrics-port", "70000"], "--metrics-port"),
    ],
)
def test_a_wrong_setting_is_named(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(TelemetryConfig, flags, {}, prog="x")
    assert raised.value.field == named


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT: 'nowhere' is no collector"):
        open_tracing(TelemetryConfig(), "x", {}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "nowhere"})
