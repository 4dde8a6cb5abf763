"""A result as one HTML page that needs nothing else: no script, font or image from elsewhere; light or dark as the reader is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources

from pdmesh.loadtest.charts import Axis, Line, Point, cdf, linear, lines_chart, logarithmic, number_text, stacked_bars
from pdmesh.loadtest.report_text import NAMES, milliseconds, share
from pdmesh.loadtest.result import Result, Slow
from pdmesh.loadtest.stats import Summary
from pdmesh.loadtest.timeline import Bin

_LATENCIES = ("ttft", "ttft_from_sent", "tpot", "itl", "e2e")


def page(result: Result) -> str:
    """The whole document."""
    style = resources.files("pdmesh.loadtest").joinpath("report.css").read_text(encoding="utf-8")
    title = f"Load test of {escape(result.target)}"
    sections = [
        _head(result),
        _tiles(result),
        _section("Over time", _timelines(result)),
        _section("Latencies against objectives", _cdfs(result)),
        _section("Latencies", _latency_table(result)),
        _breakdowns(result),
        _phases(result),
        _capacity(result.capacity),
        _section("Slowest requests", _slowest(result.slowest)),
        _errors(result.summary.errors),
        _settings(result),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{style}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _head(result: Result) -> str:
    lines = [
        f"<h1>Load test of {escape(result.target)}</h1>",
        f'<p class="sub">{escape(result.model or "unknown model")} · {escape(result.started_at)} · '
        f"{result.window.length_s:g} s · {result.summary.num_requests} requests"
        f" · objectives: {escape(str(result.objectives))}</p>",
        *(f'<p class="invalid">Not valid: {escape(reason)}</p>' for reason in result.reasons),
    ]
    if result.interrupted:
        lines.append('<p class="invalid">Interrupted: only what was due before that is counted.</p>')
    return "".join(lines)


def _tiles(result: Result) -> str:
    summary = result.summary
    verdict = {True: "kept", False: "missed", None: "no objectives"}[summary.attained]
    css = {True: "good", False: "bad", None: ""}[summary.attained]
    tiles = [
        (share(summary.attainment), f"attained: {verdict}", css),
        (number_text(summary.goodput), "goodput, requests/s", ""),
        (number_text(summary.request_rate), "due, requests/s", ""),
        (number_text(summary.output_token_rate), "output tokens/s", ""),
        (f"{milliseconds(summary.ttft.p50)} / {milliseconds(summary.ttft.p99)}", "TTFT p50 / p99, ms", ""),
        (f"{milliseconds(summary.tpot.p50)} / {milliseconds(summary.tpot.p99)}", "TPOT p50 / p99, ms", ""),
        *((str(number), name.replace("_", " "), "") for name, number in summary.outcomes.items()),
    ]
    cells = "".join(
        f'<div class="tile {css}"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name, css in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _timelines(result: Result) -> str:
    bins = result.timeline
    if not bins:
        return "<p>Nothing was due.</p>"
    end_s = max(bins[-1].at_s, result.window.end_s, 1.0)
    x = Axis(0.0, end_s)
    bounds = result.objectives.bounds
    rates = [
        Line("due", _series(bins, "due"), 0, steps=True),
        Line("completed", _series(bins, "completed"), 1, steps=True),
        Line("good", _series(bins, "good"), 2, steps=True),
        Line("failed", _series(bins, "failed"), 3, steps=True),
    ]
    charts = [
        _chart("Rate", rates, x, "requests/s", {}),
        _chart("Requests running", [Line("running", _series(bins, "running"), 0, steps=True)], x, "requests", {}),
        *(
            _chart(
                f"{name.upper()} of the requests that were due then",
                [Line("p50", _series(bins, f"{name}_p50"), 0), Line("p99", _series(bins, f"{name}_p99"), 3)],
                x,
                "ms",
                {"objective": bounds[name]} if name in bounds else {},
            )
            for name in ("ttft", "tpot")
        ),
    ]
    if result.fleet:
        fleet = [
            Line(label, [(point.at_s, float(getattr(point, name))) for point in result.fleet], number, steps=True)
            for number, (label, name) in enumerate((("prefill workers", "num_prefill"), ("decode workers", "num_decode")))
        ]
        queues = [
            Line(label, [(point.at_s, float(getattr(point, name))) for point in result.fleet], number, steps=True)
            for number, (label, name) in enumerate((("in flight", "num_inflight"), ("queued", "num_queued")))
        ]
        charts += [_chart("Replicas", fleet, x, "workers", {}), _chart("The router's requests", queues, x, "requests", {})]
    return f'<div class="charts">{"".join(charts)}</div>'


def _series(bins: Sequence[Bin], name: str) -> list[Point | None]:
    values = ((one.at_s, getattr(one, name)) for one in bins)
    return [None if value is None else (at_s, float(value)) for at_s, value in values]


def _chart(title: str, lines: Sequence[Line], x: Axis, unit: str, marks: Mapping[str, float]) -> str:
    heights = [point[1] for line in lines for point in line.points if point is not None]
    drawn = lines_chart(lines, x, linear([*heights, *marks.values()]), x_unit="s", y_unit=unit, marks=marks)
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"


def _cdfs(result: Result) -> str:
    bounds, sample = result.objectives.bounds, result.sample
    figures = []
    for name in ("ttft", "tpot", "e2e"):
        values = [value for value in getattr(sample, name) if value is not None]
        if not values:
            continue
        marks = {f"objective, {number_text(bounds[name])} ms": bounds[name]} if name in bounds else {}
        drawn = lines_chart(
            [Line("share of requests", list(cdf(values)), 0)],
            logarithmic([*values, *marks.values()]),
            Axis(0.0, 1.0),
            x_unit="ms",
            y_unit="",
            marks=marks,
            across=False,
        )
        figures.append(f"<figure><figcaption>{escape(NAMES[name])}</figcaption>{drawn}</figure>")
    return f'<div class="charts">{"".join(figures)}</div>' if figures else "<p>No request was answered.</p>"


def _latency_table(result: Result) -> str:
    rows = []
    for name in _LATENCIES:
        latency = getattr(result.summary, name)
        values = (latency.mean, latency.p50, latency.p90, latency.p95, latency.p99, latency.max)
        rows.append((NAMES[name], *map(milliseconds, values), str(latency.num_values)))
    late = result.lateness
    note = (
        "Milliseconds, from when a request was due. The load test sent requests "
        f"{milliseconds(late.p50)} ms (p50), {milliseconds(late.p99)} ms (p99) late: part of all rows but the one from sent."
    )
    return _table(("", "mean", "p50", "p90", "p95", "p99", "max", "of"), rows) + f'<p class="sub">{escape(note)}</p>'


def _breakdowns(result: Result) -> str:
    parts = [(title, groups) for title, groups in (("class", result.by_class), ("tenant", result.by_tenant)) if len(groups) > 1]
    return "".join(_section(f"By {title}", _breakdown(title, groups)) for title, groups in parts)


def _breakdown(title: str, groups: Mapping[str, Summary]) -> str:
    head = (title, "requests", "ok", "attained", "goodput/s", "TTFT p50", "p99", "TPOT p50", "p99", "end to end p50", "p99")
    rows = [
        (
            name,
            str(summary.num_requests),
            str(summary.outcomes.get("ok", 0)),
            share(summary.attainment),
            number_text(summary.goodput),
            *(milliseconds(value) for of in (summary.ttft, summary.tpot, summary.e2e) for value in (of.p50, of.p99)),
        )
        for name, summary in groups.items()
    ]
    return _table(head, rows)


def _phases(result: Result) -> str:
    if not result.phases:
        return ""
    note = (
        '<p class="sub">As the server measures it: the parts of TTFT, then what the hand-off adds to the first gap. By TTFT.</p>'
    )
    return _section("Where the time goes", f"<figure>{stacked_bars(result.phases, 'ms')}</figure>{note}")


def _capacity(capacity: Mapping[str, Sequence[Mapping[str, float | None]]]) -> str:
    if not capacity:
        return ""
    rows = [
        tuple(_number(found[name]) for name in ("attainment", "rate", "failed_rate", "goodput"))
        for found in capacity["capacities"]
    ]
    trials = [tuple(_number(trial[name]) for name in ("rate", "attainment", "goodput")) for trial in capacity["trials"]]
    return _section(
        "Capacity",
        _table(("share that keeps its objectives", "highest rate", "lowest rate that fails", "goodput"), rows)
        + f"<details><summary>All windows</summary>{_table(('rate', 'attained', 'goodput'), trials)}</details>",
    )


def _number(value: float | None) -> str:
    return "–" if value is None else number_text(value)


def _slowest(slowest: Sequence[Slow]) -> str:
    rows = []
    for slow in slowest:
        worst = max(slow.phases_ms, key=lambda name: slow.phases_ms[name], default="")
        longest = f"{worst} {milliseconds(slow.phases_ms[worst])} ms" if worst else ""
        rows.append(
            (
                slow.request,
                f"{slow.scheduled_s:.2f}",
                slow.outcome,
                milliseconds(slow.waited_ms),
                *("–" if value is None else milliseconds(value) for value in (slow.ttft_ms, slow.tpot_ms)),
                f"{slow.input_tokens} / {slow.output_tokens}",
                longest,
                slow.workers or slow.error,
            )
        )
    head = (
        "request",
        "due at, s",
        "outcome",
        "took, ms",
        "TTFT, ms",
        "TPOT, ms",
        "tokens in / out",
        "longest phase",
        "workers or error",
    )
    return _table(head, rows)


def _errors(errors: Mapping[str, int]) -> str:
    rows = [(message, str(number)) for message, number in errors.items()]
    return _section("Errors", _table(("what", "how often"), rows)) if rows else ""


def _settings(result: Result) -> str:
    rows = [(name, _setting(value)) for name, value in result.settings.items()]
    return f"<details><summary>Settings</summary>{_table(('setting', 'value'), rows)}</details>" if rows else ""


def _setting(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{"".join(f"<th>{escape(name)}</th>" for name in head)}</tr>{body}</table></div>'
