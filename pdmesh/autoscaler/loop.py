"""The loop: observe → collect → decide → act, every few seconds.

    Platform.observe   what was asked for          ┐
    Collector.look     workers, traffic            ├─► Snapshot ─► Policy.decide ─► role switches: SetRoles on idle workers
    Starts             pending replicas            ┘                                the rest: Platform.scale

Any failure holds: nothing changes until the next round, which tries again.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdmesh.autoscaler.collect.collect import Collector
from pdmesh.autoscaler.collect.workers import Pools, Starts
from pdmesh.autoscaler.config import goals_of, objective_of, promise
from pdmesh.autoscaler.forecasting.forecast import Expected, State, number
from pdmesh.autoscaler.loop_history import DecisionSpans, Held, History, held_of
from pdmesh.autoscaler.platform import Asked, Platform, PlatformError
from pdmesh.autoscaler.policy.policy import Policy
from pdmesh.autoscaler.policy.pool_plan import STUCK_STARTS
from pdmesh.autoscaler.roles import Roles
from pdmesh.autoscaler.settings import AutoscalerSettings
from pdmesh.autoscaler.views import Decision, Flip, Hold, PoolDecision, PoolName, PoolView, Snapshot
from pdmesh.planning.capacity_load import Goals
from pdmesh.runtime.config import ConfigError
from pdmesh.runtime.telemetry.spans import Span

# Holds and failed starts, applied to views and decisions. Pure.


def with_hold(views: Iterable[PoolView], by: str, until_s: float) -> tuple[PoolView, ...]:
    """Return the views with a hold on all pools. A person's hold takes precedence."""
    return tuple(view if view.hold is not None else replace(view, hold=Hold(by, until_s)) for view in views)


@dataclass(frozen=True)
class FailedStarts:
    """Report the failed starts of one pool: `num_serving` replicas serve, and why no more are asked for."""

    num_serving: int
    why: str


def restrained(decision: Decision, hopeless: Mapping[PoolName, FailedStarts]) -> Decision:
    """Return the decision without growth of pools whose replicas do not start. Role switches need no start, and stay."""
    flipped = {name for flip in decision.flips for name in (flip.giver, flip.taker)}
    pools = tuple(
        _restrained(pool, decision.flips, failed, is_flipped=pool.name in flipped)
        if (failed := hopeless.get(pool.name)) is not None
        else pool
        for pool in decision.pools
    )
    return replace(decision, pools=pools)


def _restrained(pool: PoolDecision, flips: Iterable[Flip], failed: FailedStarts, *, is_flipped: bool) -> PoolDecision:
    most = pool.before + sum(flip.num for flip in flips if flip.taker is pool.name)
    if is_flipped and pool.replicas <= most:
        return pool
    replicas = min(most, _kept(pool, failed))
    if replicas < pool.before:
        return replace(pool, replicas=replicas)
    return replace(pool, replicas=replicas, reason=f"{pool.reason}; but {failed.why}", held="failed starts")


def _kept(pool: PoolDecision, failed: FailedStarts) -> int:
    """Return the replicas to ask for: one failing start stays pending, unless the workers that serve suffice. It shows when
    starts succeed again, and the pool does not oscillate with each request for one more that cannot be met."""
    return pool.replicas if pool.replicas < failed.num_serving else max(pool.replicas, failed.num_serving + 1)


# The state that a leader leaves for the next one.
#
# Its times are readings of the former leader's clock, which may differ from the new one's. If they lie ahead of it, all are moved
# back here by the same amount, so that the latest is now: a policy drops observations older than its latest, and would neither
# learn nor shrink until that time has come.


_FORMAT = 1
_TIMES = ("time_s", "started_s", "idle_since_s")
_TIMED = ("changes", "enough", "recent")
"""Lists of pairs; the first of each pair is a time."""


class StateError(ValueError):
    """Raised when saved state cannot be used; says why."""


def saved(policy: Policy) -> State:
    """Return the JSON state that `resumed` takes."""
    return {"format": _FORMAT, "policy": policy.save()}


