"""What the autoscaler keeps and costs in simulation, beside an oracle and what others do, on the public traces.

The traces lie outside of the repository (`--traces`); without one, generated lengths stand in for it, and the figure says so.
Every run of a trace is the same requests through the same simulated routers and workers; pods take 60 s to start.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.autoscale.rivals import DynamoPlanner, DynamoSettings, Hpa, HpaSettings, Interval
from benchmarks.autoscale.scenario import PUBLISHED, SCENARIOS, Options, Scenario, quick
from benchmarks.harness import Figure, say
from pdmesh.autoscaler.collect.traffic import Counts, lengths_of
from pdmesh.autoscaler.settings import AutoscalerSettings, PoolSettings
from pdmesh.autoscaler.views import PoolName
from pdmesh.planning import prompt_times
from pdmesh.planning.capacity_load import Lengths, Limits, Worker, middle_s
from pdmesh.simulator import compiled
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.autoscaling import (
    Autoscaled,
    AutoscaledSettings,
    Moment,
    OwnScaler,
    Scaler,
    Seen,
    Wanted,
    goals_of,
    reversals,
)
from pdmesh.simulator.autoscaling_page import Shown, page
from pdmesh.simulator.results import Results, Window
from pdmesh.simulator.workers.spec import WorkerSpec

# One autoscaler on one load in the simulator, and what came of it; rivals as scalers of a simulated mesh.


POOLS = (PoolName.PREFILL, PoolName.DECODE)
WINDOW_S = 60.0
START_S = 60.0
COOL_DOWN_S = AutoscalerSettings().cool_down_s

UTILIZATION = 0.8
"""What autoscaling/v2 takes where no metric is given (API reference of HorizontalPodAutoscalerSpec: 80 % of CPU)."""
QUEUED = 5.0
"""Requests that wait for each replica: the threshold of the vLLM production stack's guide to autoscaling with KEDA."""
HPA_SYNC_S = 15.0


@dataclass(frozen=True)
class Outcome:
    """Of one run. `num_flips` workers changed roles; `moments` for those who look at it."""

    attainment: float
    pod_seconds: float
    by_pool: Mapping[str, float]
    num_reversals: int
    num_flips: int
    windows: tuple[Window, ...]
    moments: tuple[Moment, ...]
    ended_s: float

    @property
    def misses(self) -> list[int]:
        """By window."""
        return [window.num_arrived - window.num_met for window in self.windows]


def play(
    scenario: Scenario, arrivals: list[Arrival], scaler: Scaler, start: Mapping[PoolName, int], start_s: float = START_S
) -> Outcome:
    """The load through a mesh that `scaler` scales, whose pods serve `start_s` after they are asked for."""
    gc.freeze()  # what is there stays, and what comes has no cycles
    results = Results(window_s=WINDOW_S)
    scaled = Autoscaled(scenario.mesh(), results, scenario.specs, scaler, AutoscaledSettings(start_s=start_s))
    scaled.start(start)
    scaled.run(arrivals)
    by_pool = scaled.mesh.pod_seconds()
    return Outcome(
        results.total.attainment,
        sum(by_pool.values()),
        by_pool,
        reversals(scaled.moments, COOL_DOWN_S),
        sum(move.num for moment in scaled.moments for move in moment.moves),
        tuple(results.windows),
        tuple(scaled.moments),
        results.ended_at,
    )


def own(scenario: Scenario, start_s: float = START_S) -> Scaler:
    """Ours, with its defaults but for the starts that it is told of."""
    pool = PoolSettings(start_s=start_s)
    return OwnScaler(AutoscalerSettings(prefill=pool, decode=pool, both=pool), goals_of(scenario.objective))


class _Held:
    """Asked every period of its own, and as it said until then."""

    def __init__(self, period_s: float, decide: Callable[[Seen], Mapping[PoolName, int]]) -> None:
        self._period_s, self._decide = period_s, decide
        self._next_s = 0.0
        self._latest: Mapping[PoolName, int] | None = None

    def decide(self, seen: Seen) -> Wanted:
        """Pods that have died in between are not replaced before."""
        if seen.snapshot.now_s >= self._next_s - 1e-9:
            self._latest = self._decide(seen)
            self._next_s = seen.snapshot.now_s + self._period_s
        assert self._latest is not None
        return Wanted(self._latest)


