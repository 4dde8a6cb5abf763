"""Sums and copies of a launch equal the reference, bit for bit, and touch nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.blocks import TritonSums
from pdmesh.engine.kv_cache.block_moves import NUM_SUMS, Blocks, SummedCopies
from pdmesh.engine.kv_cache.ipc_pool import IndexedSums, unsigned, word_sum
from tests.engine.kernels.triton.paged import DEVICE

LAYERS = range(1, 3)
BOTH: list[SummedCopies] = [IndexedSums(), TritonSums()]


def random_words(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator).to(DEVICE)


def ids(*block_ids: int) -> Tensor:
    return torch.tensor(block_ids, dtype=torch.int32, device=DEVICE)


def no_sums() -> Tensor:
    return torch.zeros(NUM_SUMS, dtype=torch.int64, device=DEVICE)


def by_hand(words: list[int]) -> int:
    """As protos/pdmesh/v1/transfer.proto says it."""
    mask, total = 2**64 - 1, 0
    for index, word in enumerate(words):
        x = (word ^ (index + 1) * 0x9E3779B97F4A7C15) & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        total += x ^ x >> 31
    return total & mask


@pytest.mark.parametrize("copies", BOTH, ids=["torch", "triton"])
@pytest.mark.parametrize("block_words", [1, 12, 64, 1030])
@pytest.mark.parametrize("block_ids", [(5,), (7, 2, 8, 0, 1)], ids=str)
def test_sum_and_copy(copies: SummedCopies, block_words: int, block_ids: tuple[int, ...]) -> None:
    pool = random_words(4, 2, 9, block_words)
    travels = pool[1:3][:, :, list(block_ids)].contiguous()
    expected = by_hand([word % 2**64 for word in travels.flatten().tolist()])
    assert unsigned(int(word_sum(travels))) == expected
    blocks, sums, copied = Blocks(pool, LAYERS, ids(*block_ids)), no_sums(), no_sums()
    copies.sum(blocks, sums)
    target = random_words(3, 2, 11, block_words, seed=1)
    table, before = [10, 3, 0, 4, 6][: len(block_ids)], target.clone()
    copies.copy(blocks, Blocks(target, LAYERS, ids(*table)), copied)
    assert unsigned(int(sums.sum())) == unsigned(int(copied.sum())) == expected
    before[1:3][:, :, table] = travels
    assert torch.equal(target, before)


def test_what_a_sum_tells_apart() -> None:
    """A wrong bit anywhere, two in the same place of two words, words that changed places, a part of zeros that is longer."""
    words, one = random_words(64), torch.tensor(1, device=DEVICE)
    sums = {int(word_sum(words))}
    for place in (0, 63):
        for bit in (0, 31, 63):
            changed = words.clone()
            changed[place] ^= one << bit
            sums.add(int(word_sum(changed)))
            changed[7] ^= one << bit
            sums.add(int(word_sum(changed)))
    sums.add(int(word_sum(words.flip(0))))
    sums.update(int(word_sum(torch.zeros(count, dtype=torch.int64, device=DEVICE))) for count in (63, 64))
    assert len(sums) == 1 + 12 + 1 + 2


@pytest.mark.parametrize("copies", BOTH, ids=["torch", "triton"])
def test_what_does_not_fit_is_refused_by_name(copies: SummedCopies) -> None:
    pool = random_words(4, 2, 9, 8)
    good = Blocks(pool, LAYERS, ids(1, 2))
    cases = {
        "pool": Blocks(pool.transpose(0, 2), LAYERS, ids(1, 2)),
        "layers": Blocks(pool, range(3, 5), ids(1, 2)),
        "block_ids": Blocks(pool, LAYERS, ids(1, 2).long()),
        "source": Blocks(pool, LAYERS, ids(1, 2, 3)),
    }
    for name, blocks in cases.items():
        with pytest.raises(ValueError, match=name):
            copies.copy(blocks, good, no_sums())
