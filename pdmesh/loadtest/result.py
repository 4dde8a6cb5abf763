"""The result of a run: one JSON document, from which every report is made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pdmesh.loadtest.record import ObjectiveBook, Objectives, Record
from pdmesh.loadtest.runner import RunLog
from pdmesh.loadtest.stats import (
    FIRST_TURNS,
    LATER_TURNS,
    Bin,
    FleetPoint,
    Latency,
    Sessions,
    Summary,
    TurnPoint,
    Window,
    by,
    by_turn,
    count_sessions,
    met,
    phases_of_slowest,
    slowest,
    summarise,
    timeline,
)

FORMAT = "pdmesh-loadtest/1"
NUM_SLOWEST = 20


@dataclass(frozen=True)
class Slow:
    """Hold one of the slowest requests; milliseconds, except `scheduled_s`."""

    request: str
    scheduled_s: float
    outcome: str
    waited_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    input_tokens: int
    output_tokens: int
    workers: str
    error: str
    phases_ms: Mapping[str, float]


@dataclass(frozen=True)
class Sample:
    """Hold the counted requests as columns of equal length; milliseconds, None where there is no such latency. `met`: 1 kept, 0
    missed, None does not count. `compare` resamples them."""

    scheduled_s: Sequence[float] = ()
    traffic_class: Sequence[str] = ()
    outcome: Sequence[str] = ()
    ttft: Sequence[float | None] = ()
    tpot: Sequence[float | None] = ()
    e2e: Sequence[float | None] = ()
    met: Sequence[int | None] = ()
    # The number of turns before each; empty in results of before they were counted.
    depth: Sequence[int] = ()


@dataclass(frozen=True)
class Result:
    """Hold one measured window. `reasons`: why it says nothing about the target (the load test was late itself); empty: it is
    valid."""

    target: str
    model: str
    started_at: str
    settings: Mapping[str, Any]
    window: Window
    objectives: Objectives
    objectives_by_class: Mapping[str, Objectives]
    reasons: Sequence[str]
    lateness: Latency
    loop_lag: Latency
    summary: Summary
    by_class: Mapping[str, Summary]
    by_tenant: Mapping[str, Summary]
    timeline: Sequence[Bin]
    fleet: Sequence[FleetPoint]
    phases: Mapping[str, Mapping[str, float]]
    slowest: Sequence[Slow]
    sample: Sample
    interrupted: bool = False
    format: str = FORMAT
    # For a search: the rates that were found, and the windows that led there.
    capacity: Mapping[str, Any] = field(default_factory=dict)
    # Of sessions with several turns; empty where there were none, and in results of before they were counted.
    by_turns: Mapping[str, Summary] = field(default_factory=dict)
    turns: Sequence[TurnPoint] = ()
    sessions: Sessions | None = None

    @property
    def valid(self) -> bool:
        return not self.reasons


def make_result(
    log: RunLog,
    window: Window,
    book: ObjectiveBook,
    *,
    target: str,
    model: str,
    started_at: str,
    settings: Mapping[str, Any],
    max_lateness_s: float,
) -> Result:
    """Return the result of a run."""
    counted = [record for record in log.records if window.holds(record)]
    lateness, loop_lag = Latency.of(record.lateness_s for record in counted), Latency.of(log.loop_lag_s)
    turns = by_turn(counted)
    by_turns = by(counted, lambda r: LATER_TURNS if r.depth else FIRST_TURNS) if turns else {}
    return Result(
        target=target,
        model=model,
        started_at=started_at,
        settings=settings,
        window=window,
        objectives=book.common,
        objectives_by_class=book.by_class,
        reasons=_reasons(lateness, loop_lag, len(counted), 1e3 * max_lateness_s),
        lateness=lateness,
        loop_lag=loop_lag,
        summary=summarise(counted, window, book),
        by_class={name: summarise(group, window, book) for name, group in by(counted, lambda r: r.traffic_class).items()},
        by_tenant={name: summarise(group, window, book) for name, group in by(counted, lambda r: r.tenant or "(none)").items()},
        timeline=timeline(log.records, book),
        fleet=[FleetPoint.of(at_s, fleet) for at_s, fleet in log.fleet],
        phases=phases_of_slowest(counted),
        slowest=[_slow(record) for record in slowest(counted, NUM_SLOWEST)],
        sample=_sample(counted, book),
        interrupted=log.interrupted,
        by_turns={name: summarise(group, window, book) for name, group in by_turns.items()},
        turns=turns,
        sessions=count_sessions(log.records, window),
    )


def _reasons(lateness: Latency, loop_lag: Latency, num_requests: int, max_ms: float) -> list[str]:
    reasons = []
    if not num_requests:
        reasons.append("no request was due in the window")
    for name, latency in (("requests were sent", lateness), ("the load test's own timers were", loop_lag)):
        if latency.p99 > max_ms:
            reasons.append(f"{name} {latency.p99:.1f} ms late (p99; at most {max_ms:g} ms is allowed): this machine is too busy")
    return reasons


def _slow(record: Record) -> Slow:
    return Slow(
        request=f"{record.session}-{record.turn}",
        scheduled_s=round(record.scheduled_s, 3),
        outcome=record.outcome.value,
        waited_ms=round(1e3 * (record.end_s - record.scheduled_s), 3),
        ttft_ms=_ms(record.ttft_s),
        tpot_ms=_ms(record.tpot_s),
        input_tokens=record.input_tokens,
        output_tokens=record.output_tokens,
        workers=record.workers,
        error=record.error,
        phases_ms={name: round(value, 3) for name, value in record.phases_ms.items()},
    )


def _sample(counted: Sequence[Record], book: ObjectiveBook) -> Sample:
    verdicts = [met(record, book.of(record.traffic_class)) for record in counted]
    return Sample(
        scheduled_s=[round(record.scheduled_s, 4) for record in counted],
        traffic_class=[record.traffic_class for record in counted],
        outcome=[record.outcome.value for record in counted],
        ttft=[_ms(record.ttft_s) for record in counted],
        tpot=[_ms(record.tpot_s) for record in counted],
        e2e=[_ms(record.e2e_s) for record in counted],
        met=[None if verdict is None else int(verdict) for verdict in verdicts],
        depth=[record.depth for record in counted],
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def as_json(result: Result) -> dict[str, Any]:
    """Return the document."""
    return asdict(result)


def write(result: Result, path: str) -> None:
    """Write the document. Raises OSError."""
    Path(path).write_text(json.dumps(as_json(result), ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: str) -> Result:
    """Return the result that `write` wrote. Raises ValueError that names the file and what is wrong with it."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"is not a result of `pdmesh loadtest` ({FORMAT})")
        document = {**_OPTIONAL, **document}
        _check(document)
        return _parse(document)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: {reason}") from error