def fixed(replicas: Mapping[PoolName, int]) -> Scaler:
    """So many, whatever comes."""
    return _Held(float("inf"), lambda seen: replicas)


def hpa_cpu(scenario: Scenario) -> Scaler:
    """Kubernetes' on utilization: of the latest 15 s, the share of the time in which a worker had something under way."""
    hpas = {pool: Hpa(HpaSettings(UTILIZATION)) for pool in POOLS}
    recent: dict[PoolName, deque[float]] = {pool: deque(maxlen=3) for pool in POOLS}

    def decide(seen: Seen) -> dict[PoolName, int]:
        now_s = seen.snapshot.now_s
        views = {view.name: view for view in seen.snapshot.pools}
        return {
            pool: hpa.by_utilization(
                now_s,
                sum(recent[pool]) / max(1, len(recent[pool])),
                views[pool].num_ready,
                len(views[pool].starting_ages_s),
            )
            for pool, hpa in hpas.items()
        }

    held = _Held(HPA_SYNC_S, decide)

    class Sampled:
        def decide(self, seen: Seen) -> Wanted:
            for pool in POOLS:
                recent[pool].append(seen.busy[pool])
            return held.decide(seen)

    return Sampled()


def hpa_queue(scenario: Scenario) -> Scaler:
    """Kubernetes' on the length of queues: prompts that wait in the workers of the pool, and requests that wait at routers."""
    hpas = {pool: Hpa(HpaSettings(QUEUED)) for pool in POOLS}

    def decide(seen: Seen) -> dict[PoolName, int]:
        at_routers = seen.snapshot.traffic.num_queued
        return {
            view.name: hpas[view.name].by_queue(seen.snapshot.now_s, seen.num_waiting[view.name] + at_routers, view.num_replicas)
            for view in seen.snapshot.pools
        }

    return _Held(HPA_SYNC_S, decide)


def dynamo(scenario: Scenario) -> Scaler:
    """Dynamo's planner: throughput-based scaling as published, every 180 s; on what our routers count, TTFT from the choice of
    workers on."""
    worker = worker_of(scenario.spec)
    planner = DynamoPlanner(DynamoSettings(worker, worker, goals_of(scenario.objective)))
    before = Counts()

    def decide(seen: Seen) -> dict[PoolName, int]:
        nonlocal before
        interval, before = seen.counts - before, seen.counts
        views = {view.name: view for view in seen.snapshot.pools}
        lengths = lengths_of(interval)
        if lengths is None or seen.snapshot.now_s < 60.0:
            return {pool: views[pool].num_replicas for pool in POOLS}
        told = Interval(interval.num_arrived, lengths, _mean_s(interval.ttft_observed), _mean_s(interval.tpot_observed))
        prefill, decode = planner.decide(told, views[PoolName.DECODE].num_ready)
        return {PoolName.PREFILL: prefill, PoolName.DECODE: decode}

    return _Held(180.0, decide)


def _mean_s(durations: Counter[int]) -> float | None:
    """Of classes (`pdmesh/planning/duration_histogram.py`); None without any."""
    num = durations.total()
    return sum(count * middle_s(number) for number, count in durations.items()) / num if num else None


def worker_of(spec: WorkerSpec) -> Worker:
    """What capacity arithmetic calls it."""
    limits = Limits(spec.max_num_batched_tokens, spec.max_num_seqs, spec.num_blocks * spec.block_size)
    return Worker(spec.speed, limits, spec.keeps_pace)


OURS, ORACLE = "pdmesh", "oracle"
RIVALS = {
    "Kubernetes HPA on CPU (80 %)": hpa_cpu,
    "Kubernetes HPA on queue length (5 each)": hpa_queue,
    "Dynamo's planner (throughput, 180 s, constant prediction)": dynamo,
}
FIXED = "fixed pool of the same cost"
LEAST_ATTAINMENT, MOST_COST = 0.96, 1.15
NUM_PROCESSES = 2


@dataclass(frozen=True)
class Contest:
    """All runs on one load, by name."""

    scenario: Scenario
    is_generated: bool
    outcomes: Mapping[str, Outcome]
    num_searched: int


