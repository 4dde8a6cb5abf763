"""Copies that ranks make of one part, each of its heads: ranks are threads here, on devices that work as late as they may."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdmesh.engine.kv_cache.copies import Columns, IndexedBlocks, Piece, PieceCopies, RowsCopy
from pdmesh.engine.kv_cache.pool import shared_memory
from pdmesh.engine.kv_cache.staging import Staging, StagingSizes
from pdmesh.engine.kv_cache.streams import InOrder
from pdmesh.engine.parallel.copies import Answer, Copy, CopyChannel, CopyService, Order
from pdmesh.engine.parallel.events import Commands, GroupEvents, Launched, Place
from pdmesh.engine.parallel.shared_pieces import PiecesShape, SharedPieces
from pdmesh.engine.parallel.staging import RanksCopies
from pdmesh.engine.parallel.tp_protocol import RankFailed
from tests.support.reordering import ReorderingStreams

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="not tried elsewhere yet")
RANKS, LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM = 3, 4, 8, 2, 2, 4  # heads of each rank
BLOCK_BYTES = RANKS * BLOCK_SIZE * HEADS * DIM * 2
SIZES = StagingSizes(num_pieces=2, piece_bytes=LAYERS * 2 * 3 * BLOCK_BYTES)
CPU = torch.device("cpu")


class Watched:
    """What a channel tells of ranks that fail (pdmesh/engine/parallel/tp_group.py, which has processes)."""

    def __init__(self) -> None:
        self.failures: list[RankFailed] = []

    def name(self, number: int) -> str:
        return f"rank {number}"

    def fail(self, failure: RankFailed) -> None:
        self.failures.append(failure)

    def blame(self, error: BaseException, work: str) -> RankFailed:
        return RankFailed(f"a rank did not {work}")


class World:
    """Pools of three ranks, and rank 0's Staging over them. A command fills a block on every rank, layer by layer."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.pools = [torch.zeros((LAYERS, 2, BLOCKS, BLOCK_SIZE, HEADS, DIM), dtype=torch.float16) for _ in range(RANKS)]
        self.streams = [ReorderingStreams() for _ in range(RANKS)]
        self.commands, self.watched = Commands(), Watched()
        self.launched = [Launched(streams) for streams in self.streams[1:]]
        self.num_launched = [0] * RANKS  # layers, of all commands
        self.marks = GroupEvents(self.streams[0], self.commands)
        shape = PiecesShape(SIZES.num_pieces, SIZES.piece_bytes, BLOCK_BYTES)
        memory, self.fd = shared_memory("pdmesh-test", shape.num_bytes)
        self.pieces = SharedPieces(shape, memory, CPU)
        pairs = [socket.socketpair() for _ in self.launched]
        self.far = [far for _, far in pairs]
        self.services = [
            CopyService(far, self.pieces, self._copies(rank), launched, CPU).start()
            for rank, (far, launched) in enumerate(zip(self.far, self.launched, strict=True), start=1)
        ]
        self.channel = CopyChannel(self.watched, [near for near, _ in pairs], timeout_s)  # type: ignore[arg-type]
        copies = RanksCopies(self._copies(0), self.pieces, self.channel, self.marks)
        self.staging = Staging(self.pools[0], InOrder(), SIZES, copies=copies)

    def _copies(self, rank: int) -> PieceCopies:
        pool = self.pools[rank]
        return PieceCopies(pool, self.streams[rank], SIZES.piece_bytes, IndexedBlocks(), Columns.of(pool, rank, RANKS))

    @property
    def whole(self) -> Tensor:
        """As one rank would have it."""
        return torch.cat(self.pools, dim=4)

    def launch(self, rank: int) -> bool:
        """The rank's next layer. False: all are launched; rank 0 is never behind the others, since it tells them."""
        if self.num_launched[rank] == (BLOCKS * LAYERS if rank == 0 else self.num_launched[0]):
            return False
        block, layer = divmod(self.num_launched[rank], LAYERS)
        self.num_launched[rank] += 1
        if layer == 0:
            self._begin(rank)
        target = self.pools[rank][layer, :, block]
        self.streams[rank].compute(partial(fill, target, number(layer, block, rank)))
        (self.marks if rank == 0 else self.launched[rank - 1]).reach(layer + 1)
        if layer == LAYERS - 1 and rank:
            self.launched[rank - 1].end()
        return True

    def _begin(self, rank: int) -> None:
        if rank:
            self.launched[rank - 1].begin()
        else:
            self.marks.begin()
            self.commands.num_told += 1

    def advance(self, chance: random.Random) -> None:
        """Something happens on some rank, or nothing."""
        rank = chance.randrange(RANKS)
        if chance.random() < 0.5 or not self.launch(rank):
            self.streams[rank].advance(chance.randrange)

    def do_all(self) -> None:
        """That ranks were told of."""
        for rank in range(1, RANKS):
            while self.launch(rank):
                pass
        self.do_launched()

    def do_launched(self) -> None:
        for streams in self.streams:
            while streams.advance(lambda count: count - 1):
                pass

    def taken(self) -> Piece:
        piece = self.staging.take()
        assert piece is not None
        return piece


