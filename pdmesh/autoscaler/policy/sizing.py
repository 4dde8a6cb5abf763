"""How many replicas of one pool a demand needs, and how many it could do with. Pure."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.autoscaler.policy.demand import Demand
from pdmesh.autoscaler.settings import AutoscalerSettings, PoolSettings
from pdmesh.autoscaler.views import PoolName, PoolView
from pdmesh.planning.capacity import DecodePool, Pool, PrefillPool, SharedPool, bearable, fewest
from pdmesh.planning.capacity_load import Goals, Load, Worker
from pdmesh.planning.capacity_steps import keeps_tpot

WAIT_SHARE = 0.5
"""Of a TTFT objective, that requests may wait at routers before it is more than chance."""

ROOMY = 0.9
"""Of the KV that may be in use: with less, decode keeps nobody waiting."""


@dataclass(frozen=True)
class Size:
    """Replicas. `needed` keeps the objectives; `enough` would with headroom; both within the pool's bounds. `why`: what decides
    `needed`, in words."""

    needed: int
    enough: int
    why: str


def pool_of(name: PoolName, worker: Worker, goals: Goals) -> Pool:
    """How a pool of such workers is reckoned with."""
    kinds: dict[PoolName, Callable[[Worker, Goals], Pool]] = {
        PoolName.PREFILL: PrefillPool,
        PoolName.DECODE: DecodePool,
        PoolName.BOTH: SharedPool,
    }
    return kinds[name](worker, goals)


def size(view: PoolView, pool: Pool, load: Load, demand: Demand, queue_wait_s: float, settings: AutoscalerSettings) -> Size:
    """`load`: the requests that come; how many of them `demand` says. `queue_wait_s` at routers, 0 while a change may
    still have to show in it."""
    own = settings.of(view.name)
    num = fewest(pool, load.at(demand.needed), own.max_replicas)
    enough = fewest(pool, load.at(max(demand.needed, demand.later) * (1 + settings.headroom)), own.max_replicas)
    kv = _by_kv(view, settings.max_kv_occupancy)
    kv_enough = _by_kv(view, settings.max_kv_occupancy / (1 + settings.headroom))
    needed = own.max_replicas if num is None else num
    why = _why(view.name, pool.goals, demand, needed)
    if num is None:
        why += f", more than {own.max_replicas} replicas bear"
    why += _hopeless(view.name, pool, load)
    if kv > needed:
        needed, why = kv, f"{view.kv_occupancy:.0%} of the KV is in use, more than {settings.max_kv_occupancy:.0%}"
    if needed <= view.num_replicas and _waits_for(view, pool.goals, queue_wait_s, settings.max_kv_occupancy):
        needed = view.num_replicas + 1
        why = f"requests wait for {queue_wait_s:.2g} s at routers, although {needed - 1} should do: one more"
    floor = max(needed, kv_enough, own.max_replicas if enough is None else enough)
    return Size(_bounded(needed, own), _bounded(floor, own), why)


def unmeasured(view: PoolView, settings: PoolSettings) -> Size:
    """Of a pool of which no worker has told how fast it is, or which nobody has asked for anything: as it is, at least one."""
    num = _bounded(max(1, view.num_replicas), settings)
    return Size(num, num, "no worker has told its speed, or no request its length, so far")


def unasked(settings: PoolSettings) -> Size:
    """Of a pool that nobody has asked for anything ever, nor does now."""
    num = _bounded(1, settings)
    return Size(num, num, "nobody has asked for anything so far")


def borne_share(pool: Pool, load: Load, needed_per_s: float, num_replicas: int) -> float:
    """The share of the demand that so many replicas serve within the objectives."""
    return 1.0 if needed_per_s <= 0 else min(1.0, bearable(pool, load, num_replicas) / needed_per_s)


def _by_kv(view: PoolView, most: float) -> int:
    return 0 if view.name is PoolName.PREFILL else math.ceil(view.num_ready * view.kv_occupancy / most - 1e-9)


def _waits_for(view: PoolView, goals: Goals, queue_wait_s: float, max_kv_occupancy: float) -> bool:
    """Do requests wait for this pool, for so long that their TTFT is in danger? Whatever the model says then, it is wrong.

    Without room in KV they wait for decode, else for somebody to compute their prompts."""
    if goals.ttft_s is None or queue_wait_s <= WAIT_SHARE * goals.ttft_s:
        return False
    is_full = view.kv_occupancy > ROOMY * max_kv_occupancy
    return is_full if view.name is PoolName.DECODE else not is_full


def _bounded(num: int, settings: PoolSettings) -> int:
    return min(settings.max_replicas, max(settings.min_replicas, num))


def _why(name: PoolName, goals: Goals, demand: Demand, num: int) -> str:
    """The demand, where it comes from, what it needs."""
    source = "expected" if demand.expected >= demand.least else "observed"
    backlog = f", {demand.backlog:.3g}/s of it to drain the backlog," if demand.backlog > 0 else ""
    return (
        f"{demand.needed:.3g} requests/s {source} ({demand.observed:.3g}/s came){backlog} need {num} for {_promise(name, goals)}"
    )


def _hopeless(name: PoolName, pool: Pool, load: Load) -> str:
    """What no number of such workers can keep."""
    goals, notes = pool.goals, ""
    if name is not PoolName.PREFILL and goals.tpot_s is not None and not keeps_tpot(pool.worker, load.lengths, goals):
        notes += f"; a lone sequence's step takes longer than {1000 * goals.tpot_s:.0f} ms: that TPOT is out of reach"
    too_long = 1 - pool.reachable(load.lengths)
    if goals.ttft_s is not None and too_long > 1 - goals.quantile:
        notes += f"; {too_long:.0%} of prompts take longer than {1000 * goals.ttft_s:.0f} ms even alone"
    return notes


def _promise(name: PoolName, goals: Goals) -> str:
    bounds = []
    if goals.ttft_s is not None and name is not PoolName.DECODE:
        bounds.append(f"TTFT {1000 * goals.ttft_s:.0f} ms")
    if goals.tpot_s is not None and name is not PoolName.PREFILL:
        bounds.append(f"TPOT {1000 * goals.tpot_s:.0f} ms")
    return f"{' and '.join(bounds)} of {goals.quantile:.0%}" if bounds else "queues that do not grow"
