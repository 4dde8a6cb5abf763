"""How many workers a load needs to keep its objectives, and what so many make of it. Pure; seconds.

Three kinds of pool: workers that only compute prompts, workers that only decode, and workers that do both. Each answers one question,
"which share of the requests keeps this pool's objectives?", and everything else follows by search:

- **Prompts** queue for `n` servers (`queueing.py`); the queue's wait and each prompt's own time make its TTFT. Prompts that meet in
  a worker fill one step together, so the fuller the pool, the less each pays of what an empty step takes.
- **Sequences** share the steps of their worker (`concurrency.py`); how many there are varies by chance.
- **Both on one worker**: prompts lengthen the steps of sequences as far as the promised pace lets them, sequences take from prompts
  the rest (`engine/pacing.py`).

More load never keeps objectives for a larger share, and more workers never for a smaller one: so the fewest workers never fall
as the load grows. What the longest prompts would miss on an idle worker too counts against nobody: no worker more would help.

Not covered: workers of one pool that differ in speed, transfers that compute does not hide (part of `Goals.transit_s`), and requests
of several priorities.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planning import capacity_steps as steps
from planning.capacity_load import Goals, Lengths, Load, Worker
from planning.concurrency import Concurrency, concurrency
from planning.prompt_times import PromptTimes, times_alone, times_beside
from planning.queueing import Waiting, waiting

MAX_UTILIZATION = 0.9
"""Of a pool that nothing is promised about: beyond that, queues are long and never end."""

_BISECTIONS = 30


@dataclass(frozen=True)
class Outlook:
    """Of a pool under a load: `attainment`, the share of requests that keep its objectives; TTFT and TPOT at the objectives'
    quantile, None where the pool has no part in it. `utilization`: of what it could bear with queues that just do not grow."""

    attainment: float
    utilization: float
    ttft_s: float | None = None
    tpot_s: float | None = None


class Pool(Protocol):
    """One kind of worker with its objectives."""

    @property
    def goals(self) -> Goals:
        """What is promised."""

    @property
    def required(self) -> float:
        """The share of requests that has to keep this pool's objectives."""

    def outlook(self, load: Load, num_workers: int) -> Outlook | None:
        """None: so many workers cannot bear the load; queues would grow without end."""

    def reachable(self, lengths: Lengths) -> float:
        """The share of requests that would keep this pool's objectives with nobody beside them."""

    def least(self, load: Load) -> int:
        """Workers without which there is no use in asking: fewer cannot keep up."""


@dataclass(frozen=True)
class PrefillPool:
    """Workers that compute prompts for others."""

    worker: Worker
    goals: Goals

    @property
    def required(self) -> float:
        return self.goals.each

    def least(self, load: Load) -> int:
        return max(1, int(load.rate_per_s * times_alone(self.worker, load.lengths).filled_s))

    def reachable(self, lengths: Lengths) -> float:
        return times_alone(self.worker, lengths).within(None, self.goals)

    def outlook(self, load: Load, num_workers: int) -> Outlook | None:
        times = times_alone(self.worker, load.lengths)
        offered, service_s = times.offered(load.rate_per_s, num_workers)
        wait = waiting(offered, num_workers, service_s, times.scv, load.burstiness)
        if wait is None:
            return None
        return _prompt_outlook(times, wait, self.goals, offered / num_workers)


@dataclass(frozen=True)
class DecodePool:
    """Workers that own requests whose prompts others compute."""

    worker: Worker
    goals: Goals

    @property
    def required(self) -> float:
        return self.goals.each

    def least(self, load: Load) -> int:
        tokens_per_s = load.rate_per_s * load.lengths.output_tokens
        return max(1, int(tokens_per_s / steps.decode_tokens_per_s(self.worker, load.lengths, self.goals)))

    def reachable(self, lengths: Lengths) -> float:
        return 1.0

    def outlook(self, load: Load, num_workers: int) -> Outlook | None:
        lengths, worker = load.lengths, self.worker
        room, batch = steps.roomy_batch(worker, lengths), steps.largest_batch(worker, lengths, self.goals)
        found = concurrency(
            load.rate_per_s * lengths.output_tokens, num_workers, room, lambda batches: self._step_s(batches, lengths), load.burstiness
        )
        if found is None:
            return None
        tpot_s = steps.step_s(worker.model, found.quantile(self.goals.each), lengths.running_context)
        return Outlook(found.within(batch), found.mean_batch / room, tpot_s=tpot_s)

    def _step_s(self, batches: NDArray[np.float64], lengths: Lengths) -> NDArray[np.float64]:
        model = self.worker.model
        return model.fixed_s + batches * (model.per_sequence_s + model.per_context_token_s * lengths.running_context)


