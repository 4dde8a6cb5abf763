"""Pieces between a pool and the host hold what was final, whatever order a device takes, and there are so many of them."""

from __future__ import annotations

import random
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdmesh.engine.errors import IntegrityError
from pdmesh.engine.kv_cache.block_moves import Move
from pdmesh.engine.kv_cache.copies import IndexedBlocks, Piece
from pdmesh.engine.kv_cache.staging import Marks, Staging, StagingSizes
from pdmesh.engine.kv_cache.streams import InOrder, Mark
from tests.support.reordering import ReorderingStreams

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, DIM = 4, 12, 2, 2, 4
BLOCK_BYTES = BLOCK_SIZE * HEADS * DIM * 2
SIZES = StagingSizes(num_pieces=3, piece_bytes=LAYERS * 2 * 4 * BLOCK_BYTES)


def empty_pool() -> Tensor:
    return torch.zeros((LAYERS, 2, BLOCKS, BLOCK_SIZE, HEADS, DIM), dtype=torch.float16)


def filled_pool() -> Tensor:
    return torch.randn(empty_pool().shape, generator=torch.Generator().manual_seed(1)).half()


def in_order(pool: Tensor) -> Staging:
    return Staging(pool, InOrder(), SIZES, IndexedBlocks())


def taken(staging: Staging) -> Piece:
    piece = staging.take()
    assert piece is not None
    return piece


def content(piece: Piece, layers: range, num_blocks: int) -> Tensor:
    size = len(layers) * 2 * num_blocks * BLOCK_BYTES
    return piece.host[:size].clone().view(torch.float16).view(len(layers), 2, num_blocks, BLOCK_SIZE, HEADS, DIM)


def test_there_and_back() -> None:
    pool, other = filled_pool(), empty_pool()
    out, back = in_order(pool), in_order(other)
    piece, layers = taken(out), range(1, 4)
    out.fetch(piece, layers, [7, 0, 3], Mark()).result(0)
    assert torch.equal(content(piece, layers, 3), pool[1:4][:, :, [7, 0, 3]])
    with piece.view(out.num_bytes(layers, 3)) as view:
        arrived = taken(back)
        arrived.view(len(view))[:] = view
    back.store(arrived, layers, [2, 5, 11], Mark()).result(0)
    assert torch.equal(other[1:4][:, :, [2, 5, 11]], pool[1:4][:, :, [7, 0, 3]])
    assert not other[0].any() and not other[:, :, [0, 1, 3, 4, 6, 7, 8, 9, 10]].any()
    out.give_back(piece)
    back.give_back(arrived)
    assert (out.num_free, back.num_free) == (3, 3)


def test_warming_up_leaves_the_pool_as_it_was() -> None:
    pool = filled_pool()
    staging = in_order(pool)
    staging.warm()
    assert torch.equal(pool, filled_pool()) and staging.num_free == 3


def test_pieces_are_few_and_lent_once() -> None:
    staging = in_order(filled_pool())
    lent = [taken(staging) for _ in range(3)]
    assert staging.take() is None and len(set(map(id, lent))) == 3
    staging.give_back(lent[1])
    assert staging.take() is lent[1]
    staging.give_back(lent[0])
    with pytest.raises(IntegrityError):
        staging.give_back(lent[0])
    with pytest.raises(IntegrityError):
        staging.fetch(lent[0], range(1), [0], Mark())


def test_a_piece_under_way_is_neither_given_back_nor_used() -> None:
    streams = ReorderingStreams()
    staging = Staging(filled_pool(), streams, SIZES, IndexedBlocks())
    piece = taken(staging)
    future = staging.fetch(piece, range(1), [0], streams.mark())
    with pytest.raises(IntegrityError):
        staging.give_back(piece)
    with pytest.raises(IntegrityError):
        staging.store(piece, range(1), [0], streams.mark())
    assert not future.cancel()
    staging.close()  # waits for it
    assert future.done()
    staging.give_back(piece)


def test_what_does_not_fit_is_refused_by_name() -> None:
    staging = in_order(filled_pool())
    piece = taken(staging)
    for layers, block_ids in ((range(4), [0, 1, 2, 3, 4]), (range(1), [])):
        with pytest.raises(ValueError, match="block_ids"):
            staging.fetch(piece, layers, block_ids, Mark())
    with pytest.raises(ValueError, match="the pool has 0 to 11"):
        staging.store(piece, range(1), [12], Mark())
    with pytest.raises(ValueError, match="piece_bytes"):
        Staging(filled_pool(), InOrder(), StagingSizes(1, 2 * BLOCK_BYTES - 1))
    with pytest.raises(ValueError, match="num_pieces"):
        StagingSizes(0)


