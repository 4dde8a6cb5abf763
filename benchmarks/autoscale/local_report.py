"""The run of `local.py` as a page: rate, workers, attainment, and each decision in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from pdmesh.autoscaler.loop_history import Entry
from pdmesh.loadtest.record import ObjectiveBook, Record
from pdmesh.loadtest.reports.charts import Axis, Line, Mark, Point, linear, lines_chart, section, table
from pdmesh.loadtest.reports.html import document
from pdmesh.loadtest.stats import Window, summarise, timeline

SHARE_OVER_S = 10.0
"""Attainment is taken over so many seconds at a time."""


@dataclass(frozen=True)
class Sample:
    """At one moment: workers that take work, by role, and worker processes of any state."""

    at_s: float
    num_prefill: int
    num_decode: int
    num_workers: int


@dataclass(frozen=True)
class Story:
    """One run. Times count from the start of the load, in seconds; `total_s` of it."""

    records: Sequence[Record]
    samples: Sequence[Sample]
    entries: Sequence[Entry]
    events: tuple[str, ...]
    book: ObjectiveBook
    total_s: float


def page(story: Story) -> str:
    """The whole document: it needs nothing else."""
    summary = summarise(story.records, Window(0.0, story.total_s), story.book)
    outcomes = ", ".join(f"{number} {name}" for name, number in summary.outcomes.items())
    head = (
        "<h1>pdmesh up --autoscale under a ramp and bursts</h1>"
        f'<p class="sub">{len(story.records)} requests ({escape(outcomes)}) in {story.total_s:.0f} s · '
        f"{100 * (summary.attainment or 0.0):.1f} % kept {escape(str(story.book.common).replace('<=', '≤'))}</p>"
    )
    charts = f'<div class="charts">{_rates(story)}{_workers(story)}{_attained(story)}</div>'
    return document(
        "pdmesh up --autoscale", head + section("Over time", charts) + section("Decisions", _decisions(story)) + _events(story)
    )


def _axis(story: Story) -> Axis:
    return Axis(0.0, max(story.total_s, *(sample.at_s for sample in story.samples), 1.0))


def _rates(story: Story) -> str:
    bins = timeline(story.records, story.book)
    names = (("due", "due"), ("completed", "completed"), ("failed", "failed or refused"))
    series = [(name, [(each.at_s, getattr(each, field)) for each in bins]) for field, name in names]
    lines = [Line(name, points, colour, steps=True, area=not colour) for colour, (name, points) in enumerate(series)]
    return _figure("Requests", lines, _axis(story), linear([y for _, points in series for _, y in points]), "requests/s")


def _workers(story: Story) -> str:
    lines = [
        Line("processes", [(each.at_s, each.num_workers) for each in story.samples], 0, steps=True, area=True),
        Line("prefill", [(each.at_s, each.num_prefill) for each in story.samples], 1, steps=True),
        Line("decode", [(each.at_s, each.num_decode) for each in story.samples], 2, steps=True),
    ]
    most = linear([each.num_workers for each in story.samples], whole=True)
    return _figure("Workers, and decisions (upright lines)", lines, _axis(story), most, "workers", _marks(story))


def _marks(story: Story) -> list[Mark]:
    """Numbered as in the table."""
    changes = [(number, entry) for number, entry in enumerate(story.entries, 1) if entry.kind in ("scale", "flip")]
    return [Mark(str(number), entry.at_s, across=False, low=bool(number % 2)) for number, entry in changes if entry.at_s >= 0]


def _attained(story: Story) -> str:
    points: list[Point | None] = []
    at_s = 0.0
    while at_s < story.total_s:
        share = summarise(story.records, Window(at_s, at_s + SHARE_OVER_S), story.book).attainment
        points.append(None if share is None else (at_s + SHARE_OVER_S / 2, 100 * share))
        at_s += SHARE_OVER_S
    goal = Mark("goal", 100 * story.book.common.quantile)
    lines = [Line("kept both objectives", points, 2, measured=True)]
    return _figure(
        f"Kept both objectives, of those due in {SHARE_OVER_S:g} s", lines, _axis(story), Axis(0.0, 105.0), "%", [goal]
    )


def _figure(title: str, lines: Sequence[Line], x: Axis, y: Axis, unit: str, marks: Sequence[Mark] = ()) -> str:
    chart = lines_chart(lines, x, y, x_unit="s", y_unit=unit, marks=marks)
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>"


def _decisions(story: Story) -> str:
    rows = [
        (str(number), f"{entry.at_s:.1f} s", entry.kind, _replicas(entry), entry.text)
        for number, entry in enumerate(story.entries, 1)
    ]
    return table(("", "at", "what", "workers then", "why"), rows)


def _replicas(entry: Entry) -> str:
    return ", ".join(f"{num} {name}" for name, num in entry.replicas.items())


def _events(story: Story) -> str:
    return section("Processes", table(("",), [(event,) for event in story.events])) if story.events else ""
