"""How many replicas of one pool a demand needs, and how many it could do with. Pure."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from autoscaler.demand import Demand
from autoscaler.settings import AutoscalerSettings, PoolSettings
from autoscaler.views import PoolName, PoolView
from planning.capacity import DecodePool, Pool, PrefillPool, SharedPool, bearable, fewest
from planning.capacity_load import Goals, Load, Worker


@dataclass(frozen=True)
class Size:
    """Replicas. `needed` keeps the objectives; `enough` would with headroom; both within the pool's bounds. `is_short`: its bound
    is below what the demand asks for. `why`: what decides `needed`, in words."""

    needed: int
    enough: int
    is_short: bool
    why: str


def pool_of(name: PoolName, worker: Worker, goals: Goals) -> Pool:
    """How a pool of such workers is reckoned with."""
    kinds: dict[PoolName, Callable[[Worker, Goals], Pool]] = {
        PoolName.PREFILL: PrefillPool,
        PoolName.DECODE: DecodePool,
        PoolName.BOTH: SharedPool,
    }
    return kinds[name](worker, goals)


def size(view: PoolView, pool: Pool, load: Load, demand: Demand, settings: AutoscalerSettings) -> Size:
    """`load`: the requests that come; how many of them `demand` says."""
    own = settings.of(view.name)
    num = fewest(pool, load.at(demand.needed), own.max_replicas)
    enough = fewest(pool, load.at(demand.needed * (1 + settings.headroom)), own.max_replicas)
    kv = _by_kv(view, settings.max_kv_occupancy)
    kv_enough = _by_kv(view, settings.max_kv_occupancy / (1 + settings.headroom))
    needed = own.max_replicas if num is None else num
    why = _why(view.name, pool.goals, demand, needed)
    if num is None:
        why += f", more than {own.max_replicas} replicas bear"
    if kv > needed:
        needed, why = kv, f"{view.kv_occupancy:.0%} of the KV is in use, more than {settings.max_kv_occupancy:.0%}"
    floor = max(needed, kv_enough, own.max_replicas if enough is None else enough)
    return Size(_bounded(needed, own), _bounded(floor, own), num is None or kv > own.max_replicas, why)


def unmeasured(view: PoolView, settings: PoolSettings) -> Size:
    """Of a pool of which no worker has told how fast it is, or which nobody has asked for anything: as it is, at least one."""
    num = _bounded(max(1, view.num_replicas), settings)
    return Size(num, num, False, "no worker has told its speed, or no request its length, so far")


def borne_share(pool: Pool, load: Load, needed_per_s: float, num_replicas: int) -> float:
    """The share of the demand that so many replicas serve within the objectives."""
    return 1.0 if needed_per_s <= 0 else min(1.0, bearable(pool, load, num_replicas) / needed_per_s)


def _by_kv(view: PoolView, most: float) -> int:
    return 0 if view.name is PoolName.PREFILL else math.ceil(view.num_ready * view.kv_occupancy / most - 1e-9)


def _bounded(num: int, settings: PoolSettings) -> int:
    return min(settings.max_replicas, max(settings.min_replicas, num))


def _why(name: PoolName, goals: Goals, demand: Demand, num: int) -> str:
    """The demand, where it comes from, what it needs."""
    source = "expected" if demand.expected >= demand.least else "observed"
    backlog = f", {demand.backlog:.3g}/s of it to drain the backlog," if demand.backlog > 0 else ""
    return (
        f"{demand.needed:.3g} requests/s {source} ({demand.observed:.3g}/s came){backlog} need {num} for {_promise(name, goals)}"
    )


def _promise(name: PoolName, goals: Goals) -> str:
    bounds = []
    if goals.ttft_s is not None and name is not PoolName.DECODE:
        bounds.append(f"TTFT {1000 * goals.ttft_s:.0f} ms")
    if goals.tpot_s is not None and name is not PoolName.PREFILL:
        bounds.append(f"TPOT {1000 * goals.tpot_s:.0f} ms")
    return f"{' and '.join(bounds)} of {goals.quantile:.0%}" if bounds else "queues that do not grow"
