"""What rank 0 says arrives as it was said."""

from __future__ import annotations

import socket

import pytest
import torch

from pdmesh.engine.parallel import tp_protocol
from pdmesh.engine.parallel.tp_protocol import Kind
from pdmesh.engine.runner.batch import StepBatch, Tail


def tensor(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


BATCHES = {
    "mixed, with a tail": StepBatch(
        token_ids=tensor(5, 6, 7, 8),
        positions=tensor(40, 0, 1, 2),
        slot_mapping=tensor(40, 96, 97, 98),
        query_starts=[0, 1, 4],
        context_lens=[41, 3],
        block_tables=[[2, 0, 1], [6]],
        logits_rows=tensor(0, 3),
        tails={1: Tail(1, [99, 100])},
    ),
    "no logits": StepBatch(tensor(9), tensor(0), tensor(16), [0, 1], [1], [[1]], tensor()),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_survives(name: str) -> None:
    batch = BATCHES[name]
    read = tp_protocol.decode_batch(bytearray(tp_protocol.encode_batch(batch)))
    for field in ("token_ids", "positions", "slot_mapping", "logits_rows"):
        assert torch.equal(getattr(read, field), getattr(batch, field)), field
    for field in ("query_starts", "context_lens", "block_tables", "tails"):
        assert getattr(read, field) == getattr(batch, field), field


def test_slots_survive() -> None:
    assert tp_protocol.decode_slots(bytearray(tp_protocol.encode_slots([1, 2, 3], [4, 5, 6]))) == ([1, 2, 3], [4, 5, 6])


def test_frames_one_after_another_and_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        tp_protocol.send(ours, Kind.LOADED)
        tp_protocol.send(ours, Kind.STEP, b"x" * 100_000)
        assert tp_protocol.receive(theirs) == (Kind.LOADED, bytearray())
        assert tp_protocol.expect(theirs, Kind.STEP) == (Kind.STEP, bytearray(b"x" * 100_000))
        tp_protocol.send(ours, Kind.READY)
        with pytest.raises(ValueError, match="heard READY, not LOADED or FAILED"):
            tp_protocol.expect(theirs, Kind.LOADED, Kind.FAILED)
        ours.close()
        with pytest.raises(EOFError):
            tp_protocol.receive(theirs)
