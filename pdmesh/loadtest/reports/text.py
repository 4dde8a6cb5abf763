"""A result for the terminal: lines of at most 100 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdmesh.loadtest.compare import CONFIDENCE, Difference
from pdmesh.loadtest.measure import Capacity, Trial
from pdmesh.loadtest.result import Result
from pdmesh.loadtest.stats import Latency, Summary
from pdmesh.terminal import Palette, table

_LATENCIES = ("ttft", "ttft_from_sent", "tpot", "itl", "e2e")
NAMES = {
    "ttft": "TTFT",
    "ttft_from_sent": "TTFT from sent",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "end to end",
}


def lines(result: Result, colours: Palette) -> list[str]:
    """All of a result but its time line."""
    summary = result.summary
    return [
        colours.bold(f"{result.target} · {result.model or 'unknown model'} · {result.window.length_s:g} s"),
        _counts(summary),
        f"{summary.request_rate:.2f} requests/s · {summary.output_token_rate:.1f} tokens/s · goodput {summary.goodput:.2f}/s",
        "",
        *_latency_table(result, colours),
        "",
        *_objective_lines(result, colours),
        *_breakdown("CLASS", result.by_class, colours),
        *_breakdown("TENANT", result.by_tenant, colours),
        *_phase_lines(result.phases, colours),
        *_error_lines(summary.errors, colours),
        *_validity_lines(result, colours),
    ]


def _counts(summary: Summary) -> str:
    outcomes = " · ".join(f"{number} {name.replace('_', ' ')}" for name, number in summary.outcomes.items())
    cached = f" ({summary.cached_tokens} cached)" if summary.cached_tokens else ""
    return f"{summary.num_requests} requests: {outcomes} · {summary.input_tokens} tokens in{cached}, {summary.output_tokens} out"


def _latency_table(result: Result, colours: Palette) -> list[str]:
    rows = [_latency_row(NAMES[name], getattr(result.summary, name)) for name in _LATENCIES]
    head, *body = table(("ms", "MEAN", "P50", "P90", "P95", "P99", "MAX", "OF"), rows)
    return [colours.bold(head), *body]


def _latency_row(name: str, latency: Latency) -> tuple[str, ...]:
    return (name, *durations(latency, "mean", "p50", "p90", "p95", "p99", "max"), str(latency.num_values))


def durations(latency: Latency, *names: str) -> tuple[str, ...]:
    """These figures of it in milliseconds, or dashes where there were no values."""
    return tuple(milliseconds(getattr(latency, name)) if latency.num_values else "–" for name in names)


def milliseconds(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def share(value: float | None) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{100 * value:.2f} %"


def _objective_lines(result: Result, colours: Palette) -> list[str]:
    if result.summary.attained is None:
        return [f"objectives: none; {share(result.summary.attainment)} answered in full"]
    verdict = colours.good("kept") if result.summary.attained else colours.bad("missed")
    own = [f"  {name}: {objectives}" for name, objectives in result.objectives_by_class.items()]
    return [f"objectives: {result.objectives}", *own, f"{share(result.summary.attainment)} attained: {verdict}"]


def _breakdown(title: str, groups: Mapping[str, Summary], colours: Palette) -> list[str]:
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
    first, *body = table(head, rows)
    return ["", colours.bold(first), *body]


def _phase_lines(phases: Mapping[str, Mapping[str, float]], colours: Palette) -> list[str]:
    if not phases:
        return []
    names = list(phases["all"])
    rows = [(name, *(milliseconds(phases[group].get(name, 0.0)) for group in phases)) for name in names]
    head, *body = table(("PHASE, mean ms", *(group.upper() for group in phases)), rows)
    return ["", colours.bold(head), *body]


def _error_lines(errors: Mapping[str, int], colours: Palette) -> list[str]:
    if not errors:
        return []
    return ["", colours.bold("ERRORS"), *(f"{number:>6}  {message[:90]}" for message, number in errors.items())]


def _validity_lines(result: Result, colours: Palette) -> list[str]:
    late = f"{milliseconds(result.lateness.p50)} ms (p50), {milliseconds(result.lateness.p99)} ms (p99)"
    lines = ["", f"sent late by {late}: part of all latencies but the one from sent"]
    if result.interrupted:
        lines.append(colours.warning("interrupted: only what was due before that is counted"))
    return lines + [colours.bad(f"NOT VALID: {reason}") for reason in result.reasons]


def trial_line(trial: Trial) -> str:
    """One window of a search."""
    return f"{trial.rate:8.3f} requests/s: {share(trial.attainment)} attained, goodput {trial.goodput:.3f}/s"


def capacity_lines(capacities: Sequence[Capacity], colours: Palette, stopped: str = "") -> list[str]:
    """What a search found; `stopped`: why it ended early."""
    ended = [colours.warning(f"the search ended early: {stopped}")] if stopped else []
    return [colours.bold("CAPACITY"), *(_capacity_line(capacity, colours, stopped) for capacity in capacities), *ended]


def _capacity_line(capacity: Capacity, colours: Palette, stopped: str) -> str:
    of = f"{100 * capacity.attainment:g} % of requests keep their objectives"
    if capacity.rate is None and capacity.failed_rate is None:
        return colours.bad(f"{of}: nothing was found")
    if capacity.rate is None:
        return colours.bad(f"{of}: at no rate (not at {capacity.failed_rate:.3g} requests/s)")
    highest = "no rate that was measured was too high" if stopped else "no rate that was allowed was too high"
    bound = highest if capacity.failed_rate is None else f"not at {capacity.failed_rate:.4g}"
    rate = f"{'≥ ' if capacity.failed_rate is None else ''}{capacity.rate:.4g}"
    return f"{of} up to {rate} requests/s ({bound}); goodput there {capacity.goodput or 0:.4g} requests/s"


def comparison_lines(differences: Sequence[Difference], colours: Palette) -> list[str]:
    """Two results side by side."""
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
    first, *body = table(head, rows)
    paints = [colours.good if item.better else colours.bad if item.worse else str for item in differences]
    return [colours.bold(first), *(paint(line) for paint, line in zip(paints, body, strict=True))]
