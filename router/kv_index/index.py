"""The prefix index: how many tokens of a prompt each worker has cached, from workers' KV events and from what this router sent
lately; and how many it would have after it has restored what its tiers hold.

A wrong or missing entry sends a request to a worker without the prefix, which computes it. That costs time, never correctness.
"""

import asyncio
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdmesh.v1 import common_pb2, worker_pb2
from router.kv_index.block_map import BlockMap, Level, WorkerSlots
from router.kv_index.hot_prefixes import RecentPrompts
from router.routing.worker_reports import kind_of
from router.routing.worker_snapshot import WorkerKey
from router.tokenization.prepared_request import PreparedRequest

# Cached tokens of one prompt by worker.
#
# A prefix that thousands of workers share would need a dictionary of thousands for every request, but placement asks about few of
# them. So the answer is looked up in the block maps, bit by bit; only a small number of workers is listed.

LISTED = 64
"""Up to this number of workers a plain dictionary is faster."""


@dataclass(frozen=True, slots=True)
class Part:
    """Hold what one map has of the prompt, in blocks of `block_size` tokens."""

    blocks: BlockMap
    levels: Sequence[Level]
    block_size: int

    @property
    def num_holders(self) -> int:
        """Return the number of workers with at least the first block."""
        return self.levels[0].holders.bit_count()


def together(parts: Sequence[Part]) -> Mapping[WorkerKey, int]:
    """Return by worker the maximum over the parts; workers with none are absent. Parts without levels must be left out."""
    if sum(part.num_holders for part in parts) > LISTED:
        return CachedTokens(parts)
    cached: dict[WorkerKey, int] = {}
    for part in parts:
        for worker, blocks in part.blocks.workers_of(part.levels).items():
            cached[worker] = max(cached.get(worker, 0), blocks * part.block_size)
    return cached


