"""Writes a result as one self-contained HTML page: no script, font or image from elsewhere; light or dark by the reader's
setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources

from pdmesh.loadtest.record import Objectives
from pdmesh.loadtest.reports.charts import (
    Axis,
    Line,
    Mark,
    Point,
    cdf_chart,
    linear,
    lines_chart,
    number_text,
    section,
    share_within,
    table,
)
from pdmesh.loadtest.reports.text import (
    NAMES,
    durations,
    held_lines,
    milliseconds,
    reuse_line,
    sessions_line,
    share,
    turn_rows,
)
from pdmesh.loadtest.result import Result, Slow
from pdmesh.loadtest.stats import Bin, Summary, TurnPoint, Window

# The plots of the page: the run over time, latencies against their objectives, where the time goes.


def timelines(result: Result) -> str:
    """Plot rate, latencies and fleet, second by second or in longer steps."""
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
    """Plot the distribution of each latency, and how many requests kept its objective."""
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
    """Draw a bar for all requests and one for the slowest, of the parts that the server measured; the numbers below."""
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
    """Plot workers, and the router's queue; nothing where the target does not report them."""
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
    """Return the stretches of a run outside its window."""
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
    x_unit: str = "seconds",
) -> str:
    heights = [point[1] for line in lines for point in line.points if point is not None]
    y = linear([*heights, *(mark.value for mark in marks)], whole=whole)
    return _figure(title, lines_chart(lines, x, y, x_unit=x_unit, y_unit=unit, marks=marks, shaded=shaded))


def _figure(title: str, drawn: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"


_LATENCIES = ("ttft", "ttft_from_sent", "tpot", "itl", "e2e")


def page(result: Result) -> str:
    """Return the whole document."""
    sections = [
        _head(result),
        _tiles(result),
        section("Over time", timelines(result)),
        section("Latencies against objectives", cdfs(result)),
        section("Latencies", _latency_table(result)),
        _sessions(result),
        _breakdowns(result),
        phases(result),
        _capacity(result.capacity),
        section("Slowest requests", _slowest(result.slowest)),
        _errors(result.summary.errors),
        _settings(result),
    ]
    return document(f"Load test of {result.target}", "".join(sections))


def document(title: str, content: str) -> str:
    """Return a page of `content`, with the style that the classes of its parts need."""
    style = resources.files("pdmesh.loadtest.reports").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>{content}</main></body></html>\n"
    )


def _head(result: Result) -> str:
    lines = [
        f"<h1>Load test of {escape(result.target)}</h1>",
        f'<p class="sub">{escape(result.model or "unknown model")} · {escape(_moment(result.started_at))} · '
        f"{result.window.length_s:g} s · {result.summary.num_requests} requests"
        f" · objectives: {_objectives(result.objectives)}</p>",
        *(f'<p class="sub">{escape(name)}: {_objectives(own)}</p>' for name, own in result.objectives_by_class.items()),
        *(f'<p class="invalid">Not valid: {escape(reason)}</p>' for reason in result.reasons),
    ]
    if result.interrupted:
        lines.append('<p class="invalid">Interrupted: only what was due before that is counted.</p>')
    return "".join(lines)


def _objectives(objectives: Objectives) -> str:
    return escape(str(objectives).replace("<=", "≤"))


def _moment(started_at: str) -> str:
    return started_at.replace("T", " ").replace("+00:00", " UTC")


