"""The index follows its workers: lists, changes, gaps, garbage, lost workers and a Redis that comes and goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.runtime.registry.block_stream import BlockStream, Entry
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.runtime.rpc.channel import connect
from pdmesh.v1 import worker_pb2
from router.fleet.decode_stream import StreamSettings
from router.fleet.registry import FleetRegistry
from router.fleet.worker import Worker
from router.kv_index import subscriber
from router.kv_index.index import PrefixIndex
from router.kv_index.subscriber import Followed, PrefixFollower
from tests.router.mesh import expected, request, running_mesh
from tests.router.stub_workers import DECODE, StubWorker
from tests.router.test_fleet import running_fleet
from tests.support.waiting import eventually

NOBODY = cast(FleetRegistry, None)  # where nobody looks
NAMES = [(1 << 63) + number for number in range(10)]


class TellingWorker(StubWorker):
    """A stub that lists blocks: what it is told to hold."""

    blocks: Sequence[int] = ()
    tier_blocks: Sequence[int] = ()
    sequence = 0
    num_lists = 0
    list_epoch: int | None = None

    async def ListBlocks(self, request: worker_pb2.ListBlocksRequest, context: object) -> AsyncIterator[worker_pb2.BlockList]:
        self.num_lists += 1
        epoch = self.epoch if self.list_epoch is None else self.list_epoch
        for name in self.blocks:
            yield worker_pb2.BlockList(epoch=epoch, sequence=self.sequence, blocks=[name])
        for name in self.tier_blocks:
            yield worker_pb2.BlockList(epoch=epoch, sequence=self.sequence, tier_blocks=[name])
        yield worker_pb2.BlockList(epoch=epoch, sequence=self.sequence, is_last=True)

    @property
    def key(self) -> tuple[str, int]:
        return (self.address, self.epoch)

    def change(self, stored: Sequence[int] = (), evicted: Sequence[int] = ()) -> worker_pb2.BlockChange:
        """The next one; the list contains it from now on."""
        self.blocks = [name for name in (*self.blocks, *stored) if name not in evicted]
        self.sequence += 1
        return worker_pb2.BlockChange(epoch=self.epoch, sequence=self.sequence, stored=stored, evicted=evicted)


@pytest.fixture
async def redis_server() -> AsyncIterator[EmbeddedRedis]:
    async with EmbeddedRedis() as server:
        yield server


@pytest.fixture
async def worker() -> AsyncIterator[TellingWorker]:
    worker = TellingWorker("d0", (DECODE,))
    await worker.start()
    yield worker
    await worker.kill()


@asynccontextmanager
async def following(worker: TellingWorker, redis: EmbeddedRedis | None) -> AsyncIterator[PrefixIndex]:
    index = PrefixIndex(1000)
    async with running_fleet(worker.address) as fleet:
        follower = PrefixFollower(fleet, index, BlockStream(redis.url) if redis else None)
        follower.start()
        yield index
        await follower.stop()


def holds(index: PrefixIndex, worker: TellingWorker, names: Sequence[int]) -> bool:
    return set(index.told.blocks_of(worker.key)) == set(names)


async def test_a_new_worker_is_listed_without_redis(worker: TellingWorker) -> None:
    worker.blocks = NAMES
    async with following(worker, None) as index:
        await eventually(lambda: holds(index, worker, NAMES))
        await worker.kill()
        await eventually(lambda: holds(index, worker, []))
        assert len(index.told) == 0


async def test_an_incarnation_that_was_lost_for_a_moment_is_listed_again(worker: TellingWorker) -> None:
    worker.blocks = NAMES
    async with following(worker, None) as index:
        await eventually(lambda: holds(index, worker, NAMES))
        worker.watch_mute = True
        await eventually(lambda: holds(index, worker, []))
        worker.watch_mute = False
        await eventually(lambda: holds(index, worker, NAMES))


async def test_changes_are_followed_and_a_gap_is_asked_of_the_worker(worker: TellingWorker, redis_server: EmbeddedRedis) -> None:
    stream = BlockStream(redis_server.url)
    worker.blocks = NAMES[:2]
    async with following(worker, redis_server) as index:
        await eventually(lambda: holds(index, worker, NAMES[:2]))
        await stream.append("d0", worker.change(NAMES[2:5], NAMES[:1]))
        await eventually(lambda: holds(index, worker, NAMES[1:5]))
        assert worker.num_lists == 1
        worker.change(NAMES[5:7])  # lost
        await stream.append("d0", worker.change((), NAMES[1:2]))
        await eventually(lambda: holds(index, worker, NAMES[2:7]))
        assert worker.num_lists == 2
        await stream.append("d0", worker.change(NAMES[7:8]))
        await eventually(lambda: holds(index, worker, NAMES[2:8]))
        assert worker.num_lists == 2
    await stream.stop()


async def test_blocks_of_tiers_are_listed_and_followed(
    worker: TellingWorker, redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def has(index: PrefixIndex, names: Sequence[int]) -> bool:
        return set(index.tiers.blocks_of(worker.key)) == set(names)

    monkeypatch.setattr(subscriber, "MAX_TIER_BLOCKS", 4)
    stream = BlockStream(redis_server.url)
    worker.blocks, worker.tier_blocks = NAMES[:2], NAMES[:4]
    async with following(worker, redis_server) as index:
        await eventually(lambda: has(index, NAMES[:4]))
        change = worker.change()
        change.tier_stored.extend(NAMES[4:6])
        change.tier_evicted.extend(NAMES[:1])
        await stream.append("d0", change)
        await eventually(lambda: has(index, NAMES[1:6]))
        assert holds(index, worker, NAMES[:2])
        worker.tier_blocks = NAMES[:5]
        worker.change()  # lost
        await stream.append("d0", worker.change())
        await eventually(lambda: "the blocks of d0 are refused: tier_blocks are more than 4" in caplog.text)
        await worker.kill()
        await eventually(lambda: has(index, []))
    await stream.stop()


async def test_garbage_is_logged_and_ends_nothing(
    worker: TellingWorker, redis_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    stream = BlockStream(redis_server.url)
    async with following(worker, redis_server) as index:
        await eventually(lambda: worker.num_lists == 1)
        wrong = worker.change(NAMES[:3])
        wrong.ClearField("epoch")
        with caplog.at_level(logging.WARNING):
            raw = await stream._link.call(
                lambda redis: redis.xadd(stream.key(("d0", worker.epoch)), {"c": wrong.SerializeToString()}, id="1-1")
            )
            assert raw == b"1-1"
            await eventually(lambda: holds(index, worker, NAMES[:3]))
        assert "is refused: epoch 0000000000000000 is not the stream's" in caplog.text
        await stream.append("d0", worker.change(NAMES[3:4]))
        await eventually(lambda: holds(index, worker, NAMES[:4]))
    await stream.stop()


async def test_a_wrong_list_is_refused_and_asked_for_again(worker: TellingWorker, caplog: pytest.LogCaptureFixture) -> None:
    worker.blocks, worker.list_epoch = NAMES, 77
    async with following(worker, None) as index:
        await eventually(lambda: worker.num_lists >= 1 and "refused" in caplog.text)
        assert "the blocks of d0 are refused: epoch 000000000000004d is not" in caplog.text
        assert holds(index, worker, [])
        worker.list_epoch = None
        await eventually(lambda: holds(index, worker, NAMES))


async def test_a_listing_that_breaks_is_logged_and_tried_again(
    worker: TellingWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever breaks, the worker's listing does not end with it: neither a bug, nor a call that is cancelled beneath it."""
    monkeypatch.setattr(subscriber, "FIRST_LIST_GAP_S", 0.01)
    worker.blocks = NAMES
    breaks: list[BaseException] = [RuntimeError("a bug"), asyncio.CancelledError()]
    list_blocks = Worker.list_blocks

    def broken(self: Worker, timeout_s: float) -> object:
        if breaks:
            raise breaks.pop(0)
        return list_blocks(self, timeout_s)

    monkeypatch.setattr(Worker, "list_blocks", broken)
    async with following(worker, None) as index:
        await eventually(lambda: holds(index, worker, NAMES))
    assert "listing the blocks of d0 failed" in caplog.text


