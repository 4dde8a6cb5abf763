"""The tier in a store that workers of several hosts share, a Redis: the slowest, and the only one that is not this worker's own.

What it has is known only by asking, which costs a round trip. So the index here is a view: blocks that this worker wrote, or
found when it asked (`find`). Blocks that others removed since are a miss when they are read. When the store does not answer,
the view is emptied, and nothing is asked or written for a while: it may be another one when it comes back.

Whoever may write to the store can give a worker KV that it takes for its own: checksums find damage, not malice.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtransfer.tiers.backends.block_file import BadBlockFile, is_storable
from kvtransfer.tiers.backends.coding import BlockForm, CannotDecode
from kvtransfer.tiers.backends.redis_blocks import Change, RedisBlocks, StoreFull, StoreRefused
from kvtransfer.tiers.base import BlockBytes, IndexedTier
from pdmesh.engine.kv_cache.published_blocks import BlockName

TIMEOUT_S = 1.0
"""The store is down when nothing has come from it for so long."""
DOWN_S, MOST_DOWN_S = 5.0, 60.0
"""How long it is not asked then, twice as long each time."""
AGAIN_S = 60.0
"""How long nothing is written after the store has refused, or was slow."""
WRITE_LIMIT_S = 2.0
"""A batch of writes that takes longer ends there: what a worker computes meanwhile waits behind it."""
FULL_SHARE = 0.9
"""In a full store the bound becomes this share of what the mesh has there."""
LEAST_BLOCKS = 2
"""It never becomes less than so many blocks, if it was not before."""
GROWTH = 1.1
"""It grows so much for each `AGAIN_S` after which a write succeeds, up to what was asked for."""
TRIM_CALLS = 100
VIEW = 2
"""The view has room for so many times the bound: it holds blocks that others have removed meanwhile."""
TOUCH_S = 60.0
"""A block's time of use is sent at most once in so many seconds."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    """Hold what is known of a block in the view: its place in the order of arrival, in which parents come first."""

    serial: int
    touched: float