def figures(options: Options) -> list[Figure]:
    """Of all loads; writes a page for each."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=context, initializer=compiled.use) as pool:
        found = pool.map(_of_load, range(len(SCENARIOS)), [options] * len(SCENARIOS))
        return [figure for figures in found for figure in figures]


def _of_load(number: int, options: Options) -> list[Figure]:
    """In a process that may use what is compiled: of that nothing pickles, so a number comes and figures go."""
    scenario = quick(SCENARIOS[number]) if options.quick else SCENARIOS[number]
    each = contest(scenario, options.traces)
    _write(each, options.report)
    return _figures(each)


def first_pods(loads: Mapping[PoolName, list[float]]) -> dict[PoolName, int]:
    """Those that serve when a load begins."""
    return {pool: max(2, math.ceil(1.5 * max(loads[pool][:3]))) for pool in POOLS}


def contest(scenario: Scenario, traces: Path | None) -> Contest:
    """Runs them all on one load."""
    arrivals = scenario.arrivals(traces)
    loads = demands(scenario, arrivals)
    start = first_pods(loads)
    outcomes = {OURS: play(scenario, arrivals, own(scenario), start)}
    _tell(scenario, OURS, outcomes[OURS])
    for name, scaler in RIVALS.items():
        outcomes[name] = play(scenario, arrivals, scaler(scenario), start)
        _tell(scenario, name, outcomes[name])
    pool_of_same_cost = _same_cost(outcomes[OURS])
    outcomes[FIXED] = play(scenario, arrivals, fixed(pool_of_same_cost), pool_of_same_cost)
    _tell(scenario, FIXED, outcomes[FIXED])
    found = _search(scenario, arrivals, loads, outcomes[OURS])
    outcomes[ORACLE] = found.outcome
    _tell(scenario, f"{ORACLE} ({found.num_runs} runs)", found.outcome)
    is_generated = traces is None or not (traces / PUBLISHED[scenario.name][0]).is_file()
    return Contest(scenario, is_generated, outcomes, found.num_runs)


def _search(scenario: Scenario, arrivals: list[Arrival], loads: dict[PoolName, list[float]], ours: Outcome) -> Found:
    def evaluate(schedule: Schedule) -> Outcome:
        start = {pool: max(at(row, 0.0), at(row, WINDOW_S)) for pool, row in schedule.items()}
        return play(scenario, arrivals, Scheduled(schedule), start)

    return search(loads, served(ours), evaluate, ours.attainment)


def _same_cost(ours: Outcome) -> dict[PoolName, int]:
    """The same pod-seconds at least, divided as ours were."""
    return {pool: max(1, math.ceil(ours.by_pool[pool.value] / ours.ended_s)) for pool in POOLS}


def _tell(scenario: Scenario, name: str, outcome: Outcome) -> None:
    say(
        f"{scenario.name}: {name}: {outcome.attainment:.2%} kept, {outcome.pod_seconds:.0f} pod-seconds, "
        f"{outcome.num_reversals} reversals, {outcome.num_flips} flips"
    )


def _figures(each: Contest) -> list[Figure]:
    load = each.scenario.name + (" (generated lengths)" if each.is_generated else "")
    ours, best = each.outcomes[OURS], each.outcomes[ORACLE]
    found = [
        Figure(f"{load}: requests that kept their objectives", ours.attainment, "share", "higher", goal=LEAST_ATTAINMENT),
        Figure(f"{load}: pod-seconds over an oracle's", ours.pod_seconds / best.pod_seconds, "times", "lower", goal=MOST_COST),
        Figure(f"{load}: reversals within a cool-down", ours.num_reversals, "changes", "lower", goal=0),
        Figure(f"{load}: workers that changed roles instead of starting", ours.num_flips, "workers", "higher"),
        Figure(f"{load}: the oracle's share of requests that kept their objectives", best.attainment, "share", "higher"),
    ]
    for name, outcome in each.outcomes.items():
        if name not in (OURS, ORACLE):
            found += _of_rival(f"{load}: {name}", name, outcome, best)
    return found


def _of_rival(label: str, name: str, outcome: Outcome, best: Outcome) -> list[Figure]:
    over = outcome.pod_seconds / best.pod_seconds
    return [
        Figure(f"{label}: requests that kept their objectives", outcome.attainment, "share", "higher", peer=name),
        Figure(f"{label}: pod-seconds over the oracle's", over, "times", "lower", peer=name),
        Figure(f"{label}: reversals within {COOL_DOWN_S:.0f} s", outcome.num_reversals, "changes", "lower", peer=name),
    ]


def _write(each: Contest, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    best = each.outcomes[ORACLE]
    runs = [
        Shown(name, _summary(outcome, best), outcome.moments, outcome.windows, WINDOW_S)
        for name, outcome in each.outcomes.items()
    ]
    path = folder / f"{each.scenario.name}.html"
    path.write_text(page(f"Autoscalers on {each.scenario.name}", runs), encoding="utf-8")
    say(f"wrote {path}")


def _summary(outcome: Outcome, best: Outcome) -> dict[str, str]:
    return {
        "kept their objectives": f"{outcome.attainment:.2%}",
        "pod-seconds": f"{outcome.pod_seconds:.0f}, {outcome.pod_seconds / best.pod_seconds:.3f} of the oracle's",
        f"reversals within {COOL_DOWN_S:.0f} s": str(outcome.num_reversals),
        "workers that changed roles": str(outcome.num_flips),
    }


# An autoscaler that knows the future: the fewest pod-seconds that keep as large a share of the objectives, found by search.
#
# Its schedule says for each minute how many workers of each pool serve, and pods are asked for a start ahead. The search:
#
# 1. Shape: what the requests of each minute ask of a pool, from the trace. The least multiple of it that keeps the share, by
#    bisection over runs of the whole load; then the same with less of one pool; and the pools of the very autoscaler that it is
#    compared with, as that kept the share.
# 2. Exchange: stretches of a few minutes each get a worker less (every other stretch in one run, as they hardly touch each
#    other), which shows what each costs in requests and saves in pod-seconds. Those that save most for what they cost go
#    together, as many as the share allows.
#
# The runs are those of the same simulator, router and admission. It is a bound found by search, not a proof of the least.


Schedule = dict[PoolName, list[int]]
Evaluate = Callable[[Schedule], Outcome]

STRETCH = 4
"""Minutes of a stretch."""
SPILL = 2
"""Minutes behind a stretch in which what it lacks still shows."""
BISECTIONS = 3


class Scheduled:
    """Asks for each pod a start before the minute in which it is to serve, and gives it back at the end of that."""

    def __init__(self, schedule: Schedule, start_s: float = START_S) -> None:
        self._schedule, self._start_s = schedule, start_s

    def decide(self, seen: Seen) -> Wanted:
        """By the clock alone."""
        now_s = seen.snapshot.now_s
        return Wanted({pool: max(at(row, now_s), at(row, now_s + self._start_s)) for pool, row in self._schedule.items()})


def at(row: list[int], now_s: float) -> int:
    """Of the minute; the last one stays."""
    return row[min(len(row) - 1, int((now_s + 1e-6) / WINDOW_S))]


def cost(schedule: Schedule) -> float:
    """Pod-seconds, with those of starts."""
    return sum(WINDOW_S * max(now, then) for row in schedule.values() for now, then in zip(row, [*row[1:], row[-1]], strict=True))


def demands(scenario: Scenario, arrivals: list[Arrival]) -> dict[PoolName, list[float]]:
    """Workers' worth of work by the minute of arrival, without a queue: prompts in seconds, outputs in steps of the largest batch
    that keeps the objective."""
    num = int(arrivals[-1].at_s / WINDOW_S) + 1
    prompts, outputs = [0.0] * num, [0.0] * num
    speed, spec = scenario.spec.speed, scenario.spec
    inputs = [arrival.num_input for arrival in arrivals]
    drawn = [arrival.num_output for arrival in arrivals]
    lengths = Lengths(_mean(inputs), _mean([x * x for x in inputs]), _mean(drawn), output_squared=_mean([x * x for x in drawn]))
    tokens_per_s = prompt_times.decode_tokens_per_s(worker_of(spec), lengths, goals_of(scenario.objective))
    for arrival in arrivals:
        minute = int(arrival.at_s / WINDOW_S)
        prompts[minute] += speed.prefill_s(0, arrival.num_input, chunk=spec.max_num_batched_tokens) / WINDOW_S
        outputs[minute] += arrival.num_output / tokens_per_s / WINDOW_S
    return {PoolName.PREFILL: prompts, PoolName.DECODE: outputs}


def shaped(loads: dict[PoolName, list[float]], shares: dict[PoolName, float]) -> Schedule:
    """So many times the demand, with some room for chance; without valleys of a minute, which save nothing."""
    return {
        pool: filled([max(1, math.ceil(shares[pool] * (load + 0.3 * math.sqrt(load)))) for load in row])
        for pool, row in loads.items()
    }


def filled(row: list[int]) -> list[int]:
    """A pod that is missing for a minute has to be asked for in that very minute."""
    inner = [max(now, min(before, then)) for before, now, then in zip(row, row[1:], row[2:], strict=False)]
    return [row[0], *inner, row[-1]] if len(row) > 1 else row


@dataclass
class Found:
    """The cheapest so far that keeps the share."""

    schedule: Schedule
    outcome: Outcome
    num_runs: int = 0


def served(outcome: Outcome) -> Schedule:
    """What somebody's pools were in each minute, at most."""
    rows: Schedule = {pool: [1] * len(outcome.windows) for pool in POOLS}
    for moment in outcome.moments:
        minute = int(moment.at_s / WINDOW_S)
        for pool, (ready, _, _) in moment.pods.items():
            if minute < len(rows[pool]):
                rows[pool][minute] = max(rows[pool][minute], ready)
    return rows


