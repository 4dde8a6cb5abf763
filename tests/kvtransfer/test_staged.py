"""Pushes out of and into pools that no transport can see, on a device that does things as late as it may, in any order."""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import PushFailed
from kvtransfer.manifest import Part
from kvtransfer.sender import push as sender_push
from kvtransfer.sender.push import PushJob
from kvtransfer.sender.send_queue import FirstTokensDrawn, KVReadiness, Ready
from pdmesh.engine.kv_cache.streams import InOrder
from tests.kvtransfer.endpoints import CHOICES, running, until
from tests.kvtransfer.staged_world import BLOCKS, LAYERS, Device, StagedWorld, at_work, do_all, staged
from tests.kvtransfer.test_conversion import PAIRS, make_world
from tests.support.reordering import ReorderingStreams


@pytest.mark.parametrize(
    ("transport", "ends"),
    [("tcp", "both"), ("grpc", "sender"), ("shm", "receiver"), ("grpc", "receiver")],
)
async def test_pushes_side_by_side(transport: str, ends: str) -> None:
    """More of them than pieces; blocks in another order than at the sender, a prefix that decode has."""
    streams = ReorderingStreams()
    with at_work(streams):
        async with staged(transport, streams, ends) as both:
            jobs = [both.world.job(f"r{i}", num_blocks=15, first_block=2, start=15 * i, spread=True) for i in range(3)]
            results = await asyncio.gather(*(both.world.sender.push(job, timeout_s=10) for job in jobs))
            assert {result.transport for result in results} == {transport}
            for device in both.devices:
                device.show()
            pairs = [(job, both.world.delegate.held[job.reservation.reservation_id]) for job in jobs]
            for job, held in pairs:
                for source_id, target_id in list(zip(job.source_block_ids, held.block_ids, strict=True))[2:]:
                    assert both.world.source.block_bytes(source_id) == both.world.target.block_bytes(target_id)
            written = {target_id for _, held in pairs for target_id in held.block_ids[2:]}
            both.world.check_untouched(set(range(both.world.target.num_blocks)) - written)


@pytest.mark.parametrize("name", PAIRS)
async def test_other_layouts_arrive_as_they_do_in_memory_of_the_host(name: str) -> None:
    """A prefix of the target's blocks, and blocks that are changed in part."""
    plain, both = make_world("tcp", *PAIRS[name]), make_world("tcp", *PAIRS[name])
    async with running(plain):
        await plain.sender.push(plain.job(num_blocks=5, first_block=1), timeout_s=10)
        expected = bytes(plain.target.memory())
    async with staged("tcp", InOrder(), world=both) as on_devices:
        await both.sender.push(both.job(num_blocks=5, first_block=1), timeout_s=10)
        on_devices.target.show()
        assert bytes(both.target.memory()) == expected != both.before


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_told_as_it_is_launched_is_sent_as_it_is_computed(seed: int) -> None:
    streams, chance = ReorderingStreams(), random.Random(seed)
    async with staged("tcp", streams) as both:
        final = both.source.pool.clone()
        both.source.pool.zero_()
        job = both.world.job(feed=KVReadiness())
        with at_work(streams, seed):
            push = asyncio.create_task(both.world.sender.push(job, timeout_s=10))
            for first, end in ((0, 7), (7, 14), (14, BLOCKS)):
                await _step(both, job, final, range(first, end), chance)
            job.feed.end(FirstTokensDrawn(CHOICES))
            assert (await push).committed
        both.source.show()
        both.target.show()
        assert torch.equal(both.source.pool[:, :, :BLOCKS], final[:, :, :BLOCKS])
        both.world.check_arrived(job)


async def _step(both: StagedWorld, job: PushJob, final: Tensor, blocks: range, chance: random.Random) -> None:
    """As an engine on a device: what a layer writes is launched, marked and told."""
    marks, ids = both.source.memory.marks, [job.source_block_ids[block] for block in blocks]
    streams = marks._streams
    assert isinstance(streams, ReorderingStreams)
    marks.begin()
    for layer in range(LAYERS):
        for block in ids:  # a kernel that takes its time
            streams.compute(partial(_write, both.source.pool, final, layer, block))
        marks.reach(layer + 1)
        job.feed.advance(Ready(blocks.start, blocks.stop, layer + 1))
        await asyncio.sleep(0.002 * chance.random())
    job.feed.advance(Ready(blocks.stop, blocks.stop, LAYERS))