@contextmanager
def world(timeout_s: float = 30.0) -> Iterator[World]:
    """At the end all pieces are back, and no thread, descriptor or copy is left."""
    made, num_threads = World(timeout_s), threading.active_count()
    try:
        yield made
        made.do_all()
        assert made.staging.num_free == SIZES.num_pieces
    finally:
        made.do_all()
        made.staging.close()
        for service in made.services:
            service.join(10)
        assert not any(service.is_alive() for service in made.services)
        if made.fd is not None:
            os.close(made.fd)
    assert threading.active_count() <= num_threads - len(made.services)


def fill(target: Tensor, value: float) -> None:
    target.fill_(value)


def number(layer: int, block: int, rank: int) -> float:
    return float(1 + rank + RANKS * (layer + LAYERS * block))


def content(piece: Piece, layers: range, num_blocks: int) -> Tensor:
    size = len(layers) * 2 * num_blocks * BLOCK_BYTES
    return piece.host[:size].clone().view(torch.float16).view(len(layers), 2, num_blocks, BLOCK_SIZE, RANKS * HEADS, DIM)


def until_done(made: World, future: Future[None]) -> None:
    deadline = time.monotonic() + 20
    while not future.done() and time.monotonic() < deadline:
        made.do_launched()
        time.sleep(0.001)
    future.result(0)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_a_piece_holds_what_every_rank_had_at_its_mark(seed: int) -> None:
    """Parts are told of when rank 0 has launched them; the others may not have heard of the command yet."""
    chance = random.Random(seed)
    with world() as made:
        told: list[tuple[range, int]] = []
        under_way: list[tuple[Future[None], Piece, range, int]] = []
        num_seen = num_told = 0
        while num_seen < 2 * BLOCKS:
            made.advance(chance)
            while num_told < made.num_launched[0] // 2:  # every second layer
                block, half = divmod(num_told, 2)
                told.append((range(2 * half, 2 * half + 2), block))
                num_told += 1
            if told and made.staging.num_free:
                layers, block = told.pop(chance.randrange(len(told)))
                piece = made.taken()
                future = made.staging.fetch(piece, layers, [block], made.marks.behind(layers.stop))
                under_way.append((future, piece, layers, block))
            for future, piece, layers, block in [each for each in under_way if each[0].done()]:
                future.result()
                found = content(piece, layers, 1)[:, :, 0, :, ::HEADS]
                expected = torch.tensor([[number(layer, block, rank) for rank in range(RANKS)] for layer in layers])
                assert torch.equal(found.amax((1, 2, 4)).float(), expected)
                assert torch.equal(found.amin((1, 2, 4)).float(), expected)
                under_way.remove((future, piece, layers, block))
                made.staging.give_back(piece)
                num_seen += 1


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_what_arrives_outlasts_what_a_rank_has_yet_to_write_there(seed: int) -> None:
    """Blocks were given away under a step that some ranks have not launched yet when the push is accepted."""
    chance = random.Random(seed)
    with world() as made:
        for _ in range(chance.randrange(1, 4) * LAYERS):
            made.launch(0)
        blocks = chance.sample(range(BLOCKS), 3)
        session = made.marks.now()
        futures = []
        for layers in (range(1, 2), range(2, 4)):
            piece = made.taken()
            piece.host.copy_(torch.randint(1, 100, piece.host.shape, dtype=torch.uint8))
            futures.append((made.staging.store(piece, layers, blocks, session), piece, layers))
        deadline = time.monotonic() + 20
        while not all(future.done() for future, _, _ in futures) and time.monotonic() < deadline:
            rank = chance.randrange(RANKS)
            if rank and chance.random() < 0.5:
                made.launch(rank)
            made.streams[rank].advance(chance.randrange)
        for future, piece, layers in futures:
            future.result(0)
            found = made.whole[layers.start : layers.stop][:, :, blocks]
            assert torch.equal(found.view(torch.int16), content(piece, layers, 3).view(torch.int16))
            made.staging.give_back(piece)


