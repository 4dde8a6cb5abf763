"""Which worker holds which prefix, as one router knows it: what workers tell, and what was just sent. On the real maps."""

from collections.abc import Mapping, Sequence

from router.kv_index.block_map import BlockMap
from router.kv_index.cached_tokens import Part, together
from router.kv_index.index import IN_FLIGHT_S
from router.kv_index.prefix_memory import PrefixMemory
from router.routing.worker_snapshot import WorkerKey

NO_PREFIXES: Mapping[WorkerKey, int] = {}


class Prefixes:
    """`max_blocks` bounds the pairs of block and worker, as `--prefix-index-blocks` does; `prefix_tokens` of each block."""

    def __init__(self, max_blocks: int, prefix_tokens: int) -> None:
        self._told = BlockMap(max_blocks)
        self._sent = PrefixMemory(max_blocks, IN_FLIGHT_S)
        self._prefix_tokens = prefix_tokens

    def cached_tokens(self, hashes: Sequence[int], now: float) -> Mapping[WorkerKey, int]:
        """Tokens of the prompt that each worker is thought to hold; workers with none are absent. To be used at once."""
        if not hashes or not self._prefix_tokens:
            return NO_PREFIXES
        maps = (self._told, *self._sent.maps(now))
        parts = [Part(blocks, levels, self._prefix_tokens) for blocks in maps if (levels := blocks.levels(hashes))]
        return together(parts) if parts else NO_PREFIXES

    def sent(self, worker: WorkerKey, hashes: Sequence[int], now: float) -> None:
        """It computes or receives these, and will soon tell of them."""
        if hashes and self._prefix_tokens:
            self._sent.record(worker, hashes, now, keep=False)

    def tell(self, worker: WorkerKey, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """What its cache has gained and lost."""
        if stored:
            self._told.add(worker, stored)
        if evicted:
            self._told.remove(worker, evicted)

    def forget(self, worker: WorkerKey) -> None:
        """It is gone."""
        self._told.forget(worker)
        self._sent.forget(worker)
