"""Computes how many workers a load needs to keep its objectives, and the latencies of a given number. Pure; seconds.

Three kinds of pool: workers that only compute prompts, workers that only decode, and workers that do both. Each answers one
question, "which share of the requests keeps this pool's objectives?", and everything else follows by search:

- **Prompts** queue for `n` servers (`prompt_times.py`); the queue's wait and each prompt's own time make its TTFT. Prompts that
  meet in a worker fill one step together, so the fuller the pool, the less each pays of what an empty step takes.
- **Sequences** share the steps of their worker (`Concurrency`); how many there are varies by chance.
- **Both on one worker**: prompts lengthen the steps of sequences as far as their TPOT budget allows, sequences take from
  prompts the rest (`pdmesh/engine/scheduler/tpot_limiter.py`). An engine that keeps no pace lengthens them as far as prompts do.

More load never keeps objectives for a larger share, and more workers never for a smaller one: so the fewest workers never fall as
the load grows. Prompts that would miss TTFT on an idle worker too are not counted: another worker would not help them.

Not covered: workers of one pool that differ in speed, transfers that compute does not hide (part of `Goals.transit_s`), and
requests of several priorities.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdmesh.planning import prompt_times
from pdmesh.planning.capacity_load import Goals, Lengths, Load, Worker
from pdmesh.planning.prompt_times import PromptTimes, Waiting, times_alone, times_beside, waiting
from pdmesh.step_sharing import BEHIND_TARGET, MAX_SHARE, PACE_TARGET

# The number of sequences that decode at once, as they come and go by chance.
#
# A pool whose sequences share its steps evenly is a processor-sharing queue: with N of them, each gets a token every step(N /
# workers) seconds. In such a queue the long-run share of time with N sequences depends on the mean output alone, not on how
# outputs are spread (Cohen, "The multiple phase service network with generalized processor sharing", Acta Informatica, 1979;
# Kelly, "Reversibility and Stochastic Networks", 1979, §3.3):
#
#     p(N) = p(N - 1) · arrivals a second · tokens of an output · step(N / workers) / N
#
# With steps of one length that is Poisson, whose spread is √N: small pools need relatively more capacity, which is square-root
# staffing; steps that grow with the batch widen it. Bursty arrivals are counted in clumps as large as their peakedness (Hayward's
# approximation: Fredericks, "Congestion in blocking systems", Bell System Technical Journal, 1980).


Array = NDArray[np.float64]


@dataclass(frozen=True)
class Concurrency:
    """Hold the distribution of batches in one pool. `batches` [n]: sequences of one worker when n clumps are there and one more
    arrives; `shares` [n] of arrivals that find that; `beyond`: of those that find no room. Together 1."""

    batches: Array
    shares: Array
    beyond: float

    def within(self, batch: float) -> float:
        """Return the share of arrivals after which a worker has at most `batch` sequences."""
        return float(self.shares[self.batches <= batch + 1e-9].sum())

    @property
    def mean_batch(self) -> float:
        """Return the mean batch of a worker, as arrivals find it, themselves included."""
        return float(self.batches @ self.shares) + self.beyond * float(self.batches[-1])

    def quantile(self, share: float) -> float:
        """Return the batch that is not exceeded for this share of arrivals; at most the largest that there is room for."""
        reached = int(np.searchsorted(self.shares.cumsum(), share - 1e-12))
        return float(self.batches[min(reached, len(self.batches) - 1)])


def concurrency(
    tokens_per_s: float, num_workers: int, max_batch: int, step_s: Callable[[Array], Array], burstiness: float = 1.0
) -> Concurrency | None:
    """Return the distribution; None: the pool cannot sustain the load. `tokens_per_s` asked of the pool; `step_s`: of batches.

    `max_batch`: sequences that fit on a worker; more wait until one ends."""
    clump = max(1e-3, (1 + burstiness) / 2)
    num_clumps = max(1, int(num_workers * max_batch / clump))
    clumps = np.arange(num_clumps + 1, dtype=np.float64)
    batches = np.maximum(1.0, clumps * clump / num_workers)
    if tokens_per_s <= 0:
        return Concurrency(batches[:1], np.ones(1), 0.0)
    growth = tokens_per_s / clump * step_s(batches[1:]) / clumps[1:]
    if growth[-1] >= 1:
        return None
    with np.errstate(divide="ignore"):  # hardly any load: sequences never meet
        logs = np.concatenate(([0.0], np.log(growth).cumsum()))
    weights = np.exp(logs - logs.max())
    # Beyond `max_batch` the pool is as fast as when full: each further clump is rarer than the previous one by the same factor.
    waiting = float(weights[-1] * growth[-1] / (1 - growth[-1]))
    total = float(weights.sum()) + waiting
    found = weights[:-1] / total
    return Concurrency(batches[1:], found, float(weights[-1]) / total + waiting / total)


MAX_UTILIZATION = 0.9
"""Bound of a pool without objectives: beyond it, queues are long and never end."""

_BISECTIONS = 20


@dataclass(frozen=True)
class Outlook:
    """Describe a pool under a load: `attainment`, the share of requests that keep its objectives; TTFT and TPOT at the
    objectives' quantile, None where the pool has no part in it. `utilization`: relative to the load at which queues just do not
    grow."""

    attainment: float
    utilization: float
    ttft_s: float | None = None
    tpot_s: float | None = None


class Pool(Protocol):
    """Model one kind of worker with its objectives."""

    @property
    def worker(self) -> Worker:
        """Return a typical worker."""

    @property
    def goals(self) -> Goals:
        """Return the objectives."""

    @property
    def required(self) -> float:
        """Return the share of requests that must keep this pool's objectives."""

    def attainment(self, load: Load, num_workers: int) -> float | None:
        """Return the share of requests that keep the pool's objectives. None: the workers cannot sustain the load; queues would
        grow without end."""

    def outlook(self, load: Load, num_workers: int) -> Outlook | None:
        """Return all expected figures; None as above."""

    def reachable(self, lengths: Lengths) -> float:
        """Return the share of requests that would keep this pool's objectives alone on a worker."""

    def least(self, load: Load) -> int:
        """Return a lower bound on the workers: fewer cannot keep up."""


