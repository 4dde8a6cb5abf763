"""What the console keeps: requests summed up, everything within bounds."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.console.store import MAX_SPANS_PER_TRACE, SUMMARY_BYTES, TTFT_PARTS, Bounds, Store
from pdmesh.runtime.telemetry.propagation import SpanContext
from pdmesh.runtime.telemetry.received import ReceivedSpan, read_export
from pdmesh.runtime.telemetry.spans import Kind, Span
from tests.pdmesh.console.made import Made, encoded, exports, spans_of

START_NS = 1_700_000_000 * 10**9
MADE = Made(START_NS, goals=(150, 16), admission=3.0)


def arrived(made: Made) -> list[ReceivedSpan]:
    return [span for body in exports(made) for span in read_export(body).spans]


def store_of(*requests: Made, bounds: Bounds | None = None) -> Store:
    store = Store(bounds or Bounds())
    for number, made in enumerate(requests):
        store.add(arrived(made), float(number))
    return store


def test_a_request_is_summed_up_from_its_routers_span() -> None:
    (request,) = store_of(MADE).requests()
    assert (request.request_id, request.model, request.router) == (MADE.request_id, MADE.model, "router-0")
    assert (request.prefill_worker, request.decode_worker, request.mode) == ("prefill-0", "decode-0", "remote")
    assert request.ttft_ms is not None and abs(sum(request.parts[name] for name in TTFT_PARTS) - request.ttft_ms) < 1e-6
    assert abs(request.total_ms - MADE.total) < 0.01 and request.start_s == START_NS / 1e9
    assert request.met is True and request.error == "" and request.dominant() == "prefill_compute"


def test_errors_and_missed_objectives_are_seen() -> None:
    broken, missed = store_of(replace(MADE, prefill_queue=400.0), replace(MADE, error="UNAVAILABLE")).requests()
    assert broken.error == "UNAVAILABLE" and missed.met is False and missed.dominant() == "prefill_queue"


def test_a_callers_own_span_is_no_request_but_stands_above_it() -> None:
    caller = SpanContext(0xABC, 0xDEF)
    span = Span("generate tiny", caller, 0, Kind.CLIENT, START_NS, {}, lambda _: None)
    span.end_ns = START_NS + 1
    store = store_of(replace(MADE, caller=caller))
    store.add(read_export(encoded("pdmesh-client", "", [span])).spans, 0.0)
    (request,) = store.requests()
    assert request.trace_id == caller.trace_name
    trace = store.trace(caller.trace_name)
    assert trace is not None and [span.parent_id for span in trace if span.span_id == request.span_id] == [f"{0xDEF:016x}"]


def test_several_requests_of_one_trace_are_all_there() -> None:
    caller = SpanContext(0xABC, 0xDEF)
    store = store_of(*(replace(MADE, caller=caller, request_id=f"r-{number}") for number in range(3)))
    assert sorted(request.request_id for request in store.requests()) == ["r-0", "r-1", "r-2"] and store.num_traces == 1


def test_a_span_that_comes_twice_counts_once() -> None:
    store, spans = Store(Bounds()), arrived(MADE)
    store.add(spans, 0.0)
    num_bytes = store.num_bytes
    store.add(spans, 0.0)
    assert store.num_bytes == num_bytes and len(list(store.requests())) == 1


def test_the_oldest_traces_give_way_by_number_and_by_age() -> None:
    requests = [replace(MADE, request_id=f"r-{number}") for number in range(5)]
    store = store_of(*requests, bounds=Bounds(max_traces=3))
    assert [request.request_id for request in store.requests()] == ["r-4", "r-3", "r-2"]
    store = store_of(*requests, bounds=Bounds(max_age_s=2.5))  # they came at 0, 1, 2, 3 and 4 s
    assert [request.request_id for request in store.requests()] == ["r-4", "r-3", "r-2"]
    before = store.version
    store.prune(100.0)
    assert store.num_traces == 0 and store.num_bytes == 0 and store.version != before


def test_a_trace_that_never_ends_keeps_room_for_its_request() -> None:
    spans = arrived(MADE)
    (root,) = [span for span in spans if span.name.startswith("generate")]
    many = [replace(spans[0], span_id=f"{number:016x}", trace_id=root.trace_id) for number in range(1, 2 * MAX_SPANS_PER_TRACE)]
    store = Store(Bounds())
    store.add([*many, root], 0.0)
    trace = store.trace(root.trace_id)
    assert trace is not None and len(trace) == MAX_SPANS_PER_TRACE + 1 and store.num_dropped == MAX_SPANS_PER_TRACE - 1
    assert len(list(store.requests())) == 1


def test_engine_steps_are_found_by_the_traces_that_they_name() -> None:
    store = store_of(MADE, replace(MADE, request_id="r-2"))
    served, other = [request.trace_id for request in store.requests()]
    steps = [
        Span("decode.step", SpanContext(99, number + 1), 0, Kind.INTERNAL, START_NS, {}, lambda _: None) for number in range(3)
    ]
    for step in steps:
        step.end_ns = START_NS + 1
        step.links = [SpanContext(int(served, 16), 5)]
    store.add(read_export(encoded("pdmesh-worker", "decode-0", steps)).spans, 2.0)
    assert len(store.steps_of(served)) == 3 and store.steps_of(other) == []
    assert store.num_traces == 2  # the steps of a worker are no trace to look at


def test_steps_give_way_before_traces_where_they_are_most_of_what_is_kept() -> None:
    store = Store(Bounds(max_bytes=60_000))
    store.add(arrived(MADE), 0.0)
    step = Span("decode.step", SpanContext(99, 1), 0, Kind.INTERNAL, START_NS, {"text": "x" * 1000}, lambda _: None)
    step.end_ns = START_NS + 1
    (span,) = read_export(encoded("pdmesh-worker", "decode-0", [step])).spans
    for _ in range(200):
        store.add([span], 1.0)
    assert store.num_traces == 1 and store.num_bytes <= 60_000


def test_spans_stand_in_the_order_of_their_beginnings() -> None:
    store = store_of(MADE)
    (request,) = store.requests()
    trace = store.trace(request.trace_id)
    assert trace is not None and len(trace) == sum(len(spans) for spans in spans_of(MADE).values())
    assert [span.start_ns for span in trace] == sorted(span.start_ns for span in trace) and trace[0].span_id == request.span_id
    assert store.trace("0" * 32) is None


@given(
    order=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=40),
    max_traces=st.integers(1, 4),
    max_bytes=st.integers(900, 30_000),
)
def test_bounds_hold_whatever_comes_in_whatever_order(order: list[tuple[int, int]], max_traces: int, max_bytes: int) -> None:
    made = [replace(MADE, caller=SpanContext(number + 1, 7)) for number in range(6)]
    pieces = [arrived(each) for each in made]
    store = Store(Bounds(max_traces, 5.0, max_bytes))
    for now_s, (which, piece) in enumerate(order):
        spans = pieces[which]
        store.add([spans[piece % len(spans)]], now_s / 4)
        kept = [span for number in range(6) for span in store.trace(f"{number + 1:032x}") or ()]
        summaries = SUMMARY_BYTES * len(list(store.requests()))
        assert store.num_bytes == sum(span.num_bytes for span in kept) + summaries <= max_bytes
        assert store.num_traces <= max_traces