def search(loads: dict[PoolName, list[float]], known: Schedule, evaluate: Evaluate, attainment: float) -> Found:
    """The cheapest schedule found with at least this attainment. `known`: one that is thought to have it, to begin with where the
    demand's shape leads to a dearer one."""
    found = _by_shape(loads, known, evaluate, attainment)
    _exchange(found, evaluate, attainment)
    return found


def _by_shape(loads: dict[PoolName, list[float]], known: Schedule, evaluate: Evaluate, attainment: float) -> Found:
    found = Found(known, evaluate(known), 1)
    low, high = 0.6, max(1.0, cost(known) / cost(shaped(loads, dict.fromkeys(POOLS, 1.0))))
    for _ in range(BISECTIONS):
        share = (low + high) / 2
        outcome = _tried(found, shaped(loads, dict.fromkeys(POOLS, share)), evaluate, attainment)
        low, high = (low, share) if outcome.attainment >= attainment else (share, high)
    for prefill, decode in ((0.93, 1.0), (1.0, 0.9), (1.05, 0.8)):
        schedule = shaped(loads, {PoolName.PREFILL: high * prefill, PoolName.DECODE: high * decode})
        if cost(schedule) < cost(found.schedule):
            _tried(found, schedule, evaluate, attainment)
    return found