@dataclass(frozen=True)
class PrefillPool:
    """Model workers that compute prompts for others."""

    worker: Worker
    goals: Goals

    @property
    def required(self) -> float:
        return self.goals.each

    def least(self, load: Load) -> int:
        return max(1, int(load.rate_per_s * times_alone(self.worker, load.lengths).filled_s))

    def reachable(self, lengths: Lengths) -> float:
        return times_alone(self.worker, lengths).within(None, self.goals)

    def attainment(self, load: Load, num_workers: int) -> float | None:
        queue = self._queue(load, num_workers)
        return None if queue is None else queue.attainment

    def outlook(self, load: Load, num_workers: int) -> Outlook | None:
        queue = self._queue(load, num_workers)
        return None if queue is None else Outlook(queue.attainment, queue.utilization, ttft_s=queue.ttft_s)

    def _queue(self, load: Load, num_workers: int) -> "_PromptQueue | None":
        times = times_alone(self.worker, load.lengths)
        offered, service_s = times.offered(load.rate_per_s, num_workers)
        wait = waiting(offered, num_workers, service_s, times.scv, load.burstiness)
        return None if wait is None else _PromptQueue(times, wait, self.goals, offered / num_workers)


@dataclass(frozen=True)
class DecodePool:
    """Model workers that decode requests whose prompts others compute."""

    worker: Worker
    goals: Goals

    @property
    def required(self) -> float:
        return self.goals.each

    def least(self, load: Load) -> int:
        tokens_per_s = load.rate_per_s * load.lengths.output_tokens
        return max(1, int(tokens_per_s / prompt_times.decode_tokens_per_s(self.worker, load.lengths, self.goals)))

    def reachable(self, lengths: Lengths) -> float:
        return 1.0

    def attainment(self, load: Load, num_workers: int) -> float | None:
        found = self._concurrency(load, num_workers)
        return None if found is None else found.within(prompt_times.largest_batch(self.worker, load.lengths, self.goals))

    def outlook(self, load: Load, num_workers: int) -> Outlook | None:
        found, attainment = self._concurrency(load, num_workers), self.attainment(load, num_workers)
        if found is None or attainment is None:
            return None
        tpot_s = prompt_times.token_s(self.worker, found.quantile(self.goals.each), load.lengths.running_context)
        return Outlook(attainment, found.mean_batch / prompt_times.roomy_batch(self.worker, load.lengths), tpot_s=tpot_s)

    def _concurrency(self, load: Load, num_workers: int) -> Concurrency | None:
        lengths, room = load.lengths, prompt_times.roomy_batch(self.worker, load.lengths)
        tokens_per_s = load.rate_per_s * lengths.output_tokens
        return concurrency(tokens_per_s, num_workers, room, lambda batches: self._token_s(batches, lengths), load.burstiness)

    def _token_s(self, batches: Array, lengths: Lengths) -> Array:
        return prompt_times.token_s(self.worker, batches, lengths.running_context)


