"""Which worker lately held which prompt blocks: approximate, bounded. A wrong answer costs speed, never correctness."""

from collections import OrderedDict
from collections.abc import Sequence

from router.views import WorkerKey


class PrefixMemory:
    """An LRU of at most `max_blocks` chained block hashes, each with the workers that held it."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[bytes, set[WorkerKey]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def record(self, worker: WorkerKey, hashes: Sequence[bytes]) -> None:
        """`worker` has computed or received these blocks. Recorded last block first, so that tails age before heads."""
        for block in reversed(hashes):
            self._holders.setdefault(block, set()).add(worker)
            self._holders.move_to_end(block)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def match(self, hashes: Sequence[bytes]) -> dict[WorkerKey, int]:
        """Number of leading blocks of `hashes` that each worker is thought to hold; workers with none are absent."""
        matched: dict[WorkerKey, int] = {}
        alive: set[WorkerKey] | None = None
        for number, block in enumerate(hashes, start=1):
            holders = self._holders.get(block, set())
            alive = set(holders) if alive is None else alive & holders
            if not alive:
                break
            matched.update(dict.fromkeys(alive, number))
        return matched
