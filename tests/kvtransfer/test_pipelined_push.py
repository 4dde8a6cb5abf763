"""Pushes that run beside the prefill, over one connection and over several."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from kvtransfer.errors import PushFailed
from kvtransfer.manifest import Part
from kvtransfer.sender import push as sender_push
from kvtransfer.sender import sender
from kvtransfer.sender.push import PushJob
from kvtransfer.sender.send_queue import FirstTokensDrawn, KVReadiness, NothingToDecode, Ready
from tests.kvtransfer.endpoints import CHOICES, World, nothing_left, running, until

LAYERS, BLOCKS = 3, 20


@pytest.fixture
async def several(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Three connections for one push, small as it is."""
    monkeypatch.setattr(sender, "BYTES_FOR_A_CONNECTION", 1 << 10)
    with nothing_left():
        world = World("tcp", part_bytes=2048)
        world.sender = world.make_sender(part_bytes=2048, num_connections=3)
        async with running(world):
            yield world


def arrived(world: World, job: PushJob, layer: int, blocks: range) -> bool:
    """This layer of these blocks is in the receiver's pool."""
    held = world.delegate.held["r1"].block_ids
    ids = job.source_block_ids
    return all(
        world.target.block_view(layer, kv, held[b]) == world.source.block_view(layer, kv, ids[b]) for b in blocks for kv in (0, 1)
    )


async def test_layers_travel_before_the_prefill_ends(world: World) -> None:
    job = world.job(feed=KVReadiness())
    push = asyncio.create_task(world.sender.push(job, timeout_s=10))
    job.feed.advance(Ready(4, 12, 0))  # a cached prefix; a step begins
    await until(lambda: arrived(world, job, 2, range(4)), "the prefix arrives")
    for layer in range(LAYERS):
        job.feed.advance(Ready(4, 12, layer + 1))
    await until(lambda: arrived(world, job, 2, range(4, 12)), "the first step's layers arrive")
    job.feed.advance(Ready(12, BLOCKS, 1))
    await asyncio.sleep(0.05)
    assert not arrived(world, job, 2, range(12, BLOCKS))
    assert world.delegate.kinds() == ["open"]
    job.feed.advance(Ready(BLOCKS, BLOCKS, LAYERS))
    job.feed.end(FirstTokensDrawn(CHOICES))
    result = await push
    assert result.committed
    assert result.num_bytes == BLOCKS * LAYERS * 2 * 512
    assert result.num_exposed_bytes < result.num_bytes / 2
    world.check_arrived(job)


async def test_nothing_to_decode_stops_a_push_half_way(world: World) -> None:
    job = world.job(feed=KVReadiness())
    push = asyncio.create_task(world.sender.push(job, timeout_s=10))
    job.feed.advance(Ready(4, 12, 0))
    await until(lambda: arrived(world, job, 2, range(4)), "the prefix arrives")
    job.feed.end(NothingToDecode("every choice ended"))
    assert not (await push).committed
    assert world.delegate.kinds() == ["open", "finished"]


async def test_a_sender_at_work_keeps_its_lease(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_push, "ALIVE_S", 0.05)
    with nothing_left():
        async with running(World(transport, idle_timeout_s=0.6)) as world:
            ticks = iter(range(1000))
            job = world.job(feed=KVReadiness())
            job = PushJob(job.reservation, job.source_block_ids, job.num_tokens, job.feed, lambda: next(ticks))
            push = asyncio.create_task(world.sender.push(job, timeout_s=10))
            job.feed.advance(Ready(4, 12, 0))
            await asyncio.sleep(0.9)
            job.feed.advance(Ready(BLOCKS, BLOCKS, LAYERS))
            await until(lambda: arrived(world, job, 2, range(BLOCKS)), "all of it arrives")
            await asyncio.sleep(0.9)
            job.feed.end(FirstTokensDrawn(CHOICES))
            await push
            world.check_arrived(job)


async def test_a_sender_that_stands_still_loses_it(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_push, "ALIVE_S", 0.05)
    with nothing_left():
        async with running(World(transport, idle_timeout_s=0.3)) as world:
            job = world.job(feed=KVReadiness())
            push = asyncio.create_task(world.sender.push(job, timeout_s=10))
            job.feed.advance(Ready(4, 12, 0))
            await until(lambda: world.delegate.kinds() == ["open", "failed"], "the receiver gives up")
            job.feed.advance(Ready(BLOCKS, BLOCKS, LAYERS))
            with pytest.raises(PushFailed):
                await push


async def test_cancelled_while_it_waits_for_the_prefill(world: World) -> None:
    job = world.job(feed=KVReadiness())
    push = asyncio.create_task(world.sender.push(job, timeout_s=10))
    job.feed.advance(Ready(4, 12, 0))
    await until(lambda: arrived(world, job, 2, range(4)), "the prefix arrives")
    push.cancel()
    with pytest.raises(asyncio.CancelledError):
        await push
    await until(lambda: world.delegate.kinds() == ["open", "failed"], "the attempt fails")


async def test_several_connections_share_the_parts(several: World) -> None:
    job = several.job()
    push = asyncio.create_task(several.sender.push(job, timeout_s=10))
    await until(lambda: several.receiver.num_connections == 3, "three connections")
    result = await push
    several.check_arrived(job)
    assert several.delegate.kinds() == ["open", "commit"]
    assert several.delegate.commits[0][0].num_parts == result.num_parts > 10


async def test_a_connection_that_breaks_ends_the_push(several: World) -> None:
    job = several.job(feed=KVReadiness())
    push = asyncio.create_task(several.sender.push(job, timeout_s=10))
    job.feed.advance(Ready(4, 12, 0))
    await until(lambda: several.receiver.num_connections == 3, "three connections")
    last = next(c for c in several.receiver._connections.values() if c.session is not None and not c._is_first)
    last.interrupt()
    with pytest.raises(PushFailed) as raised:
        job.feed.advance(Ready(BLOCKS, BLOCKS, LAYERS))
        await push
    assert raised.value.retryable
    await until(lambda: several.receiver.num_connections == 0, "all of them end")
    assert several.delegate.kinds() == ["open", "failed"]


async def test_only_who_knows_the_secret_may_join(several: World) -> None:
    several.job()
    hello = several.hello("r1")
    async with several.raw_peer(hello) as first:
        joining = several.hello("r1")
        joining.push_id, joining.connection = hello.push_id, 1
        for field, value, code, named in (
            ("token", b"x" * 32, grpc.StatusCode.PERMISSION_DENIED, "token"),
            ("attempt", 2, grpc.StatusCode.ABORTED, "push_id"),
            ("push_id", b"y" * 16, grpc.StatusCode.NOT_FOUND, "reservation_id"),
        ):
            wrong = type(joining).FromString(joining.SerializeToString())
            setattr(wrong, field, value)
            async with several.raw_peer() as stranger:
                reply = await stranger.greet(wrong)
            assert (reply.code, reply.message.partition(":")[0]) == (code.value[0], named)
        async with several.raw_peer(joining) as second:
            assert (await second.send_part(Part(0, 0, 1, 0, 4), [0, 1, 2, 3])).part_reply.ok
            assert (await first.send_part(Part(1, 1, 2, 0, 4), [0, 1, 2, 3])).part_reply.ok


async def test_a_push_needs_an_id_of_its_own(world: World) -> None:
    world.job()
    hello = world.hello("r1")
    hello.push_id = b"short"
    async with world.raw_peer() as peer:
        reply = await peer.greet(hello)
    assert reply.message.startswith("push_id")
    assert world.delegate.events == []