async def test_a_channel_that_is_closed_meanwhile_is_one_line_of_the_log(
    worker: TellingWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """So it is when a worker restarts: its channel is closed while a listing waits for its next try."""
    caplog.set_level(logging.INFO, subscriber.logger.name)
    channel = connect(worker.address)
    lost = Worker(
        worker.address,
        channel,
        StreamSettings("router"),
        report_period_ms=50,
        static=True,
        on_change=lambda: None,
        on_view=lambda: None,
    )
    await channel.close()
    follower = PrefixFollower(NOBODY, PrefixIndex(1000), None)
    listing = asyncio.create_task(follower._list_until_done(Followed(lost, worker.info())))
    await eventually(lambda: "its channel was closed" in caplog.text)
    listing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listing
    assert not [record for record in caplog.records if record.exc_info or "\n" in record.getMessage()]


async def test_a_worker_whose_blocks_could_not_be_forgotten_is_listed_again(
    worker: TellingWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker.blocks = NAMES
    async with following(worker, None) as index:
        await eventually(lambda: holds(index, worker, NAMES))

        async def broken(_: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr(index, "forget", broken)
            worker.watch_mute = True
            await eventually(lambda: f"forgetting the blocks of {worker.address} failed" in caplog.text)
        worker.blocks, worker.watch_mute = NAMES[5:], False
        await eventually(lambda: holds(index, worker, NAMES[5:]))


async def test_redis_that_comes_back_empty(worker: TellingWorker, redis_server: EmbeddedRedis) -> None:
    async with following(worker, redis_server) as index:
        await eventually(lambda: worker.num_lists == 1)
        await redis_server.stop()
        worker.change(NAMES[:3])  # nobody hears of it
        await eventually(lambda: not index._followed)
        async with EmbeddedRedis(redis_server.port) as again:
            await eventually(lambda: holds(index, worker, NAMES[:3]))
            stream = BlockStream(again.url)
            await eventually(lambda: bool(index._followed))
            await stream.append("d0", worker.change(NAMES[3:4]))
            await eventually(lambda: holds(index, worker, NAMES[:4]))
            await stream.stop()


CHANGES = st.one_of(st.none(), st.tuples(st.lists(st.integers(0, 5), max_size=3), st.lists(st.integers(0, 5), max_size=3)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["w", "x"]), st.sampled_from([0, 1, 1, 2, 2, 3, 4, 1 << 63]), CHANGES), max_size=12))
def test_only_what_follows_in_order_is_believed(told: list[tuple[str, int, tuple[list[int], list[int]] | None]]) -> None:
    """Everything else, of anybody, makes the worker be listed, once, and raises nothing."""
    index, listed = PrefixIndex(100), list[Followed]()
    follower = PrefixFollower(NOBODY, index, None)
    followed = Followed(cast("Worker", None), worker_pb2.WorkerInfo(worker_id="w", epoch=1, address="w:1"), position=0)
    follower._followed[followed.key] = followed

    def list_again(followed: Followed) -> None:
        listed.append(followed)
        followed.position = None

    follower._list = list_again  # type: ignore[method-assign]
    follower.take(entry_of(*each) for each in told)
    truth, position, is_broken = set[int](), 0, False
    for name, sequence, change in told:
        if name != "w" or is_broken or 0 < sequence <= position:
            continue
        is_broken = change is None or sequence != position + 1
        if change is not None and not is_broken:
            truth, position = (truth | set(change[0])) - set(change[1]), sequence
    assert set(index.told.blocks_of(followed.key)) == truth
    assert len(listed) == is_broken
    assert followed.position == (None if is_broken else position)


def entry_of(worker_id: str, sequence: int, change: tuple[list[int], list[int]] | None) -> Entry:
    if change is None:
        return Entry((worker_id, 1), sequence, None, "garbage")
    return Entry(
        (worker_id, 1), sequence, worker_pb2.BlockChange(epoch=1, sequence=sequence, stored=change[0], evicted=change[1])
    )


async def test_an_index_full_of_lies_gives_right_answers(model_folder: Path) -> None:
    async with running_mesh(model_folder, decode=2) as mesh:
        prefixes = mesh.router.core.prefixes
        liars = [(worker.address, worker.epoch) for worker in mesh.workers.values()] + [("nobody:1", 9)]
        for match in (lambda names: dict.fromkeys(liars, len(names)), lambda names: dict.fromkeys(liars, 10**6)):
            prefixes.told.match = match  # type: ignore[method-assign]
            answer = await mesh.generate(request())
            assert answer.tokens() == expected(8)
        await mesh.until_whole()
