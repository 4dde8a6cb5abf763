"""What sessions retain: against a naive model, under pressure, with tenants that are over their bounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdmesh.engine.errors import IntegrityError
from pdmesh.engine.kv_cache.block_pool import BlockPool
from pdmesh.engine.kv_cache.retention import RetainedBlocks, Retention, RetentionBounds, fair_level


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def hashes(tenant: str, tokens: tuple[int, ...]) -> list[bytes]:
    """The hash chain of a prompt with one token in each block."""
    return [f"{tenant}:{tokens[: end + 1]}".encode() for end in range(len(tokens))]


# The naive model: each session holds chains, as lists of hashes.


@dataclass
class Held:
    tenant: str
    session: str
    chain: list[bytes]
    until: float


@dataclass
class Model:
    bounds: RetentionBounds
    held: list[Held] = field(default_factory=list)  # the least recently used first
    tenants: list[str] = field(default_factory=list)  # the least recently used first

    def blocks(self, tenant: str | None = None) -> set[bytes]:
        return {each for held in self.held if tenant in (None, held.tenant) for each in held.chain}

    def size(self, tenant: str) -> int:
        return max(len(self.blocks(tenant)), sum(held.tenant == tenant for held in self.held))

    def expire(self, now: float) -> None:
        self.held = [held for held in self.held if held.until > now]

    def release(self, tenant: str, session: str) -> int:
        of_session = [held for held in self.held if (held.tenant, held.session) == (tenant, session)]
        self.held = [held for held in self.held if held not in of_session]
        return len({each for held in of_session for each in held.chain})

    def forget(self, block_hash: bytes) -> None:
        for held in self.held:
            if block_hash in held.chain:
                held.chain = held.chain[: held.chain.index(block_hash)]
        self.tidy()

    def retain(self, new: Held) -> None:
        new.chain = new.chain[: self.bounds.tenant]
        if not new.chain:
            return
        self.tenants = [tenant for tenant in self.tenants if tenant != new.tenant] + [new.tenant]
        for held in [each for each in self.held if (each.tenant, each.session) == (new.tenant, new.session)]:
            if held.chain == new.chain:
                new.until = max(new.until, held.until)
            if held.chain == new.chain[: len(held.chain)] and held.until <= new.until:
                self.held.remove(held)
        self.held.append(new)
        self.cut(new.tenant, self.bounds.tenant)
        self.share_out()

    def share_out(self) -> None:
        sizes = {tenant: self.size(tenant) for tenant in self.tenants if self.size(tenant)}
        if max(len(self.blocks()), len(self.held)) <= self.bounds.total:
            return
        level = 0
        while sum(min(size, level + 1) for size in sizes.values()) <= self.bounds.total:
            level += 1
        left = self.bounds.total - sum(min(size, level) for size in sizes.values())
        over = [tenant for tenant, size in sizes.items() if size > level]
        for tenant in over:
            self.cut(tenant, level + (tenant in over[len(over) - left :]))

    def cut(self, tenant: str, limit: int) -> None:
        while self.size(tenant) > limit:
            first = next(held for held in self.held if held.tenant == tenant)
            if any(first.chain[-1] in held.chain for held in self.held if held is not first):
                first.chain = []
            else:
                first.chain = first.chain[:-1]
            self.tidy()

    def tidy(self) -> None:
        """Of equal chains of a session the last one stays, with the latest time."""
        left: list[Held] = []
        for held in reversed([each for each in self.held if each.chain]):
            twin = next((each for each in left if replace(each, until=held.until) == held), None)
            if twin is None:
                left.insert(0, held)
            else:
                twin.until = max(twin.until, held.until)
        self.held = left


@dataclass
class Running:
    """A request, with its blocks. The first `num_published` are in the prefix cache."""

    tenant: str
    chain: list[bytes]
    blocks: list[int]
    num_published: int


TENANTS, SESSIONS = ("a", "b", "c"), ("", "x", "y", "z")
TOKENS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
    st.integers(1, 12).map(lambda length: [0] * length),  # so that chains continue others
)


class RetentionMachine(RuleBasedStateMachine):
    """Requests of sessions come and go on a tiny pool, while others take blocks."""

    @initialize(num_blocks=st.integers(1, 16), tenant_share=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    def open(self, num_blocks: int, tenant_share: float) -> None:
        self.clock = Clock()
        bounds = RetentionBounds.of(num_blocks, tenant_share)
        self.pool = BlockPool(num_blocks, bounds, self.clock)
        self.model = Model(bounds)
        self.running: list[Running] = []
        self.others: list[int] = []
        self.last_used: dict[int, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.ever_retained: set[bytes] = set()
        self.num_uses = 0

    def allocate(self, count: int) -> list[int] | None:
        """Take blocks one by one, each the one that is worth least."""
        assert (count <= self.pool.num_free) or self.pool.allocate(count) is None, "retained blocks count as free"
        if count > self.pool.num_free:
            return None
        taken = []
        for _ in range(count):
            self.model.expire(self.clock.now)
            held = self.held_blocks() + Counter(taken)
            free = [block for block in range(self.pool.num_total) if not held[block]]
            [block] = self.pool.allocate(1) or [-1]
            self.check_eviction(block, free)
            taken.append(block)
            gone = self.hash_of.pop(block, None)
            if gone is not None:
                self.model.forget(gone)
        return taken

    def check_eviction(self, block: int, free: list[int]) -> None:
        retained, rank = self.model.blocks(), {each: self.last_used.get(each, -1) for each in free}
        uncached = [each for each in free if each not in self.hash_of]
        ordinary = [each for each in free if each in self.hash_of and self.hash_of[each] not in retained]
        if uncached:
            assert block in uncached
        elif ordinary:
            assert block in ordinary
            never = [each for each in ordinary if self.hash_of[each] not in self.ever_retained]
            assert block not in never or rank[block] == min(rank[each] for each in never)
        else:
            assert rank[block] == min(rank.values()), "of retained blocks, the least recently used goes first"

    def held_blocks(self) -> Counter[int]:
        return Counter(self.others) + Counter(block for each in self.running for block in each.blocks)

    def give_back(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.num_uses += 1
            self.last_used[block] = self.num_uses

    @rule(tenant=st.sampled_from(TENANTS), tokens=TOKENS)
    def begin(self, tenant: str, tokens: list[int]) -> None:
        chain = hashes(tenant, tuple(tokens))
        found = self.pool.find(chain)
        self.pool.acquire(found)
        self.running.append(Running(tenant, chain, found, len(found)))
        more = self.allocate(len(chain) - len(found))
        if more is None:
            self.give_back(self.running.pop().blocks)
        else:
            self.running[-1].blocks = found + more

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.running))
        for place in range(each.num_published, len(each.chain)):
            self.pool.publish(each.blocks[place], each.chain[place])
            if each.chain[place] not in self.hash_of.values() and each.blocks[place] not in self.hash_of:
                self.hash_of[each.blocks[place]] = each.chain[place]
        each.num_published = len(each.chain)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.running))
        self.pool.withdraw(each.blocks)
        for block in each.blocks:
            if (gone := self.hash_of.pop(block, None)) is not None:
                self.model.forget(gone)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), session=st.sampled_from(SESSIONS), seconds=st.sampled_from([0, 5, 10, 10, 60]))
    def end(self, data: st.DataObject, session: str, seconds: int) -> None:
        each = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        offered = each.chain[: each.num_published]
        published = set(self.hash_of.values())
        num_there = next((place for place, name in enumerate(offered) if name not in published), len(offered))
        self.pool.retain(Retention(each.tenant, session, seconds), offered)
        self.model.expire(self.clock.now)
        if seconds:
            self.model.retain(Held(each.tenant, session, offered[:num_there], self.clock.now + seconds))
            self.ever_retained |= set(offered)
        self.give_back(each.blocks)

    @rule(count=st.integers(1, 8))
    def press(self, count: int) -> None:
        self.others += self.allocate(count) or []

    @precondition(lambda self: self.others)
    @rule(share=st.floats(0, 1))
    def relax(self, share: float) -> None:
        count = int(share * len(self.others))
        self.others, back = self.others[:count], self.others[count:]
        self.give_back(back)

    @rule(seconds=st.sampled_from([1, 5, 30]))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(tenant=st.sampled_from(TENANTS), session=st.sampled_from(SESSIONS))
    def release(self, tenant: str, session: str) -> None:
        self.model.expire(self.clock.now)
        assert self.pool.release_retained(tenant, session) == self.model.release(tenant, session)

    @rule()
    def stats(self) -> None:
        self.model.expire(self.clock.now)
        assert self.pool.num_retained == len(self.model.blocks())

    @invariant()
    def is_whole(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check(self.held_blocks())
        published = set(self.pool.published())
        assert published == set(self.hash_of.values())
        assert {each for each in published if each in self.pool.retained} == self.model.blocks()
        assert len(self.pool.retained) == len(self.model.blocks())
        for tenant in TENANTS:
            assert self.pool.retained.num_of(tenant) == len(self.model.blocks(tenant)) <= self.model.bounds.tenant


RetentionMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRetention = RetentionMachine.TestCase
