"""The page needs nothing but itself, is well-formed, and hides nothing that was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.loadtest.record import ObjectiveBook, Objectives, Outcome
from pdmesh.loadtest.reports import comparison, html
from pdmesh.loadtest.reports import text as reports_text
from pdmesh.loadtest.reports.charts import Axis, cdf, linear, logarithmic, number_text
from pdmesh.loadtest.result import Result, make_result
from pdmesh.loadtest.runner import RunLog
from pdmesh.loadtest.stats import Window
from tests.pdmesh.loadtest.records import record
from tests.pdmesh.loadtest.test_compare import measured
from tests.support.terminal import plain

VOID = {"meta", "line", "circle", "rect", "path"}


class Balance(HTMLParser):
    """Fails on a tag that closes what was not opened last."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.num: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.num[tag] = self.num.get(tag, 0) + 1
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(page: str) -> Balance:
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert not re.search(r"<script|<link|<img|src=|href=|@import|url\(|https?://", page.replace("http://t&", ""))
    return balance


def empty() -> Result:
    return make_result(
        RunLog(), Window(0, 1), ObjectiveBook(Objectives()), target="t", model="", started_at="", settings={}, max_lateness_s=1
    )


def test_the_page_is_whole_and_alone() -> None:
    result = replace(
        measured(1, num=300),
        settings={"api_key": "hidden", "what": "<b>"},
        capacity={
            "capacities": [{"attainment": 0.9, "rate": 2.0, "failed_rate": None, "goodput": 1.9}],
            "trials": [{"rate": 2.0, "attainment": 0.95, "goodput": 1.9}],
        },
    )
    page = html.page(result)
    balance = check(page)
    # Rate, running, TTFT, TPOT, replicas, queues; three distributions.
    assert balance.num["svg"] == 9
    for text in (
        "objective 400 ms",
        "% within 400 ms",
        'class="bar"',
        "prefill workers",
        "queue",
        "Slowest requests",
        "Capacity",
        "&lt;b&gt;",
    ):
        assert text in page


def test_nothing_measured_is_a_page_and_a_text_too() -> None:
    check(html.page(empty()))
    assert any("no request was due" in line for line in plain(*reports_text.lines(empty())))


def searched(seed: int, rate: float) -> Result:
    """As a search leaves it: `rate` held, in one of two windows at least, and twice that did not."""
    trials = [(rate, 0.8, 0.8 * rate), (2 * rate, 0.1, 0.2 * rate), (rate, 1.0, rate)]
    return replace(
        measured(seed, num=300),
        capacity={
            "capacities": [{"attainment": 0.9, "rate": rate, "failed_rate": 2 * rate, "goodput": 0.9 * rate}],
            "trials": [{"rate": at, "attainment": share, "goodput": good} for at, share, good in trials],
        },
    )


def test_several_results_are_one_page() -> None:
    results = {"fast": searched(1, 4.0), "<slow>": searched(2, 1.0), "one run": measured(3, num=100)}
    facts = [comparison.Facts("Machine", [("cores", "<2>")])]
    page = comparison.page(results, "Who & what", facts)
    # Goodput and attainment over the rate; TTFT and TPOT.
    assert check(page).num["svg"] == 4
    for text in ("Who &amp; what", "&lt;slow&gt;", "&lt;2&gt;", "objective 400 ms", "90 %"):
        assert text in page
    # The mean of the two windows at that rate.
    assert "fast: 90 % at 4 offered" in page and "fast: 3.6 good/s at 4 offered" in page
    head, rows = comparison.overview(results)
    assert "capacity 90 %" in head
    assert [row[:2] for row in rows] == [("fast", "4"), ("<slow>", "1"), ("one run", "–")]
    assert "NaN" not in page and check(comparison.page({"nothing": empty()}))