@dataclass(frozen=True)
class SharedPool:
    """Model workers with both roles: each computes the prompts of the sequences that it decodes."""

    worker: Worker
    goals: Goals

    @property
    def required(self) -> float:
        return self.goals.quantile

    def least(self, load: Load) -> int:
        return max(1, int(load.rate_per_s * self._work_s(load.lengths)))

    def reachable(self, lengths: Lengths) -> float:
        return times_alone(self.worker, lengths).within(None, self.goals)

    def attainment(self, load: Load, num_workers: int) -> float | None:
        both = self._both(load, num_workers)
        return None if both is None else self._kept(load, num_workers, *both)

    def outlook(self, load: Load, num_workers: int) -> Outlook | None:
        both = self._both(load, num_workers)
        if both is None:
            return None
        found, queue = both
        tpot_s = self._tpot_s(load, num_workers, found)
        return Outlook(self._kept(load, num_workers, found, queue), queue.utilization, queue.ttft_s, tpot_s)

    def _tpot_s(self, load: Load, num_workers: int, found: Concurrency) -> float:
        """Return TPOT at the objectives' quantile."""
        if self.worker.keeps_pace or self.goals.tpot_s is None:
            slowest = self._step_s(np.array([found.quantile(self.goals.each)]), load.lengths, self._prompts(load, num_workers))
            return float(slowest[0])
        return SharedSteps(self.worker, load, num_workers, found).quantile_s(self.goals.each)

    def _kept(self, load: Load, num_workers: int, found: Concurrency, queue: "_PromptQueue") -> float:
        """Return the share that keeps both objectives, misses taken as disjoint."""
        return max(0.0, self._kept_tpot(load, num_workers, found) + queue.attainment - 1)

    def _kept_tpot(self, load: Load, num_workers: int, found: Concurrency) -> float:
        tpot_s = self.goals.tpot_s
        if tpot_s is None or self.worker.keeps_pace or not prompt_times.keeps_tpot(self.worker, load.lengths, self.goals):
            return found.within(prompt_times.largest_batch(self.worker, load.lengths, self.goals, PACE_TARGET))
        return SharedSteps(self.worker, load, num_workers, found).within(tpot_s)

    def _both(self, load: Load, num_workers: int) -> "tuple[Concurrency, _PromptQueue] | None":
        """Return the decoding sequences, and the prompts that queue beside them."""
        prompts = self._prompts(load, num_workers)
        found = self._concurrency(load, num_workers, prompts) if prompts < 1 else None
        if found is None:
            return None
        times = times_beside(self.worker, load.lengths, self.goals, found.mean_batch)
        offered = load.rate_per_s * times.mean_s
        wait = waiting(offered, num_workers, times.mean_s, times.scv, load.burstiness)
        return None if wait is None else (found, _PromptQueue(times, wait, self.goals, offered / num_workers))

    def _prompts(self, load: Load, num_workers: int) -> float:
        """Return the share of the time that prompts take for themselves."""
        return load.rate_per_s * self._work_s(load.lengths) / num_workers

    def _concurrency(self, load: Load, num_workers: int, prompts: float) -> Concurrency | None:
        lengths = load.lengths
        return concurrency(
            load.rate_per_s * lengths.output_tokens,
            num_workers,
            prompt_times.roomy_batch(self.worker, lengths),
            lambda batches: self._step_s(batches, lengths, prompts),
            load.burstiness,
        )

    def _step_s(self, batches: NDArray[np.float64], lengths: Lengths, prompts: float) -> NDArray[np.float64]:
        """Return the step times with prompts that share them, `prompts` of the time; with a TPOT objective no longer than its
        budget, where the worker keeps a pace."""
        alone = prompt_times.token_s(self.worker, batches, lengths.running_context)
        if self.goals.tpot_s is None or not self.worker.keeps_pace:
            return alone / (1 - prompts)
        filled = alone / self.goals.tpot_s
        kept = np.minimum(alone / MAX_SHARE, np.maximum(BEHIND_TARGET, (1 + filled) / 2) * self.goals.tpot_s)
        longest = np.where(filled < 1, np.maximum(kept, PACE_TARGET * self.goals.tpot_s), np.inf)
        return np.minimum(alone / (1 - prompts), longest)

    def _work_s(self, lengths: Lengths) -> float:
        return times_alone(self.worker, lengths).work_s