def _exchange(found: Found, evaluate: Evaluate, attainment: float) -> None:
    offers = list[tuple[float, PoolName, int]]()
    misses, schedule = found.outcome.misses, found.schedule
    for pool in POOLS:
        for parity in (0, 1):
            stretches = list(range(parity * STRETCH, len(schedule[pool]), 2 * STRETCH))
            lowered = _lowered(schedule, [(pool, first) for first in stretches])
            outcome = _tried(found, lowered, evaluate, attainment)
            for first in stretches:
                saved = cost(schedule) - cost(_lowered(schedule, [(pool, first)]))
                if saved > 0:
                    offers.append((_more_missed(misses, outcome.misses, first) / saved, pool, first))
    offers.sort()
    low, high = 0, len(offers)
    for _ in range(BISECTIONS):
        if low >= high:
            break
        num = (low + high + 1) // 2
        outcome = _tried(found, _lowered(schedule, [(pool, first) for _, pool, first in offers[:num]]), evaluate, attainment)
        low, high = (num, high) if outcome.attainment >= attainment else (low, num - 1)


def _tried(found: Found, schedule: Schedule, evaluate: Evaluate, attainment: float) -> Outcome:
    """Its outcome; kept if it is the best."""
    outcome = evaluate(schedule)
    found.num_runs += 1
    is_cheaper = outcome.pod_seconds < found.outcome.pod_seconds or found.outcome.attainment < attainment
    if outcome.attainment >= attainment and is_cheaper:
        found.schedule, found.outcome = schedule, outcome
    return outcome


def _lowered(schedule: Schedule, stretches: list[tuple[PoolName, int]]) -> Schedule:
    """A worker less in each."""
    lowered = {pool: list(row) for pool, row in schedule.items()}
    for pool, first in stretches:
        row = lowered[pool]
        for minute in range(first, min(len(row), first + STRETCH)):
            row[minute] = max(1, row[minute] - 1)
    return {pool: filled(row) for pool, row in lowered.items()}


def _more_missed(before: list[int], after: list[int], first: int) -> float:
    """In the stretch, and as long behind it as what it lacks shows."""
    minutes = range(first, min(len(before), len(after), first + STRETCH + SPILL))
    return max(0, sum(after[minute] - before[minute] for minute in minutes))


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)