def test_a_group_of_layers_waits_for_no_later_one_on_any_rank() -> None:
    with world() as made:
        for rank in range(RANKS):
            for _ in range(LAYERS):
                made.launch(rank)
        piece = made.taken()
        future = made.staging.fetch(piece, range(2), [0], made.marks.behind(2))
        deadline = time.monotonic() + 20
        while not future.done() and time.monotonic() < deadline:
            for streams, pool in zip(made.streams, made.pools, strict=True):
                streams.advance(lambda count: count - 1, steps=not pool[1].any())  # two layers, then copies alone
            time.sleep(0.0005)
        future.result(0)
        assert not any(pool[2:].any() for pool in made.pools)
        made.staging.give_back(piece)


def test_it_is_over_when_the_last_rank_is_through() -> None:
    with world() as made:
        piece = made.taken()
        future = made.staging.fetch(piece, range(1), [0], made.marks.now())
        for streams in made.streams[:2]:
            while not streams.advance(lambda count: count - 1):
                time.sleep(0.001)  # the order is on its way
        time.sleep(0.05)
        assert not future.done() and piece.is_under_way
        assert not future.cancel()
        until_done(made, future)
        made.staging.give_back(piece)


def test_an_error_of_one_rank_is_the_copys_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with world() as made:
        monkeypatch.setattr(made.launched[1], "behind", lambda place: 1 / 0)
        piece = made.taken()
        future = made.staging.fetch(piece, range(1), [0], made.marks.now())
        with pytest.raises(RuntimeError, match="rank 2 could not copy KV: ZeroDivisionError"):
            until_done(made, future)
        made.staging.give_back(piece)
        assert not made.watched.failures


def test_a_rank_that_is_silent_behind_our_own_copy_fails() -> None:
    with world(timeout_s=0.2) as made:
        piece = made.taken()
        made.commands.num_told += 1  # which rank 2 never hears of
        made.launched[0].begin()
        made.launched[0].end()
        future = made.staging.fetch(piece, range(1), [0], made.marks.now())
        time.sleep(0.4)
        assert not future.done() and not made.watched.failures, "we are not through ourselves"
        with pytest.raises(RankFailed, match=r"rank 2 has not answered for 0\.2 s in a copy of KV"):
            until_done(made, future)
        assert [str(each) for each in made.watched.failures] == [str(future.exception())]
        with pytest.raises(RankFailed, match="rank 2"):  # nothing begins any more
            made.staging.store(piece, range(1), [0], made.marks.now()).result(0)
        made.staging.give_back(piece)
        made.launched[1].begin()
        made.launched[1].end()


def test_places_are_behind_marks_of_ranks() -> None:
    streams = ReorderingStreams()
    launched = Launched(streams)
    first = launched.behind(Place(1, 0))
    launched.begin()
    launched.reach(2)
    launched.reach(4)
    launched.end()
    assert launched.behind(Place(1, 0)) is first
    assert launched.behind(Place(1, 1)) is launched.behind(Place(1, 2)) is not launched.behind(Place(1, 3))
    assert launched.behind(Place(1, 4)) is not launched.behind(Place(2, 0))
    later = threading.Thread(target=launched.behind, args=(Place(2, 1),), daemon=True)
    later.start()
    launched.begin()
    assert later.is_alive()
    launched.end()  # of a step without layers: its end serves
    later.join(10)
    assert not later.is_alive()


def test_orders_are_read_as_they_were_written() -> None:
    order = Order(2**40, Copy(True, 3, range(5, 9), 17, Place(2**33, 4)))
    assert Order.decode(order.encode()) == order
    for answer in (Answer(7), Answer(8, "ValueError: nö")):
        assert Answer.decode(answer.encode()) == answer


def test_rows_are_described_to_the_driver_as_its_header_does() -> None:
    """CUDA_MEMCPY2D of cuda.h, on 64 bits: what only a GPU can run is in test_devices.py."""
    pinned = torch.zeros((5, 64), dtype=torch.uint8)[:, 16:32]
    copy = RowsCopy.of(pinned, torch.zeros((5, 16), dtype=torch.uint8))
    assert ctypes.sizeof(copy) == 128
    words = list((ctypes.c_uint64 * 16).from_buffer_copy(copy))
    host, pitch, width, height = 10, 13, 14, 15
    assert (words[host], words[pitch], words[width], words[height]) == (pinned.data_ptr(), 64, 16, 5)
    assert (words[2], words[6], words[9]) == (1, 16, 1)  # memory types and the source's pitch
