"""Writes a plan as one self-contained HTML page. Pure except for the style, which is the load test's."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from pdmesh.loadtest.reports.charts import Axis, Line, Mark, linear, lines_chart, section, table
from pdmesh.loadtest.reports.html import document
from pdmesh.planner import report_text
from pdmesh.planner.meshes import AGGREGATED, SEPARATED
from pdmesh.planner.plan import Plan, Tried
from pdmesh.planner.traffic import Subject

_COLOURS = {AGGREGATED: 0, SEPARATED: 2}


def page(plan: Plan, subject: Subject) -> str:
    """Return the whole document."""
    point = plan.chosen.point
    head = (
        f"<h1>{escape(report_text.mesh_name(point))}: {escape(report_text.cost(point, subject))}</h1>"
        f'<p class="sub">{escape(subject.title)} · {len(plan.task.traffic.arrivals)} requests, {escape(subject.load)}, '
        f"{plan.task.traffic.rate_per_s:.3g}/s · {escape(report_text.objectives(plan).replace('<=', '≤'))} · "
        f"{plan.task.headroom:.0%} headroom</p>"
    )
    parts = [
        head,
        section("Cost against attainment", _charts(plan, subject)),
        section("What limits it", _limits(plan)),
        section("All that was simulated to the end", _table(plan, subject)),
        section(
            "What this rests on", "".join(f'<p class="sub">{escape(note)}</p>' for note in (subject.assumed, *subject.notes))
        ),
    ]
    return document(f"Plan for {subject.model}", "".join(parts))


def _charts(plan: Plan, subject: Subject) -> str:
    goal = plan.task.settings.objective
    assert goal is not None
    x = linear([tried.point.cost for tried in plan.seen], whole=True)
    least = min([100 * tried.outcome.attainment for tried in plan.seen] + [100 * plan.task.quantile])
    shares = Axis(max(0.0, least - 2), 100.5)
    chosen = Mark("chosen", plan.chosen.point.cost, across=False, low=True)
    quantile = Mark(f"{100 * plan.task.quantile:g} %", 100 * plan.task.quantile)
    figures = [
        _chart(
            "Attainment",
            _lines(plan, lambda t: 100 * t.outcome.attainment),
            x,
            shares,
            subject,
            "% of requests",
            [quantile, chosen],
        ),
        _latency("TTFT, p99", plan, lambda t: 1e3 * t.outcome.ttft_p99_s, x, subject, goal.ttft_ms),
        _latency("TPOT, p99", plan, lambda t: 1e3 * t.outcome.tpot_p99_s, x, subject, goal.tpot_ms),
    ]
    return f'<div class="charts">{"".join(figures)}</div>'


def _latency(title: str, plan: Plan, of: Callable[[Tried], float], x: Axis, subject: Subject, goal_ms: int) -> str:
    lines = _lines(plan, of)
    y = linear([point[1] for line in lines for point in line.points if point is not None] + [goal_ms])
    return _chart(title, lines, x, y, subject, "ms", [Mark(f"objective {goal_ms} ms", goal_ms)])


def _lines(plan: Plan, of: Callable[[Tried], float]) -> list[Line]:
    """Return for each kind of mesh the best at each cost."""
    lines = []
    for mesh in plan.task.meshes:
        best: dict[int, Tried] = {}
        for tried in plan.seen:
            known = best.get(tried.point.cost)
            if tried.point.shape.mesh == mesh and (known is None or tried.outcome.attainment > known.outcome.attainment):
                best[tried.point.cost] = tried
        points = [(float(cost), of(tried)) for cost, tried in sorted(best.items())]
        if points:
            lines.append(Line(mesh, points, _COLOURS[mesh], measured=True))
    return lines


def _chart(title: str, lines: list[Line], x: Axis, y: Axis, subject: Subject, unit: str, marks: list[Mark]) -> str:
    drawn = lines_chart(lines, x, y, x_unit=subject.unit, y_unit=unit, marks=marks)
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawn}</figure>"


def _limits(plan: Plan) -> str:
    found = [f"Prompts: {report_text.prefill_limit(plan)}.", f"Decode: {report_text.decode_limit(plan)}."]
    if plan.fewer is not None:
        found.append(f"With {plan.fewer.point.name} instead: {report_text.misses(plan.fewer.outcome)}.")
    return "".join(f"<p>{escape(line)}</p>" for line in found)


def _table(plan: Plan, subject: Subject) -> str:
    head = ("mesh", subject.unit, "attained", "TTFT p50, ms", "p99", "TPOT p50, ms", "p99", "each worker")
    rows = []
    for tried in report_text.rows(plan):
        shape = tried.point.shape
        kinds = " | ".join(kind.name for kind in (shape.prefill, shape.decode) if kind is not None)
        mark = " (chosen)" if tried.point == plan.chosen.point else ""
        rows.append((report_text.mesh_name(tried.point) + mark, str(tried.point.cost), *report_text.cells(tried.outcome), kinds))
    return table(head, rows)
