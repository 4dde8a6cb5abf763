"""Is every block where the bookkeeping says? Cheap enough to ask whenever the engine idles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pdmesh.engine.errors import IntegrityError
from pdmesh.engine.kv_cache.block_pool import BlockPool
from pdmesh.engine.scheduler.scheduler import Scheduler
from pdmesh.engine.scheduler.sequence import Phase, SequenceGroup


def check_integrity(pool: BlockPool, groups: Iterable[SequenceGroup], scheduler: Scheduler) -> None:
    """Raises IntegrityError unless blocks are held as often as sequences hold them, and every sequence has its one place."""
    groups = list(groups)
    pool.check(Counter(block_id for group in groups for sequence in group.sequences for block_id in sequence.block_ids))
    active = [sequence for group in groups if group.phase is Phase.ACTIVE for sequence in group.sequences]
    scheduled = scheduler.running + scheduler.waiting
    if len(scheduled) != len(active) or set(scheduled) != set(active):
        raise IntegrityError(f"{len(scheduled)} sequences are scheduled, {len(active)} of known requests are active")
    if any(sequence.block_ids for sequence in scheduler.waiting):
        raise IntegrityError("a waiting sequence holds blocks")
