"""A bounded map from blocks to workers, with lookups whose cost does not depend on the number of workers.

_masks   block hash → bit set of the slots of workers that have the block    match() is one `and` for each block of a prompt
_held    slot of a worker → its blocks, the oldest first                     dropping a worker touches its own blocks only
_slots   worker → its bit in the sets; maps may share them, and a prompt is looked up in two of those as if they were one
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from router.routing.worker_snapshot import WorkerKey

EVICTED_SHARE = 16


class Level(NamedTuple):
    """Say that the workers in `holders`, a bit set of slots, have at least the first `num_blocks` blocks of a prompt."""

    holders: int
    num_blocks: int


class WorkerSlots:
    """Number the workers of one map, or of several that are compared bit by bit. A number is free again once the worker is gone
    from all of them."""

    def __init__(self) -> None:
        self.of_worker: dict[WorkerKey, int] = {}
        self.workers: list[WorkerKey | None] = []
        self._num_maps: list[int] = []

    def take(self, worker: WorkerKey) -> int:
        """Return the worker's slot for one more map."""
        slot = self.of_worker.get(worker)
        if slot is None:
            slot = self.workers.index(None) if None in self.workers else len(self.workers)
            if slot == len(self.workers):
                self.workers.append(None)
                self._num_maps.append(0)
            self.of_worker[worker], self.workers[slot] = slot, worker
        self._num_maps[slot] += 1
        return slot

    def give_back(self, slot: int) -> None:
        """Free the slot for one map."""
        self._num_maps[slot] -= 1
        worker = self.workers[slot]
        if not self._num_maps[slot] and worker is not None:
            del self.of_worker[worker]
            self.workers[slot] = None


class BlockMap:
    """Map short block hashes to workers, at most `max_entries` pairs. When it is full, the worker with most blocks loses its
    oldest. Maps with the same `slots` can be looked up together (`levels_of_either`)."""

    def __init__(self, max_entries: int, slots: WorkerSlots | None = None) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._masks: dict[int, int] = {}
        self._held: dict[int, dict[int, None]] = {}
        self._numbers = slots or WorkerSlots()
        self._workers, self._slots = self._numbers.workers, self._numbers.of_worker

    def __len__(self) -> int:
        """Return the number of pairs of a block and a worker."""
        return self._num_entries

    @property
    def is_crowded(self) -> bool:
        """Return whether evictions are near."""
        return self._num_entries > self._max_entries // 8 * 7

    def blocks_of(self, worker: WorkerKey) -> Collection[int]:
        """Return the hashes of the worker's blocks, the oldest first."""
        return self._held.get(self._slots.get(worker, -1), {}).keys()

    def add(self, worker: WorkerKey, names: Sequence[int]) -> None:
        """Add blocks of `worker`, given in the order of a prompt. The first blocks count as the youngest, since the later ones
        are useless without them."""
        slot = self._slot(worker)
        held, bit = self._held[slot], 1 << slot
        grown: dict[int, int] = {0: bit}  # equal masks share one int object, because each is as long as the number of workers
        for name in reversed(names):
            if name not in held:
                held[name] = None
                self._num_entries += 1
                before = self._masks.get(name, 0)
                self._masks[name] = grown.setdefault(before, before | bit)
        while self._num_entries > self._max_entries:
            self._evict()

    def touch(self, worker: WorkerKey, names: Sequence[int]) -> None:
        """Make those of the blocks that the worker has its youngest."""
        held = self._held.get(self._slots.get(worker, -1))
        if held:
            for name in reversed(names):
                if name in held:
                    del held[name]
                    held[name] = None

    def remove(self, worker: WorkerKey, names: Iterable[int]) -> None:
        """Remove blocks of `worker`; unknown ones are ignored."""
        slot = self._slots.get(worker, -1)
        if slot in self._held:
            self._drop(slot, names)

    def forget(self, worker: WorkerKey) -> None:
        """Remove a worker that is gone, and free its slot."""
        slot = self._slots.get(worker, -1)
        if slot in self._held:
            self._drop(slot, list(self._held[slot]))
            del self._held[slot]
            self._numbers.give_back(slot)

    def match(self, names: Sequence[int]) -> dict[WorkerKey, int]:
        """Return the number of leading blocks that each worker has; workers with none are absent. O(blocks + workers found)."""
        return self.workers_of(self.levels(names))

    def levels(self, names: Sequence[int]) -> list[Level]:
        """Return the levels of a prompt: each has more leading blocks, and a subset of the workers, than the one before.
        O(blocks)."""
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

    def levels_of_either(self, other: "BlockMap", names: Sequence[int]) -> list[Level]:
        """Return the levels of a prompt of which each block may be in this map or in `other`, which has the same slots; as
        `levels`, which this repeats because a call for each block would double the time."""
        masks, more, found, holders = self._masks, other._masks, list[Level](), -1
        for number, name in enumerate(names):
            left = holders & (masks.get(name, 0) | more.get(name, 0))
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
        """Return all workers in the levels, each with its number of leading blocks."""
        matched, deeper = dict[WorkerKey, int](), 0
        for level in reversed(levels):
            matched.update(dict.fromkeys(self._workers_in(level.holders & ~deeper), level.num_blocks))
            deeper = level.holders
        return matched

    def depth_of(self, worker: WorkerKey, levels: Sequence[Level]) -> int:
        """Return the number of leading blocks that `worker` has."""
        slot = self._slots.get(worker)
        if slot is None:
            return 0
        above, below = 0, len(levels)
        while above < below:  # faster than `bisect` with a key function: placement asks about every candidate
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
            if worker is not None:  # removed since the levels were made
                yield worker
            slot = bits.find("1", slot + 1)

    def _slot(self, worker: WorkerKey) -> int:
        slot = self._slots.get(worker, -1)
        if slot not in self._held:
            slot = self._numbers.take(worker)
            self._held[slot] = {}
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
        slot = max(self._held, key=lambda slot: (len(self._held[slot]), -slot))
        count = max(1, len(self._held[slot]) // EVICTED_SHARE)  # several at once, because the front of a dict is slow to find
        self._drop(slot, list(islice(self._held[slot], count)))
