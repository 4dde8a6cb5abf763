"""CUDA graphs of decode steps: recording work once and replaying it, the rows and buffers of decode steps, and their buckets.

Work that can be recorded takes no arguments, reads and writes tensors at fixed addresses, and does not synchronize with the
device. It returns tensors; after each replay they hold the new results, until the next one. Without a GPU the same work is
called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pdmesh.engine.kernels.triton.metadata import (
    NO_ADAPTER,
    NO_TAIL,
    NOWHERE,
    StepMetadata,
    adapters_of_tokens,
    has_adapters,
    put_tables,
)
from pdmesh.engine.kernels.triton.step import StepOutput, TritonStep
from pdmesh.engine.models.layers import ROW_MULTIPLE
from pdmesh.engine.runner.batch import StepBatch

Work = Callable[[], tuple[Tensor, ...]]


class Recording(NamedTuple):
    output: tuple[Tensor, ...]
    replay: Callable[[], None]


class Recorder(Protocol):
    def record(self, work: Work) -> Recording:
        """Run the work, perhaps more than once, and keep it; `output` holds its results. Further runs of it come in the same
        stream."""
        ...


class CudaGraphs:
    """Record a graph for each piece of work; all share one pool of memory, since no two of them run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()
        self._anchor: torch.cuda.CUDAGraph | None = None

    def record(self, work: Work) -> Recording:
        """Record the work. Its first run compiles kernels and lets libraries make their plans, which a capture may not
        contain."""
        side = self._side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        if self._anchor is None:
            self._anchor = self._anchored()
        graph = torch.cuda.CUDAGraph()
        # Copies of a hand-off go on meanwhile on other threads, which query events: the capture must allow that.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()
        graph.replay()  # a capture computes nothing
        return Recording(output, graph.replay)

    def _anchored(self) -> torch.cuda.CUDAGraph:
        """Return a graph of one small kernel that stays. torch gives a pool up with its last graph, and refuses to record into it
        again: as when all graphs of one KV pool are dropped, and those of another are recorded."""
        anchor = torch.cuda.CUDAGraph()
        with torch.cuda.graph(anchor, pool=self._pool, capture_error_mode="thread_local"):
            torch.zeros(1, device="cuda")
        return anchor


class Repeats:
    """Call the function again and put its results where the first results are, as a graph does: so buffers, padding and buckets
    on a machine without a GPU are those of a GPU."""

    def record(self, work: Work) -> Recording:
        output = work()

        def replay() -> None:
            for kept, new in zip(output, work(), strict=True):
                kept.copy_(new)

        return Recording(output, replay)


