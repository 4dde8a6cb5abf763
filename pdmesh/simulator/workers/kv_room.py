"""The KV blocks of a modelled worker, its prefix cache, and its sequences. Pure.

Blocks belong to one sequence, or hold a part of a prefix that several share. An unused prefix stays until its blocks are needed,
least recently used first. Traces name prefixes in blocks of their own size (Mooncake: 512 tokens): each of those takes as many of
the worker's blocks as hold that many tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Names
from typing import NamedTuple, Protocol

# A request on one modelled worker: its tokens, and its blocks there.


class Watcher(Protocol):
    """Receive tokens at the end of the step that drew them. It may ask workers for something by events only."""

    def on_prompt(self, sequence: Sequence, at_s: float) -> None:
        """Handle a computed prompt, whose next token is drawn. With `num_left` 0 that was the last."""

    def on_end(self, sequence: Sequence, at_s: float) -> None:
        """Handle the last token of a row; the worker has forgotten it."""


class Sequence:
    """Hold a sequence. `num_tokens` must be computed before it draws its next token; `num_left` are yet to be drawn here.

    `watcher` receives its tokens, `tag` is the caller's. `goal_s`: its TPOT objective, 0 without one. `hashes` name the prompt's
    full prefix blocks in order. `prefill_only`: it ends with its first token, and its blocks stay until they are released.
    `KvRoom`, `Rows` and `Paces` own the fields that they set here."""

    __slots__ = (
        "compute_s", "end_step", "entry_step", "goal_s", "hashes", "num_blocks", "num_cached", "num_computed", "num_left",
        "num_tokens", "pace_key", "pace_step", "prefill_only", "shared", "tag", "turn", "was_preempted", "watcher", "where",
    )  # fmt: skip

    def __init__(
        self,
        watcher: Watcher,
        tag: object,
        num_tokens: int,
        num_left: int,
        *,
        goal_s: float = 0.0,
        hashes: tuple[int, ...] = (),
        prefill_only: bool = False,
    ) -> None:
        self.watcher = watcher
        self.tag, self.num_tokens, self.num_left, self.goal_s, self.hashes = tag, num_tokens, num_left, goal_s, hashes
        self.prefill_only = prefill_only
        self.where = ""  # the worker that it is on
        self.turn = 0  # its place in the order of arrival
        self.num_computed = self.num_cached = 0
        self.compute_s = 0.0  # of steps that held some of its prompt
        self.num_blocks = 0  # of its own
        self.shared: list[int] = []  # prefix blocks that it has pinned
        self.entry_step = 0
        self.end_step: int | None = None  # while it decodes
        self.pace_key: float | None = None
        self.pace_step = 0  # the one before its first
        self.was_preempted = False

    @property
    def num_remaining(self) -> int:
        """Return the prompt tokens that are still to be computed."""
        return self.num_tokens - self.num_computed


class CacheChanges(NamedTuple):
    """Hold prefix blocks that the pool, and the tiers beneath it, have stored and evicted."""

    stored: Names[int] = ()
    evicted: Names[int] = ()
    tier_stored: Names[int] = ()
    tier_evicted: Names[int] = ()


NO_CHANGES = CacheChanges()


class TierRoom:
    """Hold up to `max_blocks` prefix blocks beneath a pool, the least recently used first."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._held: dict[int, None] = {}
        self._changes: dict[int, bool] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)

    def store(self, names: Names[int]) -> None:
        """Take in blocks, given in the order of a prompt, or make them the youngest; the first of them outlive the last."""
        if not self._max_blocks:
            return
        for name in reversed(names[: self._max_blocks]):
            if name in self._held:
                del self._held[name]
            else:
                self._changes[name] = True
            self._held[name] = None
        for name in list(itertools.islice(self._held, max(0, len(self._held) - self._max_blocks))):
            del self._held[name]
            self._changes[name] = False

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Return the blocks stored and evicted since the last call."""
        changes, self._changes = self._changes, {}
        return _split(changes)


FREE_SHARE = 0.25
"""This much of the pool stays free when blocks come from elsewhere: the number of pdmesh/engine/block_sharing.py."""


class KvRoom:
    """Hold `num_blocks` of `block_size` tokens. `prefix_tokens` of one prefix hash; 0: no prefix cache. `tiers` take in what is
    published; None: there are none."""

    def __init__(self, num_blocks: int, block_size: int, prefix_tokens: int = 0, tiers: TierRoom | None = None) -> None:
        self.num_total, self.block_size = num_blocks, block_size
        self.num_used = 0
        self.num_hit_tokens = 0
        self._prefix_tokens = prefix_tokens
        self._per_prefix = prefix_tokens // block_size
        self._pinned: dict[int, int] = {}  # prefix block → sequences that use it
        self._idle: dict[int, None] = {}  # least recently used first
        self._changes: dict[int, bool] = {}  # since the last query: is it there?
        self._tiers = tiers

    @property
    def num_free(self) -> int:
        """Return the blocks available to a sequence, those of idle prefixes included."""
        return self.num_total - self.num_used

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def admit(self, sequence: Sequence, keep_free: int) -> bool:
        """Take blocks for all its tokens, shared ones for a prefix hit; False, and none, if fewer than `keep_free` stayed
        free."""
        found = self._find(sequence) if sequence.hashes and self._prefix_tokens else []
        waking = sum(name in self._idle for name in found) * self._per_prefix
        own = self.blocks_for(sequence.num_tokens) - len(found) * self._per_prefix
        if own + waking + keep_free > self.num_free:
            return False
        for name in found:
            self._idle.pop(name, None)
            self._pinned[name] = self._pinned.get(name, 0) + 1
        self.num_used += own + waking
        sequence.num_blocks, sequence.shared = own, found
        sequence.num_computed = sequence.num_cached = len(found) * self._prefix_tokens
        self.num_hit_tokens += sequence.num_computed
        self._make_place()
        return True

    def grow(self, num_blocks: int) -> None:
        """Take `num_blocks` more for decoding sequences; they must be free."""
        self.num_used += num_blocks
        self._make_place()

    def publish(self, sequence: Sequence) -> None:
        """Publish its new prefix blocks: all its tokens are computed, so the blocks can be hit from now on."""
        if not self._prefix_tokens:
            return
        full = min(len(sequence.hashes), sequence.num_tokens // self._prefix_tokens)
        for name in sequence.hashes[len(sequence.shared) : full]:
            if name not in self._pinned and name not in self._idle:
                self._pinned[name] = 1
                sequence.shared.append(name)
                sequence.num_blocks -= self._per_prefix
                self._changes[name] = True
        if self._tiers is not None and full:
            self._tiers.store(sequence.hashes[:full])

    def num_leading(self, names: Names[int], *, with_tiers: bool = False) -> int:
        """Return how many of the first `names` are in the pool, or `with_tiers` in either."""
        tiers = self._tiers if with_tiers else None
        for number, name in enumerate(names):
            if name not in self._pinned and name not in self._idle and (tiers is None or name not in tiers):
                return number
        return len(names)

    def num_missing(self, names: Names[int]) -> int:
        """Return how many of the names are not in the pool."""
        return sum([name not in self._pinned and name not in self._idle for name in names])

    def take_in(self, names: Names[int]) -> int:
        """Add the blocks of a prompt's beginning that came from elsewhere to the prefix cache, in the place of idle ones; return
        how many it lacked. None is taken if too little of the pool stayed free."""
        missing = [name for name in names if name not in self._pinned and name not in self._idle]
        num_idle = sum([name not in self._pinned for name in names])
        if num_idle * self._per_prefix + self.num_used > self.num_total * (1 - FREE_SHARE):
            return 0
        for name in reversed(names):  # the youngest from now on, the first of them outlive the last
            if name not in self._pinned:
                self._idle.pop(name, None)
                self._idle[name] = None
        for name in missing:
            self._changes[name] = True
        if self._tiers is not None:
            self._tiers.store(names)
        self._make_place()
        return len(missing)

    def release(self, sequence: Sequence) -> None:
        """Release what it holds; the end of a prefix is evicted before its beginning."""
        self.num_used -= sequence.num_blocks
        for name in reversed(sequence.shared):
            users = self._pinned.pop(name) - 1
            if users:
                self._pinned[name] = users
            else:
                self._idle[name] = None
                self.num_used -= self._per_prefix
        sequence.num_blocks, sequence.shared = 0, []

    def take_changes(self) -> CacheChanges:
        """Return the prefix blocks stored and evicted since the last call."""
        if not self._changes and self._tiers is None:
            return NO_CHANGES
        changes, self._changes = self._changes, {}
        tiers = ([], []) if self._tiers is None else self._tiers.take_changes()
        return CacheChanges(*_split(changes), *tiers)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every block in use belongs to one of these sequences."""
        own = sum(sequence.num_blocks for sequence in sequences)
        held = own + len(self._pinned) * self._per_prefix
        assert held == self.num_used <= self.num_total, f"{held} blocks are held, {self.num_used} are counted as used"

    def _find(self, sequence: Sequence) -> list[int]:
        """Return its cached blocks, never up to the last token: it is what the sequence is computed for."""
        found = []
        for name in sequence.hashes[: (sequence.num_tokens - 1) // self._prefix_tokens]:
            if name not in self._pinned and name not in self._idle:
                break
            found.append(name)
        return found

    def _make_place(self) -> None:
        while self._idle and self.num_used + len(self._idle) * self._per_prefix > self.num_total:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            self._changes[oldest] = False


def _split(changes: dict[int, bool]) -> tuple[list[int], list[int]]:
    """Return what is there now, and what is not."""
    stored = [name for name, is_there in changes.items() if is_there]
    return stored, [name for name, is_there in changes.items() if not is_there]