def resumed(policy: Policy, state: State, now_s: float, watched_s: float) -> Policy:
    """Return a copy of `policy` that continues from the state; `policy` itself is unchanged. State older than `watched_s`
    seconds, or from a clock that is off by more, may have gaps in observation. Raises StateError for any invalid state: it must
    not prevent a process from leading."""
    try:
        json.dumps(state, allow_nan=False)  # rejects numbers that are not finite and excessive depth
        own = _policy_state(state)
        latest_s = max(_times(own), default=now_s)
        fresh = copy.deepcopy(policy)
        fresh.restore(_earlier(own, max(0.0, latest_s - now_s)))
        fresh.save()
    except Exception as error:
        raise StateError(str(error) or type(error).__name__) from error
    if abs(now_s - latest_s) > watched_s:
        fresh.interrupt()
    return fresh


def _policy_state(state: State) -> State:
    own = state.get("policy")
    if state.get("format") != _FORMAT or not isinstance(own, dict):
        raise ValueError(f"format: {state.get('format')!r} is not {_FORMAT}")
    return own


def _times(state: State) -> Iterator[float]:
    """Iterate over all times in the state."""
    for name, value in state.items():
        if isinstance(value, dict):
            yield from _times(value)
        elif name in _TIMED:
            yield from (float(time_s) for time_s, _ in _pairs(name, value))
        elif name in _TIMES and value is not None:
            yield number(state, name)


def _earlier(state: State, by_s: float) -> State:
    """Return the same state, moved back by `by_s` seconds."""
    return {name: _value_earlier(name, value, by_s) for name, value in state.items()}


def _value_earlier(name: str, value: object, by_s: float) -> object:
    if isinstance(value, dict):
        return _earlier(value, by_s)
    if name in _TIMED:
        return [[time_s - by_s, what] for time_s, what in _pairs(name, value)]
    if name in _TIMES and isinstance(value, int | float):
        return value - by_s
    return value


def _pairs(name: str, value: object) -> list[tuple[float, float]]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: a saved state holds a list there, not {value!r}")
    return value


# The objectives file, reloaded when it changes.


logger = logging.getLogger(__name__)


class ObjectivesFile:
    """Watch the objectives of `model`. `goals`: those last read without a mistake."""

    def __init__(self, path: str, model: str, transit_ms: float) -> None:
        """Read the file. An empty `model` is the only one in it, from then on. Raises ConfigError."""
        self._path, self._transit_ms = path, transit_ms
        self._seen = _content(path)
        objective = objective_of(path, model)
        self.model, self.goals = objective.model, goals_of(objective, transit_ms)

    def look(self) -> Goals:
        """Return the goals in force. A file that cannot be used is logged once, and changes nothing."""
        content = _content(self._path)
        if content != self._seen:
            self._seen = content
            self._read()
        return self.goals

    def _read(self) -> None:
        before = self.goals
        try:
            self.goals = goals_of(objective_of(self._path, self.model), self._transit_ms)
        except ConfigError as error:
            logger.error("the changed objectives cannot be used, %s stays: %s", promise(before), error)
        else:
            logger.info("objectives were reloaded: %s; before: %s", promise(self.goals), promise(before))


def _content(path: str) -> bytes | None:
    """Return the bytes, None if unreadable. Compared as a whole: two writes within a clock tick leave the same time and size."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return None


NUM_TRIALS = 30
"""Decisions that restored state must survive; figures reach all parts of a policy by then."""
Listener = Callable[[Decision, float], None]


class Clock:
    """Count seconds since 1970 at creation, monotonic from then on: times never go back, and mean the same to the next leader."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()


@dataclass(frozen=True)
class LoopSettings:
    """Configure the loop: a round every `period_s`; state is saved every `save_s` and after each change."""

    period_s: float = 2.0
    save_s: float = 15.0


@dataclass
class Parts:
    """Hold what the loop runs with. `objectives`: where the policy's goals come from, checked each round; None: they are fixed.
    `on_decision` receives each decision with its time, also one that changes nothing."""

    policy: Policy
    collector: Collector
    platform: Platform
    roles: Roles
    scaling: AutoscalerSettings
    objectives: ObjectivesFile | None = None
    history: History = field(default_factory=History)
    spans: DecisionSpans = field(default_factory=DecisionSpans)
    on_decision: list[Listener] = field(default_factory=list)
    clock: Callable[[], float] = field(default_factory=Clock)