def make_recorder(device: torch.device) -> Recorder:
    return CudaGraphs() if device.type == "cuda" else Repeats()


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether both are the same pool: recordings hold the address of a pool."""
    return (one.data_ptr(), one.shape, one.dtype, one.stride()) == (other.data_ptr(), other.shape, other.dtype, other.stride())


# The kernel that unpacks a step's message to where the step's other kernels read it


# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"


@triton.jit
def unpack_kernel(
    message, token_ids, positions, slots, context_lens, logits_rows, adapter_slots, block_tables, drawn, num_rows, table_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: BLOCK rows. message [8, num_rows]: see Line. A token below 0, -1 - r, is what row r drew last."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_rows
    token = tl.load(message + at, mask=inside, other=0)
    before = inside & (token < 0)
    token = tl.where(before, tl.load(drawn + (-1 - token), mask=before, other=0), token)
    tl.store(token_ids + at, token, mask=inside)
    tl.store(positions + at, tl.load(message + num_rows + at, mask=inside, other=0), mask=inside)
    tl.store(slots + at, tl.load(message + 2 * num_rows + at, mask=inside, other=0), mask=inside)
    tl.store(context_lens + at, tl.load(message + 3 * num_rows + at, mask=inside, other=0), mask=inside)
    tl.store(logits_rows + at, tl.load(message + 4 * num_rows + at, mask=inside, other=0), mask=inside)
    tl.store(adapter_slots + at, tl.load(message + 7 * num_rows + at, mask=inside, other=0), mask=inside)
    column = tl.load(message + 5 * num_rows + at, mask=inside, other=-1)
    block = tl.load(message + 6 * num_rows + at, mask=inside, other=0)
    tl.store(block_tables + at.to(tl.int64) * table_stride + column, block, mask=inside & (column >= 0))


# Which row of a graph a sequence decodes in, and which of its numbers the device does not have yet. No tensor on a device.
#
# A sequence keeps its row from step to step, so only a new block of its block table, which is the long part, is sent. Steps
# do not name their sequences; but the block that a sequence writes to is its own alone (a shared one is copied first), so it is
# recognized by it:
#
#     step n     table 4 9 7        writes to 7                   row 0 is held by 7
#     step n+1   table 4 9 7        writes to 7   ─► row 0        nothing to send
#     step n+1   table 4 9 7 3      writes to 3, behind 7         row 0 too; column 3 becomes 3
#
# That only chooses the row: what a row's table lacks is found by comparing it with the one that was sent.


@dataclass(frozen=True)
class RowPlan:
    """`rows[i]` is the row of the batch's i-th sequence. `added`: the last column of its row's table is new, by sequence.
    `rewritten`: sequences whose row gets its whole table."""

    rows: list[int]
    added: list[int]
    rewritten: list[int]


class DecodeRows:
    """Track on the host which rows and tables the device holds."""

    def __init__(self, num_rows: int) -> None:
        self._tables: list[list[int]] = [[] for _ in range(num_rows)]
        self._row_of: dict[int, int] = {}  # keyed by the block that was written to last

    def place(self, tables: Sequence[list[int]], num_rows: int) -> RowPlan:
        """Return rows below `num_rows` for sequences with these block tables; each ends with the block that the step writes
        to."""
        taken: set[int] = set()
        rows = [self._known_row(table, num_rows, taken) for table in tables]
        free = (row for row in range(num_rows) if row not in taken)
        placed = [next(free) if row is None else row for row in rows]
        added: list[int] = []
        rewritten: list[int] = []
        for index, (row, table) in enumerate(zip(placed, tables, strict=True)):
            held = self._tables[row]
            if held == table:
                continue
            is_next = len(held) == len(table) - 1 and table[:-1] == held
            if is_next or held[: len(table)] != table:
                (added if is_next else rewritten).append(index)
            self._tables[row] = table
        self._row_of = {table[-1]: row for row, table in zip(placed, tables, strict=True)}
        return RowPlan(placed, added, rewritten)

    def _known_row(self, table: list[int], num_rows: int, taken: set[int]) -> int | None:
        for block in table[:-3:-1]:  # the last, and the one before it
            row = self._row_of.get(block)
            if row is not None and row < num_rows and row not in taken:
                taken.add(row)
                return row
        return None


# The numbers of a decode step in buffers with fixed addresses, so that a graph can read them again and again
#
#     host                                        device
#     message [8, rows] int32, pinned  ── one copy ──►  message  ── unpack, in the graph ──►  token_ids, positions, slots, ...
#     whole tables of new sequences    ── only when some are new ─────────────────────────►  block_tables [rows, width]
#
# A step's message is 32 bytes a row: the block tables, 2 MB for 64 sequences of 128 k tokens in blocks of 16, stay on the device,
# and a step adds a block to a row at most. Rows without a sequence have no context and no slot: nothing is read for
# them and nothing written; tokens of padding are token 0.


_BLOCK = 128


class Line(IntEnum):
    """Number the lines of a message: each has a number for each row."""

    TOKEN = 0
    POSITION = 1
    SLOT = 2
    CONTEXT = 3
    LOGITS = 4  # the row of the batch's i-th sequence: logits come in the batch's order
    COLUMN = 5  # where the row's table gets a block; NOWHERE: it gets none
    BLOCK = 6
    ADAPTER = 7


class DecodeBuffers:
    """Hold the inputs of up to `num_rows` sequences with up to `max_context` tokens. A bucket of fewer rows uses the first of
    them."""

    def __init__(self, num_rows: int, max_context: int, block_size: int, device: torch.device) -> None:
        self.num_rows, self.max_context, self.block_size, self.device = num_rows, max_context, block_size, device
        self.table_width = -(-max_context // block_size)
        self._rows = DecodeRows(num_rows)
        self._messages = {num_rows: self._zeros(len(Line), num_rows)}
        self._token_ids, self._positions, self._context_lens = (self._zeros(num_rows) for _ in range(3))
        self._slots, self._logits_rows = self._zeros(num_rows).fill_(NOWHERE), self._zeros(num_rows)
        self._adapter_slots = self._zeros(num_rows).fill_(NO_ADAPTER)
        self._tables = self._zeros(num_rows, self.table_width)
        self._starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._tail_firsts, self._no_tails = self._zeros(num_rows).fill_(NO_TAIL), self._zeros(num_rows, 0)
        self.drawn = self._zeros(num_rows)

    def why_not(self, batch: StepBatch) -> str | None:
        """Return what keeps the batch from being a decode step for these buffers; None: it is one."""
        if not 0 < batch.num_seqs <= self.num_rows:
            return f"{batch.num_seqs} sequences, there is room for {self.num_rows}"
        if batch.num_tokens != batch.num_seqs or batch.tails or len(batch.logits_rows) != batch.num_seqs:
            return "not one token and one row of logits of each sequence"
        if batch.logits_rows.tolist() != list(range(batch.num_seqs)):
            return "rows of logits in another order"
        longest = max(batch.context_lens)
        return f"a context of {longest}, there is room for {self.max_context}" if longest > self.max_context else None

    def metadata(self, num_rows: int) -> StepMetadata:
        """Return the metadata of a bucket: views, the same at each call."""
        return StepMetadata(
            buffer=self._messages[self.num_rows],
            token_ids=self._token_ids[:num_rows],
            positions=self._positions[:num_rows],
            slots=self._slots[:num_rows],
            adapter_slots=self._adapter_slots[:num_rows],
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
        """Queue what the device lacks of a decode step in a bucket of `num_rows`; return the row of each sequence. Before the
        graph."""
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
        """Send the message of a bucket without a sequence."""
        self._message(num_rows).copy_(_empty(num_rows, self.device), non_blocking=True)

    def unpack(self, num_rows: int) -> None:
        """Unpack the message on the device: the graph begins with it."""
        unpack_kernel[(-(-num_rows // _BLOCK),)](
            self._message(num_rows), self._token_ids, self._positions, self._slots, self._context_lens, self._logits_rows,
            self._adapter_slots, self._tables, self.drawn, num_rows, self._tables.stride(0), BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip

    def _rewrite(self, rows: Sequence[int], tables: Sequence[list[int]]) -> None:
        """Send whole rows, as wide as the widest of them."""
        width = max(map(len, tables))
        padded = torch.zeros((len(tables), width), dtype=torch.int32)
        put_tables(padded, tables)
        index = torch.tensor(rows, dtype=torch.int64)
        self._tables[:, :width].index_copy_(0, _queued(index, self.device), _queued(padded, self.device))

    def _message(self, num_rows: int) -> Tensor:
        """Return a bucket's own message, contiguous, so that it is one copy."""
        if num_rows not in self._messages:
            self._messages[num_rows] = self._zeros(len(Line), num_rows)
        return self._messages[num_rows]

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)


