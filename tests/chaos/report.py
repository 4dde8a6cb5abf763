"""From rounds to figures with their goals, and to tables that people read. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Figure
from tests.chaos import plan
from tests.chaos.plan import ANY_MOMENT, BASE_KINDS, DISK_KINDS, LIMIT_KINDS, NETWORK_KINDS, STATES, TIER_STATES, Kind
from tests.chaos.record import Dealt, Round, Tally
from tests.support import kv_counts

REAL_MODEL = "smollm2"
BUSY = "busy"
"""Ends the names of campaigns on a machine that computes something else as well."""
BUSY_FACTOR = 3
MAX_SERVING_S = 1.0
MIN_TIER_FAULTS = 500
TIERS = "tiny, tiers"
"""The campaign of workers with tiers."""
_OF_THEIR_OWN = (*LIMIT_KINDS, *NETWORK_KINDS, Kind.RANK_KILL, Kind.LOG_STANDS)
"""Kinds with campaigns of their own."""
_OF_REDIS = (Kind.REDIS_STOP, Kind.REDIS_EMPTY, Kind.REDIS_RESTART)


@dataclass(frozen=True)
class Goals:
    """How many faults there have to be, and how long a client may wait, beside the time to prefill: `stall_s` for a decode worker
    that is killed, `frozen_stall_s` for one that stands still, `router_stall_s` for one of two routers that does either."""

    faults: int
    of_kind: int
    of_cell: int
    on_real_model: int
    stall_s: float
    frozen_stall_s: float
    router_stall_s: float = 1.5


OWN_GOALS = Goals(faults=5000, of_kind=100, of_cell=20, on_real_model=200, stall_s=1.3, frozen_stall_s=1.5)
VLLM_GOALS = Goals(faults=500, of_kind=25, of_cell=2, on_real_model=50, stall_s=2.0, frozen_stall_s=2.2)


def total(rounds: Iterable[Round]) -> Tally:
    """What clients saw in all of them."""
    tally = Tally()
    for each in rounds:
        tally.add(each.tally)
    return tally


def cells(rounds: Iterable[Round]) -> Counter[tuple[str, str]]:
    """Faults dealt by (kind, state)."""
    return Counter((fault.kind, fault.state) for each in rounds for fault in each.dealt)


def figures(rounds: Sequence[Round], kinds: Sequence[Kind] = BASE_KINDS, goals: Goals = OWN_GOALS) -> list[Figure]:
    """What was asked for, as measured. `kinds`: those that were in the plan."""
    by_cell, seen = cells(rounds), total(rounds)
    by_kind = Counter[str]()
    for (kind, _), count in by_cell.items():
        by_kind[kind] += count
    on_real = sum(len(each.dealt) for each in rounds if each.campaign.startswith(REAL_MODEL))
    counts = [
        ("faults injected", by_cell.total(), "faults", goals.faults),
        ("faults of the kind that has fewest", min((by_kind[kind] for kind in kinds), default=0), "faults", goals.of_kind),
        ("faults of the kind and state that have fewest", _fewest(by_cell, kinds), "faults", goals.of_cell),
        ("faults on SmolLM2", on_real, "faults", goals.on_real_model),
        *((f"faults: {kind}", by_kind[kind], "faults", goals.of_kind) for kind in _OF_THEIR_OWN if goals is OWN_GOALS),
        *(_of_tiers(rounds) if goals is OWN_GOALS else ()),
    ]
    zeros = [
        ("wrong tokens", seen.num_wrong, "tokens"),
        ("lost tokens", seen.num_lost, "tokens"),
        ("duplicated tokens", seen.num_duplicated, "tokens"),
        ("errors that clients saw", len(seen.errors), "requests"),
        ("blocks leaked", sum(each.blocks_leaked for each in rounds), "blocks"),
        ("other problems (workers not back, processes or segments left)", sum(len(each.problems) for each in rounds), "problems"),
    ]
    return [
        *(Figure(name, value, unit, "higher", goal=f">= {goal}") for name, value, unit, goal in counts),
        Figure("requests", seen.num_requests, "requests", "higher"),
        Figure("tokens compared", seen.num_tokens, "tokens", "higher"),
        *(Figure(name, value, unit, "lower", goal=0) for name, value, unit in zeros),
        *_times(rounds, goals),
    ]


def failures(rounds: Sequence[Round]) -> list[str]:
    """What must not be, in words; empty when nothing was wrong, however little was done."""
    seen = total(rounds)
    counts = {"wrong": seen.num_wrong, "lost": seen.num_lost, "duplicated": seen.num_duplicated}
    tokens = [f"{count} {name} tokens" for name, count in counts.items() if count]
    return [*tokens, *seen.errors, *(problem for each in rounds for problem in each.problems)]


def _of_tiers(rounds: Sequence[Round]) -> list[tuple[str, int, str, int]]:
    """What there was for those faults to strike: counts, as in `figures`."""
    of_tiers = [each for each in rounds if each.campaign == TIERS]
    moved = Counter[str]()
    for each in of_tiers:
        moved.update(each.kv_counts)
    return [
        ("faults on workers with tiers", sum(len(each.dealt) for each in of_tiers), "faults", MIN_TIER_FAULTS),
        ("prompt tokens that they restored meanwhile", moved[kv_counts.RESTORED], "tokens", 1),
        ("prompt tokens that they fetched meanwhile", moved[kv_counts.FETCHED], "tokens", 1),
        ("damaged blocks that they refused meanwhile", moved[kv_counts.CORRUPT], "blocks", 1),
    ]


def tables(rounds: Sequence[Round]) -> dict[str, Any]:
    """For the file of results: faults by kind and state, stalls by kind, how often the mesh had to help itself."""
    seen, by_cell = total(rounds), cells(rounds)
    dealt = [fault for each in rounds for fault in each.dealt]
    return {
        "faults": {kind: _by_state(by_cell, kind) for kind in sorted({fault.kind for fault in dealt})},
        "states_not_reached": sum(len(each.not_dealt) for each in rounds),
        "stalls_ms": {
            kind: _stalls([fault for fault in dealt if fault.kind == kind]) for kind in sorted({f.kind for f in dealt})
        },
        "elapsed_s": round(sum(each.elapsed_s for each in rounds), 1),
        "streams_closed_by_clients": seen.num_left,
        "streams_by_transport": {name or "none": count for name, count in sorted(seen.transports.items())},
        "prefill_retries": seen.num_retries,
        "resubmissions": seen.num_resubmissions,
        "failures": failures(rounds)[:100],
    }


def lines(rounds: Sequence[Round]) -> list[str]:
    """The tables for a terminal."""
    found = tables(rounds)
    text = [f"{'kind':<16}{'faults':>7}{'fewest':>7}  own stalls in ms: n, median, 95 %, longest"]
    for kind, by_state in found["faults"].items():
        own = found["stalls_ms"][kind]["own"]
        stalls = f"{own['n']:>5}{own['p50']:>8}{own['p95']:>8}{own['max']:>8}" if own else "    -"
        text.append(f"{kind:<16}{sum(by_state.values()):>7}{min(by_state.values()):>7}  {stalls}")
    text.append(f"streams by transport: {found['streams_by_transport']}")
    return [*text, *(f"! {failure}" for failure in found["failures"][:20])]


def _fewest(by_cell: Counter[tuple[str, str]], kinds: Sequence[Kind]) -> int:
    return min((by_cell[cell] for cell in plan.cells(kinds)), default=0)


def _by_state(by_cell: Counter[tuple[str, str]], kind: str) -> dict[str, int]:
    """Faults of a kind by state; of routers' states those that it has."""
    own = [state for state in plan.states_of(Kind(kind)) if kind not in DISK_KINDS]
    states = [state for state in own if state in STATES or by_cell[kind, state]]
    states += [state for state in (ANY_MOMENT, *TIER_STATES) if state not in states and by_cell[kind, state]]
    return {state: by_cell[kind, state] for state in states}


