"""Sizes one pool: the replicas that a demand needs, and the replicas that would suffice. Learns lengths and speeds. Pure."""

import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from statistics import median_low
from typing import TypeVar

from pdmesh.autoscaler.forecasting.forecast import Expected, Forecaster, State, number
from pdmesh.autoscaler.forecasting.kalman import LUMPY_NOISE
from pdmesh.autoscaler.settings import AutoscalerSettings, PoolSettings
from pdmesh.autoscaler.views import Measured, PoolName, PoolView, Traffic
from pdmesh.planning.capacity import DecodePool, Pool, PrefillPool, SharedPool, bearable, fewest
from pdmesh.planning.capacity_load import Goals, Lengths, Load, Worker
from pdmesh.planning.latency_model import Drafts, LatencyModel, Work, prefill_context
from pdmesh.planning.prompt_times import keeps_tpot

# The demand, in requests a second, that each pool must be ready for.
#
#   sure      = observed minus its statistical error                 moves a pool up at once
#   expected  = forecast for when a pod asked for now would serve    is the floor
#   later     = forecast for a cool-down after that                  is what a pool must not shrink below
#   backlog   = what waits beyond the usual, over the time to drain it
#
# Bursty arrivals (code completions come in bursts of seconds) need a pool that bears most bursts all the time: a pod that is
# asked for when one begins serves when it is over. The forecaster learns how bursty they are. Beside such a pool, a rate or a
# queue that a usual burst explains asks for nothing more.


SURE_SIGMAS, SURE_LUMPY_SIGMAS = 2.0, 4.0
"""Standard deviations of the arrivals by which the observed rate may be too high by chance; with bursts it is further off more
often than a normal distribution says."""

USUAL_QUEUE_S, USUAL_SHARE = 0.25, 0.25
"""Seconds of arrivals, or share of a TTFT objective, that always wait at routers: routers give workers no more work in advance
than that (router/routing/cost_model.py)."""

USUAL_NOISE, LUMP_SIGMAS = 4.0, 2.0
"""With more noise than USUAL_NOISE (1: independent arrivals), LUMP_SIGMAS standard deviations are borne at any time."""

ABSORBED = 2.0
"""Multiples of the TTFT objective over which a queue evens out bursts."""


@dataclass(frozen=True)
class Demand:
    """Hold the demand in requests a second. `backlog` comes on top of everything else until it is drained."""

    observed: float
    expected: float
    least: float
    backlog: float
    later: float = 0.0

    @property
    def needed(self) -> float:
        """Return the rate that a pool must bear."""
        return max(self.least, self.expected) + self.backlog


def demand(
    now_s: float, traffic: Traffic, forecaster: Forecaster, settings: AutoscalerSettings, start_s: float, ttft_s: float | None
) -> Demand:
    """Return the demand. `start_s`: until a pod that is asked for now serves; `ttft_s`: the objective. The expected rate is the
    maximum of now and then: a pool must not shrink for a night that begins only after that."""
    rate, window_s = traffic.rate_per_s, max(traffic.window_s, 1e-3)
    evened_s = max(window_s, ABSORBED * (ttft_s or 0.0))
    moments = [forecaster.at(now_s + start_s * share) for share in (0.0, 0.5, 1.0)]
    expected = max([moment.mean + settings.forecast_sigmas * moment.spread + _lumps(moment, evened_s) for moment in moments])
    after = forecaster.at(now_s + start_s + settings.cool_down_s)
    later = after.mean + _lumps(after, evened_s)
    sigmas = SURE_LUMPY_SIGMAS if after.noise > LUMPY_NOISE else SURE_SIGMAS
    sure = max(0.0, rate - sigmas * math.sqrt(max(1.0, after.noise) * rate / window_s))
    usual = max(USUAL_QUEUE_S, USUAL_SHARE * (ttft_s or 0.0)) * rate + 1 + _lumps(moments[0], evened_s) * evened_s
    unusual = max(0.0, traffic.num_queued - usual)
    return Demand(rate, expected, sure, unusual / settings.drain_s, later)


LUMPY_COOL_DOWNS = 2.5
"""Cool-downs that a pool takes beside bursts before it shrinks: those minutes apart tell more of it than one of them does."""