def _message(batch: StepBatch, plan: RowPlan, tables: Sequence[list[int]], num_rows: int, device: torch.device) -> Tensor:
    """Return [8, num_rows] in host memory; each step has its own, as the copy before may still be queued."""
    message = _empty(num_rows, device)
    lines, rows = message.numpy(), np.array(plan.rows)  # by NumPy, as torch takes several times as long for small arrays
    lines[Line.TOKEN, rows] = batch.token_ids.numpy()
    lines[Line.POSITION, rows] = batch.positions.numpy()
    lines[Line.SLOT, rows] = batch.slot_mapping.numpy()
    lines[Line.CONTEXT, rows] = batch.context_lens
    lines[Line.LOGITS, : len(rows)] = rows
    lines[Line.ADAPTER, rows] = adapters_of_tokens(batch) or NO_ADAPTER
    for index in plan.added:
        lines[Line.COLUMN, plan.rows[index]] = len(tables[index]) - 1
        lines[Line.BLOCK, plan.rows[index]] = tables[index][-1]
    return message


def _empty(num_rows: int, device: torch.device) -> Tensor:
    """Return the message of rows without sequences; pinned where there is a GPU."""
    message = torch.zeros((len(Line), num_rows), dtype=torch.int32, pin_memory=device.type == "cuda")
    message.numpy()[[Line.SLOT, Line.COLUMN]] = NOWHERE
    message.numpy()[Line.ADAPTER] = NO_ADAPTER
    return message


