"""What a simulation is told of a machine beside the workers' own reports: measured on runs that are not the ones compared. Pure.

From requests that met nobody: what router, calls and hand-off take by themselves. From steps under another load: what passes
between them, how much they vary, and for how long.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.autoscale.fidelity_runs import Passage, Run, SeenWorker
from pdmesh.planning.latency_model import LatencyModel, Work
from pdmesh.simulator.settings import HandOff

LONGEST_BETWEEN_S = 0.02
"""What is longer was no pause between two steps: nothing was to be done."""
WINDOW_STEPS = 32
"""Over which disturbances are averaged, to see for how long they last."""
LASTS_S = (0.005, 5.0)


@dataclass(frozen=True)
class Calibration:
    """Seconds, but for `noise`: as `pdmesh.simulator.settings.MeshSettings` and `pdmesh.simulator.workers.spec.WorkerSpec` have
    them."""

    router_s: float
    call_s: float
    token_s: float
    handoff_s: float
    between_s: float
    noise: float
    noise_lasts_s: float

    @property
    def handoff(self) -> HandOff:
        """On one machine: what there is to send is sent while the prompt is computed."""
        return HandOff(fixed_s=self.handoff_s)


def calibrated(alone: Run, handed_over: Run, loaded: Run) -> Calibration:
    """`alone`: requests that met nobody, LOCAL; `handed_over`: the same, REMOTE; `loaded`: many. Raises ValueError where there is
    too little of something."""
    if any(not one.is_local for one in alone.passages) or any(one.is_local for one in handed_over.passages):
        raise ValueError("calibration: a request was placed otherwise than it was asked for")
    call_s = _median(alone.passages, "reserve") / 2
    return Calibration(
        router_s=_median(alone.passages, "route", "admission_queue"),
        call_s=call_s,
        token_s=_median(alone.passages, "outside", "first_token_return"),
        handoff_s=_median(handed_over.passages, "kv_exposed", "decode_queue"),
        between_s=_between_s(loaded.workers),
        **_noise(loaded.workers),
    )


def _median(passages: Sequence[Passage], *parts: str) -> float:
    return statistics.median(sum(one.parts[part] for part in parts) for one in passages)


def _between_s(workers: Iterable[SeenWorker]) -> float:
    """Mean."""
    pauses = [later[0] - earlier[1] for worker in workers for earlier, later in pairwise(worker.steps)]
    return statistics.fmean(pause for pause in pauses if pause < LONGEST_BETWEEN_S)


def _noise(workers: Iterable[SeenWorker]) -> dict[str, float]:
    """How single steps vary, and how much of it is left in the mean of many: which is a matter of how long disturbances last."""
    deviations = [_deviations(worker) for worker in workers if len(worker.steps) > 2 * WINDOW_STEPS]
    if not deviations:
        raise ValueError(f"calibration: no worker has done {2 * WINDOW_STEPS} steps")
    noise = statistics.pstdev(_centred(math.log(one) for some in deviations for one, _ in some))
    windows = [window for some in deviations for window in _windows(some)]
    left = statistics.pvariance(_centred(math.log(mean) for mean, _ in windows)) / noise**2
    return {"noise": noise, "noise_lasts_s": _lasts_s(left, statistics.fmean(seconds for _, seconds in windows))}


def _deviations(worker: SeenWorker) -> list[tuple[float, float]]:
    """Of each step: observed over expected, and seconds."""
    speed = worker.spec().speed
    return [((end - start) / _expected_s(speed, counts), end - start) for start, end, *counts in worker.steps]


def _expected_s(speed: LatencyModel, counts: Sequence[float]) -> float:
    return speed.step_s(Work(*map(int, counts)))


def _windows(deviations: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Mean deviation and seconds of so many steps each."""
    for start in range(0, len(deviations) - WINDOW_STEPS + 1, WINDOW_STEPS):
        some = deviations[start : start + WINDOW_STEPS]
        seconds = sum(one[1] for one in some)
        yield seconds / sum(taken / deviation for deviation, taken in some), seconds


def _centred(values: Iterable[float]) -> list[float]:
    listed = list(values)
    mean = statistics.fmean(listed)
    return [value - mean for value in listed]


def _lasts_s(left: float, seconds: float) -> float:
    """The time constant with which so much of the variance is left after so long: the formula of
    `pdmesh.simulator.workers.batch.StepTimes`."""
    low, high = LASTS_S
    for _ in range(60):
        middle = math.sqrt(low * high)
        x = seconds / middle
        low, high = (middle, high) if 2 / x * (1 - (1 - math.exp(-x)) / x) < left else (low, middle)
    return low
