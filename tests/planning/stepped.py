"""A mesh step by step: what capacity arithmetic is compared with. Requests go to the worker that has least to do."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field

from pdmesh.planning.capacity_load import Goals, Load, Worker
from pdmesh.planning.latency_model import Work, prefill_context
from pdmesh.step_sharing import MAX_SHARE, PACE_TARGET, behind_target


@dataclass(eq=False)
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


@dataclass(eq=False)
class Stepping:
    """One worker."""

    worker: Worker
    goals: Goals
    prompts: list[Asked] = field(default_factory=list)
    rows: list[Asked] = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        return sum(asked.num_tokens - asked.num_done for asked in self.prompts)

    def step(self, now_s: float) -> tuple[float, list[Asked]]:
        """How long it takes, and whose prompts it ends."""
        model, context = self.worker.model, sum(row.num_tokens + row.num_out for row in self.rows)
        decode_s = model.decode_s(len(self.rows), context)
        budget = self.worker.limits.max_num_batched_tokens - len(self.rows)
        if self.rows and self.goals.tpot_s is not None and self.worker.keeps_pace:
            pace_s = PACE_TARGET * self.goals.tpot_s
            kept_s = behind_target(decode_s / self.goals.tpot_s) * self.goals.tpot_s
            least_s = min(decode_s * (1 - MAX_SHARE) / MAX_SHARE, max(0.0, kept_s - decode_s))
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
    """`num` requests, the first tenth of them left out. `num_prefill` 0: the workers that decode compute the prompts too."""
    prefill = [Stepping(worker, Goals()) for _ in range(num_prefill)]
    decode = [Stepping(worker, goals) for _ in range(num_decode)]
    mesh = Mesh(prefill, decode)
    all_asked = _requests(random.Random(seed), load, num)
    for asked in all_asked:
        mesh.advance(asked.arrived_s)
        mesh.take(asked)
    mesh.advance(math.inf)
    return all_asked[num // 10 :]


def _requests(rng: random.Random, load: Load, num: int) -> list[Asked]:
    now_s, asked, points = 0.0, [], load.lengths.points
    for _ in range(num):
        now_s += rng.expovariate(load.rate_per_s)
        out = max(1, round(rng.expovariate(1 / load.lengths.output_tokens)))
        asked.append(Asked(now_s, max(1, round(rng.choice(points))), out))
    return asked


class Mesh:
    """Workers that step by themselves while they have anything to do. No `prefill`: those of `decode` do both."""

    def __init__(self, prefill: list[Stepping], decode: list[Stepping]) -> None:
        self._prefill, self._decode = prefill, decode
        self._workers = [*prefill, *decode]
        self._steps: list[tuple[float, int]] = []  # when each busy worker's step ends
        self._idle = set(range(len(self._workers)))

    def take(self, asked: Asked) -> None:
        taker = min(self._prefill or self._decode, key=lambda each: (each.num_waiting, len(each.rows)))
        taker.prompts.append(asked)
        self._wake(taker, asked.arrived_s)

    def advance(self, until_s: float) -> None:
        while self._steps and self._steps[0][0] < until_s:
            now_s, index = heapq.heappop(self._steps)
            worker = self._workers[index]
            if not worker.prompts and not worker.rows:
                self._idle.add(index)
                continue
            end_s, ended = worker.step(now_s)
            heapq.heappush(self._steps, (end_s, index))
            for asked in ended:
                if asked.left > 0:
                    owner = min(self._decode, key=lambda other: len(other.rows)) if self._prefill else worker
                    owner.rows.append(asked)
                    self._wake(owner, end_s)

    def _wake(self, worker: Stepping, now_s: float) -> None:
        index = next(number for number, each in enumerate(self._workers) if each is worker)
        if index in self._idle:
            self._idle.discard(index)
            heapq.heappush(self._steps, (now_s, index))
