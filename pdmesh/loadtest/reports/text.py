"""Formats a result for the terminal: lines and tables of at most 100 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pdmesh.loadtest.compare import CONFIDENCE, Difference
from pdmesh.loadtest.measure import Capacity, Trial
from pdmesh.loadtest.result import Result
from pdmesh.loadtest.stats import Latency, Sessions, Summary, TurnPoint
from pdmesh.terminal import table

_LATENCIES = ("ttft", "ttft_from_sent", "tpot", "itl", "e2e")
NAMES = {
    "ttft": "TTFT",
    "ttft_from_sent": "TTFT from sent",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "end to end",
}


def lines(result: Result) -> list[RenderableType]:
    """Return all of a result except its time line."""
    summary = result.summary
    return [
        Text(f"{result.target} · {result.model or 'unknown model'} · {result.window.length_s:g} s", "bold"),
        _counts(summary),
        f"{summary.request_rate:.2f} requests/s · {summary.output_token_rate:.1f} tokens/s · goodput {summary.goodput:.2f}/s",
        "",
        _latency_table(result),
        "",
        *_objective_lines(result),
        *_session_lines(result),
        *_breakdown("CLASS", result.by_class),
        *_breakdown("TENANT", result.by_tenant),
        *_phase_lines(result.phases),
        *_error_lines(summary.errors),
        *_validity_lines(result),
    ]


def _counts(summary: Summary) -> str:
    outcomes = " · ".join(f"{number} {name.replace('_', ' ')}" for name, number in summary.outcomes.items())
    cached = f" ({summary.cached_tokens} cached)" if summary.cached_tokens else ""
    return f"{summary.num_requests} requests: {outcomes} · {summary.input_tokens} tokens in{cached}, {summary.output_tokens} out"


def _latency_table(result: Result) -> Table:
    rows = [_latency_row(NAMES[name], getattr(result.summary, name)) for name in _LATENCIES]
    return table(("ms", "MEAN", "P50", "P90", "P95", "P99", "MAX", "OF"), rows)


def _latency_row(name: str, latency: Latency) -> tuple[str, ...]:
    return (name, *durations(latency, "mean", "p50", "p90", "p95", "p99", "max"), str(latency.num_values))


def durations(latency: Latency, *names: str) -> tuple[str, ...]:
    """Return its figures in milliseconds, or dashes where there were no values."""
    return tuple(milliseconds(getattr(latency, name)) if latency.num_values else "–" for name in names)


def milliseconds(value: float) -> str:
    """Return three significant digits."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def share(value: float | None) -> str:
    """Return a share as a percentage."""
    return "–" if value is None else f"{100 * value:.2f} %"


def _objective_lines(result: Result) -> list[RenderableType]:
    if result.summary.attained is None:
        return [f"objectives: none; {share(result.summary.attainment)} answered in full"]
    verdict = ("kept", "good") if result.summary.attained else ("missed", "bad")
    own = [f"  {name}: {objectives}" for name, objectives in result.objectives_by_class.items()]
    attained = Text.assemble(f"{share(result.summary.attainment)} attained: ", verdict)
    return [f"objectives: {result.objectives}", *own, attained]


def _breakdown(title: str, groups: Mapping[str, Summary]) -> list[RenderableType]:
    if len(groups) < 2:
        return []
    head = (title, "REQUESTS", "OK", "ATTAINED", "GOODPUT/s", "TTFT P50", "P99", "TPOT P50", "P99")
    rows = [
        (
            name,
            str(summary.num_requests),
            str(summary.outcomes.get("ok", 0)),
            share(summary.attainment),
            f"{summary.goodput:.2f}",
            *durations(summary.ttft, "p50", "p99"),
            *durations(summary.tpot, "p50", "p99"),
        )
        for name, summary in groups.items()
    ]
    return ["", table(head, rows)]


_MAX_TURNS = 12


def _session_lines(result: Result) -> list[RenderableType]:
    """Return how sessions ended, their turns, and what of their prompts could be reused."""
    reuse = reuse_line(result.summary)
    if result.sessions is None:
        return [reuse] if reuse else []
    lines: list[RenderableType] = ["", sessions_line(result.sessions), *held_lines(result.sessions), *([reuse] if reuse else [])]
    if len(result.turns) < 2:
        return lines
    head = ("TURN", "REQUESTS", "TTFT P50", "P90", "P99", "REUSABLE", "CACHED")
    return [*lines, *_breakdown("TURNS", result.by_turns), "", table(head, turn_rows(result.turns)[:_MAX_TURNS])]


def sessions_line(sessions: Sessions) -> str:
    """Return how many sessions ended in which way."""
    lost = f" ({sessions.num_turns_lost} turns behind a failed one were not sent)" if sessions.num_turns_lost else ""
    counts = {
        "complete": sessions.num_complete,
        f"broken{lost}": sessions.num_broken,
        "cancelled": sessions.num_cancelled,
        "cut off by the end of the run": sessions.num_cut_off,
    }
    ended = " · ".join(f"{number} {name}" for name, number in counts.items() if number)
    return f"{sessions.num_sessions} sessions: {ended or 'none'}"


