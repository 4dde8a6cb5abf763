"""`pdmesh up --autoscale` on this machine: real workers start, drain, stop and change roles under a ramp and bursts.

One prefill and one decode worker to begin with. The rate rises to more than one decode worker bears; then long prompts come that
hardly decode, for which idle decode workers can be lent; it is quiet; then a burst comes out of nothing. Workers take few
sequences at once, so that a load that a laptop bears needs several of them. What is measured is that nobody's request fails while
they come and go, how many kept their objectives, and what was decided.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from benchmarks.autoscale.scenario import Options
from benchmarks.harness import MODEL, PLAIN_FLAGS, Figure, say
from pdmesh.autoscaler.loop import Loop
from pdmesh.autoscaler.loop_history import Entry
from pdmesh.commands.up_autoscale import AutoscaleOptions, local_loop, scaled
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.loadtest import arrivals
from pdmesh.loadtest.arrivals import fixed
from pdmesh.loadtest.record import ObjectiveBook, Objectives, Outcome, Record
from pdmesh.loadtest.reports.charts import Axis, Line, Mark, Point, linear, lines_chart, section, table
from pdmesh.loadtest.reports.html import document
from pdmesh.loadtest.runner import Runner, RunSettings
from pdmesh.loadtest.stats import Window, summarise, timeline
from pdmesh.loadtest.targets.grpc import GrpcSettings, GrpcTarget
from pdmesh.loadtest.workload import PlannedSession, PlannedTurn, Segment, TrafficClass

# The run of `local.py` as a page: rate, workers, attainment, and each decision in words. Pure.


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


SCALING = AutoscaleOptions(
    autoscale=True, max_workers=4, ttft_ms=5000, tpot_ms=150, quantile=0.9, cool_down_s=12.0, stale_after_s=8.0
)
MAX_SEQS = 3
SEED = 7
SAMPLE_S = 1.0
SETTLE_S = 45.0
FAILED = (Outcome.ERROR, Outcome.TIMEOUT, Outcome.NOT_SENT)


@dataclass(frozen=True)
class Stretch:
    """Requests from one rate to another within so many seconds."""

    seconds: float
    first_rate: float
    last_rate: float
    input_tokens: int = 96
    output_tokens: int = 48


RAMP = (Stretch(12, 0.4, 0.4), Stretch(45, 0.4, 1.8), Stretch(25, 1.8, 1.8))
BURSTS = (Stretch(25, 0.9, 0.9, 500, 4), Stretch(30, 0.3, 0.3), Stretch(12, 1.8, 1.8), Stretch(25, 0.3, 0.3))
QUICK = (Stretch(5, 0.5, 1.0), Stretch(5, 1.0, 1.0))


def plan(stretches: tuple[Stretch, ...], seed: int) -> Iterator[PlannedSession]:
    """Poisson arrivals. Pure."""
    rng, begins_s, number = random.Random(seed), 0.0, 0
    for stretch in stretches:
        last = stretch.last_rate + (1e-9 if stretch.last_rate == stretch.first_rate else 0.0)
        for at_s in arrivals.ramp(stretch.first_rate, last, stretch.seconds, rng):
            traffic = TrafficClass(input_tokens=fixed(stretch.input_tokens), output_tokens=fixed(stretch.output_tokens))
            turn = PlannedTurn(0.0, (Segment(f"prompt-{number}", stretch.input_tokens),), stretch.output_tokens)
            yield PlannedSession(number, begins_s + at_s, traffic, (turn,))
            number += 1
        begins_s += stretch.seconds


async def figures(options: Options) -> list[Figure]:
    """Runs it once and writes the page."""
    stretches = QUICK if options.quick else (*RAMP, *BURSTS)
    story = await _run(options, stretches)
    path = options.report / "local.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(story), encoding="utf-8")
    say(f"local: {path}")
    return _figures(story)


async def _run(options: Options, stretches: tuple[Stretch, ...]) -> Story:
    folder = options.folder / "local"
    base = LocalMeshConfig(
        model=str(options.model),
        model_name=MODEL,
        port=0,
        num_threads=1,
        log_dir=str(folder),
        worker_args=("--max-num-seqs", str(MAX_SEQS), *PLAIN_FLAGS),
    )
    config = SCALING.prepared(base)
    objectives = SCALING.objectives_file(config, folder)
    config = replace(config, router_args=("--objectives", str(objectives)))
    events: list[str] = []
    async with LocalMesh(config, on_event=events.append, on_progress=say) as mesh:
        loop = local_loop(mesh, SCALING, objectives, say)
        async with scaled(loop):
            return await _loaded(mesh, loop, stretches, events, options.pick(SETTLE_S, 1.0))


async def _loaded(mesh: LocalMesh, loop: Loop, stretches: tuple[Stretch, ...], events: list[str], settle_s: float) -> Story:
    book = ObjectiveBook(Objectives(SCALING.ttft_ms, SCALING.tpot_ms, quantile=SCALING.quantile))
    target = GrpcTarget(mesh.router_address, GrpcSettings(model=MODEL))
    runner = Runner(target, RunSettings(timeout_s=120.0, book=book))
    samples: list[Sample] = []
    offset_s = _wall_offset_s(loop)
    began_s = asyncio.get_running_loop().time()
    watching = asyncio.create_task(_watch(mesh, samples, began_s))
    try:
        await target.check()
        log = await runner.run(plan(stretches, SEED))
        await asyncio.sleep(settle_s)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await target.close()
    entries = [replace(entry, at_s=entry.at_s - offset_s - log.started_at) for entry in loop.history.entries]
    total_s = sum(stretch.seconds for stretch in stretches)
    samples = [replace(sample, at_s=sample.at_s + began_s - log.started_at) for sample in samples]
    return Story(tuple(log.records), tuple(samples), tuple(entries), tuple(events), book, total_s)


def _wall_offset_s(loop: Loop) -> float:
    """What the loop's clock reads more than the event loop's."""
    return loop.clock() - asyncio.get_running_loop().time()


async def _watch(mesh: LocalMesh, samples: list[Sample], began_s: float) -> None:
    """Processes that are ready, by the roles that they have now."""
    target = GrpcTarget(mesh.router_address, GrpcSettings(model=MODEL))
    try:
        while True:
            fleet = await target.fleet()
            now_s = asyncio.get_running_loop().time() - began_s
            if fleet is not None:
                samples.append(Sample(now_s, fleet.num_prefill, fleet.num_decode, len(mesh.workers)))
            await asyncio.sleep(SAMPLE_S)
    finally:
        await target.close()


def _figures(story: Story) -> list[Figure]:
    summary = summarise(story.records, Window(0.0, story.total_s), story.book)
    num_failed = sum(record.outcome in FAILED for record in story.records)
    num_refused = sum(record.outcome is Outcome.REFUSED for record in story.records)
    lasted_s = story.samples[-1].at_s - story.samples[0].at_s if len(story.samples) > 1 else 1.0
    mean_workers = sum(sample.num_workers for sample in story.samples) / max(1, len(story.samples))
    return [
        Figure("requests that failed while workers came and went", num_failed, f"of {len(story.records)}", "lower", goal=0),
        Figure("requests that were refused", num_refused, f"of {len(story.records)}", "lower"),
        Figure("requests that kept TTFT and TPOT", round(summary.attainment or 0.0, 4), "share", "higher", SCALING.quantile),
        Figure("workers that were started", _count(story.events, " is ready after "), "processes", "higher"),
        Figure("workers that were drained and stopped", _count(story.events, " is gone, "), "processes", "higher"),
        Figure("workers that changed roles", sum(_num_flipped(entry) for entry in story.entries), "times", "higher"),
        Figure("workers on average", round(mean_workers, 2), f"of {SCALING.max_workers}, over {lasted_s:.0f} s", "lower"),
    ]


def _count(events: tuple[str, ...], words: str) -> int:
    return sum(words in event for event in events)


def _num_flipped(entry: Entry) -> int:
    return int(entry.text.partition(" ")[0]) if entry.kind == "flip" else 0
