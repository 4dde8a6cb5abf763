"""What steps took, remembered by the kind of their work. Pure.

Thousands of decode steps pass between two large prompts. So steps that do about the same (within a factor of √2 in each number)
share a cell, and each cell forgets by itself: it keeps the mean work and the mean time of its last hundred steps or so. Because
time is linear in work, the mean of the times belongs to the mean of the works: a cell is one precise observation.
"""

from collections import OrderedDict

import numpy as np

from pdmesh.planning.latency_model import Work
from pdmesh.planning.least_squares import Array

NUM_CELLS = 256  # the one that was not seen for longest makes room
MEMORY_STEPS = 64  # of a cell: a step's weight in its mean has halved after about 45 more
KNOWN_STEPS = 4  # of a kind: with fewer it is new
SATURATION_STEPS = 8  # a mean of more steps is not worth more: what is left is not noise, but that no machine is quite linear
HALF_LIFE_STEPS = 1500  # after so many steps elsewhere a cell counts half,
MIN_WEIGHT = 0.02  # but never less than so much: nothing else may know of its kind of work
_SECONDS = 5  # the column behind those of the work


class WorkCells:
    """Means of [1, prefill tokens, prefill context, sequences, context, seconds]."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[int, int, int, int], int] = OrderedDict()
        self._means = np.zeros((NUM_CELLS, _SECONDS + 1))
        self._counts = np.zeros(NUM_CELLS)
        self._seen = np.zeros(NUM_CELLS)
        self._step = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, work: Work, seconds: float) -> float | None:
        """Returns what steps of this kind took before, in seconds; None for a kind that is new."""
        self._step += 1
        row = self._row(_kind(work))
        mean, known = self._means[row], self._counts[row]
        before = float(mean[_SECONDS]) if known >= KNOWN_STEPS else None
        count = self._counts[row] = min(known + 1.0, MEMORY_STEPS)
        mean += (np.array((1.0, *work, seconds)) - mean) / count
        self._seen[row] = self._step
        return before

    def rescale(self, factor: float) -> None:
        """All times as they are on a machine that needs `factor` times as long."""
        self._means[:, _SECONDS] *= factor

    def observations(self) -> tuple[Array, Array, Array]:
        """Work [n, 5], a leading 1 included, seconds [n] and weight [n] of each cell."""
        num = len(self._rows)
        age = 0.5 ** ((self._step - self._seen[:num]) / HALF_LIFE_STEPS)
        counts = self._counts[:num]
        weights = np.maximum(age, MIN_WEIGHT) * counts / (counts + SATURATION_STEPS)
        return self._means[:num, :_SECONDS], self._means[:num, _SECONDS], weights

    def _row(self, kind: tuple[int, int, int, int]) -> int:
        row = self._rows.get(kind)
        if row is None:
            row = self._rows[kind] = self._free_row()
        self._rows.move_to_end(kind)
        return row

    def _free_row(self) -> int:
        if len(self._rows) < NUM_CELLS:
            return len(self._rows)
        _, row = self._rows.popitem(last=False)
        self._means[row], self._counts[row] = 0.0, 0.0
        return row


def _kind(work: Work) -> tuple[int, int, int, int]:
    """Half octaves of the number of tokens and of their mean context, for prompts and for decode rows."""
    tokens, context, rows, rows_context = work
    mean, rows_mean = context // tokens if tokens else 0, rows_context // rows if rows else 0
    return (
        (tokens * tokens).bit_length(),
        (mean * mean).bit_length(),
        (rows * rows).bit_length(),
        (rows_mean * rows_mean).bit_length(),
    )
