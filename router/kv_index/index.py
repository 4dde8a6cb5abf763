"""How much of a prompt each worker holds: what workers tell, and what this router has just sent them.

An index that is wrong or empty sends a request to the wrong worker, which computes what it has not. That costs time and no token.
"""

import asyncio
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pdmesh.v1 import common_pb2, worker_pb2
from router.fleet.worker import Incarnation
from router.kv_index.block_map import BlockMap
from router.kv_index.cached_tokens import Part, together
from router.kv_index.prefix_memory import PrefixMemory
from router.routing.worker_reports import kind_of
from router.routing.worker_snapshot import WorkerKey
from router.tokenization.prepared_request import Job

IN_FLIGHT_S = 10.0
"""How long a prompt that was sent is credited to a worker that tells of its blocks, before it does; at most twice as long."""

FRESH_S = 0.005
"""A request is looked up for its forecast and again, soon, for its placement."""

SLICE_BLOCKS = 1000


class _LookedUp(NamedTuple):
    cached: Mapping[WorkerKey, int]
    version: int
    at: float


class PrefixIndex:
    """The prefix caches of all workers, as far as this router knows them."""

    def __init__(self, max_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_blocks` bounds the pairs of block and worker that workers tell of, and apart from them those sent."""
        self.told = BlockMap(max_blocks)
        self._sent = PrefixMemory(max_blocks, IN_FLIGHT_S)
        self._clock = clock
        self._alive: set[WorkerKey] = set()
        self._followed: set[WorkerKey] = set()
        self._version = 0
        self._looked_up: weakref.WeakKeyDictionary[Job, _LookedUp] = weakref.WeakKeyDictionary()
        self._kinds: dict[tuple[object, ...], worker_pb2.WorkerInfo] = {}

    def cached_tokens(self, job: Job) -> Mapping[WorkerKey, int]:
        """Tokens of the prompt that each worker is thought to hold; workers with none are absent. To be used at once."""
        now = self._clock()
        known = self._looked_up.get(job)
        if known is not None and known.version == self._version and now - known.at < FRESH_S:
            return known.cached
        maps = (self.told, *self._sent.maps(now))
        parts = [part for info in self._kinds.values() for part in _parts(job, info, maps)]
        cached = together(parts)
        self._looked_up[job] = _LookedUp(cached, self._version, now)
        return cached

    def remember(self, job: Job, incarnations: Iterable[Incarnation]) -> None:
        """The prompt's blocks are, or will soon be, on these workers. What is said of one that is gone is ignored: nobody would
        have it forgotten again."""
        now = self._clock()
        self._looked_up.pop(job, None)
        for incarnation in incarnations:
            info = incarnation.info
            worker, names = (info.address, info.epoch), _names(job, info)
            if worker in self._alive:
                self._sent.record(worker, names, now, keep=worker not in self._followed)
                if self.told.is_crowded:
                    self.told.touch(worker, names)

    def set_workers(self, infos: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Workers that live: a prompt is looked up under the root of each kind among them."""
        alive = list(infos)
        self._kinds = {(kind_of(info), info.layout.block_size): info for info in alive}
        self._alive = {(info.address, info.epoch) for info in alive}
        self._version += 1

    def apply(self, worker: WorkerKey, stored: Sequence[int], evicted: Iterable[int]) -> None:
        """What a worker's cache has gained and lost."""
        self.told.add(worker, stored)
        self.told.remove(worker, evicted)
        self._version += 1

    async def replace(self, worker: WorkerKey, names: Sequence[int]) -> None:
        """All that a worker's cache holds. In slices, because streams go on meanwhile; nothing else may change the worker's."""
        kept = set(names)
        await self._remove(self._sent.kept, worker, list(self._sent.kept.blocks_of(worker)))
        await self._remove(self.told, worker, [name for name in self.told.blocks_of(worker) if name not in kept])
        for end in range(len(names), 0, -SLICE_BLOCKS):
            self.told.add(worker, names[max(0, end - SLICE_BLOCKS) : end])
            self._version += 1
            await asyncio.sleep(0)

    async def forget(self, worker: WorkerKey) -> None:
        """The worker, or this incarnation of it, is gone. As `replace`."""
        self._followed.discard(worker)
        for blocks in (self.told, self._sent.kept):
            await self._remove(blocks, worker, list(blocks.blocks_of(worker)))
        self.told.forget(worker)
        self._sent.forget(worker)
        self._version += 1

    async def _remove(self, blocks: BlockMap, worker: WorkerKey, names: Sequence[int]) -> None:
        for start in range(0, len(names), SLICE_BLOCKS):
            blocks.remove(worker, names[start : start + SLICE_BLOCKS])
            self._version += 1
            await asyncio.sleep(0)

    def set_followed(self, workers: Iterable[WorkerKey]) -> None:
        """Workers whose changes arrive: what they were sent long ago and do not tell of, they do not hold."""
        before, self._followed = self._followed, set(workers)
        for worker in self._followed - before:
            self._sent.kept.forget(worker)  # nearly nothing: it has just been listed
        self._version += 1


def _parts(job: Job, info: worker_pb2.WorkerInfo, maps: Iterable[BlockMap]) -> Iterator[Part]:
    names, block_size = _names(job, info), info.layout.block_size
    return (Part(blocks, levels, block_size) for blocks in maps if (levels := blocks.levels(names)))


def _names(job: Job, info: worker_pb2.WorkerInfo) -> list[int]:
    identity: common_pb2.Identity = info.identity
    return job.block_names(identity, info.layout.kv_dtype, info.layout.block_size)
