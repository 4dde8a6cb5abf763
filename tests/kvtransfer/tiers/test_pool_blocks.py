"""Blocks out of a pool and back: of a pool in CPU memory and of a staged one, joined or not, with and without native code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvtransfer.framing import checksum
from kvtransfer.native import library
from kvtransfer.tiers.base import BlockBytes
from kvtransfer.tiers.pool_blocks import PoolBlocks, StagedBlocks, ViewedBlocks, pool_blocks
from kvtransfer.tiers.threads import TierThreads
from pdmesh.engine.kv_cache.streams import streams_of
from tests.kvtransfer.staged_world import Device
from tests.support.kv_memory import FakeKVMemory

LAYERS, BLOCKS, BYTES = 3, 20, 96


@pytest.fixture
def threads() -> Iterator[TierThreads]:
    made = TierThreads(2, name="test", is_behind=True)
    yield made
    made.close()


@pytest.fixture(params=[True, False], ids=["native", "numpy"])
def code(request: pytest.FixtureRequest) -> Iterator[None]:
    library.prepare()
    before = library.native()
    if not request.param:
        library.use(None)
    yield
    library.use(before)


async def check(blocks: PoolBlocks, memory: FakeKVMemory) -> None:
    ids = [7, 2, 19, 0, 11]
    before = [memory.block_bytes(each) for each in ids]
    read = await blocks.read(ids)
    assert blocks.block_bytes == len(before[0])
    assert [bytes(each.content) for each in read] == before
    assert [each.crc for each in read] == [checksum([content]) for content in before]
    damaged = BlockBytes(read[2].content, read[2].crc ^ 1)
    assert await blocks.write([1, 3, 5, 8], [read[0], read[1], damaged, read[3]]) == [True, True, False, True]


@pytest.mark.parametrize("num_planes", [1, 2])
async def test_a_pool_in_cpu_memory(threads: TierThreads, code: None, num_planes: int) -> None:
    memory = FakeKVMemory(LAYERS, BLOCKS, BYTES, num_planes=num_planes)
    memory.fill(1)
    others = {each: memory.block_bytes(each) for each in range(BLOCKS) if each not in (1, 3, 5, 8)}
    blocks = pool_blocks(memory, threads)
    assert isinstance(blocks, ViewedBlocks)
    await check(blocks, memory)
    assert [memory.block_bytes(each) for each in (1, 3, 8)] == [memory.block_bytes(each) for each in (7, 2, 0)]
    assert {each: memory.block_bytes(each) for each in others} == others
    memory.close()


async def test_a_staged_pool(threads: TierThreads, code: None) -> None:
    memory = FakeKVMemory(LAYERS, BLOCKS, BYTES)
    memory.fill(2)
    device = Device(memory, 16, streams_of(torch.device("cpu")))
    others = {each: memory.block_bytes(each) for each in range(BLOCKS) if each not in (1, 3, 5, 8)}
    blocks = pool_blocks(device.memory, threads)
    assert isinstance(blocks, StagedBlocks)
    await check(blocks, memory)
    device.show()
    assert [memory.block_bytes(each) for each in (1, 3, 8)] == [memory.block_bytes(each) for each in (7, 2, 0)]
    assert {each: memory.block_bytes(each) for each in others} == others
    assert device.is_whole
    device.memory.close()
    memory.close()


async def test_an_error_in_a_thread_is_the_callers(threads: TierThreads) -> None:
    def fail() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        await threads.run(fail)
    assert await threads.run(lambda: 3) == 3
