"""How many tokens of one prompt each worker holds, answered for the few workers that somebody asks about.

A prompt that thousands of workers share would fill a dictionary of thousands for every request; the maps of blocks can tell of
one worker from its bit. Holders of a few are still listed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from router.kv_index.block_map import BlockMap, Level
from router.routing.worker_snapshot import WorkerKey

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
