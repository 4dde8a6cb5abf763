"""What the processes of a mesh hold, looked at every few seconds."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis.asyncio

from pdmesh.client.client import AsyncClient
from tests.mesh.checks import shared_memory_names

# Does a process's memory stand still? A line through its last two thirds, and its last half. Pure.


MAX_SLOPE = 1.0  # MB per 1000 requests
FEWEST = 6  # samples
MAX_GROWTH = 0.01  # share of the value at the beginning of the last half


@dataclass(frozen=True)
class Flatness:
    """`slope`: MB per 1000 requests over the last two thirds; `growth`: share of itself over the last half; else MB."""

    slope: float
    growth: float
    peak: float
    first_third: float
    last_third: float

    @property
    def problems(self) -> list[str]:
        """Why it is not flat, in words; shrinking is."""
        problems = []
        if self.slope > MAX_SLOPE:
            problems.append(f"grows by {self.slope:.2f} MB per 1000 requests (at most {MAX_SLOPE:g})")
        if self.growth > MAX_GROWTH:
            problems.append(f"grew by {self.growth:.1%} over the last half (at most {MAX_GROWTH:.0%})")
        return problems


def flatness(requests: Sequence[float], memory: Sequence[float]) -> Flatness:
    """`requests`: how many had been sent at each sample; `memory`: MB then. At least FEWEST samples, else ValueError."""
    count = len(requests)
    if count < FEWEST or count != len(memory):
        raise ValueError(f"{count} samples with {len(memory)} values are too few to see a slope; let it run longer")
    slope, _ = line(requests[count // 3 :], memory[count // 3 :])
    return Flatness(
        slope=slope * 1000,
        growth=growth(requests, memory),
        peak=max(memory),
        first_third=statistics.median(memory[: count // 3]),
        last_third=statistics.median(memory[-(count // 3) :]),
    )


def growth(at: Sequence[float], values: Sequence[float]) -> float:
    """Share of itself by which something grew over its last half."""
    slope, at_half = line(at[len(at) // 2 :], values[len(at) // 2 :])
    return slope * (at[-1] - at[len(at) // 2]) / at_half


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Slope of the least-squares line, and its value at the first of `xs`; level when all of them are the same."""
    if len(set(xs)) < 2:
        return 0.0, statistics.fmean(ys)
    slope, intercept = statistics.linear_regression(xs, ys)
    return slope, intercept + slope * xs[0]


@dataclass(frozen=True)
class ProcessSample:
    """Of one process; memory in MB (10^6 bytes). `own`: what is resident outside shared memory (workers map each other's pools of
    KV, and drop them with a connection). `pss` and `pss_shared`, the part of it in shared memory: divided among its sharers."""

    own: float
    rss: float
    pss: float
    pss_shared: float
    num_fds: int
    num_threads: int


@dataclass(frozen=True)
class Pool:
    """Blocks of a worker."""

    num_free: int
    num_cached: int
    num_total: int


@dataclass(frozen=True)
class Sample:
    """`at_s`: seconds since the first sample. `num_segments`: entries of /dev/shm. `redis`: MB, by its own account."""

    at_s: float
    num_requests: int
    processes: Mapping[str, ProcessSample]
    pools: Mapping[str, Pool]
    num_inflight: int
    num_queued: int
    num_segments: int
    redis: float

    @property
    def memory(self) -> dict[str, float]:
        """What must not grow, in MB: each process's own, and the shared memory of all of them together."""
        own = {name: process.own for name, process in self.processes.items()}
        return {**own, "shared": sum(process.pss_shared for process in self.processes.values())}


def process_sample(pid: int) -> ProcessSample:
    """Raises OSError when the process has ended."""
    folder = Path(f"/proc/{pid}")
    rollup = dict(_entries(folder / "smaps_rollup"))
    if "Rss" not in rollup:
        raise ProcessLookupError(f"process {pid} has ended")
    status = dict(_entries(folder / "status"))
    kib = (status["RssAnon"] + status["RssFile"], rollup["Rss"], rollup["Pss"], rollup["Pss_Shmem"])
    own, rss, pss, pss_shared = (value * 1024 / 1e6 for value in kib)
    return ProcessSample(own, rss, pss, pss_shared, len(os.listdir(folder / "fd")), status["Threads"])


def _entries(path: Path) -> list[tuple[str, int]]:
    """Lines of the form "Name: number …"."""
    rows = (line.split() for line in path.read_text().splitlines())
    return [(row[0].removesuffix(":"), int(row[1])) for row in rows if len(row) > 1 and row[0].endswith(":") and row[1].isdigit()]


class Sampler:
    """Looks at `pids`, by name, and at what the router and Redis tell."""

    def __init__(self, pids: Mapping[str, int], client: AsyncClient, redis_url: str) -> None:
        self.samples: list[Sample] = []
        self._pids = pids
        self._client = client
        self._redis = redis.asyncio.Redis.from_url(redis_url)
        self._started_at: float | None = None

    async def take(self, num_requests: int) -> Sample:
        """Adds a sample. Raises OSError (a process has ended), MeshError, RedisError."""
        now = asyncio.get_running_loop().time()
        self._started_at = self._started_at or now
        status = await self._client.status(timeout=30)
        memory = await self._redis.info("memory")
        sample = Sample(
            at_s=round(now - self._started_at, 1),
            num_requests=num_requests,
            processes={name: process_sample(pid) for name, pid in self._pids.items()},
            pools={
                worker.info.worker_id: Pool(
                    worker.load.num_free_blocks, worker.load.num_cached_blocks, worker.load.num_total_blocks
                )
                for worker in status.workers
            },
            num_inflight=status.num_inflight,
            num_queued=status.num_queued,
            num_segments=len(shared_memory_names()),
            redis=memory["used_memory"] / 1e6,
        )
        self.samples.append(sample)
        return sample

    async def close(self) -> None:
        """Closes the connection to Redis."""
        await self._redis.aclose()
