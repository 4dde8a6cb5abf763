"""Learns a worker's latency model from its steps, one after the other. Pure: the time is passed in.

Two memories. The shape, the five numbers' proportions, comes from all kinds of work seen over a long time (`WorkCells`), by
non-negative least squares of the relative error. The scale comes from the latest steps alone: a factor for the parts of decode
rows and one for those of prompts, medians of observed / expected. So the model follows a machine that has become slower within
some tens of steps, and is accurate at the current load although no machine is quite linear, without forgetting what other work
costs.
"""

from bisect import bisect_left, insort
from collections import OrderedDict, deque

import numpy as np
from numpy.typing import NDArray

from pdmesh.planning.latency_model import LatencyModel, Work

# Least squares with non-negative coefficients, for a handful of unknowns.
#
# Fast NNLS on the normal equations (Bro and de Jong, 1997, after Lawson and Hanson): unknowns enter the passive set, in which the
# equations hold exactly, while that lowers the error, and leave it where they would turn negative.


Array = NDArray[np.float64]
_TOLERANCE = 1e-12


def solve_non_negative(gram: Array, moments: Array) -> Array:
    """Return the x >= 0 that minimizes x·gram·x - 2·moments·x. `gram` [n, n] is positive definite, `moments` [n]; returns [n]."""
    x = np.zeros(len(moments))
    passive = np.zeros(len(moments), dtype=bool)
    tolerance = _TOLERANCE * max(1.0, float(np.abs(moments).max()))
    for _ in range(4 * len(moments)):  # rounding could cause a cycle; any x on the way is a valid answer
        slope = np.where(passive, -np.inf, moments - gram @ x)
        entering = int(slope.argmax())
        if slope[entering] <= tolerance:
            break
        passive[entering] = True
        x = _settle(gram, moments, x, passive)
    return x


def _settle(gram: Array, moments: Array, x: Array, passive: NDArray[np.bool_]) -> Array:
    """Return the solution on the passive set, after removing the unknowns that must leave it."""
    while True:
        target = np.zeros_like(x)
        target[passive] = np.linalg.solve(gram[np.ix_(passive, passive)], moments[passive])
        falling = passive & (target <= 0.0)
        if not falling.any():
            return target
        share = float(np.min(x[falling] / np.maximum(x[falling] - target[falling], 1e-300)))
        x = np.maximum(x + share * (target - x), 0.0)
        leaving = falling & (x <= _TOLERANCE)
        passive &= ~(leaving if leaving.any() else falling)
        x[~passive] = 0.0


# The median of the latest values.