NOISY_HEADROOMS = 2.0
"""Headrooms that a pool keeps with more noise than USUAL_NOISE: what came lately tells less of what will come."""


def in_force(moment: Expected, settings: AutoscalerSettings) -> AutoscalerSettings:
    """Return the settings with the cool-down and the headroom of the present: the less even arrivals are, the larger."""
    cool_downs = LUMPY_COOL_DOWNS if moment.noise > LUMPY_NOISE else 1.0
    headrooms = NOISY_HEADROOMS if moment.noise > USUAL_NOISE else 1.0
    return replace(settings, cool_down_s=cool_downs * settings.cool_down_s, headroom=headrooms * settings.headroom)


def _lumps(moment: Expected, evened_s: float) -> float:
    """Return by how much the rate over so many seconds may exceed the mean in a burst, requests a second."""
    return LUMP_SIGMAS * math.sqrt(max(0.0, moment.noise - USUAL_NOISE) * moment.mean / evened_s)


WAIT_SHARE = 0.5
"""Share of a TTFT objective beyond which waiting at routers is not chance."""

ROOMY = 0.9
"""Share of the KV in use below which decode workers keep no request waiting."""


WORTH_SAYING = 1.02
"""Tokens a step from which speculation is named in reasons."""


@dataclass(frozen=True)
class Size:
    """Hold numbers of replicas. `needed` keeps the objectives; `enough` would with headroom; both within the pool's bounds.
    `why`: what determines `needed`, in words."""

    needed: int
    enough: int
    why: str


def pool_of(name: PoolName, worker: Worker, goals: Goals) -> Pool:
    """Return the capacity model of a pool of such workers."""
    kinds: dict[PoolName, Callable[[Worker, Goals], Pool]] = {
        PoolName.PREFILL: PrefillPool,
        PoolName.DECODE: DecodePool,
        PoolName.BOTH: SharedPool,
    }
    return kinds[name](worker, goals)


def size(view: PoolView, pool: Pool, load: Load, demand: Demand, queue_wait_s: float, settings: AutoscalerSettings) -> Size:
    """Return the size of a pool. `load`: the requests' lengths; `demand`: their rate. `queue_wait_s` at routers, 0 while a change
    may still have to show in it."""
    own = settings.of(view.name)
    num = fewest(pool, load.at(demand.needed), own.max_replicas)
    enough = fewest(pool, load.at(max(demand.needed, demand.later) * (1 + settings.headroom)), own.max_replicas)
    kv = _by_kv(view, settings.max_kv_occupancy)
    kv_enough = _by_kv(view, settings.max_kv_occupancy / (1 + settings.headroom))
    needed = own.max_replicas if num is None else num
    why = _why(view.name, pool.goals, demand, needed)
    if num is None:
        why += f", more than {own.max_replicas} replicas bear"
    why += _drafted(view.name, pool.worker.drafts) + _hopeless(view.name, pool, load)
    if kv > needed:
        needed, why = kv, f"{view.kv_occupancy:.0%} of the KV is in use, more than {settings.max_kv_occupancy:.0%}"
    if needed <= view.num_replicas and _waits_for(view, pool.goals, queue_wait_s, settings.max_kv_occupancy):
        needed = view.num_replicas + 1
        why = f"requests wait for {queue_wait_s:.2g} s at routers, although {needed - 1} should do: one more"
    floor = max(needed, kv_enough, own.max_replicas if enough is None else enough)
    return Size(_bounded(needed, own), _bounded(floor, own), why)


def unmeasured(view: PoolView, settings: PoolSettings) -> Size:
    """Return the size of a pool without reported speed or lengths: as it is, at least one."""
    num = _bounded(max(1, view.num_replicas), settings)
    return Size(num, num, "no worker has reported its speed, or no request has arrived yet")


def unasked(settings: PoolSettings) -> Size:
    """Return the size of a pool that has never had a request."""
    num = _bounded(1, settings)
    return Size(num, num, "there has been no request yet")


def borne_share(pool: Pool, load: Load, needed_per_s: float, num_replicas: int) -> float:
    """Return the share of the demand that the replicas serve within the objectives."""
    return 1.0 if needed_per_s <= 0 else min(1.0, bearable(pool, load, num_replicas) / needed_per_s)


