"""The tier in host memory."""

from __future__ import annotations

import pytest

from kvtransfer.tiers.backends.host import HostTier
from kvtransfer.tiers.base import BlockBytes
from tests.kvtransfer.tiers.blocks import SIZE, block, chain


def content_of(tier: HostTier, number: int) -> bytes | None:
    name = chain(number + 1)[number]
    lent = tier.lend(name)
    if lent is None:
        return None
    content = bytes(lent.content)
    assert lent.crc == block(number).crc
    lent.content.release()
    tier.give_back(name, is_damaged=False)
    return content


def test_blocks_come_back_until_others_need_their_places() -> None:
    tier = HostTier(3 * SIZE + 17, SIZE)
    assert tier.max_bytes == 3 * SIZE
    names = chain(5)
    for number in range(3):
        tier.write(names[number], block(number), 0.0)
    assert [content_of(tier, number) for number in range(3)] == [bytes(block(number).content) for number in range(3)]
    other = chain(1, b"other")[0]
    tier.write(other, block(9), 0.0)
    tier.check()
    assert tier.num_blocks == 3 and tier.holds([*names, other]) == [True, True, False, False, False, True]
    assert content_of(tier, 2) is None and content_of(tier, 1) == bytes(block(1).content)
    assert tier.take_changes() == [names[0], names[1], names[2], names[2], other]
    tier.close()


def test_a_block_that_is_read_keeps_its_place() -> None:
    tier, names = HostTier(SIZE, SIZE), [*chain(1), *chain(1, b"other")]
    tier.write(names[0], block(0), 0.0)
    lent = tier.lend(names[0])
    assert lent is not None
    tier.write(names[1], block(1), 0.0)
    assert tier.holds(names) == [True, False] and bytes(lent.content) == bytes(block(0).content)
    lent.content.release()
    tier.give_back(names[0], is_damaged=False)
    tier.write(names[1], block(1), 0.0)
    assert tier.holds(names) == [False, True]
    tier.close()


def test_a_damaged_block_is_forgotten_behind_its_last_reader() -> None:
    tier, [name] = HostTier(2 * SIZE, SIZE), chain(1)
    tier.write(name, block(0), 0.0)
    first, second = tier.lend(name), tier.lend(name)
    assert first is not None and second is not None
    tier.give_back(name, is_damaged=True)
    assert tier.holds([name]) == [True]
    tier.give_back(name, is_damaged=False)
    assert tier.holds([name]) == [False] and tier.counts.num_corrupt == 1
    tier.check()
    tier.close()


def test_a_block_that_was_damaged_on_its_way_is_not_taken_in() -> None:
    tier, [name] = HostTier(2 * SIZE, SIZE), chain(1)
    good = block(0)
    tier.write(name, BlockBytes(good.content, good.crc ^ 1), 0.0)
    assert tier.holds([name]) == [False] and tier.counts.num_corrupt == 1 and tier.num_bytes == 0
    for number, each in enumerate(chain(2)):  # both places are free
        tier.write(each, block(number), 0.0)
    assert tier.num_blocks == 2
    tier.close()


def test_less_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match=f"kv_host_gb: 10 bytes are less than a block of {SIZE}"):
        HostTier(10, SIZE)