def test_an_error_of_the_device_is_the_copys() -> None:
    class Broken(IndexedBlocks):
        def gather(self, move: Move) -> None:
            raise RuntimeError("no device")

    staging = Staging(filled_pool(), InOrder(), SIZES, Broken())
    piece = taken(staging)
    with pytest.raises(RuntimeError, match="no device"):
        staging.fetch(piece, range(1), [0], Mark()).result(0)
    staging.give_back(piece)
    assert staging.num_free == 3


class Prefill:
    """Steps as an engine launches them: each writes a new block, layer by layer, and tells of every second layer."""

    def __init__(self, streams: ReorderingStreams, pool: Tensor) -> None:
        self.marks = Marks(streams)
        self._streams, self._pool = streams, pool
        self.num_launched = 0  # layers, of all steps
        self.told: list[tuple[range, int]] = []  # layers of a block that may be sent

    def launch(self) -> None:
        """The next layer of the step that runs, or the first of another one."""
        block, layer = divmod(self.num_launched, LAYERS)
        self.num_launched += 1
        if layer == 0:
            self.marks.begin()
        self._streams.compute(partial(fill, self._pool[layer, :, block], number(layer, block)))
        if layer % 2:
            self.marks.reach(layer + 1)
            self.told.append((range(layer - 1, layer + 1), block))


def fill(target: Tensor, value: float) -> None:
    target.fill_(value)


def number(layer: int, block: int) -> float:
    return float(1 + layer + LAYERS * block)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_a_piece_holds_what_was_told_in_whatever_order_the_device_works(seed: int) -> None:
    chance = random.Random(seed)
    streams, pool = ReorderingStreams(), empty_pool()
    staging, prefill = Staging(pool, streams, SIZES, IndexedBlocks()), Prefill(streams, pool)
    under_way: list[tuple[Future[None], Piece, range, int]] = []
    num_seen, num_to_come = 0, 2 * BLOCKS
    while num_seen < num_to_come:
        match chance.randrange(4):
            case 0 if prefill.num_launched < BLOCKS * LAYERS:
                prefill.launch()
            case 1 if prefill.told and (piece := staging.take()) is not None:
                layers, block = prefill.told.pop(chance.randrange(len(prefill.told)))
                future = staging.fetch(piece, layers, [block], prefill.marks.behind(layers.stop))
                under_way.append((future, piece, layers, block))
            case 2:
                streams.advance(chance.randrange)
            case _:
                for future, piece, layers, block in [each for each in under_way if each[0].done()]:
                    expected = [[number(layer, block)] * 2 for layer in layers]
                    assert content(piece, layers, 1)[:, :, 0, 0, 0, 0].tolist() == expected
                    under_way.remove((future, piece, layers, block))
                    staging.give_back(piece)
                    num_seen += 1
    assert staging.num_free == SIZES.num_pieces


def test_a_group_of_layers_waits_for_no_later_one() -> None:
    """The overlap: what was told early can be sent while the step goes on, though all of it was launched already."""
    streams, pool = ReorderingStreams(), empty_pool()
    staging, prefill = Staging(pool, streams, SIZES, IndexedBlocks()), Prefill(streams, pool)
    for _ in range(LAYERS):
        prefill.launch()
    piece = taken(staging)
    future = staging.fetch(piece, range(2), [0], prefill.marks.behind(2))
    for _ in range(2):
        assert not future.done()
        streams.advance(lambda _: 0)  # compute, two layers
    streams.advance(lambda count: count - 1)  # the lane
    assert future.done() and not pool[2:].any()
    assert content(piece, range(2), 1)[:, 0, 0, 0, 0, 0].tolist() == [number(0, 0), number(1, 0)]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_what_arrives_outlasts_a_step_that_still_writes_to_a_block_given_away(seed: int) -> None:
    """As in pdmesh/engine/runner/overlap.py: the row of a sequence that has ended is computed once more, and writes a slot."""
    chance, streams, pool = random.Random(seed), ReorderingStreams(), empty_pool()
    staging = Staging(pool, streams, SIZES, IndexedBlocks())
    blocks = chance.sample(range(BLOCKS), 3)
    for layer in range(LAYERS):
        streams.compute(partial(fill, pool[layer, :, blocks[0], 1], -1.0))
    session = Marks(streams).now()  # the push is accepted: its blocks are its own
    streams.compute(partial(fill, pool[:, :, min(set(range(BLOCKS)) - set(blocks))], 3.0))  # later steps are others'
    futures = []
    for layers in (range(2), range(2, 4)):
        piece = taken(staging)
        piece.view(staging.num_bytes(layers, 3))[:] = bytes([chance.randrange(1, 100)]) * staging.num_bytes(layers, 3)
        futures.append((staging.store(piece, layers, blocks, session), piece, layers))
    while streams.advance(chance.randrange):
        pass
    for future, piece, layers in futures:
        assert future.done()
        assert torch.equal(pool[layers.start : layers.stop][:, :, blocks], content(piece, layers, 3))
