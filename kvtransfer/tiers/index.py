"""Which blocks a tier holds, and in which order it gives them up. Pure: no I/O, and time is passed in.

Blocks of a root (a model, a tenant, an adapter) form a tree, since a hash stands for all tokens up to its block. Only leaves are
given up, the least recently used first: a block without those before it is of no use.

    A ── B ── C        used 10:05      D goes first, then C; B when neither C nor D is left
         └─── D        used 10:01

A block that a session retains counts as used at the end of that time, so it outlasts what is used before then. Where several
roots share a tier, those that have no more than an equal part of it lose nothing to others, but what was not used for an hour.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdmesh.engine.errors import IntegrityError
from pdmesh.engine.kv_cache.published_blocks import BlockName

STALE_S = 3600.0
_STALE_PER_LEAF = 2  # a heap is rebuilt when more of its entries than that, for each leaf, have been overtaken
_LEAST_HEAP = 64


@dataclass(eq=False, slots=True)
class _Entry:
    name: BlockName
    num_bytes: int
    used: float
    num_children: int = 0
    num_holds: int = 0  # readers, for whom it stays


@dataclass(eq=False, slots=True)
class _Root:
    """Hold one root's blocks, and a heap of its leaves (used, hash) in which entries that were overtaken are left."""

    entries: dict[bytes, _Entry] = field(default_factory=dict)
    orphans: dict[bytes, int] = field(default_factory=dict)  # blocks here, by the hash of a parent that is not here
    leaves: list[tuple[float, bytes]] = field(default_factory=list)
    num_bytes: int = 0

    def oldest(self) -> _Entry | None:
        """Return the least recently used leaf that has no reader."""
        held: list[tuple[float, bytes]] = []
        found = None
        while self.leaves and found is None:
            used, block_hash = self.leaves[0]
            entry = self.entries.get(block_hash)
            if entry is None or entry.num_children or entry.used != used:
                heapq.heappop(self.leaves)
            elif entry.num_holds:
                held.append(heapq.heappop(self.leaves))
            else:
                found = entry
        for each in held:
            heapq.heappush(self.leaves, each)
        return found

    def note_leaf(self, entry: _Entry) -> None:
        heapq.heappush(self.leaves, (entry.used, entry.name.block_hash))
        if len(self.leaves) > _LEAST_HEAP + (1 + _STALE_PER_LEAF) * len(self.entries):
            self.leaves = [(each.used, block_hash) for block_hash, each in self.entries.items() if not each.num_children]
            heapq.heapify(self.leaves)


