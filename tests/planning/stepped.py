"""A mesh step by step: what capacity arithmetic is compared with. Requests go to the worker that has least to do."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from planning.capacity_load import Goals, Load, Worker
from planning.capacity_steps import MAX_SHARE, PACE_TARGET
from planning.latency_model import Work, prefill_context


@dataclass
class Asked:
    """A request on its way. `num_done` prompt tokens are computed; `left` are to come."""

    arrived_s: float
    num_tokens: int
    left: int
    num_done: int = 0
    num_out: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.num_out - 1)


@dataclass
class Stepping:
    """One worker. `free_s`: when its step ends."""

    worker: Worker
    goals: Goals
    prompts: list[Asked] = field(default_factory=list)
    rows: list[Asked] = field(default_factory=list)
    free_s: float = 0.0

    @property
    def num_waiting(self) -> int:
        return sum(asked.num_tokens - asked.num_done for asked in self.prompts)

    def step(self, now_s: float) -> tuple[float, list[Asked]]:
        """How long it takes, and whose prompts it ends."""
        model, context = self.worker.model, sum(row.num_tokens + row.num_out for row in self.rows)
        decode_s = model.decode_s(len(self.rows), context)
        budget = self.worker.limits.max_num_batched_tokens - len(self.rows)
        if self.rows and self.goals.tpot_s is not None:
            pace_s = PACE_TARGET * self.goals.tpot_s
            least_s = min(decode_s * (1 - MAX_SHARE) / MAX_SHARE, max(0.0, self.goals.tpot_s - decode_s))
            budget = min(budget, max(8, int(max(least_s, pace_s - decode_s) / model.per_prefill_token_s)))
        tokens = contexts = 0
        for asked in self.prompts:
            own = min(budget - tokens, asked.num_tokens - asked.num_done)
            contexts += prefill_context(asked.num_done, asked.num_done + own)
            asked.num_done, tokens = asked.num_done + own, tokens + own
        end_s = now_s + model.step_s(Work(tokens, contexts, len(self.rows), context))
        for row in self.rows:
            row.num_out, row.left, row.last_s = row.num_out + 1, row.left - 1, end_s
        self.rows = [row for row in self.rows if row.left > 0]
        ended = [asked for asked in self.prompts if asked.num_done == asked.num_tokens]
        self.prompts = [asked for asked in self.prompts if asked.num_done < asked.num_tokens]
        for asked in ended:
            asked.first_s = asked.last_s = end_s
            asked.num_out, asked.left = 1, asked.left - 1
        return end_s, ended


def run(worker: Worker, goals: Goals, load: Load, num_prefill: int, num_decode: int, num: int, seed: int = 0) -> list[Asked]:
    """`num` requests; `num_prefill` 0: each of `num_decode` workers computes its own prompts."""
    rng = random.Random(seed)
    prefill = [Stepping(worker, Goals()) for _ in range(num_prefill)]
    decode = [Stepping(worker, goals) for _ in range(num_decode)]
    workers, all_asked, now_s = [*prefill, *decode], [], 0.0
    events: list[tuple[float, int, int]] = []  # (when, order, worker)
    points = load.lengths.points
    for _ in range(num):
        now_s += rng.expovariate(load.rate_per_s)
        out = max(1, round(rng.expovariate(1 / load.lengths.output_tokens)))
        all_asked.append(Asked(now_s, max(1, round(rng.choice(points))), out))
    idle = set(range(len(workers)))
    arrivals = iter(all_asked)
    coming = next(arrivals, None)
    while coming is not None or events:
        if coming is not None and (not events or coming.arrived_s <= events[0][0]):
            taker = min(prefill or decode, key=lambda each: (each.num_waiting, len(each.rows)))
            taker.prompts.append(coming)
            _wake(workers, idle, events, workers.index(taker), coming.arrived_s)
            coming = next(arrivals, None)
            continue
        now_s, _, index = heapq.heappop(events)
        each = workers[index]
        if not each.prompts and not each.rows:
            idle.add(index)
            continue
        end_s, ended = each.step(now_s)
        for asked in ended:
            if asked.left > 0:
                owner = min(decode, key=lambda other: len(other.rows)) if prefill else each
                owner.rows.append(asked)
                _wake(workers, idle, events, workers.index(owner), end_s)
        heapq.heappush(events, (end_s, index, index))
    return all_asked[num // 10 :]


def _wake(workers: list[Stepping], idle: set[int], events: list[tuple[float, int, int]], index: int, now_s: float) -> None:
    if index in idle:
        idle.discard(index)
        heapq.heappush(events, (now_s, index, index))