def _write(pool: Tensor, final: Tensor, layer: int, block: int) -> None:
    time.sleep(0.0005)
    pool[layer, :, block] = final[layer, :, block]


async def test_a_cancelled_push_ends_when_nothing_reads_its_blocks() -> None:
    streams = ReorderingStreams()
    async with staged("tcp", streams) as both:
        push = asyncio.create_task(both.world.sender.push(both.world.job(), timeout_s=10))
        await until(lambda: _has_work(both.source), "a part is fetched")
        push.cancel()
        await asyncio.sleep(0.05)
        assert not push.done()
        do_all(streams)
        with pytest.raises(asyncio.CancelledError):
            await push
        assert both.source.is_whole


async def test_blocks_are_given_away_when_nothing_writes_to_them() -> None:
    streams = ReorderingStreams()
    async with staged("tcp", streams, "receiver") as both:
        push = asyncio.create_task(both.world.sender.push(both.world.job(), timeout_s=10))
        await until(lambda: not streams.is_idle, "a part is stored")  # not only that a piece is taken for it
        quiesce = asyncio.create_task(both.world.receiver.quiesce("r1"))
        await asyncio.sleep(0.05)
        assert not quiesce.done()
        do_all(streams)
        await quiesce
        before = both.target.pool.clone()
        do_all(streams)
        with pytest.raises(PushFailed):
            await push
        do_all(streams)
        assert torch.equal(both.target.pool, before)
        await until(lambda: both.target.is_whole, "all pieces are back")


def _has_work(device: Device) -> bool:
    """Every piece is lent or one is being copied."""
    return not device.is_whole


async def test_what_arrives_outlasts_steps_that_were_launched_before_the_push() -> None:
    """They may write to blocks that were given away under them: pdmesh/engine/runner/overlap.py."""
    streams = ReorderingStreams()
    async with staged("tcp", streams, "receiver") as both:
        job = both.world.job()
        for block in both.world.delegate.held["r1"].block_ids:
            streams.compute(partial(_spoil, both.target.pool, block))
        push = asyncio.create_task(both.world.sender.push(job, timeout_s=10))
        while not push.done():
            streams.advance(lambda count: count - 1)  # copies first, wherever they may
            await asyncio.sleep(0.001)
        assert push.result().committed
        both.target.show()
        both.world.check_arrived(job)


def _spoil(pool: Tensor, block: int) -> None:
    pool[:, :, block, 0] = -1


async def test_a_push_that_waits_for_the_device_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_push, "FETCH_ALIVE_S", 0.01)
    streams, signs = ReorderingStreams(), list[str]()
    async with staged("tcp", streams, "sender") as both:
        job = both.world.job()
        both.world.delegate.on_progress = lambda target: signs.append(target.reservation_id)
        push = asyncio.create_task(both.world.sender.push(job, timeout_s=10))
        await until(lambda: len(signs) >= 3, "the lease is kept, though nothing has been sent")
        with at_work(streams):
            assert (await push).committed
        both.world.check_arrived(job)


async def test_a_peer_that_dies_within_a_part_holds_no_piece() -> None:
    async with staged("tcp", InOrder(), "receiver") as both:
        world = both.world
        world.job()
        before = both.target.pool.clone()
        part = Part(0, 0, 1, 0, 4)
        async with world.raw_peer(world.hello("r1")) as peer:
            await peer.send(part=peer.header(part))
            await peer.send_bytes(bytes(part.num_bytes(world.source.bytes_per_layer_block) // 2))
            await asyncio.sleep(0.05)
            assert both.target.is_whole
        await until(lambda: "failed" in world.delegate.kinds(), "the push has failed")
        assert torch.equal(both.target.pool, before)


async def test_a_corrupt_part_is_not_stored() -> None:
    async with staged("tcp", InOrder(), "receiver") as both:
        world = both.world
        world.job(num_blocks=4)
        before = both.target.pool.clone()
        part = Part(0, 0, LAYERS, 0, 4)
        async with world.raw_peer(world.hello("r1")) as peer:
            answer = await peer.send_part(part, [0, 1, 2, 3], crc32c=1)
            assert not answer.part_reply.ok
            assert torch.equal(both.target.pool, before)
            answer = await peer.send_part(part, [0, 1, 2, 3])
            assert answer.part_reply.ok
        held = world.delegate.held["r1"]
        both.target.show()
        for source_id, target_id in enumerate(held.block_ids):
            assert world.source.block_bytes(source_id) == world.target.block_bytes(target_id)