def test_names_from_outside_are_text() -> None:
    evil = "<script>alert(1)</script>"
    records = [record(0, outcome=Outcome.ERROR, error=evil, traffic_class=evil), record(0, 0.1, 0.2, tenant=evil)]
    book = ObjectiveBook(Objectives(ttft_ms=1))
    result = make_result(
        RunLog(records=records),
        Window(0, 1),
        book,
        target=evil,
        model=evil,
        started_at="",
        settings={evil: evil},
        max_lateness_s=1,
    )
    check(html.page(result))


def test_the_text_says_what_counts() -> None:
    text = "\n".join(plain(*reports_text.lines(measured(1, num=300))))
    for part in ("300 requests: 300 ok", "TTFT <= 400 ms for 90 %", "attained", "queue", "slowest 10 %".upper()):
        assert part in text
    assert all(len(line) <= 100 for line in text.splitlines())


@given(st.floats(1e-3, 1e9), st.floats(1.01, 1e6))
def test_ticks_lie_on_their_axis(low: float, factor: float) -> None:
    for axis in (Axis(low, low * factor, log=True), linear([low]), logarithmic([low, low * factor])):
        ticks = axis.ticks()
        assert len(ticks) <= 25 and ticks == sorted(ticks)
        assert all(-1e-9 <= axis.place(tick) <= 1 + 1e-9 for tick in ticks)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=2000))
def test_a_cdf_rises_to_one_at_the_largest_value(values: list[float]) -> None:
    points = cdf(values)
    assert points == sorted(points) and points[-1] == (max(values), 1.0) and len(points) <= 802


def test_numbers_for_people() -> None:
    assert [number_text(value) for value in (0, 0.0123456, 1.5, 12.34, 123456.7)] == ["0", "0.0123", "1.5", "12.3", "123457"]


def test_a_class_without_an_answer_has_no_latency() -> None:
    records = [record(0, 0.1, 0.2), record(0.5, outcome=Outcome.TIMEOUT, error="late", traffic_class="slow")]
    book = ObjectiveBook(Objectives(), {"slow": Objectives(ttft_ms=7)})
    result = make_result(
        RunLog(records=records), Window(0, 1), book, target="t", model="", started_at="", settings={}, max_lateness_s=1
    )
    (row,) = (line for line in plain(*reports_text.lines(result)) if line.startswith("slow"))
    assert row.split()[-4:] == ["–"] * 4
    page = html.page(result)
    check(page)
    assert "slow: TTFT ≤ 7 ms" in page and "<td>–</td><td>–</td>" in page


def test_sessions_are_drawn_with_their_numbers() -> None:
    """Also a turn that no request of it was answered in, and a server that reports nothing cached."""
    answered = [replace(record(n, n + 0.2, session=n), num_turns=3, prompt_tokens=10) for n in range(4)]
    second = {"num_turns": 3, "turn": 1, "depth": 1, "prompt_tokens": 30, "reusable_tokens": 15}
    later = [replace(record(n + 1, n + 1.2, session=n), **second) for n in range(4)]  # type: ignore[arg-type]
    failed = replace(record(3, outcome=Outcome.TIMEOUT, session=0), num_turns=3, turn=2, depth=2)
    held = replace(record(3, 6.0, session=1), num_turns=3, turn=2, depth=2, ready_s=5.0)
    for last in ([failed], [failed, held], []):
        log = RunLog(records=[*answered, *later, *last])
        made = make_result(
            log, Window(0, 9), ObjectiveBook(Objectives()), target="t", model="", started_at="", settings={}, max_lateness_s=9
        )
        page, text = html.page(made), "\n".join(plain(*reports_text.lines(made)))
        check(page)
        for shown in (page, text):
            assert "37.50 %" in shown and "none reported as cached" in shown
            assert ("1 broken" in shown) == (failed in last)
            assert ("held for 2000 ms" in shown) == (held in last)
        assert "TTFT by turn" in page and page.count("<svg") == html.page(replace(made, turns=())).count("<svg") + 2
