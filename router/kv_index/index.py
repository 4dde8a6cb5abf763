"""How much of a prompt each worker holds: what workers tell, and what this router has just sent them.

An index that is wrong or empty sends a request to the wrong worker, which computes what it has not. That costs time and no token.
"""

import asyncio
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from pdmesh.v1 import common_pb2, worker_pb2
from router.fleet.worker import Incarnation
from router.routing.worker_reports import kind_of
from router.routing.worker_snapshot import WorkerKey
from router.tokenization.prepared_request import PreparedRequest

# Which worker holds which prompt blocks: bounded, and quick to ask however many workers there are.
#
# _masks   name of a block → bit set of the slots of its holders       match() is one `and` for each block of a prompt
# _held    slot of a worker → its blocks, the oldest first             forgetting a worker touches its own blocks only


EVICTED_SHARE = 16


class Level(NamedTuple):
    """`holders`, a bit set of slots, hold at least the first `num_blocks` blocks of a prompt."""

    holders: int
    num_blocks: int


class BlockMap:
    """At most `max_entries` pairs of a block's short name and a worker. When it is full, who holds most loses its oldest."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._masks: dict[int, int] = {}
        self._held: list[dict[int, None]] = []
        self._workers: list[WorkerKey | None] = []
        self._slots: dict[WorkerKey, int] = {}

    def __len__(self) -> int:
        """Pairs of a block and a worker."""
        return self._num_entries

    @property
    def is_crowded(self) -> bool:
        """Will it soon have to evict?"""
        return self._num_entries > self._max_entries // 8 * 7

    def blocks_of(self, worker: WorkerKey) -> Collection[int]:
        """Names of what it holds, the oldest first."""
        slot = self._slots.get(worker)
        return () if slot is None else self._held[slot].keys()

    def add(self, worker: WorkerKey, names: Sequence[int]) -> None:
        """`worker` holds these. In the order of a prompt: its beginning, without which the end is worthless, stays longer."""
        slot = self._slot(worker)
        held, bit = self._held[slot], 1 << slot
        grown: dict[int, int] = {0: bit}  # equal masks are one object: they are as long as there are workers
        for name in reversed(names):
            if name not in held:
                held[name] = None
                self._num_entries += 1
                before = self._masks.get(name, 0)
                self._masks[name] = grown.setdefault(before, before | bit)
        while self._num_entries > self._max_entries:
            self._evict()

    def touch(self, worker: WorkerKey, names: Sequence[int]) -> None:
        """What it holds of these is of use, and becomes its youngest."""
        slot = self._slots.get(worker)
        if slot is not None:
            held = self._held[slot]
            for name in reversed(names):
                if name in held:
                    del held[name]
                    held[name] = None

    def remove(self, worker: WorkerKey, names: Iterable[int]) -> None:
        """`worker` does not hold these any more; what it did not hold is ignored."""
        slot = self._slots.get(worker)
        if slot is not None:
            self._drop(slot, names)

    def forget(self, worker: WorkerKey) -> None:
        """`worker` is gone; its slot is free for another."""
        slot = self._slots.pop(worker, None)
        if slot is not None:
            self._drop(slot, list(self._held[slot]))
            self._held[slot], self._workers[slot] = {}, None

    def match(self, names: Sequence[int]) -> dict[WorkerKey, int]:
        """Number of leading blocks that each worker holds; workers with none are absent. O(blocks + workers found)."""
        return self.workers_of(self.levels(names))

    def levels(self, names: Sequence[int]) -> list[Level]:
        """Who holds at least so many leading blocks: each level more blocks, and a part of the holders. O(blocks)."""
        masks, found, holders = self._masks, list[Level](), -1
        for number, name in enumerate(names):
            left = holders & masks.get(name, 0)
            if left != holders:
                if number:
                    found.append(Level(holders, number))
                holders = left
                if not holders:
                    return found
        if names:
            found.append(Level(holders, len(names)))
        return found

    def workers_of(self, levels: Sequence[Level]) -> dict[WorkerKey, int]:
        """All holders, each with its number of leading blocks."""
        matched, deeper = dict[WorkerKey, int](), 0
        for level in reversed(levels):
            matched.update(dict.fromkeys(self._workers_in(level.holders & ~deeper), level.num_blocks))
            deeper = level.holders
        return matched

    def depth_of(self, worker: WorkerKey, levels: Sequence[Level]) -> int:
        """Number of leading blocks that `worker` holds."""
        slot = self._slots.get(worker)
        if slot is None:
            return 0
        above, below = 0, len(levels)
        while above < below:  # `bisect` would call a function for each step, and decisions ask about every candidate
            middle = (above + below) // 2
            if levels[middle].holders >> slot & 1:
                above = middle + 1
            else:
                below = middle
        return levels[above - 1].num_blocks if above else 0

    def _workers_in(self, mask: int) -> Iterator[WorkerKey]:
        bits = f"{mask:b}"[::-1]
        slot = bits.find("1")
        while slot >= 0:
            worker = self._workers[slot]
            if worker is not None:  # forgotten since the levels were made
                yield worker
            slot = bits.find("1", slot + 1)

    def _slot(self, worker: WorkerKey) -> int:
        slot = self._slots.get(worker)
        if slot is None:
            slot = self._workers.index(None) if None in self._workers else len(self._workers)
            if slot == len(self._workers):
                self._workers.append(None)
                self._held.append({})
            self._slots[worker], self._workers[slot] = slot, worker
        return slot

    def _drop(self, slot: int, names: Iterable[int]) -> None:
        held, bit, shrunk = self._held[slot], 1 << slot, dict[int, int]()
        for name in names:
            if name in held:
                del held[name]
                self._num_entries -= 1
                before = self._masks[name]
                after = shrunk.setdefault(before, before & ~bit)
                if after:
                    self._masks[name] = after
                else:
                    del self._masks[name]

    def _evict(self) -> None:
        slot = max(range(len(self._held)), key=lambda slot: len(self._held[slot]))
        count = max(1, len(self._held[slot]) // EVICTED_SHARE)  # several at once: the front of a dict is slow to find
        self._drop(slot, list(islice(self._held[slot], count)))


# How many tokens of one prompt each worker holds, answered for the few workers that somebody asks about.
#
# A prompt that thousands of workers share would fill a dictionary of thousands for every request; the maps of blocks can tell of
# one worker from its bit. Holders of a few are still listed.


LISTED = 64
"""Up to so many holders a plain dictionary is quicker."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one map says of the prompt, in blocks of `block_size` tokens."""

    blocks: BlockMap
    levels: Sequence[Level]
    block_size: int

    @property
    def num_holders(self) -> int:
        """Workers with at least the first block."""
        return self.levels[0].holders.bit_count()


