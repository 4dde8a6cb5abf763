"""What sessions retain: against a naive model, under pressure, with tenants that are over their bounds."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdmesh.engine.errors import IntegrityError
from pdmesh.engine.kv_cache.block_pool import BlockPool
from pdmesh.engine.kv_cache.retention import RetainedBlocks, Retention, RetentionBounds


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
        self.num_evicted = 0  # of retained ones
        self.hash_of: dict[int, bytes] = {}
        self.ever_retained: set[bytes] = set()
        self.num_uses = 0

    def allocate(self, count: int) -> list[int] | None:
        """Take blocks one by one, each the one that is worth least."""
        assert (count <= self.pool.num_free) or self.pool.allocate(count) is None, "retained blocks count as free"
        if count > self.pool.num_free:
            return None
        taken: list[int] = []
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
            self.num_evicted += 1
        assert self.pool.num_retained_evicted == self.num_evicted

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
        assert {each for each in published if each in self.pool.retained.hashes} == self.model.blocks()
        assert len(self.pool.retained) == len(self.model.blocks())
        for tenant in TENANTS:
            assert self.pool.retained.num_of(tenant) == len(self.model.blocks(tenant)) <= self.model.bounds.tenant


RetentionMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestRetention = RetentionMachine.TestCase


# The same model against the retained blocks alone: denser, since nothing has to be computed first.

CALLS = st.tuples(
    st.sampled_from(["retain", "retain", "retain", "retain", "wait", "forget", "release"]),
    st.sampled_from("aaabc"),
    st.sampled_from("xxy"),
    st.sampled_from([(0, 0, 0, 0, 0, 0), (0, 0, 1, 1, 1), (0, 0, 1, 0), (1, 1, 1)]),
    st.integers(1, 6),
    st.sampled_from([3, 5, 9]),
)


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 9), st.integers(0, 9), st.lists(CALLS, min_size=12, max_size=40))
def test_retained_blocks_are_those_of_the_naive_model(
    of_tenant: int, more: int, calls: list[tuple[str, str, str, tuple[int, ...], int, int]]
) -> None:
    clock, lapsed = Clock(), list[bytes]()
    bounds = RetentionBounds(of_tenant, of_tenant + more)
    model, retained = Model(bounds), RetainedBlocks(bounds, lapsed.append, clock)
    for name, tenant, session, tokens, length, seconds in calls:
        before, chain = model.blocks(), hashes(tenant, tokens[:length])
        lapsed.clear()
        if name == "retain":
            retained.retain(Retention(tenant, session, seconds), chain)
            model.retain(Held(tenant, session, chain, clock.now + seconds))
        elif name == "forget":
            retained.forget(chain[-1])
            model.forget(chain[-1])
        elif name == "release":
            assert retained.release(tenant, session) == model.release(tenant, session)
        else:
            clock.now += seconds - 2
            model.expire(clock.now)
            retained.expire()
        after = model.blocks()
        retained.check(after)
        assert set(retained.hashes) == after
        assert len(lapsed) == len(set(lapsed))
        assert before - after <= set(lapsed) <= before | set(chain)


# By hand.


def chain_of(pool: BlockPool, tenant: str, length: int) -> list[bytes]:
    """A chain that was computed, published and given back."""
    chain = hashes(tenant, tuple(range(length)))
    blocks = pool.allocate(length)
    assert blocks is not None
    for block, name in zip(blocks, chain, strict=True):
        pool.publish(block, name)
    pool.release(blocks)
    return chain


def pool_of(num_blocks: int, share: float = 0.5) -> tuple[BlockPool, Clock]:
    clock = Clock()
    return BlockPool(num_blocks, RetentionBounds.of(num_blocks, share), clock), clock


def test_retained_blocks_outlive_younger_ones_and_go_from_the_end() -> None:
    pool, _ = pool_of(8)
    kept = chain_of(pool, "a", 3)
    pool.retain(Retention("a", "s", 60), kept)
    chain_of(pool, "b", 5)
    assert pool.num_free == 8, "retained blocks are free"
    assert pool.allocate(5) == [7, 6, 5, 4, 3]
    assert pool.find(kept) == [0, 1, 2]
    assert pool.num_retained_evicted == 0
    assert pool.allocate(1) == [2]
    assert pool.num_retained_evicted == 1
    assert pool.find(kept) == [0, 1]
    assert pool.num_retained == 2


@pytest.mark.parametrize("how", ["expired", "released"])
def test_a_lapsed_block_keeps_its_place(how: str) -> None:
    """It is evicted before what was used after it, whether its turn has come in the meantime or not."""
    for is_set_aside in (False, True):
        pool, clock = pool_of(6)
        kept = chain_of(pool, "a", 2)
        pool.retain(Retention("a", "s", 60), kept)
        younger = chain_of(pool, "b", 4)
        num_taken = 1 if is_set_aside else 0
        assert pool.allocate(num_taken) == [5][:num_taken]
        if how == "expired":
            clock.now += 60
        else:
            assert pool.release_retained("a", "s") == 2
        assert pool.find(kept) == [0, 1], "it stays in the prefix cache"
        assert pool.num_retained == 0
        assert pool.allocate(2) == [1, 0]
        assert pool.num_retained_evicted == 0, "its time was over"
        assert len(pool.find(younger)) == 4 - num_taken


def test_a_block_is_retained_until_the_last_session_gives_it_up() -> None:
    pool, clock = pool_of(20)
    shared = chain_of(pool, "a", 4)
    pool.retain(Retention("a", "x", 10), shared)
    pool.retain(Retention("a", "y", 60), shared[:2])
    clock.now += 10
    assert pool.num_retained == 2
    assert pool.release_retained("a", "x") == 0
    assert pool.release_retained("a", "y") == 2
    assert pool.num_retained == 0


def test_a_later_request_renews_what_it_contains_and_nothing_else() -> None:
    pool, clock = pool_of(40)
    first = chain_of(pool, "a", 4)
    other = hashes("a", (0, 1, 7, 7))
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.publish(blocks[0], other[2])
    pool.publish(blocks[1], other[3])
    pool.retain(Retention("a", "s", 10), first)
    clock.now += 5
    pool.retain(Retention("a", "s", 10), other)
    assert pool.num_retained == 6
    clock.now += 5
    assert pool.num_retained == 4, "the first request's own blocks have kept their time"
    assert all(name in pool.retained.hashes for name in other)
    pool.retain(Retention("a", "s", 1), other)
    clock.now += 4
    assert pool.num_retained == 4, "a shorter time takes nothing away"


def test_a_copy_that_is_used_makes_the_published_block_recent() -> None:
    pool, _ = pool_of(4)
    kept = chain_of(pool, "a", 1)
    pool.retain(Retention("a", "s", 60), kept)
    chain_of(pool, "b", 3)
    held = pool.allocate(2)
    pool.release_retained("a", "s")
    pool.retain(Retention("a", "s", 60), kept)
    pool.check(Counter(held))
    assert pool.allocate(1) == [1]
    assert pool.find(kept) == [0]


def test_over_its_bound_a_tenant_gives_up_its_least_recently_used_chain_and_keeps_the_beginning_of_a_long_one() -> None:
    pool, _ = pool_of(40, 0.1)
    old, long = hashes("a", (9, 9)), hashes("a", tuple(range(10)))
    for chain in (old, long):
        for block, name in zip(pool.allocate(len(chain)) or [], chain, strict=True):
            pool.publish(block, name)
    pool.retain(Retention("a", "old", 60), old)
    pool.retain(Retention("a", "new", 60), long[:3])
    assert [name in pool.retained.hashes for name in (*old, *long[:4])] == [True, False, True, True, True, False]
    pool.retain(Retention("a", "new", 60), long)
    assert [name in pool.retained.hashes for name in (*old, *long[:5])] == [False, False, True, True, True, True, False]


def test_a_tenant_within_an_equal_part_loses_nothing_to_others() -> None:
    clock, bounds = Clock(), RetentionBounds(8, 10)
    retained = RetainedBlocks(bounds, clock=clock)
    for tenant, length in (("small", 2), ("large", 8), ("other", 8)):
        retained.retain(Retention(tenant, "s", 60), hashes(tenant, tuple(range(length))))
    assert [retained.num_of(tenant) for tenant in ("small", "large", "other")] == [2, 4, 4]
    retained.retain(Retention("fourth", "s", 60), hashes("fourth", tuple(range(8))))
    assert [retained.num_of(tenant) for tenant in ("small", "large", "other", "fourth")] == [2, 2, 3, 3]


def test_many_sessions_at_one_block_cost_no_more_than_the_bound() -> None:
    clock, bounds = Clock(), RetentionBounds(50, 100)
    retained = RetainedBlocks(bounds, clock=clock)
    for number in range(5000):
        retained.retain(Retention("a", str(number), 3600), hashes("a", (1,)))
        retained.retain(Retention("a", "same", 3600), hashes("a", (1, number)))
        clock.now += 1
    retained.check(set(hashes("a", (1,))) | {hashes("a", (1, number))[1] for number in range(5000)})
    assert retained.num_of("a") <= 50
    assert retained.num_records <= 50 + (64 + 3 * 50) + (64 + 3), "ends, and entries of the heaps of times and of tenants"


def test_ends_that_meet_keep_the_longer_time_and_the_later_use() -> None:
    clock = Clock()
    retained = RetainedBlocks(RetentionBounds(5, 10), clock=clock)
    one, two, other = hashes("a", (1, 2, 3)), hashes("a", (1, 2, 4)), hashes("a", (9,))
    retained.retain(Retention("a", "s", 60), one)
    retained.retain(Retention("a", "other", 60), other)
    retained.retain(Retention("a", "s", 10), two)
    retained.forget(one[1])
    assert set(retained.hashes) == {one[0], *other}
    clock.now += 10
    retained.expire()
    assert set(retained.hashes) == {one[0], *other}
    new = hashes("a", (7, 7, 7, 7))
    retained.retain(Retention("a", "new", 60), new)
    assert set(retained.hashes) == {one[0], *new}, "the other session's block was used before the second chain"


def test_without_a_bound_nothing_is_retained() -> None:
    pool, _ = pool_of(8, 0.0)
    pool.retain(Retention("a", "s", 60), chain_of(pool, "a", 3))
    assert pool.num_retained == 0


def test_check_finds_what_is_retained_and_not_there() -> None:
    retained = RetainedBlocks(RetentionBounds(4, 4), clock=Clock())
    retained.retain(Retention("a", "s", 60), hashes("a", (1, 2)))
    with pytest.raises(IntegrityError, match="not in the prefix cache"):
        retained.check(set(hashes("a", (1,))))


# Many tenants: what each is left with, and what that takes.


def shared_out(sizes: dict[str, int], total: int) -> dict[str, int]:
    """What tenants, the least recently used first, are left with: all sizes are sorted, and a common level is computed."""
    left, ordered = total, sorted(sizes.values())
    for place, size in enumerate(ordered):
        level, num_above = divmod(left, len(ordered) - place)
        if size > level:
            break
        left -= size
    else:
        return sizes
    over = [tenant for tenant, size in sizes.items() if size > level]
    above = over[len(over) - num_above :]
    return {tenant: min(size, level + (tenant in above)) for tenant, size in sizes.items()}


@given(st.lists(st.integers(1, 20), max_size=8), st.integers(0, 60))
def test_shared_out_is_all_and_no_more(sizes: list[int], total: int) -> None:
    assert sum(shared_out({str(place): size for place, size in enumerate(sizes)}, total).values()) == min(total, sum(sizes))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(0, 30),
    st.lists(
        st.tuples(st.sampled_from(["retain"] * 5 + ["release", "forget"]), st.integers(0, 24), st.integers(1, 20)), max_size=60
    ),
)
def test_taking_from_the_largest_leaves_what_sorting_all_sizes_would(
    of_tenant: int, more: int, calls: list[tuple[str, int, int]]
) -> None:
    """Each tenant has one chain, so its size is that of the chain."""
    bounds, sizes = RetentionBounds(of_tenant, of_tenant + more), dict[str, int]()
    retained = RetainedBlocks(bounds, clock=Clock())
    for name, number, length in calls:
        tenant, size = str(number), sizes.get(str(number), 0)
        chain = hashes(tenant, (0,) * length)
        if name == "release":
            assert retained.release(tenant, "s") == sizes.pop(tenant, 0)
        elif name == "forget":
            retained.forget(chain[-1])
            sizes |= {tenant: length - 1} if length <= size else {}
        else:
            retained.retain(Retention(tenant, "s", 60), chain)
            others = {each: size for each, size in sizes.items() if each != tenant}
            sizes = shared_out(others | {tenant: max(size, min(length, of_tenant))}, bounds.total)
        sizes = {each: size for each, size in sizes.items() if size}
        retained.check(set(retained.hashes))
        assert {str(each): count for each in range(25) if (count := retained.num_of(str(each)))} == sizes


def instructions(call: Callable[[], object]) -> int:
    """How many instructions of Python a call executes."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def crowded(num_tenants: int) -> RetainedBlocks:
    """Tenants with two blocks each, and no room for more."""
    retained = RetainedBlocks(RetentionBounds(num_tenants, 2 * num_tenants), clock=Clock())
    for number in range(num_tenants):
        retained.retain(Retention(str(number), "s", 60), hashes(str(number), (0, 0)))
    return retained


def cost_of_growth(num_tenants: int) -> float:
    """Instructions of a call, on average, in which a tenant retains two blocks more and gives up two; there are so many calls
    that the heap is rebuilt. Then a newcomer's, which takes its four from others."""
    retained, times = crowded(num_tenants), 4 * num_tenants
    chains = [hashes("0", (time, 1)) for time in range(times)]
    turns = [partial(retained.retain, Retention("0", "s", 60), chain) for chain in chains]
    some = sum(instructions(turn) for turn in turns)
    assert retained.num_of("0") == 2
    some += instructions(lambda: retained.retain(Retention("new", "s", 60), hashes("new", (0,) * 4)))
    assert len(retained) == 2 * num_tenants
    return some / times


def test_what_one_tenant_retains_in_a_full_pool_costs_the_same_with_few_and_with_many_tenants() -> None:
    few, many = cost_of_growth(30), cost_of_growth(300)
    assert few > 100, "instructions are counted"
    assert many < 1.5 * few
