"""What a run of requests looked like, on a real mesh or on a simulated one: the same values of both. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from pdmesh.planning.latency_model import LatencyModel, Work
from pdmesh.simulator import arrivals as simulator_arrivals
from pdmesh.simulator.arrivals import Arrival, log_normal, poisson, read_azure
from pdmesh.simulator.settings import HandOff
from pdmesh.simulator.workers.spec import KNOWN_STEPS, WorkerSpec

TRACE = "AzureLLMInferenceTrace_conv.csv"
INPUT_SCALE, OUTPUT_SCALE = 0.05, 0.25
"""So that a prompt takes a small model on one core about as long as the trace's prompts take a large one on its machine."""
MEAN_INPUT, MEAN_OUTPUT, SCATTER = 1155 * INPUT_SCALE, 211 * OUTPUT_SCALE, 0.8
"""Of generated arrivals: those of the trace."""
MAX_INPUT, MAX_OUTPUT = 4000, 512
PARTS = (
    "route",
    "admission_queue",
    "reserve",
    "prefill_queue",
    "prefill_compute",
    "first_token_return",
    "retry",
    "kv_exposed",
    "decode_queue",
)


@dataclass(frozen=True)
class Passage:
    """One request that was answered in full. Seconds; `at_s` since the start of the run. `parts` as in mesh.proto's Timings,
    and `outside`: what of TTFT the router did not see. `tpot_s` 0 for one token."""

    at_s: float
    num_input: int
    num_output: int
    ttft_s: float
    tpot_s: float
    is_local: bool
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SeenWorker:
    """A worker: its roles and sizes, and each latency model that it reported while requests were counted: the five prices of
    `pdmesh.simulator.workers.spec.PRICES`, the errors with and without prompts, and the steps it was fitted to. `steps`: see
    `logged_worker.py`."""

    name: str
    prefill: bool
    decode: bool
    sizes: Mapping[str, int]
    models: Sequence[Sequence[float]]
    steps: Sequence[Sequence[float]] = ()

    def spec(self, **habits: float) -> WorkerSpec:
        """As the simulator takes it: as fast as it said on average. Contents of prompts are never repeated: nothing is cached.
        `habits`: what workers do not tell."""
        fixed_s, token_s, context_s, row_s, row_context_s, *_ = (
            sum(of) / len(self.models) for of in zip(*self.models, strict=True)
        )
        speed = LatencyModel(fixed_s, token_s, context_s, row_s, row_context_s, num_steps=KNOWN_STEPS)
        given: dict[str, Any] = {**self.sizes, **habits}
        return WorkerSpec(speed, **given, prefix_tokens=0, host="this machine")


@dataclass(frozen=True)
class Run:
    """`arrivals`: everything that was asked (seconds, input, output tokens). Those from `from_s` on count: they are in
    `passages`, or were refused. What came before warmed up routers and workers."""

    arrivals: Sequence[tuple[float, int, int]]
    from_s: float
    passages: Sequence[Passage]
    num_refused: int
    workers: Sequence[SeenWorker] = ()

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Run:
        """From what `asdict` made of one."""
        passages = [Passage(**one) for one in kept["passages"]]
        workers = [SeenWorker(**one) for one in kept["workers"]]
        arrivals = [(at_s, num_input, num_output) for at_s, num_input, num_output in kept["arrivals"]]
        return cls(arrivals, kept["from_s"], passages, kept["num_refused"], workers)

    def to_keep(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def arrivals_of(folder: Path | None, start: int, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """A slice of the trace from its row `start` on, at `rate` requests a second on average; generated ones without a folder."""
    num = max(2, round(rate * seconds))
    if folder is None:
        drawn: Iterable[Arrival] = poisson(rate, log_normal(MEAN_INPUT, MEAN_OUTPUT, SCATTER), seed)
        return [_cut(arrival) for arrival in islice(drawn, num)]
    rows = list(islice(read_azure(str(folder / TRACE)), start, start + num))
    first = rows[0].at_s
    factor = rate * (rows[-1].at_s - first) / (len(rows) - 1)
    scaled = simulator_arrivals.lengths(rows, inputs=INPUT_SCALE, outputs=OUTPUT_SCALE)
    return [_cut(arrival._replace(at_s=(arrival.at_s - first) / factor)) for arrival in scaled]


def _cut(arrival: Arrival) -> Arrival:
    return arrival._replace(num_input=min(arrival.num_input, MAX_INPUT), num_output=min(arrival.num_output, MAX_OUTPUT))


# What a simulation is told of a machine beside the workers' own reports: measured on runs that are not the ones compared. Pure.
#
# From requests that met nobody: what router, calls and hand-off take by themselves. From steps under another load: what passes
# between them, how much they vary, and for how long.


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
