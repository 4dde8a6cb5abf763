"""Which blocks a tier gives up: leaves first, the least recently used, and no root's equal part to others."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtransfer.tiers.backends.index import MOST_VICTIMS, STALE_S, TierIndex, _Entry, _Root
from pdmesh.engine.kv_cache.published_blocks import BlockName, PublishedBlocks, names_of

ROOT, OTHER = b"root", b"other root"


def chain(*letters: str, root: bytes = ROOT) -> list[BlockName]:
    return names_of(root, [letter.encode() for letter in letters])


NEW, NEW_OF_OTHER = chain("new")[0], chain("new", root=OTHER)[0]


def index_of(max_blocks: int, *names: BlockName, used: float = 0.0) -> TierIndex:
    index = TierIndex(max_blocks)
    for name in names:
        index.add(name, 1, used)
    return index


def test_names_follow_each_other() -> None:
    assert names_of(ROOT, [b"a", b"b", b"c"]) == [
        BlockName(ROOT, ROOT, b"a"),
        BlockName(ROOT, b"a", b"b"),
        BlockName(ROOT, b"b", b"c"),
    ]
    assert names_of(ROOT, [b"a", b"b", b"c"], 1) == names_of(ROOT, [b"a", b"b", b"c"])[1:]
    assert names_of(ROOT, []) == []


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    index = index_of(3, *chain("a", "b", "c"))
    assert index.victims(2, NEW, 1.0) == list(reversed(chain("a", "b", "c")[1:]))
    index.check()


def test_the_least_recently_used_end_goes_first() -> None:
    left, right = chain("a", "b", "c"), chain("a", "b", "d")
    index = index_of(4, *left, right[-1])
    index.touch(left[-1], 5.0)
    assert index.victims(1, NEW, 6.0) == [right[-1]]


def test_what_a_session_keeps_outlasts_what_is_used_before_its_time_is_over() -> None:
    kept, used = chain("k"), chain("u")
    index = index_of(2, *kept, *used)
    index.touch(kept[0], 100.0)  # until then
    index.touch(used[0], 50.0)
    assert index.victims(1, NEW, 51.0) == used
    index.add(used[0], 1, 101.0)
    assert index.victims(1, NEW, 102.0) == kept


def test_a_block_never_displaces_the_one_before_it() -> None:
    names = chain("a", "b", "c")
    index = index_of(2, *names[:2])
    assert index.victims(1, names[2], 1.0) == []
    assert index.victims(1, NEW, 1.0) == [names[1]]


def test_a_reader_holds_its_block() -> None:
    [name] = chain("a")
    index = index_of(1, name)
    assert index.hold(name) and index.victims(1, NEW, 9.0) == []
    index.let_go(name)
    assert index.victims(1, NEW, 9.0) == [name]
    assert not index.hold(name)


def test_a_tenant_with_no_more_than_its_part_loses_nothing_to_others() -> None:
    mine, theirs = chain("m"), chain("a", "b", "c", root=OTHER)
    index = index_of(4, *mine)
    for name in theirs:
        index.add(name, 1, 10.0)
    assert index.victims(1, NEW_OF_OTHER, 11.0) == [theirs[-1]]  # younger than mine, but they have more than half
    assert index.victims(1, NEW, 11.0) == []  # there is room now


def test_a_newcomer_gets_its_part_of_a_full_tier() -> None:
    index = index_of(4, *chain("a", "b"), *chain("c", "d", root=OTHER))
    assert len(index.victims(1, chain("new", root=b"third")[0], 1.0)) == 1
    index.check()


def test_what_was_not_used_for_long_goes_whoever_has_it() -> None:
    mine = chain("m")
    index = index_of(4, *mine)
    for name in chain("a", "b", "c", root=OTHER):
        index.add(name, 1, STALE_S + 1)
    assert index.victims(1, NEW_OF_OTHER, STALE_S + 2) == mine


def test_a_block_that_comes_before_those_behind_it() -> None:
    a, b, c = chain("a", "b", "c")
    index = index_of(9, c, a)
    index.check()
    index.add(b, 1, 0.0)
    index.check()
    assert index.remove(b) and not index.remove(b)
    index.check()
    assert set(index.victims(9, NEW, 1.0)) == {a, c} and len(index) == 0 and index.num_bytes == 0


def test_a_block_that_was_lost_and_came_back_while_it_was_read_is_not_held_less_than_not_at_all() -> None:
    [name] = chain("a")
    index = index_of(1, name)
    assert index.hold(name) and index.remove(name)
    index.add(name, 1, 0.0)
    index.let_go(name)
    index.check()
    assert index.hold(name) and index.victims(1, NEW, 9.0) == []
    index.let_go(name)
    assert index.victims(1, NEW, 9.0) == [name]


def test_a_block_that_was_lost_while_it_was_read_leaves_nothing_behind() -> None:
    [name] = chain("a")
    index = index_of(1, name)
    assert index.hold(name) and index.hold(name) and index.remove(name)
    index.let_go(name)
    index.let_go(name)
    index.let_go(name)
    index.add(name, 1, 0.0)
    assert not index.is_held(name) and index.victims(1, NEW, 9.0) == [name]


def test_one_call_gives_up_a_bounded_number_of_blocks() -> None:
    num_blocks = 3 * MOST_VICTIMS
    names = [chain(f"{number}")[0] for number in range(num_blocks)]
    index = index_of(num_blocks, *names)
    index.max_bytes = 1
    assert [len(index.victims(1, NEW, 9.0)) for _ in range(4)] == [MOST_VICTIMS] * 3 + [0]


@pytest.mark.parametrize("num_bytes", [1, 3])
def test_a_victim_is_found_without_a_look_at_all_roots(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots with more than their part and with less, the small ones the oldest, and each write a new root's."""
    index, num_roots, looks = TierIndex(0), 2_000, [0]
    for number in range(num_roots):
        is_large = number >= num_roots // 2
        for name in chain(*"abc"[: 3 if is_large else 1], root=b"%d" % number):
            index.add(name, num_bytes, 10.0 + number)
    index.max_bytes = index.num_bytes
    oldest = _Root.oldest

    def counted(root: _Root) -> _Entry | None:
        looks[0] += 1
        return oldest(root)

    monkeypatch.setattr(_Root, "oldest", counted)
    for number in range(200):
        name = chain("new", root=b"new %d" % number)[0]
        [victim] = index.victims(num_bytes, name, 3_000.0)
        assert int(victim.root) >= num_roots // 2
        index.add(name, num_bytes, 3_000.0)
    assert looks[0] < 200 * 10
    index.check()


