"""Decides how many replicas each pool needs, and why. Pure: a snapshot in, a decision out; the only clock is the snapshot's.

One decision:

1. Stale figures: everything stays, and nothing is learned. Silence is not idleness.
2. Learn: arrivals for the forecast, observed over predicted latencies for the correction.
3. For each pool, compute what the demand needs (`sizing.py`); grow at once, shrink late (`pool_plan.py`).
4. Switch the roles of idle workers before asking for pods (`pool_plan.py`).
5. Divide GPUs by their benefit if there are too few for all pools (`divide`).

A pool never shrinks within a cool-down after it grew, unless settings are lowered; beside bursty arrivals a cool-down is longer.
It may grow soon after it shrank: then the demand has risen by more than twice the headroom, since the remaining workers would
have borne the first of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

from pdmesh.autoscaler.forecasting.forecast import Expected, Forecaster, State
from pdmesh.autoscaler.forecasting.registry import forecaster_of
from pdmesh.autoscaler.policy.pool_plan import Plan, PoolMemory, plan, switch_roles
from pdmesh.autoscaler.policy.sizing import (
    LUMPY_COOL_DOWNS,
    Correction,
    SmoothedLengths,
    Speed,
    borne_share,
    demand,
    in_force,
    pool_of,
    size,
    unasked,
    unmeasured,
)
from pdmesh.autoscaler.settings import AutoscalerSettings
from pdmesh.autoscaler.views import Decision, Flip, PoolDecision, PoolName, PoolView, Snapshot
from pdmesh.planning.capacity_load import Goals, Load

# Division of GPUs between pools when there are fewer than they ask for.
#
# A request needs every pool, so the pool that bears the smallest share of the demand limits the goodput: each replica goes to
# that pool, until no pool wants one or it does not fit. As a share never falls with a replica more, no other division has a
# larger smallest share.


WORTH_MOVING = 0.1
"""Share of the demand that must be gained before a pool gives up replicas that it needs itself."""


@dataclass(frozen=True)
class Claim:
    """Hold the claim of one pool: `least` replicas that it keeps in any case, `least_ever` if replicas may be moved, `wanted`
    at most. `share` of the demand that a number of replicas bears. `gpus` of each replica; `other_gpus`: of pods that are
    draining."""

    name: PoolName
    least: int
    least_ever: int
    wanted: int
    gpus: int
    other_gpus: int
    share: Callable[[int], float]


def cost(claims: list[Claim], replicas: dict[PoolName, int]) -> int:
    """Return the GPUs of the replicas and of what still drains."""
    return sum(claim.gpus * replicas[claim.name] + claim.other_gpus for claim in claims)


def divide(claims: list[Claim], max_gpus: int, *, may_move: bool) -> dict[PoolName, int]:
    """Return the replicas of each pool. No pool gets more than it wants; the budget holds unless what pools keep already exceeds
    it.

    `may_move`: replicas of one pool may be taken for another, if that bears clearly more, or if all keep too many."""
    kept = _fill(claims, {claim.name: min(claim.least, claim.wanted) for claim in claims}, max_gpus)
    if not may_move:
        return kept
    moved = _fill(claims, {claim.name: min(claim.least_ever, claim.wanted) for claim in claims}, max_gpus)
    is_better = _smallest_share(claims, moved) >= _smallest_share(claims, kept) + WORTH_MOVING
    return moved if is_better or cost(claims, kept) > max_gpus else kept


def _fill(claims: list[Claim], replicas: dict[PoolName, int], max_gpus: int) -> dict[PoolName, int]:
    replicas = dict(replicas)
    while True:
        wanting = [claim for claim in claims if replicas[claim.name] < claim.wanted]
        if not wanting:
            return replicas
        neediest = min(wanting, key=lambda claim: (claim.share(replicas[claim.name]), claim.gpus))
        if cost(claims, replicas) + neediest.gpus > max_gpus:
            return replicas
        replicas[neediest.name] += 1


def _smallest_share(claims: list[Claim], replicas: dict[PoolName, int]) -> float:
    return min(claim.share(replicas[claim.name]) for claim in claims)


_FORMAT = 1


class Policy:
    """Decide for one model's mesh. Its state can be saved, so that a new leader continues: times are of the snapshots' clock,
    which must be the same for both."""

    def __init__(self, settings: AutoscalerSettings, goals: Goals, forecaster: Forecaster | None = None) -> None:
        """Create the policy. `forecaster` None: the one that the settings name. Raises ConfigError."""
        settings.validate()
        self._settings, self._goals = settings, goals
        self._forecaster = forecaster if forecaster is not None else forecaster_of(settings)
        self._ttft, self._tpot = Correction(), Correction()
        self._memories = {name: PoolMemory() for name in PoolName}
        self._lengths = SmoothedLengths()
        self._speeds = {name: Speed() for name in PoolName}

    def decide(self, snapshot: Snapshot) -> Decision:
        """Return a decision. Call it every few seconds; `now_s` of the snapshots must not go back."""
        if (why := self._stale(snapshot)) is not None:
            return self._keep(snapshot, why, "stale")
        if (num_stopped := sum(view.num_stopped for view in snapshot.pools)) > 0:
            return self._keep(snapshot, f"{num_stopped} workers are paused or asleep: nothing changes until they run", "stopped")
        self._learn(snapshot)
        now_s = snapshot.now_s
        settings = in_force(self._forecaster.at(now_s), self._settings)
        plans = {view.name: self._plan(_without_old_hold(view, now_s), snapshot, settings) for view in snapshot.pools}
        plans, flips = switch_roles(plans, self._memories, settings, now_s)
        plans = self._within_budget(plans, flips, now_s, settings)
        for name, planned in plans.items():
            self._memories[name].changed(snapshot.now_s, planned.num_added)
        return Decision(tuple(planned.decision for planned in plans.values()), flips)

    def save(self) -> State:
        """Return the JSON state that `restore` needs."""
        return {
            "format": _FORMAT,
            "forecast": {self._settings.forecast: self._forecaster.save()},
            "ttft": self._ttft.save(),
            "tpot": self._tpot.save(),
            "lengths": self._lengths.save(),
            "pools": {name.value: memory.save() for name, memory in self._memories.items()},
        }

    def restore(self, state: State) -> None:
        """Restore what `save` returned. A forecast of another kind than the settings' starts afresh. Raises ValueError naming
        what is wrong; a part may be restored by then, so pass it a copy (`pdmesh/autoscaler/loop.py`)."""
        if state.get("format") != _FORMAT:
            raise ValueError(f"format: {state.get('format')!r} is not {_FORMAT}; begin without a saved state")
        forecast = _table(state, "forecast")
        if self._settings.forecast in forecast:
            self._forecaster.restore(_table(forecast, self._settings.forecast))
        self._ttft.restore(_table(state, "ttft"))
        self._tpot.restore(_table(state, "tpot"))
        self._lengths.restore(_table(state, "lengths"))
        pools = _table(state, "pools")
        for name, memory in self._memories.items():
            memory.restore(_table(pools, name.value))

    @property
    def goals(self) -> Goals:
        """Return the goals that pools are sized for."""
        return self._goals

    def expected(self, time_s: float) -> Expected:
        """Return the forecast of requests per second at that time, which is not before the latest snapshot."""
        return self._forecaster.at(time_s)

    def aim(self, goals: Goals) -> None:
        """Set the goals; what was learned stays."""
        self._goals = goals

    def interrupt(self) -> None:
        """Note a gap in observation: spare capacity and idleness must be shown anew."""
        for memory in self._memories.values():
            memory.interrupt()

    def _stale(self, snapshot: Snapshot) -> str | None:
        """Return which figures are stale, if any."""
        ages_s = {"traffic": snapshot.traffic.age_s} | {f"the {view.name} pool": view.age_s for view in snapshot.pools}
        what, age_s = max(ages_s.items(), key=lambda item: item[1])
        if age_s <= self._settings.stale_after_s:
            return None
        return f"figures of {what} are {age_s:.0f} s old, more than {self._settings.stale_after_s:g} s: nothing changes"

    def _keep(self, snapshot: Snapshot, why: str, held: str) -> Decision:
        for correction in (self._ttft, self._tpot):
            correction.skip(snapshot.now_s)
        for memory in self._memories.values():
            memory.interrupt()
        pools = [PoolDecision(view.name, view.num_replicas, view.num_replicas, why, held) for view in snapshot.pools]
        return Decision(tuple(pools), held=why, held_by=held)

    def _learn(self, snapshot: Snapshot) -> None:
        traffic, now_s = snapshot.traffic, snapshot.now_s
        # A count over a window describes the middle of the window.
        self._forecaster.observe(now_s - traffic.age_s - traffic.window_s / 2, traffic.rate_per_s)
        self._lengths.observe(now_s, traffic)
        for view in snapshot.pools:
            self._speeds[view.name].observe(now_s, view.worker)
        goals = self._goals
        for correction, measured, goal_s in ((self._ttft, traffic.ttft, goals.ttft_s), (self._tpot, traffic.tpot, goals.tpot_s)):
            if self._is_settled(snapshot):
                correction.observe(now_s, measured, goal_s)
            else:
                correction.skip(now_s)

    def _is_settled(self, snapshot: Snapshot) -> bool:
        """Return whether no pod comes or goes, and nothing has changed for a cool-down."""
        return all(not view.starting_ages_s and not view.num_draining for view in snapshot.pools) and all(
            self._memories[view.name].grew_within(snapshot.now_s, self._settings.cool_down_s) is None
            and self._memories[view.name].shrank_within(snapshot.now_s, self._settings.cool_down_s) is None
            for view in snapshot.pools
        )

    def _plan(self, view: PoolView, snapshot: Snapshot, settings: AutoscalerSettings) -> Plan:
        traffic, now_s = snapshot.traffic, snapshot.now_s
        own, memory = settings.of(view.name), self._memories[view.name]
        asked = demand(now_s, traffic, self._forecaster, self._settings, own.start_s, self._goals.ttft_s)
        expected = self._forecaster.at(now_s + own.start_s).mean * own.start_s
        is_idle = traffic.rate_per_s == 0 and traffic.num_queued == traffic.num_open == 0 and expected < 0.5
        idle_s = memory.idle_s(now_s, is_idle)
        worker, lengths = self._speeds[view.name].latest, self._lengths.latest
        if worker is None or lengths is None:
            needed = unasked(own) if worker is not None and idle_s is not None else unmeasured(view, own)
            plan_size, share = needed, lambda num: min(1.0, num / needed.needed)
        else:
            load = Load(traffic.rate_per_s, lengths, self._lengths.burstiness)
            view = _without_held_kv(view, snapshot)
            pool = pool_of(view.name, worker.slower(self._factor(view.name)), self._goals)
            queue_wait_s = traffic.queue_wait_s if self._is_settled(snapshot) else 0.0
            plan_size = size(view, pool, load, asked, queue_wait_s, settings)
            share = partial(borne_share, pool, load, asked.needed)
        memory.remember(now_s, plan_size.enough, LUMPY_COOL_DOWNS * self._settings.cool_down_s, settings.step_period_s)
        return plan(view, plan_size, cache(share), memory, settings, now_s, idle_s)

    def _factor(self, name: PoolName) -> float:
        """Return the factor by which its steps take longer than its model predicts."""
        ttft, tpot = self._ttft.factor, self._tpot.factor
        return {PoolName.PREFILL: ttft, PoolName.DECODE: tpot, PoolName.BOTH: max(ttft, tpot)}[name]

    def _within_budget(
        self, plans: dict[PoolName, Plan], flips: tuple[Flip, ...], now_s: float, settings: AutoscalerSettings
    ) -> dict[PoolName, Plan]:
        """Return the plans, reduced to the GPU budget."""
        claims = [self._claim(planned, flips) for planned in plans.values()]
        wanted = sum(claim.gpus * claim.wanted + claim.other_gpus for claim in claims)
        if settings.max_gpus is None or wanted <= settings.max_gpus:
            return plans
        may_move = (
            not flips
            and all(planned.view.hold is None for planned in plans.values())
            and self._is_calm(plans, now_s, settings.cool_down_s)
        )
        given = divide(claims, settings.max_gpus, may_move=may_move)
        return {name: self._cut(planned, given[name], wanted) for name, planned in plans.items()}

    def _claim(self, planned: Plan, flips: tuple[Flip, ...]) -> Claim:
        own, view = self._settings.of(planned.view.name), planned.view
        taken = sum(each.num for each in flips if each.taker == view.name)
        least = min(planned.target, view.num_replicas + taken)
        other_gpus = view.num_draining * own.gpus_per_replica
        least_ever = min(least, own.min_replicas)
        return Claim(view.name, least, least_ever, planned.target, own.gpus_per_replica, other_gpus, planned.share)

    def _is_calm(self, plans: Mapping[PoolName, Plan], now_s: float, cool_down_s: float) -> bool:
        """Return whether no pool that gives up replicas has grown lately."""
        return all(self._memories[name].grew_within(now_s, cool_down_s) is None for name in plans)

    def _cut(self, planned: Plan, num: int, wanted_gpus: int) -> Plan:
        if num == planned.target:
            return planned
        note = (
            f"{planned.target} are wanted, but all pools together want {wanted_gpus} GPUs of {self._settings.max_gpus}: "
            f"{num} here bear {planned.share(num):.0%} of the demand, which is how most of it is borne"
        )
        return replace(planned, target=num, reason=f"{planned.reason}; {note}", held="budget")


def _without_old_hold(view: PoolView, now_s: float) -> PoolView:
    return replace(view, hold=None) if view.hold is not None and now_s >= view.hold.until_s else view


def _without_held_kv(view: PoolView, snapshot: Snapshot) -> PoolView:
    """Return the view without held KV: requests hold KV of decode workers while their prompts wait for prefill workers. That
    fills it while those start, and says nothing about decode."""
    is_short = any(other.name is PoolName.PREFILL and other.starting_ages_s for other in snapshot.pools)
    return replace(view, kv_occupancy=0.0) if view.name is PoolName.DECODE and is_short else view


def _table(state: State, name: str) -> State:
    table = state.get(name)
    if not isinstance(table, dict):
        raise ValueError(f"{name}: a saved state holds a table there, not {table!r}")
    return table