def _tiles(result: Result) -> str:
    summary = result.summary
    verdict = {True: "kept", False: "missed", None: "no objectives"}[summary.attained]
    css = {True: "good", False: "bad", None: ""}[summary.attained]
    tiles = [
        (share(summary.attainment), f"attained: {verdict}", css),
        (number_text(summary.goodput), "goodput, requests/s", ""),
        (number_text(summary.request_rate), "due, requests/s", ""),
        (number_text(summary.output_token_rate), "output tokens/s", ""),
        (" / ".join(durations(summary.ttft, "p50", "p99")), "TTFT p50 / p99, ms", ""),
        (" / ".join(durations(summary.tpot, "p50", "p99")), "TPOT p50 / p99, ms", ""),
        *((str(number), f"requests {name.replace('_', ' ')}", "") for name, number in summary.outcomes.items()),
    ]
    cells = "".join(
        f'<div class="tile {css}"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name, css in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _latency_table(result: Result) -> str:
    rows = []
    for name in _LATENCIES:
        latency = getattr(result.summary, name)
        figures = durations(latency, "mean", "p50", "p90", "p95", "p99", "max")
        rows.append((NAMES[name], *figures, str(latency.num_values)))
    late = result.lateness
    note = (
        "Milliseconds, from when a request was due. The load test sent requests "
        f"{milliseconds(late.p50)} ms (p50), {milliseconds(late.p99)} ms (p99) late: part of all rows but the one from sent."
    )
    return table(("", "mean", "p50", "p90", "p95", "p99", "max", "of"), rows) + f'<p class="sub">{escape(note)}</p>'


def _breakdowns(result: Result) -> str:
    parts = [(title, groups) for title, groups in (("class", result.by_class), ("tenant", result.by_tenant)) if len(groups) > 1]
    return "".join(section(f"By {title}", _breakdown(title, groups)) for title, groups in parts)


def _sessions(result: Result) -> str:
    """Draw TTFT over the turns of a session, and what of their prompts could be reused; the numbers below."""
    if result.sessions is None:
        return ""
    reuse = reuse_line(result.summary)
    told = [sessions_line(result.sessions), *held_lines(result.sessions), *([reuse] if reuse else [])]
    notes = "".join(f'<p class="sub">{escape(line)}</p>' for line in told)
    head = ("turn", "requests", "TTFT p50, ms", "p90", "p99", "reusable", "cached")
    drawn = f'<div class="charts">{_turn_charts(result.turns)}</div>' if len(result.turns) > 1 else ""
    groups = _breakdown("turns", result.by_turns) if len(result.by_turns) > 1 else ""
    return section("Sessions", f"{notes}{drawn}{groups}{table(head, turn_rows(result.turns))}")


def _turn_charts(turns: Sequence[TurnPoint]) -> str:
    x = Axis(1.0, float(turns[-1].turn), whole=True)

    def line(label: str, number: int, values: Iterable[float | None]) -> Line:
        pairs = zip(turns, values, strict=True)
        points = [None if value is None else (float(point.turn), value) for point, value in pairs]
        return Line(label, points, number, measured=True)

    ttft = [line("p50", 0, (point.ttft_p50 for point in turns)), line("p99", 3, (point.ttft_p99 for point in turns))]
    reuse = [
        line("reusable", 0, (_percent(point.reusable_tokens, point.prompt_tokens) for point in turns)),
        line("cached", 1, (_percent(point.cached_tokens, point.input_tokens) for point in turns)),
    ]
    return _chart("TTFT by turn", ttft, x, "ms", (), x_unit="turn") + _chart(
        "Prompt tokens that a cache could hold, and did", reuse, x, "% of the prompts", (), x_unit="turn"
    )


def _percent(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None


def _breakdown(title: str, groups: Mapping[str, Summary]) -> str:
    head = (title, "requests", "ok", "attained", "goodput/s", "TTFT p50", "p99", "TPOT p50", "p99", "end to end p50", "p99")
    rows = [
        (
            name,
            str(summary.num_requests),
            str(summary.outcomes.get("ok", 0)),
            share(summary.attainment),
            number_text(summary.goodput),
            *(figure for of in (summary.ttft, summary.tpot, summary.e2e) for figure in durations(of, "p50", "p99")),
        )
        for name, summary in groups.items()
    ]
    return table(head, rows)


def _capacity(capacity: Mapping[str, Sequence[Mapping[str, float | None]]]) -> str:
    if not capacity:
        return ""
    rows = [
        tuple(_number(found[name]) for name in ("attainment", "rate", "failed_rate", "goodput"))
        for found in capacity["capacities"]
    ]
    trials = [tuple(_number(trial[name]) for name in ("rate", "attainment", "goodput")) for trial in capacity["trials"]]
    return section(
        "Capacity",
        table(("share that keeps its objectives", "highest rate", "lowest rate that fails", "goodput"), rows)
        + f"<details><summary>All windows</summary>{table(('rate', 'attained', 'goodput'), trials)}</details>",
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
    return table(head, rows)


def _errors(errors: Mapping[str, int]) -> str:
    rows = [(message, str(number)) for message, number in errors.items()]
    return section("Errors", table(("what", "how often"), rows)) if rows else ""


def _settings(result: Result) -> str:
    rows = [(name, _setting(value)) for name, value in result.settings.items()]
    return f"<details><summary>Settings</summary>{table(('setting', 'value'), rows)}</details>" if rows else ""


def _setting(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
