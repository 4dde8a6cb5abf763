"""Which worker holds which prompt blocks: bounded, and quick to ask however many workers there are.

_masks   name of a block → bit set of the slots of its holders       match() is one `and` for each block of a prompt
_held    slot of a worker → its blocks, the oldest first             forgetting a worker touches its own blocks only
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from router.routing.worker_snapshot import WorkerKey

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
