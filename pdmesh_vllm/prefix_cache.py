"""Which blocks vLLM's prefix cache holds, in the names that pdmesh's routers know: vLLM's KV events, translated.

vLLM names a block by a hash of its own; the mesh by a chain of hashes over the token ids, which begins with identity and tenant
(pdmesh/text/block_hash.py). That beginning is a request's cache salt in vLLM, so that tenants share no block there either.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from pdmesh.engine.kv_cache.block_events import BlockEventLog, StoredBlock
from pdmesh.engine.kv_cache.block_pool import BlockChanges, BlockLog
from pdmesh.text.block_hash import hash_block

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVEventBatch

_SALT = "pdmesh:"


def salt_of(root: bytes) -> str | None:
    """Return the cache salt for requests whose block hashes begin with `root`; None for an empty one."""
    return f"{_SALT}{root.hex()}" if root else None


def _root(extra_keys: Iterable[Any]) -> bytes:
    """Return the root among the keys of a chain's first block. An adapter's name, which may begin alike, stands before it."""
    salts = (key for key in reversed(tuple(extra_keys)) if isinstance(key, str) and key.startswith(_SALT))
    return bytes.fromhex(next(salts, _SALT).removeprefix(_SALT))


class PrefixIndex:
    """Hold the blocks of vLLM's prefix cache by both names. vLLM takes it for its event publisher."""

    def __init__(self) -> None:
        self._names: dict[object, bytes] = {}  # by vLLM's hash
        self._num_copies: Counter[object] = Counter()  # blocks of each hash: two, where two prompts were computed at once
        self.log: BlockLog | None = None
        self.events: BlockEventLog | None = None  # with token ids, if it is set

    def __len__(self) -> int:
        return len(self._names)

    def publish(self, events: KVEventBatch) -> None:
        """Take the events of a step."""
        for event in events.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self._remove(block_hash)
            elif isinstance(event, AllBlocksCleared):
                for name in self._names.values():
                    self._note(name, stored=False)
                self._names.clear()
                self._num_copies.clear()

    def shutdown(self) -> None:
        """Do nothing: nothing is open."""

    def get_publisher_config(self) -> None:
        """Return None: others do not subscribe here."""

    def take(self) -> BlockChanges | None:
        """Return what has changed since the last call."""
        return None if self.log is None else self.log.take()

    def blocks(self) -> tuple[int, tuple[bytes, ...]]:
        """Return all names, and the number of the last changes that they contain."""
        return 0 if self.log is None else self.log.sequence, tuple(self._names.values())

    def _store(self, event: BlockStored) -> None:
        keys = event.extra_keys or [None]
        if event.parent_block_hash is None:
            parent: bytes | None = _root(keys[0] or ())
        else:
            parent = self._names.get(event.parent_block_hash)
        for index, block_hash in enumerate(event.block_hashes):
            self._num_copies[block_hash] += 1
            before, parent = parent, self._names.get(block_hash)
            if parent is not None or before is None:  # a copy; or its beginning is not cached any more, so no prompt finds it
                continue
            tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
            parent = self._names[block_hash] = hash_block(before, tokens)
            self._note(parent, stored=True)
            if self.events is not None:
                self.events.store(self._described(self.events, parent, before, tokens, event.lora_name or ""))

    def _remove(self, block_hash: object) -> None:
        """Forget a block with its last copy."""
        if self._num_copies[block_hash] > 1:
            self._num_copies[block_hash] -= 1
            return
        del self._num_copies[block_hash]
        self._note(self._names.pop(block_hash, None), stored=False)

    def _described(
        self, events: BlockEventLog, name: bytes, before: bytes, token_ids: Sequence[int], adapter: str
    ) -> StoredBlock:
        """Return the description of a block behind `before`, another block or the root. An adapter's root is not told apart from
        the tenant's here: the salt holds both."""
        parent = events.blocks.get(before)
        root = before if parent is None else parent.cache_root
        return StoredBlock(name, None if parent is None else before, array("I", token_ids), root, adapter)

    def _note(self, name: bytes | None, *, stored: bool) -> None:
        if name is None:
            return
        if self.log is not None:
            self.log.note(name, stored=stored)
        if self.events is not None and not stored:
            self.events.remove(name)