class StoreTier(IndexedTier):
    """Hold blocks in Redis. Satisfies `Tier`; `find`, `write_batch` and `lend_batch` talk to the store, so they are called in
    threads. Where it does not answer they do nothing."""

    name = "store"
    is_remote = True

    def __init__(
        self,
        blocks: RedisBlocks,
        max_bytes: int,
        form: BlockForm,
        *,
        shown_url: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shown_url`: without a password, for logs. Raises ValueError where not one block fits."""
        if max_bytes < form.max_bytes:
            raise ValueError(f"kv_store_gb: {max_bytes} bytes are less than a block of {form.block_bytes}")
        super().__init__(VIEW * max_bytes, clock)
        self._bound = self._configured_bytes = max_bytes
        self._grow_at = float("inf")
        self._blocks, self._form, self._shown_url = blocks, form, shown_url
        self._total_bytes = 0
        self._known: dict[BlockName, _Known] = {}
        self._num_known = 0
        self._pending: dict[BlockName, float] = {}  # uses that the store is to be told of, and how long it is to keep them
        self._bad: list[BlockName] = []
        self._not_before = self._write_not_before = float("-inf")
        self._num_failures = 0  # in a row
        self._is_closed = threading.Event()

    @property
    def num_bytes(self) -> int:
        """Return what the mesh has in the store, as of the last write."""
        return self._total_bytes

    @property
    def max_bytes(self) -> int:
        """Return what the mesh may have in the store."""
        return self._bound

    @property
    def is_available(self) -> bool:
        return not self._is_closed.is_set() and self._clock() >= self._not_before

    def lacks(self, names: Iterable[BlockName]) -> list[BlockName]:
        if not self.is_available or self._clock() < self._write_not_before:
            return []
        return [name for name in super().lacks(names) if is_storable(name)]

    def touch(self, names: Iterable[BlockName], keep_s: float = 0.0) -> None:
        """Note the use of blocks in the view, and of those before them, for the next call to the store."""
        with self._lock:
            self._touch(names, keep_s)

    def _touch(self, names: Iterable[BlockName], keep_s: float) -> None:
        now = self._clock()
        for each in names:
            name: BlockName | None = each
            while name is not None and (known := self._known.get(name)) is not None and self._pending.get(name, -1.0) < keep_s:
                if not keep_s and now < known.touched + TOUCH_S:
                    break
                known.touched = now
                self._pending[name] = keep_s
                self._index.touch(name, now + keep_s)
                name = self._index.named(name.root, name.parent)

    # Threads: asking.

    def find(self, names: Sequence[BlockName], *, all_of_them: bool = False) -> None:
        """Ask which of these blocks, in the order of a chain, are in the store; afterwards `holds` says so. It may stop at the
        first that is not there, unless `all_of_them` are asked for."""
        self._call(lambda: self._find(names, all_of_them=all_of_them))

    def _find(self, names: Sequence[BlockName], *, all_of_them: bool) -> set[str]:
        self._catch_up()
        return self._ask(names, 0.0, all_of_them=all_of_them)

    def _catch_up(self) -> None:
        """Remove what was found to be damaged, and tell the store what was used."""
        with self._lock:
            bad, self._bad = self._bad, []
            pending, self._pending = self._pending, {}
            order = {name: known.serial for name in pending if (known := self._known.get(name)) is not None}
        for name in bad:
            self._blocks.drop(self._key(name))
        for keep_s in set(pending.values()):
            names = sorted((name for name in order if pending[name] == keep_s), key=order.__getitem__)
            self._ask(names, keep_s, all_of_them=True)

    def _ask(self, names: Sequence[BlockName], keep_s: float, *, all_of_them: bool) -> set[str]:
        """Return the keys of those that are there, which then are in the view; the others are not."""
        if not names:
            return set()
        keys = [self._key(name) for name in names]
        found = self._blocks.find(keys, keep_s, all_of_them=all_of_them)
        with self._lock:
            for name, is_here in zip(names, found, strict=False):
                if not is_here:
                    self._forget(name)
                elif name.parent:  # else all of its name is not known
                    self._learn(name, keep_s)
        return {key for key, is_here in zip(keys, found, strict=False) if is_here}

    # Threads: writing.

    def write_batch(self, blocks: Sequence[tuple[BlockName, BlockBytes, float]]) -> None:
        """Write those of the blocks that the store lacks and whose parents it has, until it has taken too long."""
        began = time.monotonic()
        names = {self._key(name): name for name, _, _ in blocks}
        parents = {self._parent_key(name): BlockName(name.root, b"", name.parent) for name in names.values()}
        outer = [parent for key, parent in parents.items() if key and key not in names]
        there = self._call(lambda: self._find([*outer, *names.values()], all_of_them=True)) or set()
        for count, (name, block, keep_s) in enumerate(blocks):
            parent = self._parent_key(name)
            if self._key(name) in there or (parent and parent not in there):
                continue
            if not self.lacks([name]):  # the store is down or full by now
                return
            if time.monotonic() > began + WRITE_LIMIT_S:
                self._refused(f"{count} blocks took more than {WRITE_LIMIT_S:g} s")
                return
            self.write(name, block, keep_s)
            if self.holds([name])[0]:
                there.add(self._key(name))

    def write(self, name: BlockName, block: BlockBytes, keep_s: float) -> None:
        self._call(lambda: self._write(name, block, keep_s))

    def _write(self, name: BlockName, block: BlockBytes, keep_s: float) -> None:
        if keep_s:  # what comes before it, too, else it goes with that
            with self._lock:
                before = self._index.named(name.root, name.parent)
                self._touch([before] if before else [], keep_s)
            self._catch_up()
        value = b"".join(self._form.pack(name, block))
        try:
            change = self._blocks.put(self._key(name), self._parent_key(name), value, keep_s, self._bound)
        except StoreFull:
            self._shrink()
            return
        except StoreRefused as error:
            self._refused(f"it refuses ({error})")
            return
        with self._lock:
            self._take(change)
            if change.is_done:
                self._learn(name, keep_s)
                self.counts.num_written += 1
        if change.is_done and self._clock() >= self._grow_at:
            self._grow()

    def _grow(self) -> None:
        """Come nearer to the bound that was asked for: a full store does not stay full."""
        self._bound = min(self._configured_bytes, int(GROWTH * self._bound) + self._form.max_bytes)
        self._grow_at = float("inf") if self._bound == self._configured_bytes else self._clock() + AGAIN_S

    def _shrink(self) -> None:
        wanted = max(LEAST_BLOCKS * self._form.max_bytes, int(FULL_SHARE * self._blocks.trim(self.max_bytes).num_bytes))
        wanted = self._bound = min(self._bound, wanted)
        self._grow_at = self._clock() + AGAIN_S
        for _ in range(TRIM_CALLS):
            change = self._blocks.trim(wanted)
            with self._lock:
                self._take(change)
            if change.is_done:
                break
        self._refused(f"it has no memory left, and is used for {self.max_bytes / 1e9:.2f} GB, and slowly for more again")

    def _take(self, change: Change) -> None:
        self._total_bytes = change.num_bytes
        for key in change.gone:
            with contextlib.suppress(ValueError):
                identity, root, block_hash = map(bytes.fromhex, key.split(":"))
                name = self._index.named(root, block_hash) if identity == self._form.identity else None
                if name is not None:
                    self._forget(name)

    def _refused(self, problem: str) -> None:
        self.counts.num_failed += 1
        self._write_not_before = self._clock() + AGAIN_S
        logger.warning("the store for KV at %s: %s; nothing is written to it for a minute", self._shown_url, problem)

    # Threads: reading.

    def lend(self, name: BlockName) -> BlockBytes | None:
        return next(iter(self.lend_batch([name])), None)

    def lend_batch(self, names: Sequence[BlockName]) -> list[BlockBytes]:
        return self._call(lambda: self._read(names)) or []

    def _read(self, names: Sequence[BlockName]) -> list[BlockBytes]:
        values = self._blocks.get([self._key(name) for name in names], self._form.max_bytes)
        blocks: list[BlockBytes] = []
        for name, value in zip(names, values, strict=True):
            try:
                block = self._unpacked(name, value)
            except BadBlockFile as error:
                self._note_bad(name, str(error))
                self._catch_up()
                break
            if block is None:
                with self._lock:
                    self._forget(name)
                break
            blocks.append(block)
        self.counts.num_read += len(blocks)
        return blocks

    def _unpacked(self, name: BlockName, value: bytes | Exception) -> BlockBytes | None:
        """Return what a value holds; None: nothing, or nothing that can be read here. Raises BadBlockFile."""
        if isinstance(value, Exception):
            raise BadBlockFile(f"it is no block: {value}")
        if not value:
            return None
        try:
            return self._form.unpack(name, memoryview(value))
        except CannotDecode:  # another worker's, which it can read
            return None

    def give_back(self, name: BlockName, *, is_damaged: bool) -> None:
        """End a `lend`, which lent a copy; a damaged block is removed at the next call to the store."""
        if is_damaged:
            self._note_bad(name, "its content's checksum is wrong")

    def _note_bad(self, name: BlockName, problem: str) -> None:
        self.counts.num_corrupt += 1
        logger.warning("the block %s of the store for KV is not used and is removed: %s", self._key(name), problem)
        with self._lock:
            self._bad.append(name)
            self._forget(name)

    # The view, under the lock.

    def _learn(self, name: BlockName, keep_s: float) -> None:
        now = self._clock()
        if name not in self._index:
            size = self._form.max_bytes
            for victim in self._index.victims(size, name, now):
                self._drop(victim)
            if self._index.num_bytes + size > self._index.max_bytes:
                return
            self._index.add(name, size, now + keep_s)
            self._changes.append(name)
            self._num_known += 1
            self._known[name] = _Known(self._num_known, now)
        self._index.touch(name, now + keep_s)
        self._known[name].touched = now

    def _forget(self, name: BlockName) -> None:
        if self._index.remove(name):
            self._drop(name)

    def _drop(self, name: BlockName) -> None:
        self._changes.append(name)
        self._known.pop(name, None)
        self._pending.pop(name, None)

    # Calls.

    def _call(self, call: Callable[[], T]) -> T | None:
        """Return what `call` returns; None: the store does not answer, or has not lately."""
        if not self.is_available:
            return None
        try:
            result = call()
        except Exception as error:  # noqa: BLE001  what answers may be no Redis, and the client then raises anything
            self._failed(error)
            return None
        with self._lock:
            if self._num_failures and self.is_available:
                logger.info("the store for KV at %s answers again", self._shown_url)
                self._num_failures = 0
        return result

    def _failed(self, error: Exception) -> None:
        with self._lock:
            for name in list(self._index):
                self._forget(name)
            if not self.is_available:  # it was closed, or another thread has seen the same
                return
            is_first = not self._num_failures
            self._not_before = self._clock() + min(MOST_DOWN_S, DOWN_S * 2**self._num_failures)
            self._num_failures = min(self._num_failures + 1, 16)
            self.counts.num_failed += 1
        if is_first:
            text = "the store for KV at %s does not serve (%s); going on without it, trying again"
            logger.warning(text, self._shown_url, error or type(error).__name__)

    def close(self) -> None:
        """End the connections, also those on which a thread waits; the blocks stay."""
        self._is_closed.set()
        self._blocks.close()

    def _key(self, name: BlockName) -> str:
        return f"{self._form.identity.hex()}:{name.root.hex()}:{name.block_hash.hex()}"

    def _parent_key(self, name: BlockName) -> str:
        """Return the key of the block before one; empty: it is the first."""
        return "" if name.parent == name.root else self._key(BlockName(name.root, b"", name.parent))
