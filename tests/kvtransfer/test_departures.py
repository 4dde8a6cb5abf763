"""What a push fetches before its turn: shown by the order of what happens, on a link that the test opens part by part."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import grpc
import pytest

from kvtransfer.errors import PushFailed, TransferRefused
from kvtransfer.manifest import Part
from kvtransfer.receiver.push import PushTarget
from kvtransfer.sender import push as sender_push
from kvtransfer.sender import sender
from kvtransfer.sender.push import PushJob, PushResult
from kvtransfer.sender.send_queue import FirstTokensDrawn, KVReadiness, Ready, Told
from kvtransfer.transports.common import InlineIncoming, InlineOutgoing
from pdmesh.engine.kv_cache.block_moves import Move
from pdmesh.engine.kv_cache.copies import IndexedBlocks
from pdmesh.engine.kv_cache.staging import Staging
from pdmesh.engine.kv_cache.streams import InOrder
from pdmesh.v1 import transfer_pb2
from tests.kvtransfer.endpoints import CHOICES, until
from tests.kvtransfer.staged_world import BLOCKS, LAYERS, StagedWorld, at_work, do_all, staged
from tests.support.reordering import ReorderingStreams

NUM_PARTS = 21  # three blocks of a layer each
FIRST = range(BLOCKS)  # blocks of the first push's request


class Link:
    """Holds each part of the first push as it is about to be sent, until `let` is called; lets through what others send."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.spoiled: set[int] = set()  # parts whose checksum comes out wrong, once
        self._places = asyncio.Semaphore(0)
        send, fetch = InlineOutgoing.send_part, Staging.fetch

        async def send_part(
            connection: InlineOutgoing, header: transfer_pb2.PartHeader, views: Any, ids: Sequence[int], on_bytes: Any
        ) -> int:
            if ids[0] not in FIRST:
                return await send(connection, header, views, ids, on_bytes)
            self.events.append(("send", header.part_id))
            await self._let_through(connection)
            crc32c = await send(connection, header, views, ids, on_bytes)
            self.events.append(("sent", header.part_id))
            if header.part_id in self.spoiled:
                self.spoiled.remove(header.part_id)
                return crc32c ^ 1
            return crc32c

        def noted_fetch(staging: Staging, *args: Any) -> Future[None]:
            future = fetch(staging, *args)
            number = sum(kind == "fetch" for kind, _ in self.events)
            self.events.append(("fetch", number))
            future.add_done_callback(lambda _done: self.events.append(("fetched", number)))
            return future

        monkeypatch.setattr(InlineOutgoing, "send_part", send_part)
        monkeypatch.setattr(Staging, "fetch", noted_fetch)

    async def _let_through(self, connection: InlineOutgoing) -> None:
        while self._places.locked():
            connection.stream.check_interrupted()
            await asyncio.sleep(0.001)
        await self._places.acquire()

    def let(self, num_parts: int = 1) -> None:
        for _ in range(num_parts):
            self._places.release()

    async def saw(self, kind: str, number: int) -> None:
        await until(lambda: (kind, number) in self.events, f"{kind} {number}")


def push_of(both: StagedWorld, job: PushJob) -> asyncio.Task[PushResult]:
    return asyncio.create_task(both.world.sender.push(job, timeout_s=10))


async def test_the_next_part_is_fetched_while_one_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch)
    async with staged("tcp", InOrder(), "sender") as both:
        job = both.world.job()
        push = push_of(both, job)
        for number in range(NUM_PARTS - 1):
            await link.saw("send", number)
            await link.saw("fetched", number + 1)  # and `number` has not been let through
            assert ("sent", number) not in link.events
            link.let()
        link.let()
        assert (await push).num_parts == NUM_PARTS
        both.world.check_arrived(job)
        assert sum(kind == "fetch" for kind, _ in link.events) == NUM_PARTS


async def test_what_is_fetched_ahead_gives_way_to_what_is_to_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first push's receiver is slow: one of the two pieces is being sent to it, the other one lies ahead of its turn."""
    link = Link(monkeypatch)
    async with staged("tcp", InOrder(), "sender") as both:
        jobs = [both.world.job(), both.world.job("r2", start=BLOCKS)]
        slow = push_of(both, jobs[0])
        await link.saw("fetched", 1)
        assert both.source.out.num_free == 0
        assert (await push_of(both, jobs[1])).committed
        assert link.events.count(("sent", 0)) == 0
        link.let(NUM_PARTS)
        assert (await slow).committed
        for job in jobs:
            for source_id, target_id in zip(
                job.source_block_ids, both.world.delegate.held[job.reservation.reservation_id].block_ids, strict=True
            ):
                assert both.world.source.block_bytes(source_id) == both.world.target.block_bytes(target_id)


