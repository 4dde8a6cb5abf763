"""Computes the times of prompts over all their lengths, their queueing, and the share that keeps its TTFT. Pure."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pdmesh.planning.capacity_load import Goals, Lengths, Worker
from pdmesh.planning.latency_model import LatencyModel
from pdmesh.step_sharing import PACE_TARGET, decode_share

# The wait for one of several servers. Seconds.
#
# Allen and Cunneen's approximation of G/G/n (A. O. Allen, "Probability, Statistics, and Queueing Theory", 2nd edition, 1990,
# §5.7):
#
#     mean wait = P(all busy) · service / (n · (1 - utilization)) · (variation of gaps² + variation of service²) / 2
#
# P(all busy) is Erlang's C, that of M/M/n with the same load. Exact for M/M/n and for M/G/1 (Pollaczek-Khinchine). A request that
# waits is taken to wait for an exponential time, as is exact for M/M/n and as Kingman's heavy traffic limit has it for all.


@dataclass(frozen=True)
class Waiting:
    """Hold the wait: a `share` of the requests waits at all; the rest of a wait ends at the rate `ends_per_s`."""

    share: float
    ends_per_s: float

    @property
    def mean_s(self) -> float:
        """Return the mean over all requests."""
        return self.share / self.ends_per_s

    def within(self, seconds: float) -> float:
        """Return the share of requests that wait for no longer."""
        return 0.0 if seconds < 0 else 1 - self.share * math.exp(-self.ends_per_s * seconds)


def erlang_c(num_servers: int, offered: float) -> float:
    """Return the share of arrivals that find `num_servers` busy; `offered`: arrivals a second times seconds each, below
    `num_servers`.

    It uses the recursion of Erlang's B, which neither overflows nor loses digits."""
    blocked = 1.0
    for number in range(1, num_servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    return blocked / (1 - offered / num_servers * (1 - blocked))


def waiting(offered: float, num_servers: int, service_s: float, service_scv: float, gap_scv: float = 1.0) -> Waiting | None:
    """Return the wait; None: the servers cannot sustain the load, and waits grow without end. `*_scv`: squared coefficients of
    variation."""
    if not offered < num_servers:
        return None
    mean_wait_s = service_s / (num_servers - offered) * (gap_scv + service_scv) / 2
    return Waiting(erlang_c(num_servers, offered), 1 / max(mean_wait_s, 1e-9))


# The times of batches on one worker, for `pdmesh/planning/capacity.py`. Seconds and tokens.


Array = NDArray[np.float64]
Batch = TypeVar("Batch", float, Array)


def step_s(model: LatencyModel, batch: float, context: float) -> float:
    """Return the time of a step in which `batch` sequences of `context` tokens get one more."""
    return model.fixed_s + batch * (model.per_sequence_s + model.per_context_token_s * context)


def token_s(worker: Worker, batch: Batch, context: float) -> Batch:
    """Return the time in which each of `batch` sequences of `context` tokens gets a token: a step, or less where drafts pay
    (`Drafts.token_s`, of many batches at once)."""
    model, drafts = worker.model, worker.drafts
    plain = model.fixed_s + batch * (model.per_sequence_s + model.per_context_token_s * context)
    drafted = (plain + batch * (model.per_sequence_s * (drafts.computed_per_row - 1))) / drafts.tokens_per_row
    fits = batch * drafts.computed_per_row <= worker.limits.max_num_batched_tokens
    fitting: Any = np.where(fits, drafted, np.inf)
    found: Batch = np.minimum(plain, fitting)
    return found


def roomy_batch(worker: Worker, lengths: Lengths) -> int:
    """Return the sequences that fit on a worker: its limit of sequences, its KV."""
    by_kv = int(worker.limits.kv_tokens / lengths.running_context)
    return max(1, min(worker.limits.max_num_seqs, by_kv))


def largest_batch(worker: Worker, lengths: Lengths, goals: Goals, share: float = 1.0) -> int:
    """Return the sequences that a worker can decode at once so that each gets its tokens within `share` of the TPOT objective.

    If not even one can, the objective is unreachable, and the batch is what fits."""
    room = roomy_batch(worker, lengths)
    if goals.tpot_s is None:
        return room
    model, drafts, goal_s = worker.model, worker.drafts, goals.tpot_s * share
    row_s = model.per_sequence_s + model.per_context_token_s * lengths.running_context
    if row_s <= 0:
        return room
    drafted_s = row_s + model.per_sequence_s * (drafts.computed_per_row - 1)
    plain, drafted = (goal_s - model.fixed_s) / row_s, (drafts.tokens_per_row * goal_s - model.fixed_s) / drafted_s
    drafted = min(drafted, worker.limits.max_num_batched_tokens / drafts.computed_per_row)
    return room if max(plain, drafted) < 1 else min(room, int(max(plain, drafted) + 1e-9))


def keeps_tpot(worker: Worker, lengths: Lengths, goals: Goals) -> bool:
    """Return whether a sequence alone on a worker gets its tokens within the objective."""
    return goals.tpot_s is None or token_s(worker, 1.0, lengths.running_context) <= goals.tpot_s


def decode_tokens_per_s(worker: Worker, lengths: Lengths, goals: Goals) -> float:
    """Return the tokens a second of a worker that decodes the largest batch that keeps the TPOT objective."""
    batch = largest_batch(worker, lengths, goals)
    return batch / token_s(worker, float(batch), lengths.running_context)


_BISECTIONS = 30
_LONGEST_S = 3600.0


@dataclass(frozen=True, eq=False)
class PromptTimes:
    """Hold the times of prompts. `each` [n]: of the equally likely lengths, alone in their steps; `filled_s`: the mean where
    others fill up the last step; `work_s`: the mean without what empty steps take."""

    each: Array
    filled_s: float
    work_s: float

    @cached_property
    def mean_s(self) -> float:
        """Return the mean of prompts that share their steps with no other."""
        return float(self.each.mean())

    @cached_property
    def scv(self) -> float:
        """Return their squared coefficient of variation."""
        return float(self.each.var() / self.each.mean() ** 2)

    def offered(self, rate_per_s: float, num_workers: int) -> tuple[float, float]:
        """Return the offered load in servers, and the mean service time. At utilization u, a share u of the prompts meets another
        that fills its step: u = rate · ((1 - u) · alone + u · filled) / workers."""
        alone, filled = rate_per_s * self.mean_s / num_workers, rate_per_s * self.filled_s / num_workers
        utilization = alone / (1 + alone - filled)
        return num_workers * utilization, (1 - utilization) * self.mean_s + utilization * self.filled_s

    def within(self, wait: Waiting | None, goals: Goals) -> float:
        """Return the share of prompts that keeps the TTFT objective; all, without one. `wait` None: no wait."""
        return 1.0 if goals.ttft_s is None else self._share(wait, goals.ttft_s - goals.transit_s)

    def quantile_s(self, wait: Waiting, goals: Goals) -> float:
        """Return the TTFT that a share `goals.each` of the requests keeps."""
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
    """Return the times on a worker that does nothing else."""
    tokens, work = _work(worker, lengths)
    own, chunk = tokens * (1 - lengths.cached_share), worker.limits.max_num_batched_tokens
    each = work + worker.model.fixed_s * np.maximum(1.0, np.ceil(own / chunk))
    return PromptTimes(each, float((work + worker.model.fixed_s * own / chunk).mean()), float(work.mean()))


def times_beside(worker: Worker, lengths: Lengths, goals: Goals, batch: float) -> PromptTimes:
    """Return the times where `batch` sequences get a token in every step, within their TPOT budget if the worker keeps a pace:
    those steps are never shared for free."""
    tokens, work = _work(worker, lengths)
    decode_s = step_s(worker.model, batch, lengths.running_context)
    tpot_s = goals.tpot_s if worker.keeps_pace else None
    each_s, rows = token_s(worker, batch, lengths.running_context), batch
    if each_s < decode_s:
        decode_s, rows = each_s * worker.drafts.tokens_per_row, batch * worker.drafts.computed_per_row
    share = min(decode_share(each_s / tpot_s), each_s / (PACE_TARGET * tpot_s)) if tpot_s is not None else 0.0
    chunk = max(1.0, worker.limits.max_num_batched_tokens - rows)
    num_steps = np.maximum(1.0, np.ceil(tokens * (1 - lengths.cached_share) / chunk))
    each = np.maximum(work + decode_s * num_steps, work / (1 - share))
    return PromptTimes(each, float(each.mean()), float(work.mean()))


def prompt_work(worker: Worker, lengths: Lengths) -> Array:
    """Return what prompts' own tokens take [n], without the fixed part of their steps."""
    return _work(worker, lengths)[1]


def _work(worker: Worker, lengths: Lengths) -> tuple[Array, Array]:
    """Return lengths [n], and what their own tokens take [n]."""
    tokens, cached = np.array(lengths.points), lengths.cached_share
    context = tokens**2 * (1 - cached**2) / 2
    return tokens, tokens * (1 - cached) * worker.model.per_prefill_token_s + context * worker.model.per_prefill_context_s