def held_lines(sessions: Sessions) -> list[str]:
    """Return how many turns were held, if any."""
    held = sessions.held
    if not held.num_values:
        return []
    late = f"{milliseconds(held.p50)} ms (p50), {milliseconds(held.p99)} ms (p99)"
    return [f"{held.num_values} turns were due before the one before them had ended: held for {late}, part of their latencies"]


def reuse_line(summary: Summary) -> str:
    """Return what a cache could hold of the prompts, and what the server says was cached; empty where nothing could be."""
    if not summary.reusable_tokens:
        return ""
    told = f"{share(summary.cached_share)} reported as cached" if summary.cached_tokens else "none reported as cached"
    known = f"{summary.reusable_tokens} of {summary.prompt_tokens} prompt tokens ({share(summary.reusable_share)})"
    return f"reusable: {known} had been sent or answered before; {told}"


def turn_rows(points: Sequence[TurnPoint]) -> list[tuple[str, ...]]:
    """Return rows: number, requests, TTFT, and the shares of prompt tokens that were reusable and cached."""
    tells = any(point.cached_tokens for point in points)
    return [_turn_row(point, tells_cached=tells) for point in points]


def _turn_row(point: TurnPoint, *, tells_cached: bool) -> tuple[str, ...]:
    ttft = ("–" if value is None else milliseconds(value) for value in (point.ttft_p50, point.ttft_p90, point.ttft_p99))
    reusable = share(point.reusable_tokens / point.prompt_tokens if point.prompt_tokens else None)
    cached = share(point.cached_tokens / point.input_tokens if tells_cached and point.input_tokens else None)
    return (str(point.turn), str(point.num_requests), *ttft, reusable, cached)


def _phase_lines(phases: Mapping[str, Mapping[str, float]]) -> list[RenderableType]:
    if not phases:
        return []
    names = list(phases["all"])
    rows = [(name, *(milliseconds(phases[group].get(name, 0.0)) for group in phases)) for name in names]
    return ["", table(("PHASE, mean ms", *(group.upper() for group in phases)), rows)]


def _error_lines(errors: Mapping[str, int]) -> list[RenderableType]:
    if not errors:
        return []
    return ["", Text("ERRORS", "bold"), *(f"{number:>6}  {message[:90]}" for message, number in errors.items())]


def _validity_lines(result: Result) -> list[RenderableType]:
    late = f"{milliseconds(result.lateness.p50)} ms (p50), {milliseconds(result.lateness.p99)} ms (p99)"
    lines: list[RenderableType] = ["", f"sent late by {late}: part of all latencies but the one from sent"]
    if result.interrupted:
        lines.append(Text("interrupted: only what was due before that is counted", "warning"))
    return [*lines, *(Text(f"NOT VALID: {reason}", "bad") for reason in result.reasons)]


def trial_line(trial: Trial) -> str:
    """Return one window of a search."""
    return f"{trial.rate:8.3f} requests/s: {share(trial.attainment)} attained, goodput {trial.goodput:.3f}/s"


def capacity_lines(capacities: Sequence[Capacity], stopped: str = "") -> list[RenderableType]:
    """Return the result of a search; `stopped`: why it ended early."""
    ended = [Text(f"the search ended early: {stopped}", "warning")] if stopped else []
    return [Text("CAPACITY", "bold"), *(_capacity_line(capacity, stopped) for capacity in capacities), *ended]


def _capacity_line(capacity: Capacity, stopped: str) -> RenderableType:
    of = f"{100 * capacity.attainment:g} % of requests keep their objectives"
    if capacity.rate is None and capacity.failed_rate is None:
        return Text(f"{of}: nothing was found", "bad")
    if capacity.rate is None:
        return Text(f"{of}: at no rate (not at {capacity.failed_rate:.3g} requests/s)", "bad")
    highest = "no rate that was measured was too high" if stopped else "no rate that was allowed was too high"
    bound = highest if capacity.failed_rate is None else f"not at {capacity.failed_rate:.4g}"
    rate = f"{'≥ ' if capacity.failed_rate is None else ''}{capacity.rate:.4g}"
    return f"{of} up to {rate} requests/s ({bound}); goodput there {capacity.goodput or 0:.4g} requests/s"


def comparison_table(differences: Sequence[Difference]) -> Table:
    """Return two results side by side."""
    head = ("", "A", "B", "B − A", f"{100 * CONFIDENCE:g} % INTERVAL", "CHANGE", "")
    rows = [
        (
            f"{item.name}, {item.unit}",
            f"{item.a:.4g}",
            f"{item.b:.4g}",
            f"{item.b - item.a:+.4g}",
            f"{item.low:+.4g} … {item.high:+.4g}",
            "–" if item.relative is None else f"{100 * item.relative:+.1f} %",
            "better" if item.better else "worse" if item.worse else "not sure",
        )
        for item in differences
    ]
    return table(head, rows, ["good" if item.better else "bad" if item.worse else "" for item in differences])