def _times(rounds: Sequence[Round], goals: Goals) -> list[Figure]:
    """Stalls and starts; those on a busy machine by themselves, with three times the goals."""
    busy = [each for each in rounds if each.campaign.endswith(BUSY)]
    alone = [each for each in rounds if not each.campaign.endswith(BUSY)]
    return [*_times_of(alone, goals, 1, ""), *_times_of(busy, goals, BUSY_FACTOR, ", three busy loops beside the mesh")]


def _times_of(rounds: Sequence[Round], goals: Goals, factor: float, where: str) -> list[Figure]:
    dealt = [fault for each in rounds for fault in each.dealt]
    serving = [fault.serving_s for fault in dealt if fault.serving_s is not None]
    found = []
    if serving:
        name = f"longest time from a restarted worker's being ready to its serving{where}"
        found.append(Figure(name, round(max(serving), 3), "s", "lower", goal=f"<= {MAX_SERVING_S * factor:g}"))
    if beside := _starts_with_redis(rounds):
        name = f"the same where no fault of Redis lasted, which tells of new addresses ({len(beside)} starts){where}"
        found.append(Figure(name, round(max(beside), 3), "s", "lower", goal=f"<= {MAX_SERVING_S * factor:g}"))
    for kind, role, victim, goal_s in (
        (Kind.KILL, "decode", "SIGKILL of a decode worker", goals.stall_s),
        (Kind.STOP, "decode", "SIGSTOP of a decode worker", goals.frozen_stall_s),
        (Kind.KILL, "router", "SIGKILL of one of two routers", goals.router_stall_s),
        (Kind.STOP, "router", "SIGSTOP of one of two routers", goals.router_stall_s),
    ):
        struck = [fault for fault in dealt if fault.kind == kind and fault.victim.startswith(role)]
        if own := [fault.own_stall_s for fault in struck if fault.own_stall_s is not None]:
            name = f"longest stall after {victim}, no other fault beside it ({len(own)} stalls){where}"
            goal = f"<= {goal_s * factor:g} and the time to prefill"
            found.append(Figure(name, round(max(own), 3), "s", "lower", goal=goal))
    if stalls := [fault.stall_s for fault in dealt if fault.stall_s is not None]:
        name = f"longest stall of any client, whatever faults were under way{where}"
        found.append(Figure(name, round(max(stalls), 3), "s", "lower"))
    return found


def _starts_with_redis(rounds: Sequence[Round]) -> list[float]:
    """From ready to serving, of processes beside whose start no fault of Redis lasted."""
    found = []
    for each in rounds:
        away = [(fault.began, fault.ended) for fault in each.dealt if fault.kind in _OF_REDIS]
        for fault in each.dealt:
            is_alone = all(ended < fault.began or began > fault.ended for began, ended in away)
            if fault.serving_s is not None and is_alone:
                found.append(fault.serving_s)
    return found


def _stalls(dealt: Sequence[Dealt]) -> dict[str, dict[str, int]]:
    """`own`: no other fault lasted meanwhile. `any`: others may have."""
    own = [fault.own_stall_s for fault in dealt if fault.own_stall_s is not None]
    any_ = [fault.stall_s for fault in dealt if fault.stall_s is not None]
    return {"own": _percentiles_ms(own), "any": _percentiles_ms(any_)}


def _percentiles_ms(values: Sequence[float]) -> dict[str, int]:
    if not values:
        return {}
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    in_ms = {"p50": statistics.median(ordered), "p95": p95, "max": ordered[-1]}
    return {"n": len(values), **{name: round(value * 1000) for name, value in in_ms.items()}}
