"""Which tokens a sequence has had, counted on the device: a penalty needs the history, and a history is long.

    sequence ──► a row of `counts` [rows, V] int32         first draw: prompt and output go to the device, once
                                                           later draws: the tokens that came since

A row is a sequence's as long as the sequence lives. What is kept is checked against the sequence at each draw and counted
again if it does not fit, so nobody has to say that a request was preempted, parted into choices, or came from another worker. A
draft's tokens are not counted: they go along with each draw (sampling_record.GUESSED) until they are kept.

Bytes: 4 a row and token of the vocabulary, 0.5 MB a row of 128 k; 64 rows, 33 MB, or as many as an engine has sequences. Beyond
that, who was not drawn for the longest time loses its row and is counted anew when its turn comes. A step that needs more rows by
itself has them (drafted tokens do, where nobody owns them), in powers of two: a few more each time would be a new piece of memory
each time, while the pieces before are too small for anybody. They are not given back: step_memory.py has counted as many as a
step can need, so that the pool of KV leaves them free, and nobody else would use them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdmesh.engine.sampling.sampler import SampleRow

IN_PROMPT = 1 << 30  # bit of a count: the token stands in the prompt; below it: how often in the output
MOST_ROWS = 64

Ints = NDArray[np.int32]


@dataclass
class Update:
    """Places in the flat counts that the device has to touch before a draw."""

    prompts: list[Ints] = field(default_factory=list)  # get the bit IN_PROMPT
    outputs: list[Ints] = field(default_factory=list)  # get one more


@dataclass
class _Held:
    row: int
    prompt: Sequence[int]
    num_counted: int = 0  # of the output
    last: int = -1  # of the counted tokens

    def fits(self, prompt: Sequence[int], output: Sequence[int], num_sure: int) -> bool:
        """An output only grows; if it is another's, what was counted last does not stand there."""
        if prompt is not self.prompt or num_sure < self.num_counted:
            return False
        return not self.num_counted or output[self.num_counted - 1] == self.last


class HistoryCounts:
    """For one sampler, on its thread; sequences may be dropped on any."""

    def __init__(self, vocab_size: int, device: torch.device, most_rows: int = MOST_ROWS) -> None:
        """`most_rows`: kept from step to step, and there from the first on. A step that needs more has them."""
        self._vocab_size, self._device, self._most_rows = vocab_size, device, most_rows
        self._held: dict[weakref.ref[object], _Held] = {}  # who was drawn last stands last
        self._dropped: deque[weakref.ref[object]] = deque()  # of sequences that are no more; told on any thread
        self._free: list[int] = []
        self._lent: list[int] = []  # to rows without an owner, for one step
        self._prompt: tuple[Sequence[int], Ints] = ((), np.zeros(0, np.int32))
        self.counts: Tensor | None = None  # [rows, V] int32, from the first row that is counted on

    @property
    def num_held(self) -> int:
        """Sequences that have a row."""
        self._collect()
        return len(self._held)

    def place(self, rows: Sequence[SampleRow]) -> tuple[list[int], Update]:
        """For rows of one step that are counted: the row of counts of each, and what has to be counted before they are drawn."""
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
        if key in step:  # another node of its draft, or another choice that has not parted: the same history
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
        if is_new and row.params.repetition_penalty != 1.0:  # the other penalties do not look at the prompt
            update.prompts.append(self._prompt_of(row.prompt) + np.int32(first))
        if num_sure > held.num_counted:
            update.outputs.append(np.asarray(row.output[held.num_counted : num_sure], np.int32) + np.int32(first))
            held.num_counted, held.last = num_sure, row.output[num_sure - 1]

    def _prompt_of(self, prompt: Sequence[int]) -> Ints:
        """The choices of a request come one after the other, with the same prompt."""
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
        """A free row for each of the step that has none, if need be of sequences that are not in the step."""
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
