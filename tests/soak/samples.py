"""What the processes of a mesh hold, looked at every few seconds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import redis.asyncio

from pdmesh.client.client import AsyncClient
from tests.mesh.checks import shared_memory_names


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