_NUMBERS = {"window": ("start_s", "end_s"), "sample": ("scheduled_s", "ttft", "tpot", "e2e", "met")}
_LATENCIES = ("ttft", "ttft_from_sent", "tpot", "itl", "e2e")
_OBJECTS = ("settings", "window", "objectives", "objectives_by_class", "lateness", "loop_lag", "summary", "by_class", "by_tenant")
_LISTS = ("reasons", "timeline", "fleet", "slowest")
# What results of before sessions were counted do not have.
_OPTIONAL: Mapping[str, object] = {"by_turns": {}, "turns": [], "sessions": None}


def _check(document: Mapping[str, Any]) -> None:
    """Raise ValueError that names a field which reports cannot use."""
    objects = (*_OBJECTS, "phases", "sample", "by_turns", *(["sessions"] if document["sessions"] is not None else []))
    for kind, names, what in ((dict, objects, "an object"), (list, (*_LISTS, "turns"), "a list")):
        for name in names:
            if not isinstance(document[name], kind):
                raise ValueError(f"{name}: must be {what}")
    summaries = {name: group for of in ("by_class", "by_tenant", "by_turns") for name, group in document[of].items()}
    for name, summary in {"summary": document["summary"], **summaries}.items():
        for metric in _LATENCIES:
            if not all(map(_is_number, summary[metric].values())):
                raise ValueError(f"{name}.{metric}: must hold numbers")
    window, sample = document["window"], document["sample"]
    for name in _NUMBERS["window"]:
        if not _is_number(window[name]):
            raise ValueError(f"window.{name}: must be a number")
    if not window["start_s"] < window["end_s"]:
        raise ValueError("window: must end after its start")
    for name, column in sample.items():
        if not isinstance(column, list) or len(column) != len(sample["scheduled_s"]):
            raise ValueError(f"sample.{name}: must be a list, as long as the others")
    for name in _NUMBERS["sample"]:
        optional = name != "scheduled_s"
        if not all(_is_number(value) or (optional and value is None) for value in sample[name]):
            raise ValueError(f"sample.{name}: must hold numbers")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _parse(document: Mapping[str, Any]) -> Result:
    return Result(
        **{
            **document,
            "window": Window(**document["window"]),
            "objectives": Objectives(**document["objectives"]),
            "objectives_by_class": {name: Objectives(**value) for name, value in document["objectives_by_class"].items()},
            "lateness": Latency(**document["lateness"]),
            "loop_lag": Latency(**document["loop_lag"]),
            "summary": _summary(document["summary"]),
            "by_class": {name: _summary(value) for name, value in document["by_class"].items()},
            "by_tenant": {name: _summary(value) for name, value in document["by_tenant"].items()},
            "timeline": [Bin(**value) for value in document["timeline"]],
            "fleet": [FleetPoint(**value) for value in document["fleet"]],
            "slowest": [Slow(**value) for value in document["slowest"]],
            "sample": Sample(**document["sample"]),
            "by_turns": {name: _summary(value) for name, value in document["by_turns"].items()},
            "turns": [_turn_point(value) for value in document["turns"]],
            "sessions": _sessions(document["sessions"]),
        }
    )


def _turn_point(document: Mapping[str, Any]) -> TurnPoint:
    point = TurnPoint(**document)
    if not all(value is None or _is_number(value) for value in document.values()):
        raise ValueError("turns: must hold numbers")
    return point


def _sessions(document: Mapping[str, Any] | None) -> Sessions | None:
    if document is None:
        return None
    held = Latency(**document["held"])
    counts = {name: value for name, value in document.items() if name != "held"}
    if not all(map(_is_number, (*counts.values(), *document["held"].values()))):
        raise ValueError("sessions: must hold numbers")
    return Sessions(**counts, held=held)


def _summary(document: Mapping[str, Any]) -> Summary:
    latencies = {name: Latency(**document[name]) for name in _LATENCIES}
    return Summary(**{**document, **latencies})
