"""Inputs of one step's kernels besides tensors of the model: where tokens are, in int32, in one buffer on the device.

    buffer   | token_ids | positions | slots | adapter_slots | query_starts | context_lens | block_tables | tail_firsts | ...

`Capacity` gives the size of each part. A graph is captured over one buffer of a capacity; before each replay the next step's
numbers are packed for the same capacity and copied over it, in one transfer. What is behind the step's own numbers is padding:
sequences without context, tokens that are not stored.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from pdmesh.engine.kernels.triton.split_kv import SPLIT_BOUNDS, SplitBounds
from pdmesh.engine.runner.batch import StepBatch

PARTS_OF_TOKENS = 4  # token ids, positions, slots, slots of adapters
NO_TAIL = 2**30
NOWHERE = -1
NO_ADAPTER = 2**30  # behind all slots of adapters, in their order


@dataclass(frozen=True)
class Capacity:
    """Sizes of the parts: T tokens of B sequences, W blocks of a table, X slots of a tail, R rows of logits. `max_query_len` and
    `max_context` bound what any sequence has; they decide grids and the size of workspaces, never a number's bits. Sequences with
    at most `max_split_len` queries have their keys split over many programs (split_kv.py)."""

    num_tokens: int
    num_seqs: int
    table_width: int
    tail_width: int
    num_logits: int
    max_query_len: int
    max_context: int
    num_split_tokens: int  # tokens of sequences with at most max_split_len queries
    max_split_len: int

    @classmethod
    def of(cls, batch: StepBatch, bounds: SplitBounds = SPLIT_BOUNDS) -> Capacity:
        """Return a capacity just large enough for the batch, of which `bounds` say what is split."""
        lengths = _lengths(batch)
        longest = bounds.longest(lengths)
        return cls(
            batch.num_tokens,
            batch.num_seqs,
            max(map(len, batch.block_tables), default=0),
            max((len(tail.slots) for tail in batch.tails.values()), default=0),
            len(batch.logits_rows),
            max(lengths, default=0),
            max(batch.context_lens, default=0),
            _split_starts(batch, longest)[-1],
            longest,
        )

    def check(self, batch: StepBatch) -> None:
        """Raise ValueError naming what of the batch does not fit, or leaves padding tokens without a sequence."""
        split_tokens = _split_starts(batch, self.max_split_len)[-1]
        needed = replace(Capacity.of(batch), num_split_tokens=split_tokens, max_split_len=self.max_split_len)
        for field in fields(self):
            need, have = getattr(needed, field.name), getattr(self, field.name)
            if need > have:
                raise ValueError(f"{field.name}: the step needs {need}, there is room for {have}")
        spare = (self.num_seqs - batch.num_seqs) * self.max_query_len
        if self.num_tokens - batch.num_tokens > spare:
            padding = self.num_tokens - batch.num_tokens
            raise ValueError(f"num_seqs: {self.num_seqs} leaves no sequences for {padding} tokens of padding")


@dataclass(frozen=True)
class StepMetadata:
    """Hold views of one buffer, all int32. `query_starts[b]` to `query_starts[b + 1]` are sequence b's tokens; its last query is
    at position `context_lens[b] - 1`. A context of 0 is padding: nothing is read, zeros are written. Position p lies in slot
    `tail_slots[b, p - tail_firsts[b]]` from `tail_firsts[b]` on (pdmesh/engine/runner/batch.py, `Tail`)."""

    buffer: Tensor
    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T]: where keys and values are written; NOWHERE for padding
    adapter_slots: Tensor  # [T]: where the LoRA adapter of the token's sequence lies; NO_ADAPTER for none, and for padding
    query_starts: Tensor  # [B + 1]
    split_starts: Tensor  # [B + 1]: query_starts over tokens of split sequences only; padding has none
    context_lens: Tensor  # [B]
    block_tables: Tensor  # [B, W]
    tail_firsts: Tensor  # [B]; NO_TAIL for none
    tail_slots: Tensor  # [B, X]
    logits_rows: Tensor  # [R]
    num_seqs: int
    max_query_len: int
    max_context: int
    num_split_tokens: int
    max_split_len: int

    @classmethod
    def of(cls, batch: StepBatch, device: torch.device | str, capacity: Capacity | None = None) -> StepMetadata:
        """Return the batch's numbers on a device, in a buffer of their own. Raises ValueError if they do not fit the capacity."""
        capacity = capacity or Capacity.of(batch)
        return cls.over(pack(batch, capacity).to(device, non_blocking=True), capacity)

    @classmethod
    def over(cls, buffer: Tensor, capacity: Capacity) -> StepMetadata:
        """Return views of what `pack` made for that capacity. Raises ValueError if the buffer has another size."""
        shapes = _shapes(capacity)
        sizes = [_padded(_count(shape)) for shape in shapes.values()]
        if buffer.shape != (sum(sizes),) or buffer.dtype != torch.int32:
            raise ValueError(f"buffer: {buffer.dtype} {tuple(buffer.shape)}, expected int32 of {sum(sizes)}")
        parts = torch.split(buffer, sizes)
        views: dict[str, Any] = {
            name: part[: _count(shape)].view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }
        names = ("num_seqs", "max_query_len", "max_context", "num_split_tokens", "max_split_len")
        return cls(buffer, **views, **{name: getattr(capacity, name) for name in names})

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def splits_any(self) -> bool:
        """Return whether the kernel that splits keys has anything to do, even if only padding."""
        return bool(self.num_split_tokens) or not self.walks_any

    @property
    def walks_any(self) -> bool:
        return self.max_query_len > self.max_split_len

    @property
    def of_tokens(self) -> Tensor:
        """Return token ids, positions, slots and slots of adapters as one tensor, [4 T], where T is a multiple of 4 and the
        buffer one that `over` takes."""
        return self.buffer[: PARTS_OF_TOKENS * self.num_tokens]


