"""What is worth writing, by what became of the blocks before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtransfer.tiers import reuse
from kvtransfer.tiers.reuse import LEAST_OUTCOMES, PATIENCE_S, WORTH, ReuseWatch
from pdmesh.engine.kv_cache.published_blocks import BlockName


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> ReuseWatch:
    return ReuseWatch(clock)


def names(count: int, first: int = 0) -> list[BlockName]:
    return [BlockName(b"root", b"parent", number.to_bytes(4)) for number in range(first, first + count)]


def hashes(blocks: list[BlockName]) -> list[bytes]:
    return [name.block_hash for name in blocks]


def chosen(watch: ReuseWatch, blocks: list[BlockName], keep_s: float = 0.0) -> list[BlockName]:
    return list(watch.chosen(dict.fromkeys(blocks, keep_s)))


def serials() -> Iterator[int]:
    yield from range(10**6, 10**9, 10**5)


@pytest.fixture
def useless(watch: ReuseWatch, clock: Clock) -> ReuseWatch:
    """So many blocks were published and not used that no more are written."""
    assert chosen(watch, names(LEAST_OUTCOMES))
    clock.now += PATIENCE_S
    assert not watch.is_worth
    return watch


def test_everything_is_written_until_something_is_known(watch: ReuseWatch, clock: Clock) -> None:
    assert chosen(watch, names(10 * LEAST_OUTCOMES)) == names(10 * LEAST_OUTCOMES)
    clock.now += 0.99 * PATIENCE_S
    assert watch.is_worth, "a conversation may think for so long"


def test_what_is_not_used_again_is_not_written(useless: ReuseWatch) -> None:
    assert chosen(useless, names(5, 10**6)) == []


def test_what_a_session_wants_is_written_all_the_same(useless: ReuseWatch) -> None:
    assert chosen(useless, names(5, 10**6), keep_s=60.0) == names(5, 10**6)


def test_what_was_not_written_is_written_when_it_is_used(useless: ReuseWatch) -> None:
    blocks = names(5, 10**6)
    chosen(useless, blocks)
    useless.used(hashes(blocks[:3]))
    assert useless.has_again
    assert [*useless.take_again(2), *useless.take_again(2)] == blocks[:3]
    useless.used(hashes(blocks[:3]))
    assert not useless.has_again and not useless.take_again(2), "once is enough"


def test_conversations_that_come_back_after_a_long_time_are_written_from_then_on(useless: ReuseWatch, clock: Clock) -> None:
    clock.now += 3600.0
    useless.used(hashes(names(LEAST_OUTCOMES // 8)))
    assert useless.is_worth
    assert chosen(useless, names(5, 10**6)) == names(5, 10**6)


def test_one_prompt_that_all_share_is_no_reason_to_write_the_rest(watch: ReuseWatch, clock: Clock) -> None:
    chosen(watch, shared := names(4))
    for serial, _ in zip(serials(), range(50), strict=False):
        watch.used(hashes(shared))
        chosen(watch, names(20, serial))
        clock.now += 1.0
    assert not watch.is_worth
    assert chosen(watch, names(20, 5)) == []


def test_the_share_is_that_of_the_last_blocks(watch: ReuseWatch, clock: Clock) -> None:
    for serial, _ in zip(serials(), range(60), strict=False):
        blocks = names(100, serial)
        chosen(watch, blocks)
        watch.used(hashes(blocks[: int(100 * 2 * WORTH)]))
        clock.now += PATIENCE_S
    assert watch.is_worth


def test_names_are_forgotten(watch: ReuseWatch, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "MOST_NAMES", 1000)
    monkeypatch.setattr(reuse, "MOST_HASHES", 1000)
    for serial, _ in zip(serials(), range(50), strict=False):
        chosen(watch, names(100, serial))
        clock.now += PATIENCE_S / 4
    kept = (watch._young, watch._missed, watch._skipped)
    assert all(len(each) <= 1000 for each in kept) and watch._skipped
