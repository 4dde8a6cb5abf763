"""What this router has sent where: credited before a worker tells of it, and for good where nobody tells.

Approximate, bounded, forgotten with the worker. A wrong answer costs speed, never correctness.
"""

from collections.abc import Iterator, Sequence

from router.kv_index.block_map import BlockMap
from router.routing.worker_snapshot import WorkerKey

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