class TierIndex:
    """Know a tier's blocks, at most `max_bytes` of them once `victims` were given up. Not safe for several threads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._roots: dict[bytes, _Root] = {}

    def __len__(self) -> int:
        return sum(len(root.entries) for root in self._roots.values())

    def __contains__(self, name: BlockName) -> bool:
        return self._find(name) is not None

    def __iter__(self) -> Iterator[BlockName]:
        return (entry.name for root in self._roots.values() for entry in root.entries.values())

    def add(self, name: BlockName, num_bytes: int, used: float) -> None:
        """Add a block; one that is here already is touched."""
        if name in self:
            self.touch(name, used)
            return
        root = self._roots.setdefault(name.root, _Root())
        entry = root.entries[name.block_hash] = _Entry(name, num_bytes, used)
        root.num_bytes += num_bytes
        self.num_bytes += num_bytes
        entry.num_children = root.orphans.pop(name.block_hash, 0)
        parent = root.entries.get(name.parent)
        if parent is not None:
            parent.num_children += 1
        else:
            root.orphans[name.parent] = root.orphans.get(name.parent, 0) + 1
        if not entry.num_children:
            root.note_leaf(entry)

    def touch(self, name: BlockName, used: float) -> None:
        """Record that a block was used, or is kept until `used`; unknown ones are ignored."""
        entry = self._find(name)
        if entry is not None and used > entry.used:
            entry.used = used
            if not entry.num_children:
                self._roots[name.root].note_leaf(entry)

    def named(self, root: bytes, block_hash: bytes) -> BlockName | None:
        """Return the name of a block; None: it is not here."""
        entry = self._find(BlockName(root, b"", block_hash))
        return None if entry is None else entry.name

    def hold(self, name: BlockName) -> bool:
        """Keep a block from being given up until `let_go`; False: it is not here."""
        entry = self._find(name)
        if entry is not None:
            entry.num_holds += 1
        return entry is not None

    def let_go(self, name: BlockName) -> None:
        """End one `hold`."""
        entry = self._find(name)
        if entry is not None:
            entry.num_holds -= 1

    def is_held(self, name: BlockName) -> bool:
        """Return whether a reader holds the block."""
        entry = self._find(name)
        return entry is not None and entry.num_holds > 0

    def remove(self, name: BlockName) -> bool:
        """Remove a block; False: it is not here."""
        entry = self._find(name)
        if entry is None:
            return False
        root = self._roots[name.root]
        del root.entries[name.block_hash]
        root.num_bytes -= entry.num_bytes
        self.num_bytes -= entry.num_bytes
        if entry.num_children:
            root.orphans[name.block_hash] = entry.num_children
        self._leave_parent(root, name)
        if not root.entries:
            del self._roots[name.root]
        return True

    def victims(self, num_bytes: int, name: BlockName, now: float) -> list[BlockName]:
        """Remove, and return, blocks to give up so that the `num_bytes` of `name` fit; fewer where readers hold the others. Never
        the block before it, without which it is of no use."""
        gone: list[BlockName] = []
        before = self._find(BlockName(name.root, b"", name.parent))
        if before is not None:
            before.num_holds += 1
        while self.num_bytes + num_bytes > self.max_bytes and (entry := self._next_victim(name.root, now)) is not None:
            self.remove(entry.name)
            gone.append(entry.name)
        if before is not None:
            before.num_holds -= 1
        return gone

    def check(self) -> None:
        """Raise IntegrityError unless sizes and numbers of children are those of the blocks that are here."""
        for block_root, root in self._roots.items():
            children: dict[bytes, int] = {}
            for entry in root.entries.values():
                children[entry.name.parent] = children.get(entry.name.parent, 0) + 1
            if any(entry.num_children != children.get(block_hash, 0) for block_hash, entry in root.entries.items()):
                raise IntegrityError(f"root {block_root.hex()}: a block's number of children is wrong")
            missing = {parent: count for parent, count in children.items() if parent not in root.entries}
            if root.orphans != missing:
                raise IntegrityError(f"root {block_root.hex()}: the blocks without a parent are counted wrong")
            if root.num_bytes != sum(entry.num_bytes for entry in root.entries.values()) or not root.entries:
                raise IntegrityError(f"root {block_root.hex()}: its size is wrong")
        if self.num_bytes != sum(root.num_bytes for root in self._roots.values()):
            raise IntegrityError("the tier's size is not that of its roots")

    def _find(self, name: BlockName) -> _Entry | None:
        root = self._roots.get(name.root)
        return None if root is None else root.entries.get(name.block_hash)

    def _leave_parent(self, root: _Root, name: BlockName) -> None:
        parent = root.entries.get(name.parent)
        if parent is None:
            root.orphans[name.parent] -= 1
            if not root.orphans[name.parent]:
                del root.orphans[name.parent]
            return
        parent.num_children -= 1
        if not parent.num_children:
            root.note_leaf(parent)

    def _next_victim(self, incoming: bytes, now: float) -> _Entry | None:
        """Return the oldest block of the roots that have more than an equal part, or that was not used for long; else the
        incoming root's own."""
        num_roots = len(self._roots) + (incoming not in self._roots)
        equal_part = self.max_bytes / max(1, num_roots)
        best: _Entry | None = None
        fallback: _Entry | None = None
        for block_root, root in self._roots.items():
            entry = root.oldest()
            if entry is None:
                continue
            if root.num_bytes <= equal_part and entry.used > now - STALE_S:
                if block_root == incoming:
                    fallback = entry
            elif best is None or entry.used < best.used:
                best = entry
        return best or fallback
