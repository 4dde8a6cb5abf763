"""A step's sampling batch: token counts of sequences, a record for each row, and the message that sends them to the device.

    message [words] int32    records of the rows │ masks │ biases │ forbidden tokens │ draft tokens │ places to count
                                                  ──────────────── records say where ──────────────

A step whose rows differ from the last step's only in their index needs no message: it reads the last one's, `ahead` tokens on.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from pdmesh.engine.kernels.triton.launching import settle_keys
from pdmesh.engine.sampling.sampler import SampleRow, Unseen, record_of, record_type
from pdmesh.sampling_params import SamplingParams

# Token counts of sequences, kept on the device: a penalty needs the history, and a history is long
#
#     sequence ──► a row of `counts` [rows, V] int32         first draw: prompt and output go to the device, once
#                                                            later draws: the tokens that came since
#
# A row is a sequence's as long as the sequence lives. The counts are checked against the sequence at each draw and counted
# again if they do not fit, so preemption, parallel sampling and migration need no notification. Draft tokens are not counted:
# they go along with each draw (GUESSED) until they are accepted.
#
# Bytes: 4 a row and token of the vocabulary, 0.5 MB a row of 128 k; 64 rows, 33 MB, or as many as an engine has sequences. Beyond
# that, the sequence that was not drawn for the longest time loses its row and is counted anew in its next draw. A step that needs
# more rows by itself has them (draft tokens without an owner do), in powers of two: growing by a few rows each time would
# allocate a new tensor each time, and the freed ones would be too small to be used again. They are not given back: model.py has
# counted as many as a step can need, so the KV pool leaves them free.


IN_PROMPT = 1 << 30  # bit of a count: the token is in the prompt; the bits below it: how often it is in the output
MOST_ROWS = 64

Ints = NDArray[np.int32]


@dataclass
class Update:
    """Hold the places in the flat counts that the device has to change before a draw."""

    prompts: list[Ints] = field(default_factory=list)  # places that get the bit IN_PROMPT
    outputs: list[Ints] = field(default_factory=list)  # places that are incremented


@dataclass
class _Held:
    row: int
    prompt: Sequence[int]
    num_counted: int = 0  # tokens of the output
    last: int = -1  # the last counted token

    def fits(self, prompt: Sequence[int], output: Sequence[int], num_sure: int) -> bool:
        """Return whether the counts are this output's: it only grows; another's has a different token where the counts end."""
        if prompt is not self.prompt or num_sure < self.num_counted:
            return False
        return not self.num_counted or output[self.num_counted - 1] == self.last


class HistoryCounts:
    """Count tokens for one sampler, on its thread; sequences may be dropped on any."""

    def __init__(self, vocab_size: int, device: torch.device, most_rows: int = MOST_ROWS) -> None:
        """`most_rows` are kept from step to step, and allocated at once. A step that needs more gets them."""
        self._vocab_size, self._device, self._most_rows = vocab_size, device, most_rows
        self._held: dict[weakref.ref[object], _Held] = {}  # the sequence that was drawn last is last
        self._dropped: deque[weakref.ref[object]] = deque()  # sequences that were deleted, reported on any thread
        self._free: list[int] = []
        self._lent: list[int] = []  # rows lent to rows without an owner, for one step
        self._prompt: tuple[Sequence[int], Ints] = ((), np.zeros(0, np.int32))
        self.counts: Tensor | None = None  # [rows, V] int32, from the first row that is counted on

    @property
    def num_held(self) -> int:
        """Return the number of sequences that have a row."""
        self._collect()
        return len(self._held)

    def place(self, rows: Sequence[SampleRow]) -> tuple[list[int], Update]:
        """Return the row of counts of each row of a step, and what has to be counted before they are drawn."""
        self._collect()
        self._make_room(rows)
        update, step = Update(), dict[weakref.ref[object], int]()
        return [self._place(row, step, update) for row in rows], update

    def _place(self, row: SampleRow, step: dict[weakref.ref[object], int], update: Update) -> int:
        num_sure = len(row.output) - row.num_guessed
        if row.owner is None:
            self._lent.append(self._cleared())
            self._count(_Held(self._lent[-1], row.prompt), row, num_sure, update, is_new=True)
            return self._lent[-1]
        key = weakref.ref(row.owner, self._dropped.append)
        if key in step:  # another node of its draft, or another choice that still shares the sequence: the same history
            return step[key]
        held = self._held.pop(key, None)
        is_new = held is None or not held.fits(row.prompt, row.output, num_sure)
        if held is None or is_new:
            if held is not None:
                self._free.append(held.row)
            held = _Held(self._cleared(), row.prompt)
        self._held[key] = held
        self._count(held, row, num_sure, update, is_new=is_new)
        step[key] = held.row
        return held.row

    def _count(self, held: _Held, row: SampleRow, num_sure: int, update: Update, *, is_new: bool) -> None:
        first = held.row * self._vocab_size
        if is_new and row.params.penalizes_prompt:  # the other penalties do not look at the prompt
            update.prompts.append(self._prompt_of(row.prompt) + np.int32(first))
        if num_sure > held.num_counted:
            update.outputs.append(np.asarray(row.output[held.num_counted : num_sure], np.int32) + np.int32(first))
            held.num_counted, held.last = num_sure, row.output[num_sure - 1]

    def _prompt_of(self, prompt: Sequence[int]) -> Ints:
        """Return the prompt as an array: choices of a request follow one another, with the same prompt."""
        if self._prompt[0] is not prompt:
            self._prompt = (prompt, np.asarray(prompt, np.int32))
        return self._prompt[1]

    def _collect(self) -> None:
        while self._dropped:
            held = self._held.pop(self._dropped.popleft(), None)
            if held is not None:
                self._free.append(held.row)
        self._free += self._lent
        self._lent.clear()

    def _make_room(self, rows: Sequence[SampleRow]) -> None:
        """Get a free row for each row of the step that has none, if need be from sequences that are not in the step."""
        keys = [None if row.owner is None else weakref.ref(row.owner) for row in rows]
        step = {key for key in keys if key is not None}
        num_needed = sum(key is None for key in keys) + sum(key not in self._held for key in step)
        for key in [key for key in self._held if key not in step]:
            if len(self._free) >= num_needed or len(self._held) + num_needed <= self._most_rows:
                break
            self._free.append(self._held.pop(key).row)
        if len(self._free) < num_needed:
            self._grow(num_needed - len(self._free))

    def _grow(self, num_more: int) -> None:
        old = self.counts
        num_old = 0 if old is None else old.shape[0]
        num_needed = num_old + num_more
        num_rows = self._most_rows if num_needed <= self._most_rows else 1 << (num_needed - 1).bit_length()
        self.counts = torch.empty((num_rows, self._vocab_size), dtype=torch.int32, device=self._device)
        if old is not None:
            self.counts[:num_old].copy_(old)
        self._free += range(num_rows - 1, num_old - 1, -1)

    def _cleared(self) -> int:
        row = self._free.pop()
        assert self.counts is not None, "there was a free row"
        self.counts[row].zero_()
        return row


# A row's record: parameters of a row of logits for the kernels, in words of 32 bits of a step's message
#
# All records begin a message, one after the other. Kernels get only the message's address and find a row's record themselves: an
# address for each field would be aligned or not by the number of rows, and each case would be compiled.


# The parameters come first: float32, int32 (of more, the most), or two words, the lower first.
PARAMS = record_type("<f4", "<i4", align=False)
_PARAM_WORDS = PARAMS.itemsize // 4


def word_of(name: str) -> tl.constexpr:
    """Where a parameter stands in a record. Kernels see a module's constants as constexpr only."""
    assert PARAMS.fields is not None
    return tl.constexpr(PARAMS.fields[name][1] // 4)


SEED = word_of("seed")
FLOOR = tl.constexpr(_PARAM_WORDS)  # float32: less likely tokens are not in top-p's set, see sampling/sampler.keep_top_p
CHOICE = tl.constexpr(_PARAM_WORDS + 1)
INDEX = tl.constexpr(_PARAM_WORDS + 2)  # in the choice's output
COUNT_ROW = tl.constexpr(_PARAM_WORDS + 3)  # of the counts, -1: none
MASK = tl.constexpr(_PARAM_WORDS + 4)  # where in the message the words of its mask begin, -1: none
FORBIDDEN = tl.constexpr(_PARAM_WORDS + 5)  # where in the message its forbidden tokens begin; the next word: where they end
GUESSED = tl.constexpr(_PARAM_WORDS + 7)  # the same of drafted tokens before this one, which no count holds
BIASED = tl.constexpr(_PARAM_WORDS + 9)  # the same of its biased tokens, each followed by the bits of what is added
WORDS = tl.constexpr(_PARAM_WORDS + 11)


@triton.jit
def float_at(record: tl.tensor, FIELD: tl.constexpr) -> tl.tensor:
    return tl.load(record + FIELD).to(tl.float32, bitcast=True)


@triton.jit
def seed_of(record: tl.tensor) -> tl.tensor:
    low = tl.load(record + SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(record + SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32) | low


def column(field: tl.constexpr) -> int:
    """Return a field's column, on the host."""
    return int(field.value)


def packed(params: SamplingParams, vocab_size: int) -> Ints:
    """Return [WORDS], without what changes from token to token."""
    record = np.zeros(column(WORDS), np.int32)
    record[:_PARAM_WORDS] = record_of(params, PARAMS).view("<i4")
    record[column(FLOOR)] = np.float32((1.0 - params.top_p) / vocab_size).view(np.int32)
    record[[column(COUNT_ROW), column(MASK)]] = -1
    return record


settle_keys(globals())


_MAX_REMEMBERED = 4096
_CHOICE, _INDEX, _COUNT_ROW = column(CHOICE), column(INDEX), column(COUNT_ROW)
_MASK, _FORBIDDEN, _GUESSED, _BIASED = column(MASK), column(FORBIDDEN), column(GUESSED), column(BIASED)


@dataclass(frozen=True)
class SamplingBatch:
    """Hold R rows to sample."""

    message: Tensor  # int32, on the device
    counts: Tensor  # [C, V] int32 (HistoryCounts); anything if no record points into it
    vocab_size: int
    num_rows: int
    first_place: int  # in the message: the first of the places to count
    num_prompt: int  # how many of them are of prompts
    num_places: int
    is_random: bool  # whether any row's temperature is above 0: else half of the kernels are not launched
    ahead: int = 0  # added to each row's index


class Plan:
    """Hold what depends on the parameters of a request only, whatever the row."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.params = params  # also keeps their id() from being reused
        self.min_tokens = params.min_tokens
        self.is_random = not params.greedy
        self.has_repetition = params.penalizes_prompt
        self.has_penalty = self.has_repetition or params.penalizes_output
        self.biased = _biased(params)
        self.record = packed(params, vocab_size).tobytes()

    def is_free(self, row: SampleRow) -> bool:
        """Return whether temperature and filters are all that the row needs."""
        return not self.has_penalty and not len(self.biased) and row.allowed is None and row.index >= self.min_tokens

    def is_counted(self, row: SampleRow) -> bool:
        return self.has_repetition or (self.has_penalty and len(row.output) > 0)


class BatchMaker:
    """Make the batches of one sampler, on its thread. It keeps parameters in packed form, histories, and the last batch."""

    def __init__(self, vocab_size: int, device: torch.device, num_seqs: int = 0) -> None:
        """`num_seqs`: how many histories are kept, if more than MOST_ROWS."""
        self.vocab_size, self.device = vocab_size, device
        self.history = HistoryCounts(vocab_size, device, max(MOST_ROWS, num_seqs))
        self.num_messages = 0
        self._plans: dict[int, Plan] = {}
        self._last: tuple[list[tuple[Plan, int, int]], int, SamplingBatch] | None = None

    def plans(self, rows: Sequence[SampleRow]) -> list[Plan]:
        """Return the plans by identity: hashing the parameters by value would cost more than all the rest."""
        known = self._plans
        return [known.get(id(row.params)) or self._new_plan(row.params) for row in rows]

    def of(self, rows: Sequence[SampleRow], plans: Sequence[Plan], unseen: Unseen | None = None) -> SamplingBatch:
        """Return a batch of at least one row; `unseen`: one token more of each. Copies to the device without waiting for it."""
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
        biased = [plan.biased for plan in plans]
        parts = _with_lists(table, rows, biased, set(counted), self.vocab_size, _NONE if unseen is None else _ROOM)
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
        """Write tokens that the host has not read to the places left for them, on the device."""
        seen = tokens.index_select(0, to_device(places, self.device)).clamp_(min=0)  # NO_TOKEN: its row is dropped
        message.index_copy_(0, to_device(words.astype(np.int64), self.device), seen)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy through pinned memory, so that the copy is only queued."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _with_lists(
    table: Ints, rows: Sequence[SampleRow], biased: Sequence[Ints], counted: set[int], vocab_size: int, room: Ints
) -> list[Ints]:
    """Return the table's records, with the places of the lists behind it, and those lists. `room` is behind the draft tokens of
    counted rows."""
    parts, end, mask_of = [table.reshape(-1)], table.size, dict[int, int]()
    for place, row in enumerate(rows):
        lists = {
            _BIASED: biased[place],
            _FORBIDDEN: _forbidden(row),
            _GUESSED: np.concatenate([_guessed(row), room]) if place in counted else _NONE,
        }
        for word, tokens in lists.items():
            if len(tokens):
                table[place, word : word + 2] = end, end + len(tokens)
                parts.append(tokens)
                end += len(tokens)
        if row.allowed is None:
            continue
        if id(row.allowed) not in mask_of:  # choices that still share a sequence share one
            mask_of[id(row.allowed)] = end
            parts.append(_mask(row.allowed, vocab_size))
            end += len(parts[-1])
        table[place, _MASK] = mask_of[id(row.allowed)]
    return parts


_NONE = np.zeros(0, np.int32)
_ROOM = np.zeros(1, np.int32)  # room for a token that the host has not read


def _biased(params: SamplingParams) -> Ints:
    """Return token ids, each followed by the bits of what is added to its logit."""
    pairs = np.zeros((len(params.logit_bias), 2), np.int32)
    for place, (token, number) in enumerate(params.logit_bias):
        pairs[place] = min(token, 2**31 - 1), np.float32(number).view(np.int32)
    return pairs.reshape(-1)


def _forbidden(row: SampleRow) -> Ints:
    tokens = row.forbidden if row.index < row.params.min_tokens else ()
    return np.minimum(np.array(sorted(tokens), np.int64), 2**31 - 1).astype(np.int32)  # ids beyond the vocabulary match no token


def _guessed(row: SampleRow) -> Ints:
    return np.array(row.output[len(row.output) - row.num_guessed :], np.int32)


def _mask(allowed: NDArray[np.uint32], vocab_size: int) -> Ints:
    """Return the mask: token t is allowed if bit t % 32 of word t // 32 is set."""
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    words[: len(allowed)] = allowed[: len(words)]
    return words.view(np.int32)