async def test_a_piece_that_is_asked_for_while_it_is_filled_comes_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    link, streams = Link(monkeypatch), ReorderingStreams()
    async with staged("tcp", streams, "sender") as both:
        slow = push_of(both, both.world.job())
        await _copied_first(link, streams)
        quick = push_of(both, both.world.job("r2", start=BLOCKS))
        await asyncio.sleep(0.05)
        assert ("fetch", 2) not in link.events
        with at_work(streams):
            assert (await quick).committed
            assert ("sent", 0) not in link.events
            link.let(NUM_PARTS)
            assert (await slow).committed


async def test_parts_that_are_not_computed_yet_hold_no_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a part wait for steps that came after it was told of."""
    link, streams = Link(monkeypatch), ReorderingStreams()
    async with staged("tcp", streams, "sender") as both:
        early = push_of(both, both.world.job())
        with at_work(streams, steps=False):
            await link.saw("fetched", 1)
            _launch_step(both, streams)
            late = push_of(both, both.world.job("r2", start=BLOCKS, feed=_told_layers()))
            link.let(NUM_PARTS)
            assert (await early).committed
            await asyncio.sleep(0.05)
            assert both.source.is_whole
            assert streams.num_waited_for == 2  # its first part, whose turn has come, and the next one
        do_all(streams)
        with at_work(streams):
            assert (await late).committed


def _launch_step(both: StagedWorld, streams: ReorderingStreams) -> None:
    marks = both.source.memory.marks
    marks.begin()
    streams.compute(lambda: None)
    marks.reach(LAYERS)


def _told_layers() -> KVReadiness:
    """By the step that runs."""
    feed = KVReadiness()
    feed.advance(Ready(0, BLOCKS, LAYERS))
    feed.end(FirstTokensDrawn(CHOICES))
    return feed


async def _at_the_mark(both: StagedWorld, link: Link, streams: ReorderingStreams) -> asyncio.Task[PushResult]:
    _launch_step(both, streams)
    push = push_of(both, both.world.job(feed=_told_layers()))
    await until(lambda: streams.num_waited_for == 2, "it waits for what is computed")
    return push


async def _copying(both: StagedWorld, link: Link, streams: ReorderingStreams) -> asyncio.Task[PushResult]:
    push = push_of(both, both.world.job())
    await _copied_first(link, streams)
    return push


async def _copied_first(link: Link, streams: ReorderingStreams) -> None:
    """Of both parts that are fetched."""
    await link.saw("fetch", 1)
    assert streams.advance(lambda count: count - 1)
    assert ("fetched", 0) in link.events and ("fetched", 1) not in link.events


async def _fetched(both: StagedWorld, link: Link, streams: ReorderingStreams) -> asyncio.Task[PushResult]:
    push = await _copying(both, link, streams)
    do_all(streams)
    await link.saw("send", 0)
    return push


async def _unanswered(both: StagedWorld, link: Link, streams: ReorderingStreams) -> asyncio.Task[PushResult]:
    """The window is full; of the two parts behind it one is in hand, one waits, and both are fetched."""
    push = push_of(both, both.world.job())
    link.let(NUM_PARTS)
    with at_work(streams):
        await link.saw("sent", sender_push.MAX_UNANSWERED - 1)
        await link.saw("fetched", sender_push.MAX_UNANSWERED + 1)
    return push


@pytest.mark.parametrize(("stage", "is_read"), [(_at_the_mark, False), (_copying, True), (_fetched, False), (_unanswered, False)])
async def test_a_push_that_is_cancelled_gives_all_pieces_back(
    monkeypatch: pytest.MonkeyPatch, stage: Callable[..., Any], is_read: bool
) -> None:
    """And ends as soon as nothing reads its blocks: at once where only steps are waited for."""
    link, streams = Link(monkeypatch), ReorderingStreams()
    if stage is _unanswered:
        _hear_nothing(monkeypatch)
    async with staged("tcp", streams, "sender") as both:
        push = await stage(both, link, streams)
        push.cancel()
        await asyncio.wait([push], timeout=0.05)
        if is_read:
            push.cancel()  # whoever is in a hurry changes nothing
            await asyncio.wait([push], timeout=0.05)
            assert not push.done() and not both.source.is_whole
            do_all(streams)
        with pytest.raises(asyncio.CancelledError):
            await push
        assert both.source.is_whole and not streams.num_waited_for
        assert streams.is_idle


def _hear_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that takes bytes only."""

    async def receive_part(*_: object) -> int:
        await asyncio.Event().wait()
        return 0

    monkeypatch.setattr(InlineIncoming, "receive_part", receive_part)


