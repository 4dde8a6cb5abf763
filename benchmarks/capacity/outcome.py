"""What was found, as figures and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.capacity.plan import MAX_INPUT_TOKENS, OUTPUT_TOKENS, TRAFFIC, Plan
from benchmarks.harness import Figure, this_machine
from benchmarks.peers.systems import System
from pdmesh.loadtest.measure import Capacity, Trial, found
from pdmesh.loadtest.reports import comparison
from pdmesh.loadtest.reports.comparison import Facts
from pdmesh.loadtest.result import Result

# What was asked of the mesh: times its peer's capacity.
GOALS = {"aggregated": 0.98, "vllm": 2.0, "smg": 2.0}


@dataclass(frozen=True)
class Outcome:
    """One system: all its windows, and the one that shows how it answers at its capacity (where it has none: the last one)."""

    system: System
    plan: Plan
    trials: Sequence[Trial]
    shown: Result
    num_stuck: int = 0

    @property
    def capacity(self) -> Capacity:
        """The highest rate that held in the second round, too, below those that failed; without one, the highest that held."""
        search = self.plan.search
        known = found(search, self.trials)
        counts = Counter(trial.rate for trial in self.trials)
        sure = [rate for rate, number in counts.items() if number > search.windows and rate <= (known.rate or 0.0)]
        held = [rate for rate in sure if search.holds(rate, self.trials)]
        if not held:
            return known
        return replace(found(search, [trial for trial in self.trials if trial.rate <= max(held)]), failed_rate=known.failed_rate)

    @property
    def confirmed(self) -> bool:
        """Whether the capacity held in windows of the second round, too."""
        return sum(trial.rate == self.capacity.rate for trial in self.trials) > self.plan.search.windows

    @property
    def strict(self) -> Capacity:
        """Of 99 %, as far as the same windows tell it."""
        return found(self.plan.strict_search, self.trials)

    @property
    def shown_at(self) -> str:
        """Where the shown window was measured."""
        attainment = self.shown.summary.attainment or 0.0
        rate = next((trial.rate for trial in reversed(self.trials) if trial.attainment == attainment), None)
        if rate is None or rate == self.capacity.rate:
            return "at its capacity" if self.capacity.rate else "at the lowest rate that was tried"
        return f"at {rate:g} requests/s" if self.capacity.rate else "at the lowest rate that was tried"

    @property
    def result(self) -> Result:
        """As `pdmesh loadtest --find-capacity` would have written it."""
        capacities = [capacity.as_json() for capacity in (self.strict, self.capacity)]
        trials = [asdict(trial) for trial in self.trials]
        return replace(self.shown, target=self.system.name, capacity={"capacities": capacities, "trials": trials})


def figures(outcomes: Sequence[Outcome]) -> list[Figure]:
    """A capacity that was not found counts as 0: not even the lowest rate that was tried held."""
    listed = [figure for outcome in outcomes for figure in _of_one(outcome)]
    return [*listed, *_ratios({outcome.system.key: outcome for outcome in outcomes})]


def _of_one(outcome: Outcome) -> list[Figure]:
    name, summary = outcome.system.name, outcome.shown.summary
    capacity = "capacity" if outcome.confirmed or not outcome.capacity.rate else "capacity (not confirmed)"
    latencies = {
        f"{metric} {quantile} {outcome.shown_at}": getattr(latency, quantile) if latency.num_values else "none answered"
        for metric, latency in (("TTFT", summary.ttft), ("TPOT", summary.tpot))
        for quantile in ("p50", "p99")
    }
    return [
        Figure(f"{name}: {capacity}, 90 % keep their objectives", outcome.capacity.rate or 0.0, "requests/s", "higher"),
        Figure(f"{name}: capacity, 99 % keep their objectives (at least)", outcome.strict.rate or 0.0, "requests/s", "higher"),
        Figure(f"{name}: goodput at its capacity", outcome.capacity.goodput or 0.0, "requests/s", "higher"),
        *(Figure(f"{name}: {metric}", value, "ms", "lower") for metric, value in latencies.items()),
        Figure(f"{name}: times that it was stuck after a window", outcome.num_stuck, "times", "lower"),
    ]


def _ratios(by_key: Mapping[str, Outcome]) -> list[Figure]:
    ours = by_key.get("mesh")
    if ours is None:
        return []
    ratios = []
    for key, goal in GOALS.items():
        if (peer := by_key.get(key)) is not None:
            theirs, rate = peer.capacity.rate, ours.capacity.rate or 0.0
            value = rate / theirs if theirs else f"{rate:.3g} requests/s against none"
            name = f"{ours.system.name} over {peer.system.name}: capacity"
            ratios.append(Figure(name, value, "times", "higher", goal=goal, peer=peer.system.name))
    return ratios


def page(outcomes: Sequence[Outcome], absent: Mapping[str, str], command: str) -> str:
    """The report."""
    machine = asdict(this_machine())
    late = [(o.system.name, f"{o.shown.lateness.p50:.1f}", f"{o.shown.lateness.p99:.1f}", str(o.num_stuck)) for o in outcomes]
    plan = outcomes[0].plan
    asked = [
        ("prompts", f"{TRAFFIC.input_tokens} tokens, at most {MAX_INPUT_TOKENS}; words, no two prompts alike"),
        ("answers", f"{OUTPUT_TOKENS} tokens, greedy, end of sequence ignored"),
        ("arrivals", "Poisson; at equal rates the same times and prompts for everybody"),
        (
            "a window",
            f"{plan.warmup_s:g} s that do not count, then {plan.duration_s:g} s; then what can still be good",
        ),
        ("confirmed by", "further windows at the capacity, whose latencies are shown, and at 1.15 times it, in a second round"),
        ("99 %", "only what these windows tell: that search was not made"),
        ("command", command),
    ]
    facts = [
        *([Facts("Could not take part", list(absent.items()))] if absent else []),
        Facts("What was asked", asked),
        Facts("The systems", [(o.system.name, o.system.about, o.system.command) for o in outcomes]),
        Facts("The load test itself", late, ("", "sent late by p50, ms", "p99, ms", "times the system was stuck after a window")),
        Facts("The machine", [(name, str(value)) for name, value in machine.items()]),
    ]
    results = {outcome.system.name: outcome.result for outcome in outcomes}
    return comparison.page(results, "Capacity of four systems on one machine", facts)
