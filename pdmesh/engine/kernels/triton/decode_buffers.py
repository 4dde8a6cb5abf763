"""The numbers of a decode step in buffers that stay where they are, so that a graph can read them again and again.

    host                                        device
    message [7, rows] int32, pinned  ── one copy ──►  message  ── unpack, in the graph ──►  token_ids, positions, slots, ...
    whole tables of new sequences    ── only when some are new ─────────────────────────►  block_tables [rows, width]

A step's message is 28 bytes a row: the block tables, 2 MB for 64 sequences of 128 k tokens in blocks of 16, stay on the device,
and a step adds a block to a row at most. Rows without a sequence have no context and no slot: nothing is read for
them and nothing written; tokens of padding are token 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.decode_kernels import unpack_kernel
from pdmesh.engine.kernels.triton.decode_rows import DecodeRows, RowPlan
from pdmesh.engine.kernels.triton.metadata import NO_TAIL, NOWHERE, StepMetadata, put_tables
from pdmesh.engine.runner.batch import StepBatch

_BLOCK = 128


class Line(IntEnum):
    """Of a message: a number for each row."""

    TOKEN = 0
    POSITION = 1
    SLOT = 2
    CONTEXT = 3
    LOGITS = 4  # the row of the batch's i-th sequence: logits come in the batch's order
    COLUMN = 5  # where the row's table gets a block; NOWHERE: it gets none
    BLOCK = 6


class DecodeBuffers:
    """Of up to `num_rows` sequences with up to `max_context` tokens. A bucket of fewer rows uses the first of them."""

    def __init__(self, num_rows: int, max_context: int, block_size: int, device: torch.device) -> None:
        self.num_rows, self.max_context, self.block_size, self.device = num_rows, max_context, block_size, device
        self.table_width = -(-max_context // block_size)
        self._rows = DecodeRows(num_rows)
        self._messages = {num_rows: self._zeros(len(Line), num_rows)}
        self._token_ids, self._positions, self._context_lens = (self._zeros(num_rows) for _ in range(3))
        self._slots, self._logits_rows = self._zeros(num_rows).fill_(NOWHERE), self._zeros(num_rows)
        self._tables = self._zeros(num_rows, self.table_width)
        self._starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._tail_firsts, self._no_tails = self._zeros(num_rows).fill_(NO_TAIL), self._zeros(num_rows, 0)
        self.drawn = self._zeros(num_rows)

    def why_not(self, batch: StepBatch) -> str | None:
        """What keeps the batch from being a decode step for these buffers; None: it is one."""
        if not 0 < batch.num_seqs <= self.num_rows:
            return f"{batch.num_seqs} sequences, there is room for {self.num_rows}"
        if batch.num_tokens != batch.num_seqs or batch.tails or len(batch.logits_rows) != batch.num_seqs:
            return "not one token and one row of logits of each sequence"
        if batch.logits_rows.tolist() != list(range(batch.num_seqs)):
            return "rows of logits in another order"
        longest = max(batch.context_lens)
        return f"a context of {longest}, there is room for {self.max_context}" if longest > self.max_context else None

    def metadata(self, num_rows: int) -> StepMetadata:
        """Of a bucket: views, the same at each call."""
        return StepMetadata(
            buffer=self._messages[self.num_rows],
            token_ids=self._token_ids[:num_rows],
            positions=self._positions[:num_rows],
            slots=self._slots[:num_rows],
            query_starts=self._starts[: num_rows + 1],
            split_starts=self._starts[: num_rows + 1],
            context_lens=self._context_lens[:num_rows],
            block_tables=self._tables[:num_rows],
            tail_firsts=self._tail_firsts[:num_rows],
            tail_slots=self._no_tails[:num_rows],
            logits_rows=self._logits_rows[:num_rows],
            num_seqs=num_rows,
            max_query_len=1,
            max_context=self.max_context,
            num_split_tokens=num_rows,
            max_split_len=1,
        )

    def send(self, batch: StepBatch, num_rows: int) -> list[int]:
        """Queues what the device lacks of a decode step in a bucket of `num_rows`; the row of each sequence. Before the graph."""
        widths = [-(-context // self.block_size) for context in batch.context_lens]
        tables = [
            table if len(table) == width else table[:width] for table, width in zip(batch.block_tables, widths, strict=True)
        ]
        plan = self._rows.place(tables, num_rows)
        if plan.rewritten:
            self._rewrite([plan.rows[index] for index in plan.rewritten], [tables[index] for index in plan.rewritten])
        self._message(num_rows).copy_(_message(batch, plan, tables, num_rows, self.device), non_blocking=True)
        return plan.rows

    def clear(self, num_rows: int) -> None:
        """A message of a bucket without a sequence."""
        self._message(num_rows).copy_(_empty(num_rows, self.device), non_blocking=True)

    def unpack(self, num_rows: int) -> None:
        """On the device, from the message: the graph begins with it."""
        unpack_kernel[(-(-num_rows // _BLOCK),)](
            self._message(num_rows), self._token_ids, self._positions, self._slots, self._context_lens, self._logits_rows,
            self._tables, self.drawn, num_rows, self._tables.stride(0), BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip

    def _rewrite(self, rows: Sequence[int], tables: Sequence[list[int]]) -> None:
        """Whole rows, as wide as the widest of them."""
        width = max(map(len, tables))
        padded = torch.zeros((len(tables), width), dtype=torch.int32)
        put_tables(padded, tables)
        index = torch.tensor(rows, dtype=torch.int64)
        self._tables[:, :width].index_copy_(0, _queued(index, self.device), _queued(padded, self.device))

    def _message(self, num_rows: int) -> Tensor:
        """A bucket's own, in one piece, so that it is one copy."""
        if num_rows not in self._messages:
            self._messages[num_rows] = self._zeros(len(Line), num_rows)
        return self._messages[num_rows]

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)


def _message(batch: StepBatch, plan: RowPlan, tables: Sequence[list[int]], num_rows: int, device: torch.device) -> Tensor:
    """[7, num_rows] in host memory; each step has its own, as the copy before may still be queued."""
    message = _empty(num_rows, device)
    lines, rows = message.numpy(), np.array(plan.rows)  # by NumPy: torch takes several times as long for so little
    lines[Line.TOKEN, rows] = batch.token_ids.numpy()
    lines[Line.POSITION, rows] = batch.positions.numpy()
    lines[Line.SLOT, rows] = batch.slot_mapping.numpy()
    lines[Line.CONTEXT, rows] = batch.context_lens
    lines[Line.LOGITS, : len(rows)] = rows
    for index in plan.added:
        lines[Line.COLUMN, plan.rows[index]] = len(tables[index]) - 1
        lines[Line.BLOCK, plan.rows[index]] = tables[index][-1]
    return message


def _empty(num_rows: int, device: torch.device) -> Tensor:
    """Of rows without sequences; pinned where there is a GPU."""
    message = torch.zeros((len(Line), num_rows), dtype=torch.int32, pin_memory=device.type == "cuda")
    message.numpy()[[Line.SLOT, Line.COLUMN]] = NOWHERE
    return message


def _queued(tensor: Tensor, device: torch.device) -> Tensor:
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