def test_many_roots_of_the_same_size_make_room_for_another() -> None:
    index = TierIndex(100)
    for number in range(100):
        index.add(chain("a", root=b"%d" % number)[0], 1, float(number))
    for number in range(100, 300):
        name = chain("a", root=b"%d" % number)[0]
        assert [each.root for each in index.victims(1, name, float(number))] == [b"%d" % (number - 100)]
        index.add(name, 1, float(number))


class Tiers(RuleBasedStateMachine):
    """Whatever comes, goes, is used and is held: the index stays whole, and keeps its bound."""

    NAMES = tuple(
        name
        for root in (ROOT, OTHER)
        for letters in ("abcd", "abxy", "pq")
        for name in chain(*(letters[: n + 1] for n in range(len(letters))), root=root)
    )

    def __init__(self) -> None:
        super().__init__()
        self.index = TierIndex(6)
        self.held: list[BlockName] = []
        self.now = 0.0

    @rule(name=st.sampled_from(NAMES))
    def write(self, name: BlockName) -> None:
        self.now += 1
        if name not in self.index:
            gone = self.index.victims(1, name, self.now)
            assert not set(gone) & set(self.held)
            if self.index.num_bytes < self.index.max_bytes:
                self.index.add(name, 1, self.now)

    @rule(name=st.sampled_from(NAMES))
    def use(self, name: BlockName) -> None:
        self.now += 1
        self.index.touch(name, self.now)

    @rule(name=st.sampled_from(NAMES))
    def hold(self, name: BlockName) -> None:
        if self.index.hold(name):
            self.held.append(name)

    @rule()
    def let_go(self) -> None:
        if self.held:
            self.index.let_go(self.held.pop())

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: BlockName) -> None:
        was_here = name in self.index
        assert self.index.remove(name) is was_here

    @invariant()
    def whole(self) -> None:
        self.index.check()
        assert self.index.num_bytes <= self.index.max_bytes
        assert all(self.index.is_held(name) for name in self.held if name in self.index)


Tiers.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTiers = Tiers.TestCase


def test_a_log_that_is_not_read_drops_its_oldest_names() -> None:
    log = PublishedBlocks(3)
    names = chain("a", "b", "c", "d")
    log.note(names[:2], 0.0)
    log.note(names[1:], 7.0)
    assert log.pending and log.num_dropped == 1
    assert log.take(2) == [(names[1], 7.0), (names[2], 7.0)]
    assert log.take(9) == [(names[3], 7.0)] and not log.pending


@pytest.mark.parametrize("max_blocks", [1, 2, 5])
def test_the_heap_of_leaves_does_not_grow_with_uses(max_blocks: int) -> None:
    index = index_of(max_blocks, *chain(*"abcde"[:max_blocks]))
    for number in range(10_000):
        index.touch(chain(*"abcde"[:max_blocks])[-1], float(number))
    assert max(len(root.leaves) for root in index._roots.values()) < 200
