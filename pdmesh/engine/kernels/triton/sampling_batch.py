"""What a step's draws need, in one message to the device, or in none.

    message [words] int32    records of the rows │ masks │ forbidden tokens │ guessed tokens │ places to count
                             sampling_record.py    ─────────── records say where ──────────    sampling_history.py

A step whose rows differ from the last one's in their index alone needs no message: it reads the last one's, `ahead` tokens on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdmesh.engine.kernels.triton import sampling_record as record
from pdmesh.engine.kernels.triton.sampling_history import MOST_ROWS, HistoryCounts, Update
from pdmesh.engine.sampling.sampler import SampleRow, Unseen
from pdmesh.engine.sampling_params import SamplingParams

_MAX_REMEMBERED = 4096
_CHOICE, _INDEX, _COUNT_ROW = record.column(record.CHOICE), record.column(record.INDEX), record.column(record.COUNT_ROW)
_MASK, _FORBIDDEN, _GUESSED = record.column(record.MASK), record.column(record.FORBIDDEN), record.column(record.GUESSED)

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class SamplingBatch:
    """R rows."""

    message: Tensor  # int32, on the device
    counts: Tensor  # [C, V] int32 (sampling_history.py); anything if no record points into it
    vocab_size: int
    num_rows: int
    first_place: int  # in the message: of the places to count
    num_prompt: int  # of them: of prompts
    num_places: int
    is_random: bool  # whether any row's temperature is above 0: else half of the kernels are not launched
    ahead: int = 0  # added to each row's index


class Plan:
    """What the parameters of a request come to, whatever the row."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.params = params  # also keeps their id() from being another's
        self.min_tokens = params.min_tokens
        self.is_random = not params.greedy
        self.has_repetition = params.repetition_penalty != 1.0
        self.has_penalty = self.has_repetition or bool(params.presence_penalty or params.frequency_penalty)
        self.record = record.packed(params, vocab_size).tobytes()

    def is_free(self, row: SampleRow) -> bool:
        """Whether temperature and filters are all that the row asks for."""
        return not self.has_penalty and row.allowed is None and row.index >= self.min_tokens

    def is_counted(self, row: SampleRow) -> bool:
        return self.has_repetition or (self.has_penalty and len(row.output) > 0)


