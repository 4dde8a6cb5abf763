"""Numbers from records."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.loadtest.record import ObjectiveBook, Objectives, Outcome
from pdmesh.loadtest.stats import Latency, Window, met, phases_of_slowest, quantile, slowest, summarise, timeline
from tests.pdmesh.loadtest.records import record

WINDOW = Window(0, 10)
TIGHT = Objectives(ttft_ms=500, tpot_ms=100, quantile=0.5)
SAMPLES = st.lists(st.floats(0, 1e6), min_size=2, max_size=60)


@given(SAMPLES)
def test_quantiles_are_the_inclusive_ones(values: list[float]) -> None:
    ordered = sorted(values)
    cuts = statistics.quantiles(ordered, n=100, method="inclusive")
    assert [quantile(ordered, q / 100) for q in range(1, 100)] == pytest.approx(cuts)
    assert quantile(ordered, 0) == ordered[0] and quantile(ordered, 1) == ordered[-1]


def test_latencies_count_from_when_the_request_was_due() -> None:
    late = record(1.0, 1.5, 1.6, 1.8, sent_s=1.4)
    assert late.ttft_s == pytest.approx(0.5) and late.ttft_from_sent_s == pytest.approx(0.1)
    assert late.tpot_s == pytest.approx(0.15) and late.e2e_s == pytest.approx(0.8) and late.lateness_s == pytest.approx(0.4)
    assert late.gaps_s == pytest.approx([0.1, 0.2])


def test_one_token_has_no_time_per_token() -> None:
    assert record(0, 0.1).tpot_s is None and Latency.of([None]) == Latency()


@pytest.mark.parametrize(
    ("one", "verdict"),
    [
        (record(0, 0.4, 0.45), True),
        (record(0, 0.6, 0.65), False),
        (record(0, 0.4, 0.6), False),
        (record(0, 0.4), True),
        (record(0, outcome=Outcome.REFUSED), False),
        (record(0, 0.1, outcome=Outcome.TIMEOUT), False),
        (record(0, outcome=Outcome.NOT_SENT), False),
        (record(0, outcome=Outcome.CANCELLED, end_s=0.2), None),
        (record(0, 0.3, outcome=Outcome.CANCELLED, end_s=0.9), None),
        (record(0, outcome=Outcome.CANCELLED, end_s=0.9), False),
        (record(0, 0.6, outcome=Outcome.CANCELLED, end_s=0.9), False),
    ],
)
def test_who_keeps_the_objectives(one: object, verdict: bool | None) -> None:
    assert met(one, TIGHT) is verdict  # type: ignore[arg-type]


def test_a_summary() -> None:
    records = [
        record(0, 0.4, 0.45, tenant="a"),
        record(1, 1.9, 1.95, tenant="b"),
        record(2, outcome=Outcome.REFUSED, error="full"),
        record(3, outcome=Outcome.CANCELLED, end_s=3.1),
        record(4, outcome=Outcome.ABORTED),
        record(10, 10.1, 10.2),
    ]
    summary = summarise(records, WINDOW, ObjectiveBook(TIGHT))
    assert summary.num_requests == 4 and summary.outcomes == {"ok": 2, "refused": 1, "cancelled": 1}
    assert summary.attainment == pytest.approx(1 / 3) and summary.attained is False
    assert summary.goodput == pytest.approx(0.1) and summary.request_rate == pytest.approx(0.4)
    assert summary.output_token_rate == pytest.approx(0.4) and summary.errors == {"full": 1}
    assert summary.ttft.num_values == 2 and summary.ttft.p50 == pytest.approx(650)


def test_without_objectives_nothing_is_attained_or_missed() -> None:
    summary = summarise([record(0, 9.0)], WINDOW, ObjectiveBook(Objectives()))
    assert summary.attained is None and summary.attainment == 1


def test_classes_have_objectives_of_their_own() -> None:
    book = ObjectiveBook(Objectives(ttft_ms=100), {"batch": Objectives(ttft_ms=5000)})
    records = [record(0, 1.0, traffic_class="batch"), record(0, 1.0, traffic_class="chat")]
    assert summarise(records, WINDOW, book).attainment == 0.5


def test_phases_of_the_slowest_tenth() -> None:
    records = [record(0, 0.01 * number, phases_ms={"queue": float(number)}) for number in range(1, 101)]
    phases = phases_of_slowest(records)
    assert phases["all"]["queue"] == pytest.approx(50.5)
    assert phases["slowest 10 %"]["queue"] == pytest.approx(95.5) and phases["slowest 1 %"]["queue"] == 100


def test_the_slowest_include_those_never_answered() -> None:
    timed_out = record(0, outcome=Outcome.TIMEOUT, end_s=60.0, session=2)
    assert [r.session for r in slowest([record(0, 1.0, session=1), timed_out, record(0, outcome=Outcome.NOT_SENT)], 5)] == [2, 1]


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 400)), max_size=40))
def test_the_time_line_loses_nobody(times: list[tuple[float, float]]) -> None:
    records = [record(at_s, at_s + took_s) for at_s, took_s in times]
    bins = timeline(records, ObjectiveBook(Objectives()))
    step_s = bins[1].at_s - bins[0].at_s if len(bins) > 1 else 1.0
    assert len(bins) <= 241
    for name in ("due", "completed", "good"):
        assert sum(getattr(one, name) for one in bins) * step_s == pytest.approx(len(records))
    assert all(0 <= one.running <= len(records) for one in bins)
