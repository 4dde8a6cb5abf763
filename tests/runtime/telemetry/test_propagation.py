"""W3C Trace Context: what OpenTelemetry's own propagator reads, we read; what breaks the rules is ignored."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdmesh.runtime.telemetry.propagation import SpanContext, extract, inject, parse

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"

contexts = st.builds(SpanContext, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())


def theirs(traceparent: str) -> tuple[int, int, bool] | None:
    carrier = {"traceparent": traceparent}
    found = trace.get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()
    return (found.trace_id, found.span_id, found.trace_flags.sampled) if found.is_valid else None


@given(contexts)
def test_what_is_sent_is_read_again(context: SpanContext) -> None:
    assert extract(inject(context)) == context
    assert theirs(dict(inject(context))["traceparent"]) == (context.trace_id, context.span_id, context.is_sampled)


@given(st.text(st.sampled_from("0123456789abcdefABg-"), min_size=50, max_size=60) | st.text())
@example(GOOD)
@example(GOOD.replace("01", "03"))
@example(f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like")
def test_any_text_gives_a_context_that_they_see_too_or_none(traceparent: str) -> None:
    found = parse(traceparent)
    if found is not None:
        assert theirs(traceparent) == (found.trace_id, found.span_id, found.is_sampled)


@pytest.mark.parametrize(
    "traceparent",
    [
        "", "00", GOOD.upper(), GOOD + "-01", GOOD[:-1], f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-0x", GOOD.replace("-", "_"), "é" * 55, f"cc-{TRACE}-{SPAN}-01.",
    ],
)  # fmt: skip
def test_what_is_malformed_is_ignored(traceparent: str) -> None:
    assert extract([("traceparent", traceparent)]) is None


def test_two_parents_are_none() -> None:
    assert extract([("traceparent", GOOD), ("Traceparent", GOOD)]) is None


def test_headers_come_in_any_case_and_among_others() -> None:
    found = extract(
        [("x", "y"), ("TraceParent", GOOD), ("traceparent-bin", b"\0"), ("TRACESTATE", "a=1, b=2"), ("tracestate", "c=3")]
    )
    assert found == SpanContext(int(TRACE, 16), int(SPAN, 16), True, "a=1,b=2,c=3")


TOO_MANY, TOO_LONG = ",".join(f"k{n}=1" for n in range(33)), ",".join(f"{name}={name * 200}" for name in "abc")


@pytest.mark.parametrize("state", ["a", "a=1,a=2", "A=1", "a=\x07", TOO_MANY, TOO_LONG])
def test_a_bad_state_is_left_out_and_the_trace_goes_on(state: str) -> None:
    found = extract([("traceparent", GOOD), ("tracestate", state)])
    assert found is not None and found.state == ""


def test_without_a_context_nothing_is_sent() -> None:
    assert inject(None) == ()