class CachedTokens(Mapping[WorkerKey, int]):
    """Look like the dictionary of cached tokens, computed on access. Use it at once: a new worker may get the slot, and so the
    bits, of a lost one."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """Take the parts; at least one."""
        self._parts = sorted(parts, key=lambda part: -part.num_holders)
        self._len: int | None = None

    def __getitem__(self, worker: WorkerKey) -> int:
        tokens = self.get(worker, 0)
        if not tokens:
            raise KeyError(worker)
        return tokens

    def get(self, worker: WorkerKey, default: int = 0) -> int:  # type: ignore[override]
        """Return the tokens of one worker. It is called for every candidate, so it raises nothing for workers without a hit."""
        most = 0
        for part in self._parts:
            tokens = part.blocks.depth_of(worker, part.levels) * part.block_size
            if tokens > most:
                most = tokens
        return most or default

    def __contains__(self, worker: object) -> bool:
        return isinstance(worker, tuple) and self.get(worker) > 0

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        if self._len is None:
            self._len = self._parts[0].num_holders + sum(1 for _ in self._others())
        return self._len

    def __iter__(self) -> Iterator[WorkerKey]:
        yield from self._parts[0].blocks.workers_of(self._parts[0].levels[:1])
        yield from self._others()

    def _others(self) -> Iterator[WorkerKey]:
        """Return the workers that only the smaller parts have."""
        first, *others = self._parts
        told = dict.fromkeys(worker for part in others for worker in part.blocks.workers_of(part.levels[:1]))
        return (worker for worker in told if not first.blocks.depth_of(worker, first.levels[:1]))


# What this router has sent to which worker: counted until the worker's KV events arrive, and for good where it sends none.
#
# Approximate, bounded, removed with the worker. A wrong entry costs speed, never correctness.

MAX_IN_FLIGHT = 100_000
"""Bounds the pairs of a block and a worker in one generation, which is dropped as a whole."""


class PrefixMemory:
    """Hold two generations of what was sent lately to any worker, and apart from them what was sent to workers without KV
    events."""

    def __init__(self, max_blocks: int, lately_s: float) -> None:
        """Keep at most `max_blocks` pairs of block and worker. An entry counts as recent for `lately_s`, at most for twice as
        long."""
        self.kept = BlockMap(max_blocks)
        self._max_in_flight = min(max_blocks, MAX_IN_FLIGHT)
        self._lately_s = lately_s
        self._young = BlockMap(self._max_in_flight)
        self._old = BlockMap(self._max_in_flight)
        self._young_since = float("-inf")

    def record(self, worker: WorkerKey, names: Sequence[int], now: float, *, keep: bool) -> None:
        """Record that `worker` computes or receives these blocks. `keep`: the worker sends no KV events. `now`: monotonic
        seconds."""
        self._grow_old(now)
        if keep and self.kept.is_crowded:
            self.kept.touch(worker, names)
        (self.kept if keep else self._young).add(worker, names)

    def maps(self, now: float) -> Iterator[BlockMap]:
        """Return the maps in which a prompt is looked up."""
        self._grow_old(now)
        return (blocks for blocks in (self.kept, self._young, self._old) if len(blocks))

    def evicted(self, worker: WorkerKey, names: Collection[int]) -> None:
        """Remove blocks that the worker has said it lost, also those of prompts that it was sent a moment ago."""
        for blocks in (self.kept, self._young, self._old):
            blocks.remove(worker, names)

    def forget(self, worker: WorkerKey) -> None:
        """Remove a worker that is gone."""
        for blocks in (self.kept, self._young, self._old):
            blocks.forget(worker)

    def _grow_old(self, now: float) -> None:
        if now - self._young_since < self._lately_s:
            return
        is_old = now - self._young_since < 2 * self._lately_s
        self._old = self._young if is_old else BlockMap(self._max_in_flight)
        self._young, self._young_since = BlockMap(self._max_in_flight), now


IN_FLIGHT_S = 10.0
"""Blocks of a prompt count for a worker from sending until its KV event arrives, for this long, at most for twice as long."""

FRESH_S = 0.005
"""A prompt is looked up for its forecast and, shortly after, for its placement: the second lookup reuses the first."""

SLICE_BLOCKS = 1000


NO_TOKENS: Mapping[WorkerKey, int] = {}


class PromptTokens(NamedTuple):
    """Hold what workers have of a prompt, in tokens; workers with none are absent. `cached` are in the worker's pool;
    `restorable` are in its pool or its tiers, as far as KV events say. It is empty while no worker has tiers."""

    cached: Mapping[WorkerKey, int]
    restorable: Mapping[WorkerKey, int]


class _LookedUp(NamedTuple):
    tokens: PromptTokens
    version: int
    at: float


class PrefixIndex:
    """Index the prefix caches of all workers, as far as this router knows them."""

    def __init__(self, max_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the index. `max_blocks` bounds the pairs from KV events, and apart from them those of tiers, and the pairs from
        sent prompts."""
        slots = WorkerSlots()
        self.told, self.tiers = BlockMap(max_blocks, slots), BlockMap(max_blocks, slots)
        self.recent = RecentPrompts()
        self._sent = PrefixMemory(max_blocks, IN_FLIGHT_S)
        self._clock = clock
        self._alive: set[WorkerKey] = set()
        self._followed: set[WorkerKey] = set()
        self._version = 0
        self._looked_up: weakref.WeakKeyDictionary[PreparedRequest, _LookedUp] = weakref.WeakKeyDictionary()
        self._kinds: dict[tuple[object, ...], worker_pb2.WorkerInfo] = {}

    def cached_tokens(self, prepared: PreparedRequest) -> Mapping[WorkerKey, int]:
        """Return the cached tokens of the prompt by worker; workers with none are absent. Use the result at once."""
        return self.look_up(prepared).cached

    def look_up(self, prepared: PreparedRequest) -> PromptTokens:
        """Return what workers have of the prompt. Use the result at once."""
        now = self._clock()
        known = self._looked_up.get(prepared)
        if known is not None and known.version == self._version and now - known.at < FRESH_S:
            return known.tokens
        maps = (self.told, *self._sent.maps(now))
        parts = [part for info in self._kinds.values() for part in _parts(prepared, info, maps)]
        tokens = PromptTokens(together(parts), self._restorable(prepared) if len(self.tiers) else NO_TOKENS)
        self._looked_up[prepared] = _LookedUp(tokens, self._version, now)
        return tokens

    def _restorable(self, prepared: PreparedRequest) -> Mapping[WorkerKey, int]:
        parts = []
        for info in self._kinds.values():
            levels = self.told.levels_of_either(self.tiers, _names(prepared, info))
            if levels:
                parts.append(Part(self.told, levels, info.layout.block_size))
        return together(parts)

    def holders(self, names: Sequence[int]) -> Mapping[WorkerKey, int]:
        """Return how many leading blocks of a prefix each worker has in its pool; workers with none are absent."""
        found = Counter[WorkerKey]()
        for blocks in (self.told, *self._sent.maps(self._clock())):
            found |= Counter(blocks.match(names))
        return found

    def remember(self, prepared: PreparedRequest, infos: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Record that the prompt's blocks are, or will soon be, on these workers, as they were when the request was placed: a
        change of weights gives blocks other names. One that is gone is ignored, since nothing would remove its entry again."""
        self._looked_up.pop(prepared, None)
        for info in infos:
            names = _names(prepared, info)
            self.record(info, names)
            self.recent.note(prepared, info, names, self._clock())

    async def remember_output(
        self,
        prepared: PreparedRequest,
        outputs: Iterable[Sequence[int]],
        info: worker_pb2.WorkerInfo,
        at_once: int = SLICE_BLOCKS,
    ) -> None:
        """Record that a worker has the blocks of the prompt and of its choices' output, before its KV events say so: the next
        turn of an agent comes sooner. It hashes `at_once` blocks at a time, so that streams go on meanwhile."""
        prompt, layout = _names(prepared, info), info.layout
        for output in outputs:
            names = list(prompt)
            for more in prepared.output_names(info.identity, layout.kv_dtype, layout.block_size, output, at_once):
                names += more
                if len(more) == at_once:
                    await asyncio.sleep(0)
            self.record(info, names)

    def record(self, info: worker_pb2.WorkerInfo, names: Sequence[int]) -> None:
        """Record blocks of a worker, in the order of a prompt; of one that is gone nothing."""
        worker = (info.address, info.epoch)
        if worker not in self._alive:
            return
        self._sent.record(worker, names, self._clock(), keep=worker not in self._followed)
        for blocks in (self.told, self.tiers):
            if blocks.is_crowded:
                blocks.touch(worker, names)

    def set_workers(self, infos: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Set the live workers: a prompt is looked up under the hash root of each kind among them."""
        alive = list(infos)
        self._kinds = {(kind_of(info), info.layout.block_size): info for info in alive}
        self._alive = {(info.address, info.epoch) for info in alive}
        self._version += 1

    def apply(
        self,
        worker: WorkerKey,
        stored: Sequence[int],
        evicted: Collection[int],
        tier_stored: Sequence[int] = (),
        tier_evicted: Iterable[int] = (),
    ) -> None:
        """Apply what a worker's cache and its tiers have gained and lost. What it has lost counts no more, even if it was sent
        the prompt lately; a request on its way there has the blocks stored again."""
        self.told.add(worker, stored)
        if evicted:
            self.told.remove(worker, evicted)
            self._sent.evicted(worker, evicted)
        if tier_stored:
            self.tiers.add(worker, tier_stored)
        self.tiers.remove(worker, tier_evicted)
        self._version += 1

    async def replace(self, worker: WorkerKey, names: Sequence[int], tier_names: Sequence[int] = ()) -> None:
        """Set all blocks of a worker's cache, and those of its tiers. It works in slices, so that streams go on meanwhile;
        nothing else may change this worker then."""
        await self._remove(self._sent.kept, worker, list(self._sent.kept.blocks_of(worker)))
        for blocks, wanted in ((self.told, names), (self.tiers, tier_names)):
            kept = set(wanted)
            await self._remove(blocks, worker, [name for name in blocks.blocks_of(worker) if name not in kept])
            for end in range(len(wanted), 0, -SLICE_BLOCKS):
                blocks.add(worker, wanted[max(0, end - SLICE_BLOCKS) : end])
                self._version += 1
                await asyncio.sleep(0)

    async def forget(self, worker: WorkerKey) -> None:
        """Remove a worker, or this incarnation of it, in slices as `replace`."""
        self._followed.discard(worker)
        for blocks in (self.told, self.tiers, self._sent.kept):
            await self._remove(blocks, worker, list(blocks.blocks_of(worker)))
        self.told.forget(worker)
        self.tiers.forget(worker)
        self._sent.forget(worker)
        self._version += 1

    async def _remove(self, blocks: BlockMap, worker: WorkerKey, names: Sequence[int]) -> None:
        for start in range(0, len(names), SLICE_BLOCKS):
            blocks.remove(worker, names[start : start + SLICE_BLOCKS])
            self._version += 1
            await asyncio.sleep(0)

    def set_followed(self, workers: Iterable[WorkerKey]) -> None:
        """Set the workers whose KV events arrive: they do not hold what they were sent before and do not report."""
        before, self._followed = self._followed, set(workers)
        for worker in self._followed - before:
            self._sent.kept.forget(worker)  # nearly nothing: it has just been listed
        self._version += 1


def _parts(prepared: PreparedRequest, info: worker_pb2.WorkerInfo, maps: Iterable[BlockMap]) -> Iterator[Part]:
    names, block_size = _names(prepared, info), info.layout.block_size
    return (Part(blocks, levels, block_size) for blocks in maps if (levels := blocks.levels(names)))


def _names(prepared: PreparedRequest, info: worker_pb2.WorkerInfo) -> list[int]:
    identity: common_pb2.Identity = info.identity
    return prepared.block_names(identity, info.layout.kv_dtype, info.layout.block_size)