def pack(batch: StepBatch, capacity: Capacity) -> Tensor:
    """Return [N] int32 in CPU memory, pinned where there is a GPU to copy it to. Raises ValueError if it does not fit."""
    capacity.check(batch)
    split_starts = _split_starts(batch, capacity.max_split_len)
    sizes = [_padded(_count(shape)) for shape in _shapes(capacity).values()]
    buffer = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=torch.cuda.is_available())
    views = StepMetadata.over(buffer, capacity)
    _put(views.token_ids, batch.token_ids)
    _put(views.positions, batch.positions)
    _put(views.slots.fill_(NOWHERE), batch.slot_mapping)
    _put(views.adapter_slots.fill_(NO_ADAPTER), adapters_of_tokens(batch))
    _put(views.query_starts, _query_starts(batch, capacity))
    _put(views.split_starts.fill_(split_starts[-1]), split_starts)
    _put(views.context_lens, batch.context_lens)
    _put(views.logits_rows, batch.logits_rows)
    views.tail_firsts.fill_(NO_TAIL)
    put_tables(views.block_tables, batch.block_tables)
    for index, tail in batch.tails.items():
        views.tail_firsts[index] = tail.first
        _put(views.tail_slots[index], tail.slots)
    return buffer


def has_adapters(batch: StepBatch) -> bool:
    """Return whether some sequence of the batch has a LoRA adapter."""
    return any(slot >= 0 for slot in batch.adapter_slots)


def adapters_of_tokens(batch: StepBatch) -> list[int]:
    """Return the slot of each token's adapter, as kernels read it; empty: no sequence has one."""
    if not has_adapters(batch):
        return []
    slots = zip(batch.adapter_slots, _lengths(batch), strict=True)
    return [NO_ADAPTER if slot < 0 else slot for slot, length in slots for _ in range(length)]


def put_tables(target: Tensor, tables: Sequence[list[int]]) -> None:
    """Copy each table to the beginning of its row of `target` [rows, width] int32, contiguous and in CPU memory. Arrays are used
    because torch takes ten times as long for a list, which is milliseconds a step for long contexts of many sequences."""
    flat, width = target.numpy().reshape(-1).data, target.shape[1]
    for index, table in enumerate(tables):
        flat[index * width : index * width + len(table)] = array("i", table)


def _query_starts(batch: StepBatch, capacity: Capacity) -> list[int]:
    """Distribute the padding tokens over the padding sequences."""
    missing = capacity.num_tokens - batch.num_tokens
    starts = list(batch.query_starts)
    for _ in range(capacity.num_seqs - batch.num_seqs):
        rows = min(missing, capacity.max_query_len)
        starts.append(starts[-1] + rows)
        missing -= rows
    return starts


def _split_starts(batch: StepBatch, max_split_len: int) -> list[int]:
    return list(accumulate((n if n <= max_split_len else 0 for n in _lengths(batch)), initial=0))


def _put(target: Tensor, values: Tensor | Sequence[int]) -> None:
    source = values.numpy() if isinstance(values, Tensor) else array("i", values)
    target.numpy()[: len(source)] = source


def _shapes(capacity: Capacity) -> dict[str, tuple[int, ...]]:
    tokens, seqs = (capacity.num_tokens,), (capacity.num_seqs,)
    return {
        "token_ids": tokens,
        "positions": tokens,
        "slots": tokens,
        "adapter_slots": tokens,
        "query_starts": (capacity.num_seqs + 1,),
        "split_starts": (capacity.num_seqs + 1,),
        "context_lens": seqs,
        "block_tables": (*seqs, capacity.table_width),
        "tail_firsts": seqs,
        "tail_slots": (*seqs, capacity.tail_width),
        "logits_rows": (capacity.num_logits,),
    }


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _padded(count: int) -> int:
    """Round up, so that parts begin at multiples of 16 bytes, which Triton needs to read whole vectors."""
    return count + -count % 4


def _lengths(batch: StepBatch) -> list[int]:
    return [end - start for start, end in pairwise(batch.query_starts)]