_LONGEST_TPOT_S = 60.0


@dataclass(frozen=True, eq=False)
class SharedSteps:
    """Model TPOT where an engine holds no prompt back: each that comes while a request decodes lengthens its steps.

    In the time that an output of n tokens may take, n · goal, its own steps leave room for prompts' work. That work is a compound
    renewal sum, taken as normal: its mean is the prompts' share of the time, its variance grows with the time. Requests that are
    spread over workers come to each of them more evenly than to the pool: their gaps vary by one part in the workers."""

    worker: Worker
    load: Load
    num_workers: int
    found: Concurrency

    def within(self, tpot_s: float) -> float:
        """Return the share of requests whose TPOT is at most `tpot_s`."""
        likely = self.found.shares > 1e-9  # [batches]
        steps_s = self._steps_s[likely, None]
        gaps = np.maximum(0.0, np.round(np.array(self.load.lengths.output_points)) - 1)  # [outputs]
        room_s, rate = gaps * (tpot_s - steps_s), self.load.rate_per_s / self.num_workers
        work = prompt_times.prompt_work(self.worker, self.load.lengths)
        variance = rate * (work.var() + work.mean() ** 2 * self.load.burstiness / self.num_workers) * gaps * tpot_s
        fits = _normal((room_s - rate * work.mean() * gaps * tpot_s) / np.sqrt(np.maximum(variance, 1e-18)))
        kept = np.where(gaps > 0, fits, 1.0).mean(axis=1)
        return float(kept @ self.found.shares[likely])

    def quantile_s(self, share: float) -> float:
        """Return the TPOT that this share of the requests keeps."""
        low, high = 0.0, _LONGEST_TPOT_S
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.within(middle) < share else (low, middle)
        return high

    @property
    def _steps_s(self) -> Array:
        return prompt_times.token_s(self.worker, self.found.batches, self.load.lengths.running_context)


def _normal(values: Array) -> Array:
    """Return the normal distribution function, to 4e-4 (E. Page, "Approximations to the cumulative normal function", Applied
    Statistics, 1977)."""
    found: Array = 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (values + 0.044715 * values**3)))
    return found


@dataclass(frozen=True, eq=False)
class _PromptQueue:
    """Model prompts that wait for one of several workers, and then take their times."""

    times: PromptTimes
    wait: Waiting
    goals: Goals
    utilization: float

    @property
    def attainment(self) -> float:
        """Return the share that keeps TTFT. Without an objective a pool must keep up, with headroom for chance."""
        if self.goals.ttft_s is None:
            return float(self.utilization <= MAX_UTILIZATION)
        return self.times.within(self.wait, self.goals)

    @property
    def ttft_s(self) -> float:
        """Return TTFT at the objectives' quantile."""
        return self.times.quantile_s(self.wait, self.goals)


def keeps(pool: Pool, load: Load, num_workers: int) -> bool:
    """Return whether the workers keep the objectives of the required share of those requests that can keep them at all."""
    if load.rate_per_s <= 0:
        return True
    needed = pool.reachable(load.lengths) - (1 - pool.required)
    kept = pool.attainment(load, num_workers) if num_workers else None
    return kept is not None and kept >= needed - 1e-9


def fewest(pool: Pool, load: Load, most: int) -> int | None:
    """Return the fewest workers that keep the objectives, 0 for no load; None: not even `most` do."""
    if load.rate_per_s <= 0:
        return 0
    return next((number for number in range(pool.least(load), most + 1) if keeps(pool, load, number)), None)


def bearable(pool: Pool, load: Load, num_workers: int) -> float:
    """Return the requests a second, like those of `load`, for which the workers still keep the objectives."""
    if num_workers < 1:
        return 0.0
    low, high = 0.0, 1.0
    while high < 1e6 and keeps(pool, load.at(high), num_workers):
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(pool, load.at(middle), num_workers) else (low, middle)
    return low
