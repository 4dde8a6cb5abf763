"""Retention: which blocks of the prefix cache are worth keeping for a session's next request, and until when.

What requests retain are chains of block hashes, each from a prompt's beginning. The chains of a tenant form trees, since a hash
stands for all tokens up to its block; a chain is held by its end alone:

    A ── B ── C ── D ◄ end of session 1, until 10:05          A, B, C, D, E are retained, each until the last end behind it is
              └─── E ◄ end of session 2, until 10:03          gone: E until 10:03, the others until 10:05

So a block that many sessions share costs no more than one that a single session has, and a session's next request, whose chain
begins with the one before, moves the session's end. Where it does not begin with it, the session has two ends, each with a time.

Bounds count blocks, in use or free, and ends where there are more of them. Over a tenant's bound its least recently used ends are
moved towards the beginning of their chains, block by block, or dropped where that gives up nothing, since other ends hold the
block. Over the bound of all tenants together, the tenant that has most gives up a block, until the bound is kept; of several
that have most, the least recently used. So each tenant may have the same number of blocks and gives up what exceeds it (max-min
fairness), and a tenant with no more than an equal part loses nothing to others.

This module knows hashes and times. Which block has a hash, and in what order blocks are evicted, is the pool's concern.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Sequence, Set
from dataclasses import dataclass, field

from pdmesh.engine.errors import IntegrityError

MAX_SECONDS = 86_400
"""The longest time that a request may ask for."""
TOTAL_SHARE = 0.5
"""Share of the pool's blocks that all tenants together may retain: the other blocks serve requests without retention."""
_STALE_PER_ENTRY = 2  # a heap is rebuilt when more of its entries than that, for each valid one, have been overtaken
_LEAST_HEAP = 64


@dataclass(frozen=True)
class Retention:
    """Say for whom, and for how long after a request has given its blocks back, they are worth keeping. `final`: nothing of the
    session follows, so when the request ends, the session is released: what is retained for it, and what others of its requests
    that run then would retain."""

    tenant: str
    session: str  # "": of no session, so only time and bounds release it
    seconds: float
    final: bool = False


@dataclass(frozen=True)
class RetentionBounds:
    """Limit the blocks that are retained for one tenant, and for all of them together."""

    tenant: int
    total: int

    @classmethod
    def of(cls, num_blocks: int, tenant_share: float) -> RetentionBounds:
        """Return the bounds of a pool. `tenant_share` 0: nothing is retained."""
        total = int(num_blocks * TOTAL_SHARE) if tenant_share else 0
        return cls(min(int(num_blocks * tenant_share), total), total)


NO_RETENTION = RetentionBounds(0, 0)


class _Tenant:
    """Hold what one tenant retains: its ends, the least recently used first, and the same by session."""

    __slots__ = ("ends", "name", "num_blocks", "sessions", "size", "used")

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_blocks = 0
        self.size = 0  # what counts against bounds: blocks, or ends where there are more of them
        self.used = 0  # a number that grows with each use of any tenant
        self.ends: OrderedDict[_End, None] = OrderedDict()
        self.sessions: dict[str, set[_End]] = {}