def _by_kv(view: PoolView, most: float) -> int:
    return 0 if view.name is PoolName.PREFILL else math.ceil(view.num_ready * view.kv_occupancy / most - 1e-9)


def _waits_for(view: PoolView, goals: Goals, queue_wait_s: float, max_kv_occupancy: float) -> bool:
    """Return whether requests wait for this pool so long that their TTFT is in danger. Whatever the model says then, it is wrong.

    Without free KV they wait for decode workers, else for prefill workers."""
    if goals.ttft_s is None or queue_wait_s <= WAIT_SHARE * goals.ttft_s:
        return False
    is_full = view.kv_occupancy > ROOMY * max_kv_occupancy
    return is_full if view.name is PoolName.DECODE else not is_full


def _bounded(num: int, settings: PoolSettings) -> int:
    return min(settings.max_replicas, max(settings.min_replicas, num))


def _why(name: PoolName, goals: Goals, demand: Demand, num: int) -> str:
    """Return the demand, its source and what it needs, in words."""
    source = "expected" if demand.expected >= demand.least else "observed"
    backlog = f", {demand.backlog:.3g}/s of it to drain the backlog," if demand.backlog > 0 else ""
    return (
        f"{demand.needed:.3g} requests/s {source} ({demand.observed:.3g}/s came){backlog} need {num} for {_promise(name, goals)}"
    )


def _drafted(name: PoolName, drafts: Drafts) -> str:
    """Return what is counted on besides the steps' own tokens."""
    if name is PoolName.PREFILL or drafts.tokens_per_row < WORTH_SAYING:
        return ""
    return f" with up to {drafts.tokens_per_row:.2f} tokens a step by speculation"


def _hopeless(name: PoolName, pool: Pool, load: Load) -> str:
    """Return the objectives that no number of such workers can keep."""
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


# Request lengths, smoothed.
#
# The mean square of a window's prompts depends on the longest one or two; a pool that followed it would move with each of them.
# So all moments are smoothed over a minute, and the last values hold while there are no requests.


SMOOTH_S = 60.0
_FIELDS = ("input_tokens", "input_squared", "output_tokens", "cached_share", "output_squared")


class SmoothedLengths:
    """Hold the smoothed lengths. `latest`: None before the first request. `burstiness` of arrivals is smoothed with them."""

    def __init__(self) -> None:
        self.latest: Lengths | None = None
        self.burstiness = 1.0
        self._time_s: float | None = None
        self._looked_s: float | None = None

    def observe(self, now_s: float, traffic: Traffic) -> None:
        """Update from the traffic. Without requests nothing is learned about lengths, and the burst before the silence counts
        less and less."""
        silent_s = 0.0 if self._looked_s is None else max(0.0, now_s - self._looked_s)
        self._looked_s = now_s
        if traffic.lengths is None or traffic.rate_per_s == 0:
            self.burstiness += (1 - math.exp(-silent_s / SMOOTH_S)) * (1 - self.burstiness)
            return
        since_s = SMOOTH_S if self._time_s is None else max(0.0, now_s - self._time_s)
        weight = 1 - math.exp(-since_s / SMOOTH_S) if self.latest is not None else 1.0
        self.latest = _between(self.latest or traffic.lengths, traffic.lengths, weight)
        self.burstiness += weight * (traffic.burstiness - self.burstiness)
        self._time_s = now_s

    def save(self) -> State:
        """Return the state for `restore`; empty before the first request."""
        if self.latest is None or self._time_s is None:
            return {}
        return {name: getattr(self.latest, name) for name in _FIELDS} | {"burstiness": self.burstiness, "time_s": self._time_s}

    def restore(self, state: State) -> None:
        """Restore saved state. Raises ValueError."""
        if not state:
            return
        tokens, squares, outputs, cached = (number(state, name) for name in _FIELDS[:4])
        squared = None if state.get("output_squared") is None else number(state, "output_squared")
        self.latest = Lengths(tokens, squares, outputs, cached, squared)
        self.burstiness, self._time_s = number(state, "burstiness"), number(state, "time_s")


