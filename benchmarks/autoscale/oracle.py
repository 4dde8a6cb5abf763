"""An autoscaler that knows the future: the fewest pod-seconds that keep as large a share of the objectives, found by search.

Its schedule says for each minute how many workers of each pool serve, and pods are asked for a start ahead. The search:

1. Shape: what the requests of each minute ask of a pool, from the trace. The least multiple of it that keeps the share, by
   bisection over runs of the whole load; then the same with less of one pool; and the pools of the very autoscaler that it is
   compared with, as that kept the share.
2. Exchange: stretches of a few minutes each get a worker less (every other stretch in one run, as they hardly touch each
   other), which shows what each costs in requests and saves in pod-seconds. Those that save most for what they cost go
   together, as many as the share allows.
3. Fill: the cheapest of the schedules that nearly keep the share gets a worker more in the same stretches, which shows how many
   requests each wins for its pod-seconds. Those that win most together, as few as the share needs.

2 and 3 are repeated while they save something.

The runs are those of the same simulator, router and admission. It is a bound found by search, not a proof of the least.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.autoscale.runs import POOLS, START_S, WINDOW_S, Outcome, worker_of
from benchmarks.autoscale.scenario import Scenario
from pdmesh.autoscaler.views import PoolName
from pdmesh.planning import prompt_times
from pdmesh.planning.capacity_load import Lengths
from pdmesh.simulator.arrivals import Arrival
from pdmesh.simulator.autoscaling import Seen, Wanted, goals_of

Schedule = dict[PoolName, list[int]]


class Judged(NamedTuple):
    """What came of a schedule, as far as the search asks. `misses` by minute."""

    attainment: float
    pod_seconds: float
    misses: list[int]


Evaluate = Callable[[Schedule], Judged]

STRETCH = 4
"""Minutes of a stretch."""
SPILL = 2
"""Minutes behind a stretch in which what it lacks still shows."""
BISECTIONS = 3
PASSES, WORTH_A_PASS = 3, 0.01
"""Exchange and fill are repeated as long as that saves so much of the pod-seconds."""
NEARLY = 0.01
"""How much less of the share a schedule may keep that workers are added to."""


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
    """The cheapest so far that keeps the share, and the cheapest that nearly does."""

    schedule: Schedule
    outcome: Judged
    num_runs: int = 0
    near: tuple[Schedule, Judged] | None = None


def served(outcome: Outcome) -> Schedule:
    """What an autoscaler's pools were in each minute, at most."""
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
    for _ in range(PASSES):
        before = found.outcome.pod_seconds
        _exchange(found, evaluate, attainment)
        _fill(found, evaluate, attainment)
        if found.outcome.pod_seconds > (1 - WORTH_A_PASS) * before:
            break
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
    schedule = found.schedule
    effects = _effects(found, (schedule, found.outcome), -1, evaluate, attainment)
    offers = [place for _, place in sorted((won / price, place) for price, won, place in effects if price < 0)]
    low, high = 0, len(offers)
    for _ in range(BISECTIONS):
        if low >= high:
            break
        num = (low + high + 1) // 2
        outcome = _tried(found, _changed(schedule, offers[:num], -1), evaluate, attainment)
        low, high = (num, high) if outcome.attainment >= attainment else (low, num - 1)


def _fill(found: Found, evaluate: Evaluate, attainment: float) -> None:
    if found.near is None or found.near[1].pod_seconds >= found.outcome.pod_seconds:
        return
    schedule, _ = near = found.near
    effects = _effects(found, near, 1, evaluate, attainment)
    offers = [place for _, place in sorted((price / won, place) for price, won, place in effects if won > 0)]
    low, high = 0, len(offers)
    for _ in range(BISECTIONS + 1):
        if low >= high:
            break
        num = (low + high) // 2
        outcome = _tried(found, _changed(schedule, offers[:num], 1), evaluate, attainment)
        low, high = (low, num) if outcome.attainment >= attainment else (num + 1, high)


_Place = tuple[PoolName, int]
"""A pool, and the first minute of a stretch."""


def _effects(
    found: Found, known: tuple[Schedule, Judged], more: int, evaluate: Evaluate, attainment: float
) -> list[tuple[float, float, _Place]]:
    """What each stretch costs in pod-seconds and wins in requests with a worker more (1), or less (-1): then neither is above
    0."""
    schedule, judged = known
    found_of = list[tuple[float, float, _Place]]()
    for pool in POOLS:
        for parity in (0, 1):
            places = [(pool, first) for first in range(parity * STRETCH, len(schedule[pool]), 2 * STRETCH)]
            changed = _tried(found, _changed(schedule, places, more), evaluate, attainment)
            for place in places:
                price = cost(_changed(schedule, [place], more)) - cost(schedule)
                won = _missed(judged.misses, place[1]) - _missed(changed.misses, place[1])
                found_of.append((price, max(0, won) if more > 0 else min(0, won), place))
    return found_of


def _tried(found: Found, schedule: Schedule, evaluate: Evaluate, attainment: float) -> Judged:
    """Its outcome; kept if it is the best."""
    outcome = evaluate(schedule)
    found.num_runs += 1
    is_cheaper = outcome.pod_seconds < found.outcome.pod_seconds or found.outcome.attainment < attainment
    if outcome.attainment >= attainment and is_cheaper:
        found.schedule, found.outcome = schedule, outcome
    is_near = attainment - NEARLY <= outcome.attainment < attainment
    if is_near and (found.near is None or outcome.pod_seconds < found.near[1].pod_seconds):
        found.near = schedule, outcome
    return outcome


def _changed(schedule: Schedule, stretches: list[_Place], more: int) -> Schedule:
    """So many workers more, or below zero less, in each."""
    changed = {pool: list(row) for pool, row in schedule.items()}
    for pool, first in stretches:
        row = changed[pool]
        for minute in range(first, min(len(row), first + STRETCH)):
            row[minute] = max(1, row[minute] + more)
    return {pool: filled(row) for pool, row in changed.items()}


def _missed(misses: list[int], first: int) -> int:
    """In the stretch, and as long behind it as what it lacks shows."""
    return sum(misses[first : first + STRETCH + SPILL])


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)
