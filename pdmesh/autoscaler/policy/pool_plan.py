"""What one pool would do, were it alone: up at once, down late. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.autoscaler.decision import PoolDecision
from pdmesh.autoscaler.policy.memory import PoolMemory
from pdmesh.autoscaler.policy.sizing import Size
from pdmesh.autoscaler.settings import AutoscalerSettings, PoolSettings
from pdmesh.autoscaler.views import PoolView

STUCK_STARTS = 5
"""Times the usual start, after which a pod that does not serve counts for nothing."""


@dataclass(frozen=True)
class Plan:
    """`target` replicas for now. `share`: of the demand that so many would bear. `held` as in `PoolDecision`."""

    view: PoolView
    size: Size
    target: int
    reason: str
    share: Callable[[int], float]
    held: str | None = None

    @property
    def num_added(self) -> int:
        """Below zero: taken away."""
        return self.target - self.view.num_replicas

    @property
    def decision(self) -> PoolDecision:
        """As it stands."""
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
    """`idle_s`: for how long nobody has asked for anything, nor is expected to; None: somebody does.

    The memory knows already what is enough now. A hold that is over is none: the caller has taken it off the view."""
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
    """Target, reason, and what held it."""
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
        return view.num_replicas, f"nobody has asked for anything for {idle_s:.0f} s, but it {held}", held
    return 0, f"nobody has asked for anything for {idle_s:.0f} s; {wake}", None


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
        notes.append(f"{num_stuck} have been starting for more than {STUCK_STARTS * own.start_s:.0f} s and count for nothing")
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