def _between(before: Lengths, after: Lengths, weight: float) -> Lengths:
    """Interpolate: means of means and of squares are those of all requests together."""
    tokens, squares, outputs, cached = (
        (1 - weight) * getattr(before, name) + weight * getattr(after, name) for name in _FIELDS[:4]
    )
    squared = after.output_squared
    if squared is not None and before.output_squared is not None:
        squared = (1 - weight) * before.output_squared + weight * squared
    return Lengths(tokens, squares, outputs, cached, squared)


# The correction of the workers' models: observed over predicted latency, bounded and slow.
#
# The prediction is the routers' own for the very requests that were observed, queues included: a queue that was foreseen is not
# an error of the model, and load alone does not make workers look slow.


LEAST, MOST = 0.8, 2.0
KEPT = 0.9
"""Share of an objective: admission rejects requests that would miss it, so observations beyond it are cut off."""
LEARN_S = 300.0
"""Seconds after which two thirds of an error are corrected."""


class Correction:
    """Correct the prediction of one latency."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._time_s: float | None = None

    def observe(self, now_s: float, measured: Measured, goal_s: float | None) -> None:
        """Learn from a measurement. Call it only while nothing else changes: latencies observed while pods come and go belong to
        neither the old nor the new pool.

        `goal_s`: the objective. A latency well within it needs no more workers, whatever was predicted: longer latencies than
        predicted then show what a request takes, not how many a worker bears."""
        since_s = 0.0 if self._time_s is None else max(0.0, now_s - self._time_s)
        self._time_s = now_s
        if measured.observed_s is None or not measured.predicted_s:
            return
        ratio = min(MOST, max(LEAST, measured.observed_s / measured.predicted_s))
        if goal_s is None or measured.observed_s <= KEPT * goal_s:
            ratio = min(1.0, ratio)
        # After a gap one figure weighs no more than a minute of them.
        weight = 1 - math.exp(-min(since_s, 60.0) / LEARN_S)
        self.factor *= (ratio / self.factor) ** weight

    def skip(self, now_s: float) -> None:
        """Learn nothing from the time until now."""
        self._time_s = now_s

    def save(self) -> State:
        return {"factor": self.factor}

    def restore(self, state: State) -> None:
        """Restore saved state. Raises ValueError."""
        self.factor = min(MOST, max(LEAST, number(state, "factor")))


# The speed of a pool's workers, smoothed.
#
# A worker refits its model every few steps; on a machine that does other things too, one fit may differ tenfold from the one
# before. So the median of a minute's typical workers counts, as with workers themselves. Speculation gains what the requests of
# the moment allow: only the least of a minute is counted on, and as a pool shrinks only behind its cool-down, the least of that.


T = TypeVar("T")
USUAL = Work(prefill_tokens=512, prefill_context=prefill_context(0, 512), num_decoding=8, decode_context=8 * 512)
"""A step by which workers' speeds are compared."""

KEEP_S = 60.0


def typical_speed(told: Collection[LatencyModel]) -> LatencyModel | None:
    """Return the median; measured models take precedence over estimated ones. None without any."""
    measured = [latency for latency in told if latency.num_steps]
    return middle(measured or told, lambda latency: latency.step_s(USUAL))


def middle(values: Collection[T], measure: Callable[[T], float]) -> T | None:
    """Return the median; None without any."""
    if not values:
        return None
    found = median_low([measure(value) for value in values])
    return next(value for value in values if measure(value) == found)


class Speed:
    """Track the speed of one pool."""

    def __init__(self) -> None:
        self._told: deque[tuple[float, Worker]] = deque()

    def observe(self, now_s: float, worker: Worker | None) -> None:
        """Record the typical worker of the moment; None: there is none, and the last values still hold."""
        if worker is None:
            return
        self._told.append((now_s, worker))
        while self._told[0][0] <= now_s - KEEP_S:
            self._told.popleft()

    @property
    def latest(self) -> Worker | None:
        """Return the last limits, the median speed of the latest minute and its least speculation. None before any worker has
        reported."""
        if not self._told:
            return None
        latency = typical_speed([worker.model for _, worker in self._told])
        if latency is None:
            return None
        decode_s = latency.decode_s(USUAL.num_decoding, USUAL.decode_context)
        told = [worker.drafts for _, worker in self._told]
        least = max(told, key=lambda drafts: drafts.token_s(latency, USUAL.num_decoding, decode_s))
        return replace(self._told[-1][1], model=latency, drafts=least)
