"""The load of one turn, the same work in each, and what it took; and turns compared with those just before and behind."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, quantiles, stdev
from typing import TypeVar

from benchmarks.cpu_time import process_cpu_ns
from pdmesh.client.client import AsyncClient

AT_ONCE = 12
TIMEOUT_S = 120.0
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 300), (32, 128)
"""From, to: as in a chat; each length as likely as any other."""


@dataclass(frozen=True)
class Job:
    """One request."""

    prompt: tuple[int, ...]
    num_tokens: int


def jobs(turn: int, count: int) -> list[Job]:
    """Of a turn: the lengths are those of every other, the tokens nobody has seen, so that no prefix is cached. Pure."""
    lengths, tokens = random.Random(0), random.Random(f"turn {turn}")
    sizes = [(lengths.randint(*PROMPT_TOKENS), lengths.randint(*OUTPUT_TOKENS)) for _ in range(count)]
    return [Job(tuple(tokens.choices(range(1000, 40_000), k=length)), num_tokens) for length, num_tokens in sizes]


@dataclass(frozen=True)
class Turn:
    """`cpu_s`: of each process, by name."""

    tokens_per_s: float
    num_requests: int
    cpu_s: Mapping[str, float]

    def cpu_ms(self, *kinds: str) -> float:
        """Per request, of the processes whose names begin so."""
        return 1e3 * sum(seconds for name, seconds in self.cpu_s.items() if name.startswith(kinds)) / self.num_requests


async def turn(client: AsyncClient, pids: Mapping[str, int], work: Sequence[Job]) -> Turn:
    """All of `work`, `AT_ONCE` at a time: as one ends the next begins."""
    waiting = iter(work)
    before, began_s = _cpu_s(pids), time.perf_counter()

    async def one_after_the_other() -> None:
        for job in waiting:
            await client.generate(
                job.prompt, max_tokens=job.num_tokens, ignore_eos=True, temperature=0, mode="remote", timeout=TIMEOUT_S
            )

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))
    took_s, after = time.perf_counter() - began_s, _cpu_s(pids)
    num_tokens = sum(job.num_tokens for job in work)
    return Turn(num_tokens / took_s, len(work), {name: after[name] - before[name] for name in pids})


def _cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    return {name: process_cpu_ns(pid) / 1e9 for name, pid in pids.items()}


Name = TypeVar("Name", bound=Hashable)


def ratios(values: Sequence[tuple[Name, float]], base: Name) -> dict[Name, list[float]]:
    """Of each value that has one of `base` before and behind it, its ratio to the mean of these two, by name. `base` itself is
    compared with the next of its own on either side: how far apart equals are. Pure."""
    found: dict[Name, list[float]] = {}
    bases = [index for index, (name, _) in enumerate(values) if name == base]
    for index, (name, value) in enumerate(values):
        before = max((at for at in bases if at < index), default=None)
        behind = min((at for at in bases if at > index), default=None)
        if before is not None and behind is not None:
            found.setdefault(name, []).append(value / mean((values[before][1], values[behind][1])))
    return found


def spread(found: Sequence[float]) -> str:
    """In words."""
    low, _, high = quantiles(found, n=4)
    return f"quartiles of {len(found)} turns: {low:.3f} to {high:.3f}; the median's standard error: {_median_error(found):.4f}"


def _median_error(found: Sequence[float]) -> float:
    """As it is where values are spread normally: sqrt(pi / 2) times that of the mean."""
    return math.sqrt(math.pi / 2 / len(found)) * stdev(found)
