"""Which blocks a tier holds, and in which order it gives them up. Pure: no I/O, and time is passed in.

Blocks of a root (a model, a tenant, an adapter) form a tree, since a hash stands for all tokens up to its block. Only leaves are
given up, the least recently used first: a block without those before it is of no use.

    A ── B ── C        used 10:05      D goes first, then C; B when neither C nor D is left
         └─── D        used 10:01

A block that a session retains counts as used at the end of that time, so it outlasts what is used before then. Where several
roots share a tier, those that have no more than an equal part of it lose nothing to others, but what was not used for an hour.

A victim costs O(log roots): heaps have the roots by their oldest leaf, one all of them and one those above the equal part. That
part moves with the number of roots and the bound, so where roots are many it is a little less than equal, and stays for a while.
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
MOST_VICTIMS = 256
"""One call of `victims` gives up so many, as its caller holds a lock meanwhile."""
_MANY_ROOTS = 32  # from so many on, the equal part is an approximate one, else each root that comes or goes would move all others
_PART_SLACK = 1 / 16


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


class _RootHeap:
    """Order roots by their oldest leaf. A root's key here is that leaf's time of use or less, and is put right when it is first;
    entries that were overtaken are left."""

    def __init__(self, keys: dict[bytes, float] | None = None) -> None:
        self.keys = {} if keys is None else keys
        self._heap: list[tuple[float, bytes]] = []
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(key, block_root) for block_root, key in self.keys.items()]
        heapq.heapify(self._heap)

    def note(self, block_root: bytes, used: float) -> None:
        """Record that a root has a leaf that was last used then."""
        known = self.keys.get(block_root)
        if known is None or used < known:
            self.keys[block_root] = used
            heapq.heappush(self._heap, (used, block_root))
            if len(self._heap) > _LEAST_HEAP + (1 + _STALE_PER_LEAF) * len(self.keys):
                self._rebuild()

    def discard(self, block_root: bytes) -> None:
        """Take a root out, if it is here."""
        self.keys.pop(block_root, None)

    def first(self, roots: dict[bytes, _Root]) -> _Entry | None:
        """Return the oldest leaf without a reader; roots in which readers hold all leaves are taken out."""
        while self._heap:
            used, block_root = self._heap[0]
            if self.keys.get(block_root) != used:
                heapq.heappop(self._heap)
                continue
            entry = roots[block_root].oldest()
            if entry is not None and entry.used <= used:
                return entry
            heapq.heappop(self._heap)
            del self.keys[block_root]
            if entry is not None:
                self.note(block_root, entry.used)
        return None


class TierIndex:
    """Know a tier's blocks, at most `max_bytes` of them once `victims` were given up. Not safe for several threads, but for its
    numbers of blocks and bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._num_blocks = 0
        self._roots: dict[bytes, _Root] = {}
        self._by_age = _RootHeap()
        self._above_part = _RootHeap()
        self._part = 0.0
        self._lost_holds: dict[tuple[bytes, bytes], int] = {}  # of blocks that were removed while readers had them

    def __len__(self) -> int:
        return self._num_blocks

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
        entry.num_holds = self._lost_holds.pop((name.root, name.block_hash), 0)  # their readers let go of this one
        root.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._num_blocks += 1
        entry.num_children = root.orphans.pop(name.block_hash, 0)
        parent = root.entries.get(name.parent)
        if parent is not None:
            parent.num_children += 1
        else:
            root.orphans[name.parent] = root.orphans.get(name.parent, 0) + 1
        if not entry.num_children:
            self._note_leaf(root, entry)
        self._place(name.root, root)

    def touch(self, name: BlockName, used: float) -> None:
        """Record that a block was used, or is kept until `used`; unknown ones are ignored."""
        entry = self._find(name)
        if entry is not None and used > entry.used:
            entry.used = used
            if not entry.num_children:
                self._note_leaf(self._roots[name.root], entry)

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
        """End one `hold`, also where the block was removed meanwhile, or removed and added again."""
        entry = self._find(name)
        if entry is None:
            key = (name.root, name.block_hash)
            num_left = self._lost_holds.pop(key, 0) - 1
            if num_left > 0:
                self._lost_holds[key] = num_left
        elif entry.num_holds:
            entry.num_holds -= 1
            self._note_root(entry)

    def is_held(self, name: BlockName) -> bool:
        """Return whether a reader holds the block."""
        entry = self._find(name)
        return entry is not None and entry.num_holds > 0

    def remove(self, name: BlockName) -> bool:
        """Remove a block, held or not; False: it is not here."""
        entry = self._find(name)
        if entry is None:
            return False
        root = self._roots[name.root]
        del root.entries[name.block_hash]
        root.num_bytes -= entry.num_bytes
        self.num_bytes -= entry.num_bytes
        self._num_blocks -= 1
        if entry.num_holds:
            self._lost_holds[name.root, name.block_hash] = entry.num_holds
        if entry.num_children:
            root.orphans[name.block_hash] = entry.num_children
        self._leave_parent(root, name)
        if not root.entries:
            del self._roots[name.root]
            self._by_age.discard(name.root)
        self._place(name.root, root)
        return True

    def victims(self, num_bytes: int, name: BlockName, now: float) -> list[BlockName]:
        """Remove, and return, blocks to give up so that the `num_bytes` of `name` fit; fewer where readers hold the others, and
        `MOST_VICTIMS` at most: call it again then. Never the block before it, without which it is of no use."""
        gone: list[BlockName] = []
        before = self._find(BlockName(name.root, b"", name.parent))
        if before is not None:
            before.num_holds += 1
        while self.num_bytes + num_bytes > self.max_bytes and len(gone) < MOST_VICTIMS:
            entry = self._next_victim(name.root, now)
            if entry is None:
                break
            self.remove(entry.name)
            gone.append(entry.name)
        if before is not None:
            before.num_holds -= 1
            self._note_root(before)
        return gone

    def check(self) -> None:
        """Raise IntegrityError unless sizes and numbers of children are those of the blocks that are here, and heaps know all
        roots that have something to give up."""
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
            if any(entry.num_holds < 0 for entry in root.entries.values()):
                raise IntegrityError(f"root {block_root.hex()}: a block has fewer readers than none")
            self._check_order(block_root, root)
        if len(self) != sum(len(root.entries) for root in self._roots.values()):
            raise IntegrityError("the tier's number of blocks is wrong")
        if self.num_bytes != sum(root.num_bytes for root in self._roots.values()):
            raise IntegrityError("the tier's size is not that of its roots")

    def _check_order(self, block_root: bytes, root: _Root) -> None:
        oldest = root.oldest()
        heaps = [self._by_age, self._above_part] if root.num_bytes > self._part else [self._by_age]
        if oldest is not None and any(heap.keys.get(block_root, float("inf")) > oldest.used for heap in heaps):
            raise IntegrityError(f"root {block_root.hex()}: its oldest block is not known")
        if root.num_bytes <= self._part and block_root in self._above_part.keys:
            raise IntegrityError(f"root {block_root.hex()}: it has no more than an equal part")

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
            self._note_leaf(root, parent)

    def _note_leaf(self, root: _Root, entry: _Entry) -> None:
        root.note_leaf(entry)
        self._note_root(entry)

    def _note_root(self, entry: _Entry) -> None:
        """Tell the heaps of a block that may be its root's oldest leaf, or older."""
        block_root = entry.name.root
        self._by_age.note(block_root, entry.used)
        if self._roots[block_root].num_bytes > self._part:
            self._above_part.note(block_root, entry.used)

    def _place(self, block_root: bytes, root: _Root) -> None:
        """Put a root among those above the equal part, or take it out, after its size has changed."""
        if root.num_bytes <= self._part or block_root not in self._roots:
            self._above_part.discard(block_root)
        elif block_root in self._by_age.keys:
            self._above_part.note(block_root, self._by_age.keys[block_root])

    def _set_part(self, incoming: bytes) -> None:
        num_roots = len(self._roots) + (incoming not in self._roots)
        equal = max(0, self.max_bytes) / num_roots
        if num_roots < _MANY_ROOTS:
            if equal == self._part:
                return
        elif equal * (1 - _PART_SLACK) <= self._part <= equal:
            return
        self._part = equal if num_roots < _MANY_ROOTS else equal * (1 - _PART_SLACK / 2)
        ages = self._by_age.keys
        self._above_part = _RootHeap({each: ages[each] for each in ages if self._roots[each].num_bytes > self._part})

    def _next_victim(self, incoming: bytes, now: float) -> _Entry | None:
        """Return the oldest block of the roots that have more than an equal part, or that was not used for long; else the
        incoming root's own."""
        self._set_part(incoming)
        oldest = self._by_age.first(self._roots)
        if oldest is None or oldest.used <= now - STALE_S:
            return oldest
        above = self._above_part.first(self._roots)
        if above is not None or incoming not in self._roots:
            return above
        return self._roots[incoming].oldest()
