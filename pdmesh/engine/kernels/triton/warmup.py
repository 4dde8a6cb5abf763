"""Compilation and loading of every kernel that steps of a model launch, before the first request.

Triton compiles a kernel when it is first launched with other constants, which takes seconds in which nothing else is computed.
Steps of one model differ in little: a product's rows, up to the next power of two and once beyond the last; short
sequences (split, merge) or long ones (walk); with tails or without. Numbers that grow (tokens, sequences, widths of tables) are
constants to no kernel. So some ten steps without a sequence launch all that any step will, and write nothing.

Not included: sampling (sampling/sampler.py), and a decode step's message (cuda_graphs.py), which belongs to its graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.blocks import TritonBlocks
from pdmesh.engine.kernels.triton.linear.weight_product import TILE_ROWS_MAX
from pdmesh.engine.kernels.triton.metadata import Capacity, StepMetadata
from pdmesh.engine.kernels.triton.split_kv import Splits
from pdmesh.engine.kernels.triton.step import TritonStep
from pdmesh.engine.kv_cache.block_moves import Move
from pdmesh.engine.models.layers import ROW_MULTIPLE
from pdmesh.engine.runner.batch import StepBatch


@torch.inference_mode()
def warm(step: TritonStep, kv: Tensor, max_logits: int = TILE_ROWS_MAX + ROW_MULTIPLE) -> None:
    """Launch the kernels of all kinds of steps. kv is the pool, which is not changed. `max_logits`: the most rows of logits of a
    step. Takes the memory of a step of 132 tokens."""
    for capacity in padding_steps(step.attention.splits, max_logits):
        step.run(StepMetadata.of(_nothing(), kv.device, capacity), kv)


@torch.inference_mode()
def warm_moves(kv: Tensor) -> None:
    """Compile the copies of blocks with all their heads (blocks.py), by one token that is read and put back: before the pool is
    used."""
    heads, copies = range(kv.shape[4]), TritonBlocks()
    piece = kv.new_empty((1, 2, 1, *kv.shape[4:]))
    ids = torch.zeros(1, dtype=torch.int32, device=kv.device)
    move = Move(kv, range(1), ids, piece, 0, heads)
    copies.gather(move)
    copies.scatter(move)


def padding_steps(splits: Splits, max_logits: int) -> Iterator[Capacity]:
    """Yield one step for each kind, each with one sequence without context. `splits` are attention's."""
    kinds = [(rows, 0) for rows in _rows()] + [(ROW_MULTIPLE, 1), (2 * ROW_MULTIPLE, 1)]
    for rows, tail_width in kinds:
        yield Capacity(
            num_tokens=rows,
            num_seqs=1,
            table_width=1,
            tail_width=tail_width,
            num_logits=min(rows, max_logits + -max_logits % ROW_MULTIPLE),
            max_query_len=rows,
            max_context=2 * splits.min_keys,  # two parts, so that there is something to merge
            num_split_tokens=0,
            max_split_len=ROW_MULTIPLE,  # the others are walked
        )


def _rows() -> list[int]:
    powers = [ROW_MULTIPLE]
    while powers[-1] < TILE_ROWS_MAX:
        powers.append(2 * powers[-1])
    return [*powers, TILE_ROWS_MAX + ROW_MULTIPLE]


def _nothing() -> StepBatch:
    none = torch.zeros(0, dtype=torch.int64)
    return StepBatch(
        token_ids=none, positions=none, slot_mapping=none, query_starts=[0], context_lens=[], block_tables=[], logits_rows=none
    )