def _queued(tensor: Tensor, device: torch.device) -> Tensor:
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


# Decode steps in buckets: their numbers of rows are powers of two, with one recording for each
#
#     5 sequences ─► bucket 8:   rows 0 1 2 3 4 | 5 6 7           the last three are padding
#                                real           | padding
#
# A bucket's launches are the same for any batch that fits, whether recorded or not. So what a graph computes has the bits of the
# same launches made one by one; and the number of rows of a product, by which libraries choose their kernels, is a bucket's.
#
# A model with places for LoRA adapters has two recordings for each bucket: of steps with an adapter in some row, and of those
# without, which so cost what they cost on a worker without adapters. Which rows have which adapter is in the message, so adapters
# come and go under the same recordings.


@dataclass(frozen=True)
class DecodeSizes:
    """Hold the limits of a decode step: sequences, and tokens of a sequence; and the rows of the least bucket."""

    max_num_seqs: int
    max_context: int
    block_size: int
    fewest: int = ROW_MULTIPLE

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_context", "block_size", "fewest"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")

    @property
    def buckets(self) -> tuple[int, ...]:
        """Return the rows of each bucket, ascending: powers of two from `fewest` on; the last holds all."""
        most = self.max_num_seqs + -self.max_num_seqs % min(self.fewest, ROW_MULTIPLE)
        powers = [self.fewest << shift for shift in range(most.bit_length()) if self.fewest << shift < most]
        return (*powers, most)


def fewest_rows(device: torch.device) -> int:
    """Return the rows of the least bucket: on a CPU 4, as products there have other bits below."""
    return ROW_MULTIPLE if device.type == "cpu" else 1


class DecodeGraphs:
    """Run decode steps of one model on one pool. `recorder` None: the same launches, made one by one in each step."""

    def __init__(self, step: TritonStep, kv: Tensor, sizes: DecodeSizes, recorder: Recorder | None) -> None:
        self._step, self._kv, self._recorder = step, kv, recorder
        self._buckets = sizes.buckets
        self.buffers = DecodeBuffers(self._buckets[-1], sizes.max_context, sizes.block_size, kv.device)
        self._recordings: dict[tuple[int, bool], Recording] = {}  # by rows, and whether some have adapters

    @property
    def buckets(self) -> Sequence[int]:
        return self._buckets

    def is_of(self, kv: Tensor) -> bool:
        """Return whether the graphs are recorded on this pool."""
        return is_same_memory(self._kv, kv)

    def run(self, batch: StepBatch) -> StepOutput:
        """Run one decode step (`DecodeBuffers.why_not` says None). Outputs [batch.num_seqs, ...] hold until the next step."""
        num_rows = next(bucket for bucket in self._buckets if bucket >= batch.num_seqs)
        self.buffers.send(batch, num_rows)
        output = self._output(num_rows, has_adapters(batch))
        return StepOutput(output.logits[: batch.num_seqs], output.states[: batch.num_seqs])

    def prepare(self) -> None:
        """Record all buckets, the largest first, whose memory the others share. Rows have no sequences, so nothing is written."""
        for bucket in reversed(self._buckets):
            for adapted in self._step.kinds:
                self.buffers.clear(bucket)
                self._output(bucket, adapted)

    def _output(self, num_rows: int, adapted: bool) -> StepOutput:
        if self._recorder is None:
            return self._work(num_rows, adapted)
        if (recording := self._recordings.get((num_rows, adapted))) is not None:
            recording.replay()
        else:
            recording = self._recordings[num_rows, adapted] = self._recorder.record(lambda: self._work(num_rows, adapted))
        return StepOutput(*recording.output)

    def _work(self, num_rows: int, adapted: bool) -> StepOutput:
        self.buffers.unpack(num_rows)
        return self._step.run(self.buffers.metadata(num_rows), self._kv, adapted=adapted)
