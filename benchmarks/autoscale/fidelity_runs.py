"""What a run of requests looked like, on a real mesh or on a simulated one: the same values of both. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pdmesh.planning.latency_model import LatencyModel
from pdmesh.simulator import arrivals as shaping
from pdmesh.simulator.arrivals import Arrival, log_normal, poisson, read_azure
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
    scaled = shaping.lengths(rows, inputs=INPUT_SCALE, outputs=OUTPUT_SCALE)
    return [_cut(arrival._replace(at_s=(arrival.at_s - first) / factor)) for arrival in scaled]


def _cut(arrival: Arrival) -> Arrival:
    return arrival._replace(num_input=min(arrival.num_input, MAX_INPUT), num_output=min(arrival.num_output, MAX_OUTPUT))