class _LargestFirst:
    """Find the largest tenant; of several the least recently used.

    A heap has an entry of each tenant, with a size that is never less than the tenant's: growth is noted at once, and an entry
    whose tenant has become smaller is corrected when it comes to the top. So each correction follows a block or an end that was
    given up, and takes O(log n) for n tenants.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, _Tenant]] = []  # -size, used; those with an older use are overtaken

    def __len__(self) -> int:
        return len(self._heap)

    def note(self, tenant: _Tenant, tenants: Collection[_Tenant]) -> None:
        """Note that a tenant was used and may have grown; `tenants` are all that have something."""
        heapq.heappush(self._heap, _rank(tenant))
        if len(self._heap) > _LEAST_HEAP + (1 + _STALE_PER_ENTRY) * len(tenants):
            self._heap = [_rank(each) for each in tenants]
            heapq.heapify(self._heap)

    def first(self) -> _Tenant:
        """Return the largest tenant; there is one that has something."""
        while True:
            size, used, tenant = self._heap[0]
            if used != tenant.used or not tenant.size:
                heapq.heappop(self._heap)
            elif -size != tenant.size:
                heapq.heapreplace(self._heap, _rank(tenant))
            else:
                return tenant


def _rank(tenant: _Tenant) -> tuple[int, int, _Tenant]:
    return -tenant.size, tenant.used, tenant


@dataclass(eq=False, slots=True)
class _Node:
    """Hold one retained block: an end is at it or behind it."""

    block_hash: bytes
    parent: _Node | None
    tenant: _Tenant
    children: set[_Node] = field(default_factory=set)
    ends: dict[str, _End] = field(default_factory=dict)  # by session


@dataclass(eq=False, slots=True)
class _End:
    """Hold the last block of a chain that a session retains until then."""

    session: str
    node: _Node
    until: float
    used: int = 0  # a number that grows with each use of any end
    is_dropped: bool = False


class RetainedBlocks:
    """Know which block hashes are retained. Costs of a call grow with the blocks that it is about; without retention there are
    none."""

    def __init__(
        self,
        bounds: RetentionBounds,
        on_lapse: Callable[[bytes], None] = lambda block_hash: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_lapse` is called with each hash that is not retained any more, ends of chains first. `clock`: seconds."""
        self.bounds = bounds
        self._on_lapse = on_lapse
        self._clock = clock
        self._nodes: dict[bytes, _Node] = {}
        self.hashes: Set[bytes] = self._nodes.keys()  # of what is retained, at any time
        self._tenants: dict[str, _Tenant] = {}
        self._largest = _LargestFirst()
        self._num_ends = 0
        self._size = 0  # of all tenants
        self._times: list[tuple[float, int, _End]] = []  # a heap; some of its entries are overtaken
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_records(self) -> int:
        """Return how many ends, and entries of heaps, are stored: the bounds limit them as well."""
        return self._num_ends + len(self._times) + len(self._largest)

    def num_of(self, tenant: str) -> int:
        """Return how many blocks are retained for a tenant."""
        found = self._tenants.get(tenant)
        return 0 if found is None else found.num_blocks

    def retain(self, retention: Retention, chain: Sequence[bytes]) -> None:
        """Retain the blocks of a chain, from its beginning on, for `retention.seconds` from now. What the session retains until
        later stays so."""
        chain = chain[: self.bounds.tenant]
        if retention.seconds <= 0 or not chain:
            return
        tenant = self._tenants.get(retention.tenant) or _Tenant(retention.tenant)
        path = self._path(tenant, chain)
        if not path:
            return
        self._tenants[retention.tenant] = tenant
        tenant.used = next(self._order)
        until = self._clock() + retention.seconds
        self._set_end(retention.session, path[-1], until)
        for node in path[:-1]:
            self._drop_overtaken(node, retention.session, until)
        self._count(tenant)
        self._largest.note(tenant, self._tenants.values())
        self._keep_bounds(tenant)

    def release(self, tenant: str, session: str) -> int:
        """Give up what is retained for a session; return how many blocks that were: some are still retained by others."""
        found = self._tenants.get(tenant)
        ends = list(found.sessions.get(session, ())) if found is not None else []
        num_blocks = len(_held_by(ends))
        for end in ends:
            self._drop(end)
        return num_blocks

    def expire(self) -> None:
        """Give up what is retained until now or before."""
        if not self._times or self._times[0][0] > (now := self._clock()):
            return
        while self._times and self._times[0][0] <= now:
            until, _, end = heapq.heappop(self._times)
            if not end.is_dropped and end.until == until:
                self._drop(end)

    def forget(self, block_hash: bytes) -> None:
        """Give up a block that the prefix cache has lost, and those behind it, which no prompt can reach without it."""
        node = self._nodes.get(block_hash)
        if node is None:
            return
        lost = [node]
        for each in lost:  # grows by what is behind
            lost.extend(each.children)
        for each in reversed(lost):
            for end in list(each.ends.values()):
                self._move(end, node.parent)
            self._remove(each)

    # The trees.

    def _path(self, tenant: _Tenant, chain: Sequence[bytes]) -> list[_Node]:
        """Return the nodes of a chain; those that are missing are made. A hash has its tenant in it; if a caller's has not, the
        tenant that retained it first has the block."""
        path: list[_Node] = []
        for block_hash in chain:
            parent = path[-1] if path else None
            node = self._nodes.get(block_hash)
            if node is None:
                node = self._nodes[block_hash] = _Node(block_hash, parent, tenant)
                tenant.num_blocks += 1
                if parent is not None:
                    parent.children.add(node)
            elif node.tenant is not tenant or node.parent is not parent:
                break
            path.append(node)
        return path

    def _set_end(self, session: str, node: _Node, until: float) -> None:
        """Put an end of the session at a node, as the most recently used; one that is there already is kept for longer."""
        end = node.ends.get(session)
        if end is None:
            end = node.ends[session] = _End(session, node, until)
            node.tenant.sessions.setdefault(session, set()).add(end)
            self._num_ends += 1
        end.until, end.used = max(end.until, until), next(self._order)
        node.tenant.ends[end] = None
        node.tenant.ends.move_to_end(end)
        self._note_time(end)

    def _drop_overtaken(self, node: _Node, session: str, until: float) -> None:
        """Drop an end of the session that lies on the way to another one, which holds all its blocks for as long."""
        end = node.ends.get(session) if node.ends else None
        if end is not None and end.until <= until:
            self._drop(end)

    def _drop(self, end: _End) -> None:
        node = end.node
        self._unlist(end)
        del node.ends[end.session]
        self._prune(node)

    def _unlist(self, end: _End) -> None:
        tenant = end.node.tenant
        end.is_dropped = True
        self._num_ends -= 1
        del tenant.ends[end]
        self._count(tenant)
        session = tenant.sessions[end.session]
        session.discard(end)
        if not session:
            del tenant.sessions[end.session]
        if not tenant.ends:
            del self._tenants[tenant.name]

    def _prune(self, node: _Node | None) -> None:
        """Remove a node that holds nothing, and those before it that then do so as well."""
        while node is not None and not node.ends and not node.children:
            self._remove(node)
            node = node.parent

    def _remove(self, node: _Node) -> None:
        del self._nodes[node.block_hash]
        node.tenant.num_blocks -= 1
        self._count(node.tenant)
        if node.parent is not None:
            node.parent.children.discard(node)
        self._on_lapse(node.block_hash)

    def _move(self, end: _End, node: _Node | None) -> None:
        """Move an end to a node before its own, which the caller prunes. If the session has an end there already, the one that
        was used last is left, for the longer time."""
        del end.node.ends[end.session]
        other = node.ends.get(end.session) if node is not None else None
        left, gone = (other, end) if other is not None and other.used > end.used else (end, other)
        if gone is not None:
            left.until = max(left.until, gone.until)
            self._unlist(gone)
        if node is None:
            self._unlist(end)
            return
        left.node = node
        node.ends[left.session] = left
        self._note_time(left)

    # Bounds.

    def _count(self, tenant: _Tenant) -> None:
        """Bring sizes up to date with a tenant's blocks and ends."""
        size = max(tenant.num_blocks, len(tenant.ends))
        self._size += size - tenant.size
        tenant.size = size

    def _keep_bounds(self, tenant: _Tenant) -> None:
        self._cut(tenant, self.bounds.tenant)
        if max(len(self._nodes), self._num_ends) <= self.bounds.total:
            return
        while self._size > self.bounds.total:
            largest = self._largest.first()
            self._cut(largest, largest.size - 1)

    def _cut(self, tenant: _Tenant, limit: int) -> None:
        while tenant.size > limit:
            self._shorten(next(iter(tenant.ends)))

    def _shorten(self, end: _End) -> None:
        """Give up the last block of a chain; the whole end if another one holds that block."""
        node = end.node
        if node.children or len(node.ends) > 1:
            self._drop(end)
            return
        self._move(end, node.parent)
        self._prune(node)

    # Times.

    def _note_time(self, end: _End) -> None:
        heapq.heappush(self._times, (end.until, next(self._order), end))
        if len(self._times) > _LEAST_HEAP + (1 + _STALE_PER_ENTRY) * self._num_ends:
            ends = (each for tenant in self._tenants.values() for each in tenant.ends)
            self._times = [(each.until, next(self._order), each) for each in ends]
            heapq.heapify(self._times)

    # Integrity.

    def check(self, published: Container[bytes]) -> None:
        """Raise IntegrityError unless retained blocks are published, each for an end behind it, and within the bounds."""
        ends = [end for tenant in self._tenants.values() for end in tenant.ends]
        held = _held_by(ends)
        if len(held) != len(self._nodes) or any(self._nodes.get(node.block_hash) is not node for node in held):
            raise IntegrityError(f"{len(self._nodes)} blocks are retained, and ends hold {len(held)}")
        if num_lost := sum(node.block_hash not in published for node in held):
            raise IntegrityError(f"{num_lost} retained blocks are not in the prefix cache")
        if len(ends) != self._num_ends or max(len(held), len(ends)) > self.bounds.total:
            raise IntegrityError(f"{len(held)} blocks and {len(ends)} ends do not keep the bound of {self.bounds.total}")
        num_blocks = Counter(node.tenant.name for node in held)
        if self._size != sum(tenant.size for tenant in self._tenants.values()):
            raise IntegrityError(f"the sizes of tenants do not add up to {self._size}")
        for tenant in self._tenants.values():
            if num_blocks[tenant.name] != tenant.num_blocks or not 0 < tenant.size <= self.bounds.tenant:
                raise IntegrityError(f"tenant {tenant.name!r} retains {num_blocks[tenant.name]} blocks, not {tenant.num_blocks}")
            if tenant.size != max(tenant.num_blocks, len(tenant.ends)):
                raise IntegrityError(f"tenant {tenant.name!r} has another size than {tenant.size}")


def _held_by(ends: Iterable[_End]) -> set[_Node]:
    """Return the nodes on the way to these ends."""
    held: set[_Node] = set()
    for end in ends:
        node: _Node | None = end.node
        while node is not None and node not in held:
            held.add(node)
            node = node.parent
    return held
