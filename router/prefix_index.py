"""How much of a prompt each worker holds: what workers tell, and what this router has just sent them.

An index that is wrong or empty sends a request to the wrong worker, which computes what it has not. That costs time and no token.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from protos.v1 import common_pb2, worker_pb2
from router.block_map import BlockMap
from router.job import Job
from router.prefix_memory import PrefixMemory
from router.views import WorkerKey
from router.worker import Incarnation
from router.worker_views import kind_of

IN_FLIGHT_S = 10.0
"""How long a prompt that was sent is credited to a worker that tells of its blocks, before it does."""

SLICE_BLOCKS = 1000


class PrefixIndex:
    """The prefix caches of all workers, as far as this router knows them."""

    def __init__(self, max_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_blocks` bounds the pairs of block and worker that workers tell of, and apart from them the blocks sent."""
        self.told = BlockMap(max_blocks)
        self._sent = PrefixMemory(max_blocks)
        self._clock = clock
        self._followed: set[WorkerKey] = set()
        self._kinds: dict[tuple[object, ...], worker_pb2.WorkerInfo] = {}

    def cached_tokens(self, job: Job) -> dict[WorkerKey, int]:
        """Tokens of the prompt that each worker is thought to hold; workers with none are absent."""
        cached: dict[WorkerKey, int] = {}
        horizon = self._clock() - IN_FLIGHT_S
        for info in self._kinds.values():
            names, block_size = _names(job, info), info.layout.block_size
            sent = self._sent.match(names, lambda worker: horizon if worker in self._followed else 0.0)
            for matched in (self.told.match(names), sent):
                for worker, blocks in matched.items():
                    cached[worker] = max(cached.get(worker, 0), blocks * block_size)
        return cached

    def remember(self, job: Job, incarnations: Iterable[Incarnation]) -> None:
        """The prompt's blocks are, or will soon be, on these workers."""
        now = self._clock()
        for incarnation in incarnations:
            info = incarnation.info
            worker, names = (info.address, info.epoch), _names(job, info)
            self._sent.record(worker, names, now)
            if self.told.is_crowded:
                self.told.touch(worker, names)

    def set_workers(self, infos: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Workers that live: a prompt is looked up under the root of each kind among them."""
        self._kinds = {(kind_of(info), info.layout.block_size): info for info in infos}

    def apply(self, worker: WorkerKey, stored: Sequence[int], evicted: Iterable[int]) -> None:
        """What a worker's cache has gained and lost."""
        self.told.add(worker, stored)
        self.told.remove(worker, evicted)

    async def replace(self, worker: WorkerKey, names: Sequence[int]) -> None:
        """All that a worker's cache holds. In slices, because streams go on meanwhile; nothing else may change the worker's."""
        kept = set(names)
        await self._remove(worker, [name for name in self.told.blocks_of(worker) if name not in kept])
        for end in range(len(names), 0, -SLICE_BLOCKS):
            self.told.add(worker, names[max(0, end - SLICE_BLOCKS) : end])
            await asyncio.sleep(0)

    async def forget(self, worker: WorkerKey) -> None:
        """The worker, or this incarnation of it, is gone. As `replace`."""
        self._followed.discard(worker)
        await self._remove(worker, list(self.told.blocks_of(worker)))
        self.told.forget(worker)

    async def _remove(self, worker: WorkerKey, names: Sequence[int]) -> None:
        for start in range(0, len(names), SLICE_BLOCKS):
            self.told.remove(worker, names[start : start + SLICE_BLOCKS])
            await asyncio.sleep(0)

    def set_followed(self, workers: Iterable[WorkerKey]) -> None:
        """Workers whose changes arrive: what they were sent long ago and do not tell of, they do not hold."""
        self._followed = set(workers)


def _names(job: Job, info: worker_pb2.WorkerInfo) -> list[int]:
    identity: common_pb2.Identity = info.identity
    return job.block_names(identity, info.layout.kv_dtype, info.layout.block_size)
