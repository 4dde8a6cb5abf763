"""NVIDIA Dynamo's planner as its documentation states it ("Planner Design", throughput-based scaling). Pure.

    every adjustment interval (180 s):
        correction of prefill = observed TTFT / expected TTFT        correction of decode = observed ITL / expected ITL
        prefill replicas = ceil(requests · input length / interval · min(1, correction) / tokens/s of an engine's prefill)
        decode replicas  = ceil(requests · output length / interval / best tokens/s whose ITL is target / correction)

The number and the lengths of requests are predicted for the next interval; "constant" predicts those of the last one. Throughput
is interpolated from a profile there; here it is the step model's, which makes the profile exact. Its load-based mode (one replica
more or less each interval, marked experimental) and its other predictors (ARIMA, Kalman, Prophet) are not covered.
"""

import math
from dataclasses import dataclass, replace

from pdmesh.planning.capacity_load import Goals, Lengths, Worker
from pdmesh.planning.prompt_times import largest_batch, step_s, times_alone


@dataclass(frozen=True)
class Interval:
    """What was seen in the last one: requests, mean lengths, mean TTFT and ITL (None: no request ended)."""

    num_requests: float
    lengths: Lengths
    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True)
class DynamoSettings:
    """Objectives in `goals`; `has_correction` False is its option --no-correction."""

    prefill: Worker
    decode: Worker
    goals: Goals
    interval_s: float = 180.0
    min_replicas: int = 1
    max_replicas: int = 64
    has_correction: bool = True


class DynamoPlanner:
    """Prefill and decode apart."""

    def __init__(self, settings: DynamoSettings) -> None:
        self._settings = settings
        self._prefill_correction = self._decode_correction = 1.0

    def decide(self, seen: Interval, num_decode: int) -> tuple[int, int]:
        """Prefill and decode replicas for the next interval; `num_decode` served in the last one."""
        if self._settings.has_correction:
            self._correct(seen, num_decode)
        per_s = seen.num_requests / self._settings.interval_s
        prefill = per_s * seen.lengths.input_tokens * min(1.0, self._prefill_correction) / self.prefill_tokens_per_s(seen.lengths)
        decode = per_s * seen.lengths.output_tokens / self.decode_tokens_per_s(seen.lengths, self._decode_correction)
        return self._bounded(prefill), self._bounded(decode)

    def prefill_tokens_per_s(self, lengths: Lengths) -> float:
        """Of an engine that computes one prompt of the mean length after the other."""
        return lengths.input_tokens / self._expected_ttft_s(lengths)

    def decode_tokens_per_s(self, lengths: Lengths, correction: float) -> float:
        """The most of an engine with its steps within the objective / `correction`; where none is, its least step."""
        context = _context(lengths)
        goal_s = math.inf if self._settings.goals.tpot_s is None else self._settings.goals.tpot_s / correction
        same = replace(lengths, output_squared=lengths.output_tokens**2)
        worker = self._settings.decode
        if step_s(worker.model, 1, context) > goal_s:
            return 1 / step_s(worker.model, 1, context)
        batch = largest_batch(worker, same, Goals(tpot_s=None if goal_s == math.inf else goal_s))
        return batch / step_s(worker.model, batch, context)

    def _correct(self, seen: Interval, num_decode: int) -> None:
        """Expected ITL: at the concurrency that the load of the interval means for each engine."""
        if seen.ttft_s is not None:
            self._prefill_correction = seen.ttft_s / self._expected_ttft_s(seen.lengths)
        if seen.itl_s is None or num_decode < 1:
            return
        running = seen.num_requests / self._settings.interval_s * seen.itl_s * seen.lengths.output_tokens / num_decode
        expected_s = step_s(self._settings.decode.model, max(1.0, running), _context(seen.lengths))
        self._decode_correction = max(1e-3, seen.itl_s / expected_s)

    def _expected_ttft_s(self, lengths: Lengths) -> float:
        mean = replace(lengths, input_squared=lengths.input_tokens**2)
        return times_alone(self._settings.prefill, mean).mean_s

    def _bounded(self, replicas: float) -> int:
        return min(self._settings.max_replicas, max(self._settings.min_replicas, math.ceil(replicas - 1e-9)))


def _context(lengths: Lengths) -> float:
    """Input and half of the output, as the document has it."""
    return lengths.input_tokens + lengths.output_tokens / 2
