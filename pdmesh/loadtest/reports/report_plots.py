"""The plots of the page: the run over time, latencies against their objectives, where the time goes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from pdmesh.loadtest.reports.charts import Axis, Line, Mark, Point, cdf_chart, linear, lines_chart, number_text, share_within
from pdmesh.loadtest.reports.report_parts import section, table
from pdmesh.loadtest.reports.text import NAMES, milliseconds
from pdmesh.loadtest.result import Result
from pdmesh.loadtest.stats import Window
from pdmesh.loadtest.timeline import Bin


def timelines(result: Result) -> str:
    """Rate, latencies and what served, second by second or in longer steps."""
    bins = result.timeline
    if not bins:
        return "<p>Nothing was due.</p>"
    x = Axis(0.0, max(bins[-1].at_s, result.window.end_s, 1.0))
    shaded = _uncounted(result.window, x.high)
    rates = [
        Line("due", _series(bins, "due"), 0, steps=True, area=True),
        Line("completed", _series(bins, "completed"), 1, steps=True),
        Line("good", _series(bins, "good"), 2, steps=True),
        Line("failed", _series(bins, "failed"), 3, steps=True),
    ]
    running = [Line("running", _series(bins, "running"), 0, steps=True, area=True)]
    charts = [
        _chart("Rate", rates, x, "requests/s", shaded),
        *(_latency(name, bins, x, result.objectives.bounds.get(name), shaded) for name in ("ttft", "tpot")),
        _chart("Requests running", running, x, "requests", shaded, whole=True),
        *_served(result, x, shaded),
    ]
    note = '<p class="sub">Shaded: before and after the time that counts.</p>' if shaded else ""
    return f'<div class="charts">{"".join(charts)}</div>{note}'


def cdfs(result: Result) -> str:
    """The distribution of each latency, and how many requests kept its objective."""
    bounds, sample = result.objectives.bounds, result.sample
    figures = []
    for name in ("ttft", "tpot", "e2e"):
        values = [value for value in getattr(sample, name) if value is not None]
        if not values:
            continue
        bound = bounds.get(name)
        kept = "" if bound is None else f": {number_text(100 * share_within(values, bound))} % within {number_text(bound)} ms"
        figures.append(_figure(NAMES[name] + kept, cdf_chart(values, "ms", bound)))
    return f'<div class="charts">{"".join(figures)}</div>' if figures else "<p>No request was answered.</p>"


def phases(result: Result) -> str:
    """A bar for all requests and one for the slowest, of the parts that the server measured; the numbers below."""
    groups = result.phases
    if not groups:
        return ""
    names = list(dict.fromkeys(name for parts in groups.values() for name in parts))
    widest = max(math.fsum(parts.values()) for parts in groups.values()) or 1.0
    bars = "".join(_bar(group, parts, names, widest) for group, parts in groups.items())
    legend = "".join(f'<span><i class="swatch c{number}"></i>{escape(name)}</span>' for number, name in enumerate(names))
    rows = [(name, *(milliseconds(parts.get(name, 0.0)) for parts in groups.values())) for name in names]
    note = "Mean milliseconds, as the server measures them: the parts of TTFT, then what the hand-off adds to the first gap."
    numbers = table(("phase, ms", *groups), rows)
    drawn = f'<figure><div class="legend">{legend}</div>{bars}</figure>{numbers}<p class="sub">{note}</p>'
    return section("Where the time goes", drawn)


def _bar(group: str, parts: Mapping[str, float], names: Sequence[str], widest: float) -> str:
    pieces = "".join(
        f'<i class="c{names.index(name)}" style="width:{100 * value / widest:.3f}%"'
        f' title="{escape(name)}: {milliseconds(value)} ms"></i>'
        for name, value in parts.items()
    )
    total = f"{milliseconds(math.fsum(parts.values()))} ms"
    return f'<div class="bar"><b>{escape(group)}</b><span>{total}</span><div>{pieces}</div></div>'


def _latency(name: str, bins: Sequence[Bin], x: Axis, bound: float | None, shaded: Sequence[Point]) -> str:
    lines = [Line("p50", _series(bins, f"{name}_p50"), 0), Line("p99", _series(bins, f"{name}_p99"), 3)]
    marks = [] if bound is None else [Mark(f"objective {number_text(bound)} ms", bound)]
    return _chart(f"{NAMES[name]}, by when requests were due", lines, x, "ms", shaded, marks=marks)


def _served(result: Result, x: Axis, shaded: Sequence[Point]) -> list[str]:
    """Workers, and what the router held; nothing where the target does not tell."""
    if not result.fleet:
        return []

    def lines(**names: str) -> list[Line]:
        return [
            Line(
                label.replace("_", " "), [(point.at_s, float(getattr(point, name))) for point in result.fleet], number, steps=True
            )
            for number, (label, name) in enumerate(names.items())
        ]

    workers = lines(prefill_workers="num_prefill", decode_workers="num_decode")
    requests = lines(in_flight="num_inflight", queued="num_queued")
    return [
        _chart("Replicas", workers, x, "workers", shaded, whole=True),
        _chart("The router's requests", requests, x, "requests", shaded, whole=True),
    ]


def _uncounted(window: Window, end_s: float) -> list[Point]:
    """The stretches of a run outside its window."""
    return [(start, end) for start, end in ((0.0, window.start_s), (window.end_s, end_s)) if end > start]


def _series(bins: Sequence[Bin], name: str) -> list[Point | None]:
    values = ((one.at_s, getattr(one, name)) for one in bins)
    return [None if value is None else (at_s, float(value)) for at_s, value in values]


def _chart(
    title: str,
    lines: Sequence[Line],
    x: Axis,
    unit: str,
    shaded: Sequence[Point],
    *,
    marks: Sequence[Mark] = (),
    whole: bool = False,
) -> str:
    heights = [point[1] for line in lines for point in line.points if point is not None]
    y = linear([*heights, *(mark.value for mark in marks)], whole=whole)
    return _figure(title, lines_chart(lines, x, y, x_unit="seconds", y_unit=unit, marks=marks, shaded=shaded))


def _figure(title: str, drawn: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"
