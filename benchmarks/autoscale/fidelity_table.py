"""Two runs of the same requests side by side: quantiles, how far apart they are, and in which part of the time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.autoscale.fidelity_runs import PARTS, Passage, Run
from pdmesh.loadtest.stats import quantile


class Quantity(NamedTuple):
    """What is compared, and how far apart a simulation may be: a share."""

    name: str
    field: str
    q: float
    goal: float


QUANTITIES = (
    Quantity("TTFT median", "ttft_s", 0.5, 0.10),
    Quantity("TPOT median", "tpot_s", 0.5, 0.10),
    Quantity("TTFT p99", "ttft_s", 0.99, 0.25),
    Quantity("TPOT p99", "tpot_s", 0.99, 0.25),
)


def value(runs: Iterable[Run], what: Quantity) -> float:
    """Of the requests of all these runs together, in seconds. Raises ValueError without any."""
    values = sorted(seconds for run in runs for one in run.passages if (seconds := getattr(one, what.field)) > 0)
    if not values:
        raise ValueError(f"{what.name}: no request was answered")
    return quantile(values, what.q)


def apart(ours: float, theirs: float) -> float:
    """|ours / theirs - 1|."""
    return abs(ours / theirs - 1)


def lines(real: Sequence[Run], simulated: Sequence[Run]) -> list[str]:
    """A table for people: milliseconds, real and simulated."""
    listed = [f"{'':<20}{'real':>9}{'simulated':>11}{'off':>8}"]
    for what in QUANTITIES:
        theirs, ours = value(real, what), value(simulated, what)
        listed.append(f"{what.name:<20}{1e3 * theirs:9.2f}{1e3 * ours:11.2f}{ours / theirs - 1:+8.1%}")
    listed.append(f"{'LOCAL':<20}{_local(real):9.1%}{_local(simulated):11.1%}")
    listed.append(f"{'refused':<20}{_refused(real):9.1f}{_refused(simulated):11.1f}")
    listed.append(f"{'':<20}{'mean':>9}{'p50':>9}{'p99':>9}   |{'mean':>9}{'p50':>9}{'p99':>9}")
    for part in ("outside", *PARTS, "first_gap"):
        theirs_of, ours_of = _three(real, part), _three(simulated, part)
        listed.append(f"{part:<20}{theirs_of}   |{ours_of}")
    return listed


def _three(runs: Sequence[Run], part: str) -> str:
    values = sorted(one.parts.get(part, 0.0) for one in _passages(runs))
    three = (sum(values) / len(values), quantile(values, 0.5), quantile(values, 0.99))
    return "".join(f"{1e3 * seconds:9.2f}" for seconds in three)


def _local(runs: Sequence[Run]) -> float:
    passages = _passages(runs)
    return sum(one.is_local for one in passages) / len(passages)


def _refused(runs: Sequence[Run]) -> float:
    return sum(run.num_refused for run in runs) / len(runs)


def _passages(runs: Sequence[Run]) -> list[Passage]:
    return [one for run in runs for one in run.passages]
