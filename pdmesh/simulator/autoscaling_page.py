"""Writes a page on what autoscalers did: load, pods of each pool and SLO attainment over time, and every decision with its
reason.

It is one HTML file that loads nothing. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from pdmesh.autoscaler.views import PoolName
from pdmesh.simulator.autoscaling import Moment, net_changes
from pdmesh.simulator.results import Window

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 900, 150, 50, 18, 20
MAX_DECISIONS = 400
"""Rows in the table of a run."""

_COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626")
_STYLE = """body{font:14px/1.4 system-ui,sans-serif;margin:2em auto;max-width:960px;padding:0 1em;background:#fff;color:#1f2937}
svg{width:100%;height:auto}text{font-size:11px;fill:#6b7280}table{border-collapse:collapse;font-size:12px;width:100%}
td,th{text-align:left;padding:2px 8px;border-bottom:1px solid #e5e7eb;vertical-align:top}
@media(prefers-color-scheme:dark){body{background:#111827;color:#e5e7eb}td,th{border-color:#374151}}"""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Shown:
    """Hold one run: `summary` in words and numbers; `windows` of `window_s` each."""

    name: str
    summary: Mapping[str, str]
    moments: Sequence[Moment]
    windows: Sequence[Window]
    window_s: float


def page(title: str, runs: Sequence[Shown]) -> str:
    """Return the whole document."""
    body = "".join(_run(run) for run in runs)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body><h1>{escape(title)}</h1>{body}</body></html>\n"


def _run(run: Shown) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in run.summary.items())
    charts = "".join(_charts(run))
    return f"<h2>{escape(run.name)}</h2><table>{rows}</table>{charts}{_decisions(run.moments)}"


def _charts(run: Shown) -> list[str]:
    end_s = max([moment.at_s for moment in run.moments] + [len(run.windows) * run.window_s, 1.0])
    rate = [(moment.at_s, moment.rate_per_s) for moment in run.moments]
    kept = [(number * run.window_s, window.attainment) for number, window in enumerate(run.windows)]
    return [
        _chart("requests/s", {"came": rate}, end_s),
        *(_chart(f"{pool} pods", _pods(run.moments, pool), end_s) for pool in _pools(run.moments)),
        _chart("share that kept its objectives", {"kept": kept}, end_s, high=1.0),
    ]


def _pods(moments: Sequence[Moment], pool: PoolName) -> dict[str, Points]:
    """Return the series of all pods, and of those that serve."""
    paid = [(moment.at_s, float(sum(moment.pods[pool]))) for moment in moments]
    return {"paid for": paid, "serving": [(moment.at_s, float(moment.pods[pool][0])) for moment in moments]}


def _pools(moments: Sequence[Moment]) -> list[PoolName]:
    return list(moments[0].pods) if moments else []


def _chart(title: str, lines: Mapping[str, Points], end_s: float, high: float | None = None) -> str:
    """Return a step chart: values hold until the next."""
    top = high if high is not None else max([1.0, *(value for points in lines.values() for _, value in points)]) * 1.05
    drawn = []
    for number, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        drawn.append(f'<path d="{_path(points, end_s, top)}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        drawn.append(f'<text x="{WIDTH - 150 + 70 * number}" y="12" style="fill:{colour}">{escape(name)}</text>')
    grid = "".join(_tick(share, top) for share in (0.0, 0.5, 1.0)) + "".join(_minute(s, end_s) for s in _minutes(end_s))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<text x="{LEFT}" y="12">{escape(title)}</text>{grid}{"".join(drawn)}</svg>'
    )


def _path(points: Points, end_s: float, top: float) -> str:
    steps = []
    for number, (at_s, value) in enumerate(points):
        x, y = _x(at_s, end_s), _y(value, top)
        steps.append(f"M{x:.1f},{y:.1f}" if number == 0 else f"H{x:.1f}V{y:.1f}")
    return "".join(steps)


def _x(at_s: float, end_s: float) -> float:
    return LEFT + (WIDTH - LEFT - 10) * at_s / end_s


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, value / top)


def _tick(share: float, top: float) -> str:
    y = _y(share * top, top)
    line = f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#9ca3af" stroke-width="0.4"/>'
    return f'{line}<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * top:.3g}</text>'


def _minute(at_s: float, end_s: float) -> str:
    return f'<text x="{_x(at_s, end_s):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{at_s / 60:.0f} min</text>'


def _minutes(end_s: float) -> list[float]:
    """Return about eight tick positions."""
    step = max(60.0, round(end_s / 8 / 60) * 60.0)
    return [number * step for number in range(int(end_s / step) + 1)]


def _decisions(moments: Sequence[Moment]) -> str:
    """Return the decisions that changed anything."""
    rows = []
    for moment in moments:
        for pool, change in net_changes(moment).items():
            if change:
                num = sum(moment.pods[pool][:2])
                cells = (f"{moment.at_s:.0f} s", pool, f"{num} → {num + change}", moment.reasons.get(pool, ""))
                rows.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    left_out = f"<p>{len(rows) - MAX_DECISIONS} more are left out.</p>" if len(rows) > MAX_DECISIONS else ""
    table = (
        f"<table><tr><th>at</th><th>pool</th><th>replicas</th><th>why</th></tr>{''.join(rows[:MAX_DECISIONS])}</table>{left_out}"
    )
    return f"<details><summary>{len(rows)} decisions</summary>{table}</details>"
