"""What a prefix cache has gained and lost, for whoever keeps an index of it elsewhere.

Only the latest state of a block counts, so a block that comes and goes between two readings costs one entry. A log that nobody
reads stays small: it drops everything and skips a number, which tells the reader that something is missing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockChanges:
    """Net changes since the reading before: no hash stands in both. `sequence` is one more than before unless some were lost."""

    sequence: int
    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


class BlockLog:
    """Written and taken on the engine thread; `pending` may be asked on any."""

    def __init__(self, max_changes: int) -> None:
        self.sequence = 0  # of what was taken last
        self._max_changes = max_changes
        self._changes: dict[bytes, bool] = {}
        self._has_overflowed = False

    @property
    def pending(self) -> bool:
        """Is there something to take?"""
        return bool(self._changes) or self._has_overflowed

    def note(self, block_hash: bytes, *, stored: bool) -> None:
        """The block is there now, or it is not any more."""
        self._changes[block_hash] = stored
        if len(self._changes) > self._max_changes:
            self._changes.clear()
            self._has_overflowed = True

    def take(self) -> BlockChanges | None:
        """What has changed; None: nothing. Readings before and after a gap have numbers that do not follow each other."""
        if not self.pending:
            return None
        self.sequence += 2 if self._has_overflowed else 1
        changes, self._changes, self._has_overflowed = self._changes, {}, False
        stored = tuple(block for block, is_stored in changes.items() if is_stored)
        evicted = tuple(block for block, is_stored in changes.items() if not is_stored)
        return BlockChanges(self.sequence, stored, evicted)