@dataclass(frozen=True)
class SharedPool:
    """Workers with both roles: each computes the prompts of the sequences that it decodes."""

    worker: Worker
    goals: Goals

    @property
    def required(self) -> float:
        return self.goals.quantile

    def least(self, load: Load) -> int:
        return max(1, int(load.rate_per_s * self._work_s(load.lengths)))

    def reachable(self, lengths: Lengths) -> float:
        return times_alone(self.worker, lengths).within(None, self.goals)

    def outlook(self, load: Load, num_workers: int) -> Outlook | None:
        lengths = load.lengths
        prompts = load.rate_per_s * self._work_s(lengths) / num_workers
        found = self._concurrency(load, num_workers, prompts) if prompts < 1 else None
        if found is None:
            return None
        times = times_beside(self.worker, lengths, self.goals, found.mean_batch)
        offered = load.rate_per_s * times.mean_s
        wait = waiting(offered, num_workers, times.mean_s, times.scv, load.burstiness)
        if wait is None:
            return None
        kept = found.within(steps.largest_batch(self.worker, lengths, self.goals, steps.PACE_TARGET))
        prompt_side = _prompt_outlook(times, wait, self.goals, offered / num_workers)
        slowest = self._step_s(np.array([found.quantile(self.goals.each)]), lengths, prompts)
        attainment = max(0.0, kept + prompt_side.attainment - 1)
        return Outlook(attainment, max(prompts, prompt_side.utilization), prompt_side.ttft_s, float(slowest[0]))

    def _concurrency(self, load: Load, num_workers: int, prompts: float) -> Concurrency | None:
        lengths = load.lengths
        return concurrency(
            load.rate_per_s * lengths.output_tokens,
            num_workers,
            steps.roomy_batch(self.worker, lengths),
            lambda batches: self._step_s(batches, lengths, prompts),
            load.burstiness,
        )

    def _step_s(self, batches: NDArray[np.float64], lengths: Lengths, prompts: float) -> NDArray[np.float64]:
        """With the prompts that share them, `prompts` of the time; beside promised sequences no more than leaves these their pace."""
        model = self.worker.model
        alone = model.fixed_s + batches * (model.per_sequence_s + model.per_context_token_s * lengths.running_context)
        if self.goals.tpot_s is None:
            return alone / (1 - prompts)
        return np.minimum(alone / (1 - prompts), np.maximum(alone / steps.MAX_SHARE, steps.PACE_TARGET * self.goals.tpot_s))

    def _work_s(self, lengths: Lengths) -> float:
        return times_alone(self.worker, lengths).work_s


def _prompt_outlook(times: PromptTimes, wait: Waiting, goals: Goals, utilization: float) -> Outlook:
    """Where nothing is promised, a pool is to keep up, with room for what comes by chance."""
    kept = times.within(wait, goals) if goals.ttft_s is not None or utilization <= MAX_UTILIZATION else 0.0
    return Outlook(kept, utilization, ttft_s=times.quantile_s(wait, goals))


def keeps(pool: Pool, load: Load, num_workers: int) -> bool:
    """Do so many workers keep the objectives of as many requests as they have to, of those that could be kept at all?"""
    if load.rate_per_s <= 0:
        return True
    needed = pool.reachable(load.lengths) - (1 - pool.required)
    outlook = pool.outlook(load, num_workers) if num_workers else None
    return outlook is not None and outlook.attainment >= needed - 1e-9


def fewest(pool: Pool, load: Load, most: int) -> int | None:
    """The fewest workers that keep the objectives, 0 for no load; None: not even `most` do."""
    if load.rate_per_s <= 0:
        return 0
    return next((number for number in range(pool.least(load), most + 1) if keeps(pool, load, number)), None)


def bearable(pool: Pool, load: Load, num_workers: int) -> float:
    """Requests a second, like those of `load`, of which so many workers still keep the objectives."""
    if num_workers < 1:
        return 0.0
    low, high = 0.0, 1.0
    while high < 1e6 and keeps(pool, load.at(high), num_workers):
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(pool, load.at(middle), num_workers) else (low, middle)
    return low