class BatchMaker:
    """Makes the batches of one sampler, on its thread. Remembers parameters in packed form, histories, and the last batch."""

    def __init__(self, vocab_size: int, device: torch.device, num_seqs: int = 0) -> None:
        """`num_seqs`: whose histories are kept, if they are more than MOST_ROWS."""
        self.vocab_size, self.device = vocab_size, device
        self.history = HistoryCounts(vocab_size, device, max(MOST_ROWS, num_seqs))
        self.num_messages = 0
        self._plans: dict[int, Plan] = {}
        self._last: tuple[list[tuple[Plan, int, int]], int, SamplingBatch] | None = None

    def plans(self, rows: Sequence[SampleRow]) -> list[Plan]:
        """By identity: to hash the parameters by value would cost more than all the rest."""
        known = self._plans
        return [known.get(id(row.params)) or self._new_plan(row.params) for row in rows]

    def of(self, rows: Sequence[SampleRow], plans: Sequence[Plan], unseen: Unseen | None = None) -> SamplingBatch:
        """Of at least one row; `unseen`: one token more of each. Copies to the device, waits for nothing that runs there."""
        if not all(plan.is_free(row) for row, plan in zip(rows, plans, strict=True)):
            self._last = None
            return self._sent(rows, plans, unseen)
        first = rows[0].index
        key = [(plan, row.choice, row.index - first) for row, plan in zip(rows, plans, strict=True)]
        if self._last is None or self._last[0] != key:
            self._last = (key, first, self._sent(rows, plans))
        return replace(self._last[2], ahead=first - self._last[1])

    def _new_plan(self, params: SamplingParams) -> Plan:
        if len(self._plans) >= _MAX_REMEMBERED:
            self._plans.clear()
        plan = self._plans[id(params)] = Plan(params, self.vocab_size)
        return plan

    def _sent(self, rows: Sequence[SampleRow], plans: Sequence[Plan], unseen: Unseen | None = None) -> SamplingBatch:
        counted = [place for place, (row, plan) in enumerate(zip(rows, plans, strict=True)) if plan.is_counted(row)]
        count_rows, update = self.history.place([rows[place] for place in counted]) if counted else ([], Update())
        table = np.frombuffer(bytearray(b"".join([plan.record for plan in plans])), np.int32).reshape(len(rows), -1)
        table[:, _CHOICE] = [row.choice for row in rows]
        table[:, _INDEX] = [row.index for row in rows]
        table[counted, _COUNT_ROW] = count_rows
        parts = _with_lists(table, rows, set(counted), self.vocab_size, _NONE if unseen is None else _ROOM)
        first_place = sum(map(len, parts))
        message = np.concatenate([*parts, *update.prompts, *update.outputs])
        self.num_messages += 1
        sent = to_device(message, self.device)
        if unseen is not None and counted:
            self._fill_in(sent, table[counted, _GUESSED + 1] - 1, np.array(unseen.places, np.int64)[counted], unseen.tokens)
        return SamplingBatch(
            message=sent,
            counts=sent if self.history.counts is None else self.history.counts,
            vocab_size=self.vocab_size,
            num_rows=len(rows),
            first_place=first_place,
            num_prompt=sum(map(len, update.prompts)),
            num_places=len(message) - first_place,
            is_random=any(plan.is_random for plan in plans),
        )

    def _fill_in(self, message: Tensor, words: Ints, places: NDArray[np.int64], tokens: Tensor) -> None:
        """On the device: what the host has not seen is put where it left room."""
        seen = tokens.index_select(0, to_device(places, self.device))
        message.index_copy_(0, to_device(words.astype(np.int64), self.device), seen)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Through pinned memory, so that the copy is only queued."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _with_lists(table: Ints, rows: Sequence[SampleRow], counted: set[int], vocab_size: int, room: Ints) -> list[Ints]:
    """The table's records, told where the lists behind it are, and those lists. `room`: behind the guesses of who is counted."""
    parts, end, mask_of = [table.reshape(-1)], table.size, dict[int, int]()
    for place, row in enumerate(rows):
        lists = {_FORBIDDEN: _forbidden(row), _GUESSED: np.concatenate([_guessed(row), room]) if place in counted else _NONE}
        for field, tokens in lists.items():
            if len(tokens):
                table[place, field : field + 2] = end, end + len(tokens)
                parts.append(tokens)
                end += len(tokens)
        if row.allowed is None:
            continue
        if id(row.allowed) not in mask_of:  # choices that have not parted share one
            mask_of[id(row.allowed)] = end
            parts.append(_mask(row.allowed, vocab_size))
            end += len(parts[-1])
        table[place, _MASK] = mask_of[id(row.allowed)]
    return parts


_NONE = np.zeros(0, np.int32)
_ROOM = np.zeros(1, np.int32)  # for a token that the host has not seen


def _forbidden(row: SampleRow) -> Ints:
    tokens = row.forbidden if row.index < row.params.min_tokens else ()
    return np.minimum(np.array(sorted(tokens), np.int64), 2**31 - 1).astype(np.int32)  # beyond the vocabulary: nobody's


def _guessed(row: SampleRow) -> Ints:
    return np.array(row.output[len(row.output) - row.num_guessed :], np.int32)


def _mask(allowed: NDArray[np.uint32], vocab_size: int) -> Ints:
    """Token t is allowed if bit t % 32 of word t // 32 is set."""
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    words[: len(allowed)] = allowed[: len(words)]
    return words.view(np.int32)