def together(parts: Sequence[Part]) -> Mapping[WorkerKey, int]:
    """By worker the most that any part says; workers with none are absent. Parts without levels are left out by the caller."""
    if sum(part.num_holders for part in parts) > LISTED:
        return CachedTokens(parts)
    cached: dict[WorkerKey, int] = {}
    for part in parts:
        for worker, blocks in part.blocks.workers_of(part.levels).items():
            cached[worker] = max(cached.get(worker, 0), blocks * part.block_size)
    return cached


class CachedTokens(Mapping[WorkerKey, int]):
    """As the dictionary would say. Good for a moment: a worker that comes into the place of a lost one gets its bit."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """At least one part."""
        self._parts = sorted(parts, key=lambda part: -part.num_holders)
        self._len: int | None = None

    def __getitem__(self, worker: WorkerKey) -> int:
        tokens = self.get(worker, 0)
        if not tokens:
            raise KeyError(worker)
        return tokens

    def get(self, worker: WorkerKey, default: int = 0) -> int:  # type: ignore[override]
        """Asked for every candidate: without an exception for those that hold nothing."""
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
        """Holders that only the smaller parts know."""
        first, *others = self._parts
        told = dict.fromkeys(worker for part in others for worker in part.blocks.workers_of(part.levels[:1]))
        return (worker for worker in told if not first.blocks.depth_of(worker, first.levels[:1]))


# What this router has sent where: credited before a worker tells of it, and for good where nobody tells.
#
# Approximate, bounded, forgotten with the worker. A wrong answer costs speed, never correctness.


MAX_IN_FLIGHT = 100_000
"""Pairs of a block and a worker in one generation, which is dropped in one go."""


class PrefixMemory:
    """Two generations of what was sent to anybody lately; apart from them what was sent to workers that do not tell."""

    def __init__(self, max_blocks: int, lately_s: float) -> None:
        """At most `max_blocks` pairs of block and worker are kept. What was sent counts as lately for `lately_s`, at most for
        twice as long."""
        self.kept = BlockMap(max_blocks)
        self._max_in_flight = min(max_blocks, MAX_IN_FLIGHT)
        self._lately_s = lately_s
        self._young = BlockMap(self._max_in_flight)
        self._old = BlockMap(self._max_in_flight)
        self._young_since = float("-inf")

    def record(self, worker: WorkerKey, names: Sequence[int], now: float, *, keep: bool) -> None:
        """`worker` computes or receives these blocks; `keep`: it will not tell of them. `now`: monotonic seconds."""
        self._grow_old(now)
        if keep and self.kept.is_crowded:
            self.kept.touch(worker, names)
        (self.kept if keep else self._young).add(worker, names)

    def maps(self, now: float) -> Iterator[BlockMap]:
        """Where to look a prompt up."""
        self._grow_old(now)
        return (blocks for blocks in (self.kept, self._young, self._old) if len(blocks))

    def forget(self, worker: WorkerKey) -> None:
        """`worker` is gone."""
        for blocks in (self.kept, self._young, self._old):
            blocks.forget(worker)

    def _grow_old(self, now: float) -> None:
        if now - self._young_since < self._lately_s:
            return
        is_old = now - self._young_since < 2 * self._lately_s
        self._old = self._young if is_old else BlockMap(self._max_in_flight)
        self._young, self._young_since = BlockMap(self._max_in_flight), now


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
        self._looked_up: weakref.WeakKeyDictionary[PreparedRequest, _LookedUp] = weakref.WeakKeyDictionary()
        self._kinds: dict[tuple[object, ...], worker_pb2.WorkerInfo] = {}

    def cached_tokens(self, prepared: PreparedRequest) -> Mapping[WorkerKey, int]:
        """Tokens of the prompt that each worker is thought to hold; workers with none are absent. To be used at once."""
        now = self._clock()
        known = self._looked_up.get(prepared)
        if known is not None and known.version == self._version and now - known.at < FRESH_S:
            return known.cached
        maps = (self.told, *self._sent.maps(now))
        parts = [part for info in self._kinds.values() for part in _parts(prepared, info, maps)]
        cached = together(parts)
        self._looked_up[prepared] = _LookedUp(cached, self._version, now)
        return cached

    def remember(self, prepared: PreparedRequest, incarnations: Iterable[Incarnation]) -> None:
        """The prompt's blocks are, or will soon be, on these workers. What is said of one that is gone is ignored: nobody would
        have it forgotten again."""
        now = self._clock()
        self._looked_up.pop(prepared, None)
        for incarnation in incarnations:
            info = incarnation.info
            worker, names = (info.address, info.epoch), _names(prepared, info)
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


def _parts(prepared: PreparedRequest, info: worker_pb2.WorkerInfo, maps: Iterable[BlockMap]) -> Iterator[Part]:
    names, block_size = _names(prepared, info), info.layout.block_size
    return (Part(blocks, levels, block_size) for blocks in maps if (levels := blocks.levels(names)))


def _names(prepared: PreparedRequest, info: worker_pb2.WorkerInfo) -> list[int]:
    identity: common_pb2.Identity = info.identity
    return prepared.block_names(identity, info.layout.kv_dtype, info.layout.block_size)