class Loop:
    """Run the rounds. `latest`: the last decision and its time; None before the first, and while another process leads."""

    def __init__(self, parts: Parts, settings: LoopSettings) -> None:
        self.latest: tuple[Decision, float] | None = None
        self._parts, self._settings = parts, settings
        self._starts = {name: Starts(STUCK_STARTS * parts.scaling.of(name).start_s) for name in PoolName}
        self.ended_at = time.monotonic()  # when the latest round ended, whatever it decided
        self.num_ready: dict[PoolName, int] = {}  # as of the latest decided round
        self._failing: set[PoolName] = set()  # pools with failed starts, reported once until some succeed
        self._leads = False
        self._before: Policy | None = None  # the policy before a restore, while the restored one is on trial
        self._trials = 0  # decisions left in the trial
        self._saved_s = float("-inf")

    @property
    def history(self) -> History:
        """Return the history of what was done, and why."""
        return self._parts.history

    @property
    def clock(self) -> Callable[[], float]:
        """Return the clock of the decisions."""
        return self._parts.clock

    def expected(self, now_s: float) -> Expected:
        """Return the forecast of requests per second."""
        return self._parts.policy.expected(now_s)

    def num_failed_starts(self, now_s: float) -> dict[PoolName, int]:
        """Return the number of failed starts of each pool."""
        return {name: self._starts[name].num_failed(now_s) for name in self.num_ready}

    async def run(self) -> None:
        """Run until cancelled. A round that fails is logged, and the next one tries again."""
        while True:
            began = time.monotonic()
            try:
                await self.round()
                self.ended_at = time.monotonic()
            except Exception:  # a bug with one round's figures must not end the loop
                logger.exception("a round failed; everything stays as it is until the next one")
            await asyncio.sleep(max(0.05, self._settings.period_s - (time.monotonic() - began)))

    async def round(self) -> Decision | None:
        """Run one round. Returns the decision, None if there is none."""
        parts, now_s, began_ns = self._parts, self._parts.clock(), time.monotonic_ns()
        if parts.objectives is not None:
            parts.policy.aim(parts.objectives.look())
        try:
            await parts.collector.look(now_s)
            if not await self._take_lead(now_s):
                return None
            asked = await parts.platform.observe(now_s)
            decision = await self._decide_and_act(asked, now_s, began_ns)
            await self._save(now_s, changed=decision is not None and any(pool.replicas != pool.before for pool in decision.pools))
        except PlatformError as error:
            parts.history.failed(now_s, self._with_problems(str(error)))
            return None
        return decision

    async def close(self) -> None:
        """Save the state and give up the lead. The replicas stay."""
        try:
            if self._leads:
                await self._save(self._parts.clock(), changed=True)
        except PlatformError as error:
            logger.warning("the learned state is not saved: %s", error)
        await self._parts.roles.close()
        await self._parts.collector.close()
        await self._parts.platform.close()

    async def _take_lead(self, now_s: float) -> bool:
        """Return whether this process leads; continue from the former leader's state. Raises PlatformError."""
        leads = await self._parts.platform.leads(now_s)
        if leads and not self._leads:
            self._parts.policy.interrupt()  # what it knows itself may be stale
            self._restore(await self._parts.platform.load(), now_s)
        if not leads:
            self.latest = None
        self._leads = leads
        return leads

    def _restore(self, state: State | None, now_s: float) -> None:
        if state is None:
            return
        try:
            policy = resumed(self._parts.policy, state, now_s, self._parts.scaling.stale_after_s)
        except StateError as error:
            logger.warning("the saved state cannot be used, learning starts afresh: %s", error)
        else:
            self._before, self._parts.policy, self._trials = self._parts.policy, policy, NUM_TRIALS

    async def _save(self, now_s: float, *, changed: bool) -> None:
        if changed or now_s - self._saved_s >= self._settings.save_s:
            await self._parts.platform.save(saved(self._parts.policy))
            self._saved_s = now_s

    async def _decide_and_act(self, asked: Mapping[PoolName, Asked], now_s: float, began_ns: int) -> Decision | None:
        parts = self._parts
        pools = Pools(asked, parts.collector.workers)
        traffic = parts.collector.traffic(now_s, parts.policy.goals.quantile)
        heard_s = parts.collector.heard_s
        if traffic is None or heard_s is None:
            unheard = Held("unheard", self._with_problems("not all routers have answered")) if parts.collector.problems else None
            parts.history.held(now_s, unheard, _replicas(asked))
            return None
        pools.follow(self._starts, now_s)
        await self._tell_failed_starts(asked, now_s)
        views = pools.views(self._starts, now_s, heard_s)
        self.num_ready = {view.name: view.num_ready for view in views}
        if parts.collector.lost_registry:
            views = with_hold(views, "an outage of the registry (Redis)", now_s + 2 * self._settings.period_s)
        decision = restrained(self._decide(Snapshot(now_s, traffic, views)), self._hopeless())
        self._tell(decision, now_s)
        with parts.spans.around(decision, began_ns) as span:
            problem = await self._act(decision, pools, now_s, span) if decision.held is None else None
        parts.history.failed(now_s, problem)
        return decision

    def _decide(self, snapshot: Snapshot) -> Decision:
        """Decide. Restored state that fails within its trial is discarded: numbers that fit no formula must not end every
        round."""
        before = self._before
        try:
            decision = self._parts.policy.decide(snapshot)
        except Exception:
            if before is None:
                raise
            logger.exception("the saved state gives no decision, learning starts afresh")
            before.aim(self._parts.policy.goals)
            self._before, self._parts.policy = None, before
            return before.decide(snapshot)
        self._trials -= decision.held is None
        if self._trials <= 0:
            self._before = None
        return decision

    def _tell(self, decision: Decision, now_s: float) -> None:
        self.latest = (decision, now_s)
        held = held_of(decision)
        if held is not None:
            held = replace(held, text=self._with_problems(held.text))
        self._parts.history.held(now_s, held, {pool.name.value: pool.before for pool in decision.pools})
        for listener in self._parts.on_decision:
            listener(decision, now_s)

    async def _tell_failed_starts(self, asked: Mapping[PoolName, Asked], now_s: float) -> None:
        for name, each in asked.items():
            starts = self._starts[name]
            num, limit_s = starts.num_failed(now_s), starts.patience_s
            if num and name not in self._failing:
                self._failing.add(name)
                problem = f"{num} of {each.replicas} replicas: not started within {limit_s:.0f} s, and no longer counted"
                await self._parts.platform.starts_failed(name, problem)
            elif not starts.is_failing(now_s):
                self._failing.discard(name)

    async def _act(self, decision: Decision, pools: Pools, now_s: float, span: Span) -> str | None:
        """Act on the decision, role switches first: they change how many of its own a pool needs. Returns what went wrong with
        them. Raises PlatformError."""
        problem = None
        history, wanted = self._parts.history, {pool.name: pool.replicas for pool in decision.pools}
        for flip in decision.flips:
            done = await self._parts.roles.flip(flip, pools)
            pools, num_missing = done.pools, flip.num - len(done.workers)
            wanted[flip.giver] += num_missing
            wanted[flip.taker] -= num_missing
            if done.workers:
                text = f"{flip} ({', '.join(done.workers)}): {_reason(decision, flip.taker)}"
                history.changed(now_s, "flip", text, {name.value: num for name, num in wanted.items()})
                span.event("flip", attributes={"pdmesh.autoscale.flip": str(flip), "pdmesh.autoscale.workers": done.workers})
            if done.problem:
                span.fail("flip", done.problem)
            problem = problem or done.problem
        for pool in decision.pools:
            own = pools.num_own(pool.name, wanted[pool.name])
            if own != pools.asked[pool.name].replicas:
                await self._parts.platform.scale(pool, own, now_s)
                history.changed(now_s, "scale", str(pool), {name.value: num for name, num in wanted.items()})
                span.event("scale", attributes={"pdmesh.autoscale.pool": pool.name.value, "pdmesh.autoscale.asked": own})
        return problem

    def _hopeless(self) -> dict[PoolName, FailedStarts]:
        """Return the pools that must not grow, and why."""
        return {
            name: FailedStarts(
                starts.num_serving,
                f"replicas have not started within {starts.patience_s:.0f} s, also of those that were asked for in place of "
                "others: no more are asked for until one comes",
            )
            for name, starts in self._starts.items()
            if starts.is_hopeless
        }

    def _with_problems(self, text: str) -> str:
        problems = "; ".join(self._parts.collector.problems.values())
        return f"{text} ({problems})" if problems else text


def _reason(decision: Decision, name: PoolName) -> str:
    return next(pool.reason for pool in decision.pools if pool.name is name)


def _replicas(asked: Mapping[PoolName, Asked]) -> dict[str, int]:
    return {name.value: each.replicas for name, each in asked.items()}