async def test_a_corrupt_part_is_sent_again_beside_what_is_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch)
    link.spoiled = {0, 5, NUM_PARTS - 1}
    async with staged("tcp", InOrder(), "sender") as both:
        job = both.world.job()
        link.let(2 * NUM_PARTS)
        assert (await push_of(both, job)).committed
        both.world.check_arrived(job)
        num_fetched = sum(kind == "fetch" for kind, _ in link.events)
        assert NUM_PARTS + 3 <= num_fetched <= NUM_PARTS + 6  # what is sent again may take away what was fetched ahead


async def test_a_push_that_is_refused_gives_all_pieces_back(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch)
    async with staged("tcp", InOrder(), "sender") as both:
        push = push_of(both, both.world.job())
        await link.saw("fetched", 1)
        both.world.delegate.on_progress = _refuse
        link.let()
        with pytest.raises(PushFailed, match="enough"):
            await push
        assert both.source.is_whole


def _refuse(target: PushTarget) -> None:
    raise TransferRefused(grpc.StatusCode.ABORTED, "enough")


async def test_a_device_that_fails_fails_the_push_and_keeps_no_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged("tcp", InOrder(), "sender") as both:
        gather, calls = IndexedBlocks.gather, 0

        def failing(self: IndexedBlocks, move: Move) -> None:
            nonlocal calls
            calls += 1
            if calls > 3:
                raise OSError("the device is gone")
            gather(self, move)

        monkeypatch.setattr(IndexedBlocks, "gather", failing)
        with pytest.raises(PushFailed, match="the device is gone"):
            await push_of(both, both.world.job())
        assert both.source.is_whole


@pytest.mark.parametrize("seed", range(6))
async def test_many_pushes_share_two_pieces(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Two connections each, links of any speed, steps under way, some cancelled: those that are not all end, and are right."""
    monkeypatch.setattr(sender, "BYTES_FOR_A_CONNECTION", 1)
    streams, chance = ReorderingStreams(), random.Random(seed)
    send = InlineOutgoing.send_part

    async def late(*args: Any) -> int:
        await asyncio.sleep(chance.choice((0.0, 0.0, 0.002, 0.01)))
        return await send(*args)

    monkeypatch.setattr(InlineOutgoing, "send_part", late)
    async with staged("tcp", streams, "sender") as both:
        with at_work(streams, seed + 1):
            jobs = [both.world.job(f"r{i}", num_blocks=12, start=12 * i) for i in range(5)]
            pushes = [push_of(both, job) for job in jobs]
            for push in chance.sample(pushes, 2):
                await asyncio.sleep(0.01 * chance.random())
                _launch_step(both, streams)
                push.cancel()
            for job, push in zip(jobs, pushes, strict=True):
                with suppress(asyncio.CancelledError):
                    assert (await push).committed
                    held = both.world.delegate.held[job.reservation.reservation_id]
                    for source_id, target_id in zip(job.source_block_ids, held.block_ids, strict=True):
                        assert both.world.source.block_bytes(source_id) == both.world.target.block_bytes(target_id)
            assert sum(not push.cancelled() for push in pushes) >= 3


async def test_a_part_waits_for_the_step_that_told_of_it() -> None:
    streams = ReorderingStreams()
    async with staged("tcp", streams, "sender") as both:
        told, marks = Told(both.source.memory), both.source.memory.marks
        whole, layers = Part(0, 0, LAYERS, 0, 4), Part(1, 0, 1, 4, 8)
        _launch_step(both, streams)
        told.note(Ready(4, 4, LAYERS))  # the step has ended
        expected = marks.behind(LAYERS)
        marks.begin()
        streams.compute(lambda: None)
        marks.reach(1)
        told.note(Ready(4, 8, 1))
        first_layer = marks.behind(1)
        _launch_step(both, streams)
        assert told.final(whole).at is expected
        assert told.final(layers).at is first_layer
        told.note(Ready(8, 8, LAYERS))
        assert told.final(whole).at is expected
        do_all(streams)
