"""Plans one pool on its own (grow at once, shrink late), and the role switches between pools. Pure."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from pdmesh.autoscaler.forecasting.forecast import State, number
from pdmesh.autoscaler.policy.sizing import Size
from pdmesh.autoscaler.settings import AutoscalerSettings, PoolSettings
from pdmesh.autoscaler.views import Flip, PoolDecision, PoolName, PoolView

# The policy's memory of one pool: its changes, and what would have been enough lately. Saved as JSON.


Pairs = deque[tuple[float, int]]


class PoolMemory:
    """Remember `changes`: (time, replicas added), and `enough`: (time, replicas that would have borne the load with headroom)."""

    def __init__(self) -> None:
        self.changes: Pairs = deque()
        self.enough: Pairs = deque()
        self.idle_since_s: float | None = None

    def changed(self, now_s: float, num_added: int) -> None:
        """Record a decision, not its outcome."""
        if num_added:
            self.changes.append((now_s, num_added))

    def remember(self, now_s: float, num_enough: int, cool_down_s: float, step_period_s: float) -> None:
        """Record what would be enough and drop what no rule needs any more; of `enough` one entry from before the cool-down
        stays, to span it."""
        self.enough.append((now_s, num_enough))
        while len(self.enough) > 1 and self.enough[1][0] <= now_s - cool_down_s:
            self.enough.popleft()
        while self.changes and self.changes[0][0] < now_s - max(cool_down_s, step_period_s):
            self.changes.popleft()

    def interrupt(self) -> None:
        """Note a gap in observation: idleness must be shown anew."""
        self.enough.clear()
        self.idle_since_s = None

    def most_enough(self, now_s: float, seconds: float) -> int | None:
        """Return the most that was needed at any time of the latest `seconds`, at most what `remember` was told; None if it
        was not observed for so long."""
        known = [place for place, (time_s, _) in enumerate(self.enough) if time_s <= now_s - seconds]
        return max(num for _, num in list(self.enough)[known[-1] :]) if known else None

    def grew_within(self, now_s: float, seconds: float) -> float | None:
        """Return how long ago it grew, None if not within `seconds`."""
        ages = [now_s - time_s for time_s, num in self.changes if num > 0 and now_s - time_s < seconds]
        return min(ages, default=None)

    def shrank_within(self, now_s: float, seconds: float) -> float | None:
        """Return how long ago it shrank, None if not within `seconds`."""
        ages = [now_s - time_s for time_s, num in self.changes if num < 0 and now_s - time_s < seconds]
        return min(ages, default=None)

    def stepped(self, now_s: float, period_s: float, sign: int) -> int:
        """Return the replicas added (`sign` 1) or removed (-1) within the period."""
        return sum(num * sign for time_s, num in self.changes if num * sign > 0 and now_s - time_s < period_s)

    def idle_s(self, now_s: float, is_idle: bool) -> float | None:
        """Return how long there have been no requests; None while there are some."""
        if not is_idle:
            self.idle_since_s = None
            return None
        if self.idle_since_s is None:
            self.idle_since_s = now_s
        return now_s - self.idle_since_s

    def save(self) -> State:
        """Return the state for `restore`."""
        return {"changes": list(self.changes), "enough": list(self.enough), "idle_since_s": self.idle_since_s}

    def restore(self, state: State) -> None:
        """Restore saved state. Raises ValueError."""
        self.changes, self.enough = _pairs(state, "changes"), _pairs(state, "enough")
        self.idle_since_s = None if state.get("idle_since_s") is None else number(state, "idle_since_s")


def _pairs(state: State, name: str) -> Pairs:
    pairs = state.get(name)
    if not isinstance(pairs, list):
        raise ValueError(f"{name}: a saved state holds a list there, not {pairs!r}")
    try:
        return deque((float(time_s), int(num)) for time_s, num in pairs)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: a saved state holds pairs of a time and a number there") from error


STUCK_STARTS = 5
"""Multiples of the usual start time after which a starting pod is not counted."""


@dataclass(frozen=True)
class Plan:
    """Hold the plan of a pool: `target` replicas for now, the `share` of the demand that they would bear, and `held` as in
    `PoolDecision`."""

    view: PoolView
    size: Size
    target: int
    reason: str
    share: Callable[[int], float]
    held: str | None = None

    @property
    def num_added(self) -> int:
        """Return the replicas added; below zero: removed."""
        return self.target - self.view.num_replicas

    @property
    def decision(self) -> PoolDecision:
        """Return the plan as a decision."""
        return PoolDecision(self.view.name, self.view.num_replicas, self.target, self.reason, self.held)


def plan(
    view: PoolView,
    size: Size,
    share: Callable[[int], float],
    memory: PoolMemory,
    settings: AutoscalerSettings,
    now_s: float,
    idle_s: float | None,
) -> Plan:
    """Return the plan of one pool. `idle_s`: how long there have been no requests, nor are any expected; None: there are some.

    The memory already includes the current need. The caller has removed a hold that is over from the view."""
    own = settings.of(view.name)
    target, reason, held = _decided(view, size, memory, settings, now_s, idle_s)
    if view.hold is not None:
        asked = f"; {target} would be right: {reason}" if target != view.num_replicas else ""
        reason = f"set by {view.hold.by}, which holds for {view.hold.until_s - now_s:.0f} s more{asked}"
        return Plan(view, size, view.num_replicas, reason, share, f"set by {view.hold.by}")
    if target > own.max_replicas:
        target, reason = own.max_replicas, f"no more than {own.max_replicas} are allowed"
    return Plan(view, size, target, reason, share, held)


def _decided(
    view: PoolView, size: Size, memory: PoolMemory, settings: AutoscalerSettings, now_s: float, idle_s: float | None
) -> tuple[int, str, str | None]:
    """Return target, reason, and the hold."""
    own, num = settings.of(view.name), view.num_replicas
    if own.allow_zero and idle_s is not None and (num == 0 or idle_s >= settings.zero_after_s):
        return _zero(view, memory, settings, own, now_s, idle_s)
    num_stuck = sum(age_s > STUCK_STARTS * own.start_s for age_s in view.starting_ages_s)
    if size.needed > num - num_stuck:
        return _up(view, size, memory, settings, now_s, num_stuck)
    return _down(view, size, memory, settings, now_s)


def _zero(
    view: PoolView, memory: PoolMemory, settings: AutoscalerSettings, own: PoolSettings, now_s: float, idle_s: float
) -> tuple[int, str, str | None]:
    wake = f"the first request will wait about {own.start_s:.0f} s for a pod"
    grew_s = memory.grew_within(now_s, settings.cool_down_s)
    if grew_s is not None and view.num_replicas:
        held = f"grew {grew_s:.0f} s ago"
        return view.num_replicas, f"no request for {idle_s:.0f} s, but it {held}", held
    return 0, f"no request for {idle_s:.0f} s; {wake}", None


def _up(
    view: PoolView, size: Size, memory: PoolMemory, settings: AutoscalerSettings, now_s: float, num_stuck: int
) -> tuple[int, str, str | None]:
    own, num = settings.of(view.name), view.num_replicas
    shrank_s = memory.shrank_within(now_s, settings.cool_down_s)
    if shrank_s is not None and not num_stuck and size.needed <= num * (1 + settings.headroom):
        return num, f"{size.why}, but it shrank {shrank_s:.0f} s ago, and that is hardly more", "cool-down"
    wanted = min(own.max_replicas, size.needed + num_stuck)
    left = max(0, settings.max_step_up - memory.stepped(now_s, settings.step_period_s, 1))
    target = max(num, min(wanted, num + left))
    notes = [size.why]
    if num == 0:
        notes.append(f"it wakes from zero and serves in about {own.start_s:.0f} s")
    elif view.starting_ages_s:
        notes.append(f"{view.num_ready} serve and {len(view.starting_ages_s)} start")
    if num_stuck:
        notes.append(f"{num_stuck} have been starting for more than {STUCK_STARTS * own.start_s:.0f} s and are not counted")
    if target < wanted:
        notes.append(f"{wanted} are wanted, but a step is at most {settings.max_step_up} in {settings.step_period_s:.0f} s")
    return target, "; ".join(notes), f"step of {settings.max_step_up}" if target < wanted else None


def _down(
    view: PoolView, size: Size, memory: PoolMemory, settings: AutoscalerSettings, now_s: float
) -> tuple[int, str, str | None]:
    num, cool_down_s = view.num_replicas, settings.cool_down_s
    if size.enough >= num:
        return num, size.why, None
    fewer = f"{size.enough} would do with {settings.headroom:.0%} to spare"
    grew_s, most = memory.grew_within(now_s, cool_down_s), memory.most_enough(now_s, cool_down_s)
    if grew_s is not None:
        return num, f"{fewer}, but it grew {grew_s:.0f} s ago and stays for {cool_down_s:.0f} s", "cool-down"
    if most is None or most >= num:
        return num, f"{fewer}, but not for {cool_down_s:.0f} s yet", "cool-down"
    left = max(0, settings.max_step_down - memory.stepped(now_s, settings.step_period_s, -1))
    target = max(most, num - left)
    reason = f"{most} have been enough for {cool_down_s:.0f} s with {settings.headroom:.0%} to spare; now {size.why}"
    if target > most:
        return target, f"{reason}; a step is at most {settings.max_step_down} in {settings.step_period_s:.0f} s", "step"
    return target, reason, None


# Role switching: idle workers take the other role before pods are asked for, and give it back.


SPARE_SHARE = 0.5
"""Share of a cool-down for which a pool must have had workers to spare before it lends them."""


def switch_roles(
    plans: dict[PoolName, Plan], memories: dict[PoolName, PoolMemory], settings: AutoscalerSettings, now_s: float
) -> tuple[dict[PoolName, Plan], tuple[Flip, ...]]:
    """Return the plans with the workers that switch roles. Only one direction at a time: the other pool has none to give."""
    for taker, giver in ((PoolName.PREFILL, PoolName.DECODE), (PoolName.DECODE, PoolName.PREFILL)):
        if not settings.flips or giver not in plans or settings.of(taker).gpus_per_replica != settings.of(giver).gpus_per_replica:
            break
        taking, giving = plans[taker], plans[giver]
        if taking.view.hold is not None or giving.view.hold is not None:
            break
        num = min(taking.num_added, _spare(giving, memories[giver], settings, now_s))
        if num > 0:
            return plans | {taker: _taken(taking, num), giver: _given(giving, taker, num)}, (Flip(giver, taker, num),)
        returned = min(-giving.num_added, giving.view.num_borrowed, settings.of(taker).max_replicas - taking.target)
        if returned > 0 and taking.num_added >= 0:
            return plans | {taker: _returned(taking, giver, returned)}, (Flip(giver, taker, returned),)
    return plans, ()


def _spare(giving: Plan, memory: PoolMemory, settings: AutoscalerSettings, now_s: float) -> int:
    """Return how many serving workers the pool can spare, with headroom. It need not wait as long as before it shrinks: they can
    be taken back as fast."""
    if memory.grew_within(now_s, settings.cool_down_s) is not None:
        return 0
    most = memory.most_enough(now_s, SPARE_SHARE * settings.cool_down_s)
    enough = giving.size.enough if most is None else max(most, giving.size.enough)
    return giving.view.num_ready - max(enough, settings.of(giving.view.name).min_replicas)


def _taken(taking: Plan, num: int) -> Plan:
    rest = taking.num_added - num
    pods = f", so {rest} pods instead of {taking.num_added} are asked for" if rest else ", so no pod is asked for"
    return replace(taking, reason=f"{taking.reason}; {num} idle take this role at once{pods}")


def _given(giving: Plan, taker: PoolName, num: int) -> Plan:
    target = min(giving.target, giving.view.num_replicas - num)
    return replace(giving, target=target, reason=f"{giving.size.enough} would do; {num} idle become {taker}")


def _returned(taking: Plan, giver: PoolName, num: int) -> Plan:
    return replace(taking, target=taking.target + num, reason=f"{taking.reason}; {num} come back from {giver}")
