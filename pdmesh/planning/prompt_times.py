"""How long prompts take, over all their lengths; and with a wait before, which share of them keeps its TTFT. Pure."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from pdmesh.planning import capacity_steps as steps
from pdmesh.planning.capacity_load import Goals, Lengths, Worker
from pdmesh.planning.pace_rules import MAX_SHARE, PACE_TARGET
from pdmesh.planning.queueing import Waiting

Array = NDArray[np.float64]
_BISECTIONS = 30
_LONGEST_S = 3600.0


@dataclass(frozen=True, eq=False)
class PromptTimes:
    """`each` [n]: of the equally likely lengths, with nobody else's prompt in the steps; `filled_s`: the mean where others fill
    up the last step; `work_s`: the mean without what empty steps take."""

    each: Array
    filled_s: float
    work_s: float

    @cached_property
    def mean_s(self) -> float:
        """Of prompts that share their steps with no other."""
        return float(self.each.mean())

    @cached_property
    def scv(self) -> float:
        """Their squared coefficient of variation."""
        return float(self.each.var() / self.each.mean() ** 2)

    def offered(self, rate_per_s: float, num_workers: int) -> tuple[float, float]:
        """Servers' worth of work, and the mean service time. At utilization u, a share u of the prompts meets another that fills
        its step: u = rate · ((1 - u) · alone + u · filled) / workers."""
        alone, filled = rate_per_s * self.mean_s / num_workers, rate_per_s * self.filled_s / num_workers
        utilization = alone / (1 + alone - filled)
        return num_workers * utilization, (1 - utilization) * self.mean_s + utilization * self.filled_s

    def within(self, wait: Waiting | None, goals: Goals) -> float:
        """The share of prompts whose TTFT keeps the objective; all, without one. `wait` None: nobody waits."""
        return 1.0 if goals.ttft_s is None else self._share(wait, goals.ttft_s - goals.transit_s)

    def quantile_s(self, wait: Waiting, goals: Goals) -> float:
        """The TTFT that a share `goals.each` of the requests keeps."""
        low, high = 0.0, _LONGEST_S
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._share(wait, middle) < goals.each else (low, middle)
        return high + goals.transit_s

    def _share(self, wait: Waiting | None, seconds: float) -> float:
        left_s = seconds - self.each
        late = wait.share * np.exp(-wait.ends_per_s * np.maximum(left_s, 0.0)) if wait is not None else 0.0
        return float(np.where(left_s >= 0, 1 - late, 0.0).mean())


@lru_cache(maxsize=64)
def times_alone(worker: Worker, lengths: Lengths) -> PromptTimes:
    """On a worker that does nothing else."""
    tokens, work = _work(worker, lengths)
    own, chunk = tokens * (1 - lengths.cached_share), worker.limits.max_num_batched_tokens
    each = work + worker.model.fixed_s * np.maximum(1.0, np.ceil(own / chunk))
    return PromptTimes(each, float((work + worker.model.fixed_s * own / chunk).mean()), float(work.mean()))


def times_beside(worker: Worker, lengths: Lengths, goals: Goals, batch: float) -> PromptTimes:
    """Where `batch` sequences get a token in every step, and keep their pace: those steps are never shared for free."""
    tokens, work = _work(worker, lengths)
    decode_s = steps.step_s(worker.model, batch, lengths.running_context)
    share = min(MAX_SHARE, decode_s / (PACE_TARGET * goals.tpot_s)) if goals.tpot_s is not None else 0.0
    chunk = max(1.0, worker.limits.max_num_batched_tokens - batch)
    num_steps = np.maximum(1.0, np.ceil(tokens * (1 - lengths.cached_share) / chunk))
    each = np.maximum(work + decode_s * num_steps, work / (1 - share))
    return PromptTimes(each, float(each.mean()), float(work.mean()))


def _work(worker: Worker, lengths: Lengths) -> tuple[Array, Array]:
    """Lengths [n], and what their own tokens take [n]."""
    tokens, cached = np.array(lengths.points), lengths.cached_share
    context = tokens**2 * (1 - cached**2) / 2
    return tokens, tokens * (1 - cached) * worker.model.per_prefill_token_s + context * worker.model.per_prefill_context_s
