"""What this router has sent where: credited before a worker tells of it, and for good where nobody tells.

Approximate, bounded. A wrong answer costs speed, never correctness.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from router.views import WorkerKey


class PrefixMemory:
    """An LRU of at most `max_blocks` blocks by short name, each with the workers that were sent it, and when."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._sent: OrderedDict[int, dict[WorkerKey, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent)

    def record(self, worker: WorkerKey, names: Sequence[int], now: float) -> None:
        """`worker` computes or receives these blocks. Recorded last block first, so that tails age before heads."""
        for name in reversed(names):
            self._sent.setdefault(name, {})[worker] = now
            self._sent.move_to_end(name)
        while len(self._sent) > self._max_blocks:
            self._sent.popitem(last=False)

    def match(self, names: Sequence[int], valid_from: Callable[[WorkerKey], float]) -> dict[WorkerKey, int]:
        """Number of leading blocks that each worker was sent at its `valid_from` or later; workers with none are absent."""
        matched: dict[WorkerKey, int] = {}
        oldest: dict[WorkerKey, float] | None = None
        for number, name in enumerate(names, start=1):
            sent = self._sent.get(name, {})
            if oldest is None:
                oldest = {worker: valid_from(worker) for worker in sent}
            oldest = {worker: limit for worker, limit in oldest.items() if worker in sent and sent[worker] >= limit}
            if not oldest:
                break
            matched.update(dict.fromkeys(oldest, number))
        return matched
