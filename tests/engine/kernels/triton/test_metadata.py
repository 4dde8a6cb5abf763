"""A step's numbers in one buffer, padded to what a graph was captured with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pdmesh.engine.kernels.triton.metadata import NO_TAIL, Capacity, StepMetadata, pack
from pdmesh.engine.kernels.triton.split_kv import SplitBounds
from pdmesh.engine.runner.batch import StepBatch, Tail

BATCH = StepBatch(
    token_ids=torch.tensor([5, 6, 7]),
    positions=torch.tensor([4, 8, 9]),
    slot_mapping=torch.tensor([20, 40, 51]),
    query_starts=[0, 1, 3],
    context_lens=[5, 10],
    block_tables=[[5], [3, 10, 2]],
    logits_rows=torch.tensor([0, 2]),
    tails={1: Tail(9, [51])},
)
WIDE = Capacity(6, 5, 4, 2, 3, 2, 100, 6, 2)


def test_exact() -> None:
    meta = StepMetadata.of(BATCH, "cpu")
    assert Capacity.of(BATCH) == Capacity(3, 2, 3, 1, 2, 2, 10, 3, 2)
    assert [meta.token_ids.tolist(), meta.positions.tolist(), meta.slots.tolist()] == [[5, 6, 7], [4, 8, 9], [20, 40, 51]]
    assert [meta.query_starts.tolist(), meta.split_starts.tolist()] == [[0, 1, 3], [0, 1, 3]]
    assert [meta.context_lens.tolist(), meta.block_tables.tolist()] == [[5, 10], [[5, 0, 0], [3, 10, 2]]]
    assert [meta.tail_firsts.tolist(), meta.tail_slots.tolist()] == [[NO_TAIL, 9], [[0], [51]]]
    assert (meta.logits_rows.tolist(), meta.num_seqs, meta.max_query_len, meta.max_context) == ([0, 2], 2, 2, 10)


def test_padded() -> None:
    meta = StepMetadata.of(BATCH, "cpu", WIDE)
    assert meta.slots.tolist() == [20, 40, 51, -1, -1, -1]
    assert meta.query_starts.tolist() == [0, 1, 3, 5, 6, 6]
    assert meta.split_starts.tolist() == [0, 1, 3, 3, 3, 3]
    assert meta.context_lens.tolist() == [5, 10, 0, 0, 0]
    assert meta.block_tables.tolist() == [[5, 0, 0, 0], [3, 10, 2, 0], *[[0] * 4] * 3]
    assert meta.tail_firsts.tolist() == [NO_TAIL, 9, *[NO_TAIL] * 3]
    assert meta.logits_rows.tolist() == [0, 2, 0]


def test_a_buffer_takes_the_next_step() -> None:
    """What a replay does: the views stay, one copy changes them; nothing of the step before is left."""
    meta = StepMetadata.of(BATCH, "cpu", WIDE)
    smaller = replace(BATCH, query_starts=[0, 1, 1], context_lens=[6, 0], block_tables=[[5], []], tails={}, **_first_token())
    meta.buffer.copy_(pack(smaller, WIDE))
    fresh = StepMetadata.of(smaller, "cpu", WIDE)
    assert torch.equal(meta.buffer, fresh.buffer)
    assert meta.context_lens.tolist() == [6, 0, 0, 0, 0]


def _first_token() -> dict[str, Any]:
    names = ("token_ids", "positions", "slot_mapping", "logits_rows")
    return {name: getattr(BATCH, name)[:1] for name in names}


def test_long_chunks_are_not_split() -> None:
    zeros: dict[str, Any] = {name: torch.zeros(34, dtype=torch.int64) for name in ("token_ids", "positions", "slot_mapping")}
    batch = replace(
        BATCH,
        query_starts=[0, 1, 18, 34],
        context_lens=[5, 20, 30],
        block_tables=[[1], [2, 3], [4, 5]],
        tails={},
        **zeros,
    )
    meta = StepMetadata.of(batch, "cpu", Capacity.of(batch, SplitBounds(16, 17)))
    assert (meta.split_starts.tolist(), meta.num_split_tokens, meta.max_split_len) == ([0, 1, 1, 17], 17, 16)
    meta = StepMetadata.of(batch, "cpu", Capacity.of(batch, SplitBounds(16, 16)))
    assert (meta.split_starts.tolist(), meta.num_split_tokens, meta.max_split_len) == ([0, 1, 1, 1], 1, 1)


@pytest.mark.parametrize(
    "field",
    ["num_tokens", "num_seqs", "table_width", "tail_width", "num_logits", "max_query_len", "max_context", "num_split_tokens"],
)
def test_what_does_not_fit_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        StepMetadata.of(BATCH, "cpu", replace(WIDE, **{field: 1 if field != "tail_width" else 0}))


def test_padding_tokens_need_a_sequence() -> None:
    with pytest.raises(ValueError, match="num_seqs: 2 leaves no sequences for 3 tokens"):
        StepMetadata.of(BATCH, "cpu", replace(WIDE, num_seqs=2))


def test_a_buffer_of_another_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer"):
        StepMetadata.over(pack(BATCH, WIDE), replace(WIDE, num_tokens=30))
