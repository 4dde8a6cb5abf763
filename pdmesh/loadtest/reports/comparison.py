"""Writes several results as one self-contained HTML page: the rate that each system sustains, and its latencies there.

Results of a search (`--find-capacity`) draw a curve over the rates that were tried; a single run is one point of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pdmesh.loadtest.measure import Trial
from pdmesh.loadtest.reports.charts import (
    Axis,
    Line,
    Mark,
    Point,
    cdf,
    linear,
    lines_chart,
    logarithmic,
    number_text,
    section,
    table,
)
from pdmesh.loadtest.reports.html import document
from pdmesh.loadtest.reports.text import NAMES, durations, share
from pdmesh.loadtest.result import Result

_NUM_COLOURS = 9
_NOTE = (
    "Capacity: the highest rate, in requests/s, at which so many requests keep their objectives. The rest is of one window, for "
    "a system with a capacity at that rate; latencies in milliseconds, from when a request was due."
)


@dataclass(frozen=True)
class Facts:
    """Hold a table that the caller adds to the measurements, such as the machine."""

    title: str
    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()


def page(results: Mapping[str, Result], title: str = "Load tests compared", facts: Sequence[Facts] = ()) -> str:
    """Return the whole document. `results` by the name of what was tested; at least one."""
    some = next(iter(results.values()))
    objectives = dict.fromkeys(str(result.objectives) for result in results.values())
    head = (
        f'<h1>{escape(title)}</h1><p class="sub">{escape(some.model or "unknown model")} · {escape(some.started_at)} · '
        f"objectives: {escape(' | '.join(objectives))}</p>"
    )
    doubts = "".join(
        f'<p class="invalid">{escape(name)}: not valid: {escape(reason)}</p>'
        for name, result in results.items()
        for reason in result.reasons
    )
    sections = [
        head,
        doubts,
        section("Capacity", table(*overview(results)) + f'<p class="sub">{_NOTE}</p>'),
        section("Over the offered rate", f'<div class="charts">{_goodput_chart(results)}{_attainment_chart(results)}</div>'),
        section("Latencies at the capacity, against objectives", f'<div class="charts">{_cdf_charts(results)}</div>'),
        *(section(fact.title, f'<div class="text">{table(fact.head, fact.rows)}</div>') for fact in facts),
        _windows(results),
    ]
    return document(title, "".join(sections))


def overview(results: Mapping[str, Result]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return head and rows of the table: a row for each result."""
    shares = sorted({found["attainment"] for result in results.values() for found in _capacities(result)})
    head = (
        "",
        *(f"capacity {100 * one:g} %" for one in shares),
        *("due/s", "attained", "goodput/s", "TTFT p50", "p99", "TPOT p50", "p99", "requests"),
    )
    return head, [(name, *_cells(result, shares)) for name, result in results.items()]


def _cells(result: Result, shares: Sequence[float]) -> Sequence[str]:
    summary = result.summary
    found = {capacity["attainment"]: capacity for capacity in _capacities(result)}
    return (
        *(_capacity(found.get(one)) for one in shares),
        number_text(summary.request_rate),
        share(summary.attainment),
        number_text(summary.goodput),
        *durations(summary.ttft, "p50", "p99"),
        *durations(summary.tpot, "p50", "p99"),
        str(summary.num_requests),
    )


def _capacity(found: Mapping[str, Any] | None) -> str:
    """Return a rate, with a mark if it may be higher; or that there is none."""
    if found is None:
        return "–"
    rate, failed = found["rate"], found["failed_rate"]
    if rate is None:
        return "none" if failed is None else f"none (not {number_text(failed)})"
    return f"≥ {number_text(rate)}" if failed is None else number_text(rate)


def _capacities(result: Result) -> Sequence[Mapping[str, Any]]:
    capacities: Sequence[Mapping[str, Any]] = result.capacity.get("capacities", ())
    return capacities


def trials(result: Result) -> list[Trial]:
    """Return all windows of a search, or the only one of a run, by rate."""
    searched = [Trial(**trial) for trial in result.capacity.get("trials", ())]
    summary = result.summary
    only = Trial(summary.request_rate, summary.attainment or 0.0, summary.goodput)
    return sorted(searched or [only], key=lambda trial: trial.rate)


def _curve(result: Result, name: str) -> list[Point]:
    """Return the mean over the windows of each rate."""
    by_rate: dict[float, list[float]] = {}
    for trial in trials(result):
        by_rate.setdefault(trial.rate, []).append(getattr(trial, name))
    return [(rate, math.fsum(values) / len(values)) for rate, values in by_rate.items()]


def _goodput_chart(results: Mapping[str, Result]) -> str:
    lines = [
        Line(name, _curve(result, "goodput"), number % _NUM_COLOURS, measured=True)
        for number, (name, result) in enumerate(results.items())
    ]
    heights = [point[1] for line in lines for point in line.points if point is not None]
    return _figure("Goodput", lines_chart(lines, _rates(results), linear(heights), x_unit="offered, requests/s", y_unit="good/s"))


def _attainment_chart(results: Mapping[str, Result]) -> str:
    lines = [
        Line(name, [(rate, 100 * value) for rate, value in _curve(result, "attainment")], number % _NUM_COLOURS, measured=True)
        for number, (name, result) in enumerate(results.items())
    ]
    wanted = [Mark(f"{100 * quantile:g} %", 100 * quantile) for quantile in {r.objectives.quantile for r in results.values()}]
    drawn = lines_chart(lines, _rates(results), Axis(0, 105), x_unit="offered, requests/s", y_unit="%", marks=wanted)
    return _figure("Requests that keep their objectives", drawn)


def _rates(results: Mapping[str, Result]) -> Axis:
    return linear([trial.rate for result in results.values() for trial in trials(result)])


def _cdf_charts(results: Mapping[str, Result]) -> str:
    figures = []
    for metric in ("ttft", "tpot"):
        values = {name: [value for value in getattr(r.sample, metric) if value is not None] for name, r in results.items()}
        bounds = {bound for r in results.values() if (bound := r.objectives.bounds.get(metric)) is not None}
        if not any(values.values()):
            continue
        lines = [
            Line(name, [(at, 100 * kept) for at, kept in cdf(of)], number % _NUM_COLOURS)
            for number, (name, of) in enumerate(values.items())
            if of
        ]
        drawn = lines_chart(
            lines,
            logarithmic([*(value for of in values.values() for value in of), *bounds]),
            Axis(0.0, 100.0),
            x_unit="ms",
            y_unit="% of requests",
            marks=[Mark(f"objective {number_text(bound)} ms", bound, across=False, low=True) for bound in sorted(bounds)],
        )
        figures.append(_figure(NAMES[metric], drawn))
    return "".join(figures) or "<p>No request was answered.</p>"


def _figure(title: str, drawn: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"


def _windows(results: Mapping[str, Result]) -> str:
    rows = [
        (name, number_text(trial.rate), share(trial.attainment), number_text(trial.goodput))
        for name, result in results.items()
        for trial in trials(result)
    ]
    shown = table(("", "offered, requests/s", "attained", "goodput/s"), rows)
    return f"<details><summary>All windows</summary>{shown}</details>"