class RunningMedian:
    """Keep the median of the last `size` values; adding one costs about a microsecond."""

    def __init__(self, size: int) -> None:
        self._latest: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, value: float) -> None:
        if len(self._latest) == self._latest.maxlen:
            del self._sorted[bisect_left(self._sorted, self._latest[0])]
        self._latest.append(value)
        insort(self._sorted, value)

    @property
    def value(self) -> float:
        """Return the upper one of two in the middle; 0 without any value."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else 0.0


# The times of steps, by the kind of their work.
#
# Thousands of decode steps pass between two large prompts. So steps with similar work (within a factor of √2 in each number)
# share a cell, and each cell forgets by itself: it keeps the mean work and the mean time of its last hundred steps or so. Because
# time is linear in work, the mean of the times belongs to the mean of the works: a cell is one precise observation.


NUM_CELLS = 256  # the least recently seen one is replaced
MEMORY_STEPS = 64  # of a cell: a step's weight in its mean has halved after about 45 more
KNOWN_STEPS = 4  # of a kind: with fewer it is new
SATURATION_STEPS = 8  # a mean of more steps weighs no more: the rest is not noise, but nonlinearity
HALF_LIFE_STEPS = 1500  # after this many steps elsewhere a cell counts half,
MIN_WEIGHT = 0.02  # but never less: it may be the only one of its kind of work
_SECONDS = 5  # the column after those of the work


class WorkCells:
    """Hold means of [1, prefill tokens, prefill context, sequences, context, seconds]."""

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[int, int, int, int], int] = OrderedDict()
        self._means = np.zeros((NUM_CELLS, _SECONDS + 1))
        self._counts = np.zeros(NUM_CELLS)
        self._seen = np.zeros(NUM_CELLS)
        self._step = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, work: Work, seconds: float) -> float | None:
        """Add a step; return what steps of this kind took before, in seconds; None for a new kind."""
        self._step += 1
        row = self._row(_kind(work))
        mean, known = self._means[row], self._counts[row]
        before = float(mean[_SECONDS]) if known >= KNOWN_STEPS else None
        count = self._counts[row] = min(known + 1.0, MEMORY_STEPS)
        mean += (np.array((1.0, *work, seconds)) - mean) / count
        self._seen[row] = self._step
        return before

    def rescale(self, factor: float) -> None:
        """Scale all times to a machine that needs `factor` times as long."""
        self._means[:, _SECONDS] *= factor

    def observations(self) -> tuple[Array, Array, Array]:
        """Return work [n, 5], a leading 1 included, seconds [n] and weight [n] of each cell."""
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
    """Return half octaves of the number of tokens and of their mean context, for prompts and for decode rows."""
    tokens, context, rows, rows_context = work
    mean, rows_mean = context // tokens if tokens else 0, rows_context // rows if rows else 0
    return (
        (tokens * tokens).bit_length(),
        (mean * mean).bit_length(),
        (rows * rows).bit_length(),
        (rows_mean * rows_mean).bit_length(),
    )


ERROR_STEPS = 64  # of each kind, for the medians of the error
RECENT_STEPS = 48  # of each kind, for the scale
SURE_STEPS = 8  # of a kind: with this many the scale counts half
SOLVE_PERIOD_S = 0.1
MAX_WAIT_S = 1.0  # a single new step is worth solving for after this
MIN_NEW_STEPS = 8
# The prior covers what no step has shown: its weight fades with the steps, to almost nothing.
PRIOR_STEPS = 4.0
MIN_PRIOR_WEIGHT = 1e-5
# A step that is off by more than a multiple of the usual error was disturbed: its error is clipped to that multiple.
CLIP_ERRORS = 4.0
MIN_CLIP, MAX_CLIP = 0.15, 20.0
MAX_SCALE = 20.0
# When three quarters of the latest steps took that much longer (or less long) than earlier steps of their kind, the machine has
# changed. Steps are compared with steps: where the shape is wrong, the shape must change.
CHANGE = 1.3
MIN_SECONDS = 1e-7
_DECODE, _PREFILL = [0, 3, 4], [1, 2]  # columns


class LatencyFit:
    """Fit one worker's model. Not thread-safe."""

    def __init__(self, prior: LatencyModel) -> None:
        """Create it. `prior`: the model before the first step; each of its five numbers > 0, or that part stays free of cost
        until steps say otherwise."""
        self.num_steps = 0
        self._prior = np.maximum(_numbers(prior), 1e-12)
        self._model = prior
        self._cells = WorkCells()
        self._errors = {True: RunningMedian(ERROR_STEPS), False: RunningMedian(ERROR_STEPS)}
        self._recent: dict[bool, deque[tuple[float, ...]]] = {kind: deque(maxlen=RECENT_STEPS) for kind in (True, False)}
        self._paces: deque[float] = deque(maxlen=RECENT_STEPS)  # of the latest steps, relative to earlier ones of their kind
        self._num_solved_steps = 0
        self._solved_s = float("-inf")

    def observe(self, work: Work, seconds: float) -> None:
        """Add a step that did `work` in `seconds`. The error is that of the model as it was last read."""
        seconds = max(seconds, MIN_SECONDS)
        predicted = max(self._model.step_s(work), MIN_SECONDS)
        has_prompt = work.prefill_tokens > 0
        errors = self._errors[has_prompt]
        clip = 1.0 + (min(max(CLIP_ERRORS * errors.value, MIN_CLIP), MAX_CLIP) if len(errors) >= SURE_STEPS else MAX_CLIP)
        errors.add(abs(predicted - seconds) / seconds)
        before = self._cells.add(work, min(max(seconds, predicted / clip), predicted * clip))
        if before is not None:
            self._paces.append(seconds / before)
        self._recent[has_prompt].append((1.0, *work, seconds))
        self.num_steps += 1

    def model(self, now_s: float) -> LatencyModel:
        """Return the current model; solve again (less than a millisecond) when enough steps are new."""
        num_new, waited_s = self.num_steps - self._num_solved_steps, now_s - self._solved_s
        if num_new and waited_s >= (SOLVE_PERIOD_S if num_new >= MIN_NEW_STEPS else MAX_WAIT_S):
            self._num_solved_steps, self._solved_s = self.num_steps, now_s
            self._model = self._solve()
        return self._model

    def _solve(self) -> LatencyModel:
        fixed, token, context, row, row_context = map(float, self._scaled(self._followed(self._shape())))
        return LatencyModel(
            fixed,
            token,
            context,
            row,
            row_context,
            num_steps=self.num_steps,
            prefill_error=self._errors[True].value,
            decode_error=self._errors[False].value,
        )

    def _followed(self, numbers: Array) -> Array:
        """Return the numbers, scaled to the machine's new speed also for work that has not been seen since."""
        if len(self._paces) < RECENT_STEPS:
            return numbers
        paces = sorted(self._paces)
        quarter, middle = RECENT_STEPS // 4, paces[RECENT_STEPS // 2]
        if paces[-quarter] > 1 / CHANGE and paces[quarter] < CHANGE:
            return numbers
        self._cells.rescale(middle)
        self._paces.clear()
        return numbers * middle

    def _shape(self) -> Array:
        """Return the five numbers that fit all cells best, in units of the prior, so that it holds each of them equally."""
        work, seconds, weights = self._cells.observations()
        rows = work * self._prior / seconds[:, None]
        held = max(PRIOR_STEPS / (self.num_steps + PRIOR_STEPS) / 10, MIN_PRIOR_WEIGHT)
        weighted = rows * weights[:, None]
        gram = weighted.T @ rows + held * np.eye(len(self._prior))
        return self._prior * solve_non_negative(gram, weighted.sum(axis=0) + held)

    def _scaled(self, numbers: Array) -> Array:
        """Return the numbers, scaled to the latest steps of either kind. The fixed time belongs to the decode rows."""
        scaled = numbers.copy()
        for has_prompt, columns in ((False, _DECODE), (True, _PREFILL)):
            if self._recent[has_prompt]:
                scaled[columns] *= _scale(np.array(self._recent[has_prompt]), scaled, columns)
        return scaled


def _scale(recent: Array, numbers: Array, columns: list[int]) -> float:
    """Return the factor for the parts in `columns` with which half of the `recent` steps took longer than expected."""
    work, seconds = recent[:, :5], recent[:, 5]
    part = work[:, columns] @ numbers[columns]
    if not part.all():
        return 1.0
    rest = work @ numbers - part
    # A part that is small within its step says little about its own price.
    shares = part / (part + rest)
    ratios = np.maximum(seconds - rest, 0.0) / part
    scale, belief = _weighted_median(ratios, shares), float(shares.sum()) ** 2 / SURE_STEPS**2
    return float(np.clip((belief * scale + 1.0) / (belief + 1.0), 1 / MAX_SCALE, MAX_SCALE))


def _weighted_median(values: Array, weights: Array) -> float:
    order = values.argsort()
    reached = weights[order].cumsum()
    return float(values[order[int(np.searchsorted(reached, reached[-1] / 2))]])


def _numbers(model: LatencyModel) -> Array:
    return np.array(
        (
            model.fixed_s,
            model.per_prefill_token_s,
            model.per_prefill_context_s,
            model.per_sequence_s,
            model.per_context_token_s,
        )
    )
