"""The events of a prefix cache with token ids, for readers outside the mesh that name blocks in their own way.

It is kept only where a reader asks for it: the other log (block_pool.py) has hashes alone, and costs no tokens. What it holds is
bounded by the pool: a block that is stored and removed between two readings cancels itself out, so there are at most as many
changes as blocks that the reader has been told of, and blocks that are cached now. So nothing is ever lost here.
"""

from __future__ import annotations

from array import array
from contextlib import AbstractContextManager
from dataclasses import dataclass

from pdmesh.engine.request import EngineRequest


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlock:
    """Describe a block of the prefix cache. It takes about 300 bytes beside 4 for each token."""

    block_hash: bytes
    parent: bytes | None  # hash of the block before it; None: it begins a prompt
    token_ids: array[int]  # uint32, as many as a block has slots
    cache_root: bytes  # of identity, tenant and salt: the beginning of the chain, without the adapter
    adapter: str  # name of the LoRA adapter that computed it; empty: none


@dataclass(frozen=True)
class BlockEvents:
    """Net changes since the last reading. No block is in both, and each was unknown, or known, to the reader before."""

    removed: tuple[bytes, ...]
    stored: tuple[StoredBlock, ...]


class BlockEventLog:
    """Hold the cached blocks and their changes. It is written under the engine's lock, `lock`, which readings take."""

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._lock = lock
        self.blocks: dict[bytes, StoredBlock] = {}
        self._changes: dict[bytes, StoredBlock | None] = {}  # None: removed

    @property
    def pending(self) -> bool:
        """Return whether there is something to take. It takes no lock."""
        return bool(self._changes)

    def store(self, block: StoredBlock) -> None:
        """Record that the block is in the prefix cache; again, it changes nothing."""
        if block.block_hash in self.blocks:
            return
        self.blocks[block.block_hash] = block
        if self._changes.pop(block.block_hash, block) is not None:
            self._changes[block.block_hash] = block

    def remove(self, block_hash: bytes) -> None:
        """Record that the block is not in the prefix cache any more."""
        if self.blocks.pop(block_hash, None) is not None and self._changes.pop(block_hash, None) is None:
            self._changes[block_hash] = None

    def take(self) -> BlockEvents | None:
        """Return what has changed; None: nothing."""
        with self._lock:
            changes, self._changes = self._changes, {}
        if not changes:
            return None
        removed = tuple(block_hash for block_hash, block in changes.items() if block is None)
        return BlockEvents(removed, tuple(block for block in changes.values() if block is not None))

    def take_all(self) -> tuple[BlockEvents | None, tuple[StoredBlock, ...]]:
        """Return what has changed, and all blocks, the changes included."""
        with self._lock:
            return self.take(), tuple(self.blocks.values())


def stored_block(request: EngineRequest, block_hash: bytes, parent: bytes | None, token_ids: tuple[int, ...]) -> StoredBlock:
    """Return the description of a block that a request has filled."""
    adapter = "" if request.adapter is None else request.adapter.name
    return StoredBlock(block_hash, parent, array("I", token_ids), request.cache_root, adapter)
