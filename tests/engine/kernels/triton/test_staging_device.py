"""Pieces and a real device: marks order its streams, and nobody waits for what computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdmesh.engine.kv_cache.copies import Columns, Piece, PieceCopies
from pdmesh.engine.kv_cache.staging import Marks, Staging, StagingSizes
from pdmesh.engine.kv_cache.streams import streams_of

pytestmark = pytest.mark.gpu
SHAPE = (4, 2, 64, 16, 8, 128)  # 512 KiB a block
LONG = 2_000_000_000  # cycles, about a second


def a_pool() -> Tensor:
    return torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda")


def keep_busy(cycles: int) -> None:
    """The stream of steps."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def taken(staging: Staging) -> Piece:
    piece = staging.take()
    assert piece is not None
    return piece


def test_a_piece_is_there_while_the_step_behind_its_mark_still_runs() -> None:
    pool = a_pool()
    streams = streams_of(pool.device)
    staging = Staging(pool, streams, StagingSizes(2, 8 << 20))
    staging.warm()
    torch.cuda.synchronize()
    marks = Marks(streams)
    marks.begin()
    pool[:2] = 3.0
    marks.reach(2)
    keep_busy(LONG)
    end = torch.cuda.Event()  # type: ignore[no-untyped-call]
    end.record()
    piece = taken(staging)
    staging.fetch(piece, range(2), [5, 1], marks.behind(2)).result(10)
    assert not end.query()  # type: ignore[no-untyped-call]
    assert (piece.host[: staging.num_bytes(range(2), 2)].view(torch.bfloat16) == 3.0).all()
    torch.cuda.synchronize()
    staging.give_back(piece)
    staging.close()


def test_a_mark_is_heard_of_when_the_device_has_come_past_it() -> None:
    """And not those behind it: two questions, the later one first."""
    pool = a_pool()
    streams = streams_of(pool.device)
    marks = Marks(streams)
    marks.begin()
    keep_busy(LONG // 4)
    marks.reach(1)
    keep_busy(LONG // 4)
    marks.reach(2)
    step = marks.so_far()
    last, first = (marks.reached(step.behind(num_layers)) for num_layers in (2, 1))
    assert not first.done() and not last.done()
    first.result(10)
    last.result(10)
    assert marks.reached(step.behind(2)).done()
    marks.close()


def test_both_ways_wait_for_their_mark() -> None:
    pool = a_pool()
    streams = streams_of(pool.device)
    staging = Staging(pool, streams, StagingSizes(2, 8 << 20))
    marks = Marks(streams)
    out, back = taken(staging), taken(staging)
    back.view(staging.num_bytes(range(4), 1))[:] = bytes(staging.num_bytes(range(4), 1))
    keep_busy(LONG // 4)
    pool.fill_(7.0)
    copies = [staging.fetch(out, range(4), [3], marks.now()), staging.store(back, range(4), [9], marks.now())]
    for copy in copies:
        copy.result(10)
    assert (out.host[: staging.num_bytes(range(4), 1)].view(torch.bfloat16) == 7.0).all()
    expected = torch.full_like(pool, 7.0)
    expected[:, :, 9] = 0.0
    assert torch.equal(pool, expected)
    for piece in (out, back):
        staging.give_back(piece)
    staging.close()


def test_two_ranks_heads_lie_side_by_side_in_a_piece() -> None:
    """Each by copies of its own, between rows that lie apart in pinned memory and room on the device."""
    whole = torch.randn(SHAPE, device="cuda").bfloat16()
    pools = [whole[..., :4, :].contiguous(), whole[..., 4:, :].contiguous()]
    streams, layers = streams_of(whole.device), range(1, 3)
    ranks = [PieceCopies(pool, streams, 8 << 20, columns=Columns.of(pool, rank, 2)) for rank, pool in enumerate(pools)]
    piece = ranks[0].new_piece(0)
    piece.block_ids[:3] = torch.tensor([7, 60, 2])
    for rank in ranks:
        rank.fetch(piece, layers, 3, streams.mark()).result(10)
    found = piece.host[: 2 * 2 * 3 * whole[0, 0, 0].nbytes].view(torch.bfloat16).view(2, 2, 3, *SHAPE[3:])
    assert torch.equal(found, whole[1:3][:, :, [7, 60, 2]].cpu())
    piece.block_ids[:3] = torch.tensor([11, 12, 40])
    for rank in ranks:
        rank.store(piece, layers, 3, streams.mark()).result(10)
        rank.close()
    assert torch.equal(torch.cat(pools, dim=4)[1:3][:, :, [11, 12, 40]], whole[1:3][:, :, [7, 60, 2]])
    for part, pool in enumerate(pools):
        assert torch.equal(pool[0], whole[0, ..., 4 * part : 4 * part + 4, :]), "other layers"
