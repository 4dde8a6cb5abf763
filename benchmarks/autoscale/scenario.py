"""The loads that autoscalers are compared on: public traces at a rate that keeps tens of workers busy, with a day and its night
and a threefold burst that comes within a minute; and the machines that serve them, from their published numbers.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import say
from pdmesh.autoscaler.views import PoolName
from pdmesh.planning.latency_model import LatencyModel
from pdmesh.planning.objectives import ModelObjective
from pdmesh.simulator import arrivals as simulator_arrivals
from pdmesh.simulator.arrivals import READERS, Arrival, log_normal, poisson
from pdmesh.simulator.routers.routing import MODEL
from pdmesh.simulator.settings import HandOff, MeshSettings
from pdmesh.simulator.workers.spec import KNOWN_STEPS, WorkerSpec
from router.flow_control.capacity import AdmissionSettings

FOUR_L4 = WorkerSpec(
    LatencyModel(0.0735, 7.2e-4, 1.35e-8, 1e-4, 1.7e-7, num_steps=KNOWN_STEPS),
    max_num_batched_tokens=2048,
    max_num_seqs=128,
    num_blocks=4600,
    max_context=32768,
    kv_bytes_per_token=163_840,
)
"""Llama 3.3 70B with weights in INT8 and KV in FP8 on four NVIDIA L4 (each 300 GB/s, 121 TFLOPS dense in bfloat16, 24 GB), split
four ways: a step reads 70.6 GB at 80 % of the bandwidth, a prompt token computes 2 · 70e9 operations at 40 % of the peak, a token
of context is 160 KiB of KV, of which 12 GB fit."""

H200 = WorkerSpec(
    LatencyModel(0.0184, 1.42e-4, 5.3e-9, 5e-5, 4.3e-8, num_steps=KNOWN_STEPS),
    max_num_batched_tokens=8192,
    max_num_seqs=256,
    num_blocks=20_500,
    max_context=131_072,
    kv_bytes_per_token=163_840,
)
"""Llama 3.3 70B in FP8, KV too, on one NVIDIA H200 (4.8 TB/s, 1979 TFLOPS dense in FP8, 141 GB): 70.6 GB of weights at 80 % of
the bandwidth, a prompt token at 50 % of the peak (attention in bfloat16), 160 KiB of KV for each token, of which 54 GB fit."""

PUBLISHED = {
    "azure-conv": (
        "AzureLLMInferenceTrace_conv.csv",
        "Azure Public Dataset, LLM inference traces 2023: github.com/Azure/AzurePublicDataset",
    ),
    "azure-code": (
        "AzureLLMInferenceTrace_code.csv",
        "Azure Public Dataset, LLM inference traces 2023: github.com/Azure/AzurePublicDataset",
    ),
    "mooncake": ("mooncake_conversation_trace.jsonl", "Mooncake, FAST'25 release: github.com/kvcache-ai/Mooncake"),
}
MEANS = {"azure-conv": (1155, 211), "azure-code": (2048, 28), "mooncake": (12035, 343)}
"""Input and output tokens of a request, for generated lengths."""

RISE_S = 60.0
"""In which the burst comes, and goes."""


@dataclass(frozen=True)
class Options(harness.Options):
    """`traces`: the folder of the public traces, None: generated lengths stand in for them. `report`: where pages that show the
    runs are written."""

    name: str = "autoscale"
    quick: bool = False
    traces: Path | None = None
    report: Path = Path("build/autoscale")


@dataclass(frozen=True)
class Scenario:
    """`num_copies` of the trace at its own speed, each from another place of it on, so that what wanders within minutes in
    reality does so here; `rate_per_s` of each on average, for generated lengths. `day_s`, the length of it all, and `depth` of
    the swing; from `burst_s` on the rate rises within a minute to `factor` of what it would be, stays so for `burst_length_s`,
    and falls within a minute. `seed` of what is drawn, and of where copies begin."""

    name: str
    spec: WorkerSpec
    rate_per_s: float
    num_copies: int
    objective: ModelObjective
    day_s: float = 7200.0
    depth: float = 0.5
    burst_s: float = 4500.0
    burst_length_s: float = 300.0
    factor: float = 3.0
    seed: int = 0

    def arrivals(self, traces: Path | None) -> list[Arrival]:
        """All of them. Raises TraceError."""
        copies = [self._steady(traces, copy) for copy in range(self.num_copies)]
        steady = simulator_arrivals.lengths(simulator_arrivals.together(copies), max_context=self.spec.largest)
        swung = simulator_arrivals.warped(steady, simulator_arrivals.swing(self.day_s, self.depth))
        bursting = simulator_arrivals.warped(swung, surge(self.burst_s, self.burst_length_s, self.factor))
        return list(takewhile(lambda arrival: arrival.at_s < self.day_s, bursting))

    def mesh(self) -> MeshSettings:
        """Routers and what is between them and workers."""
        return MeshSettings(
            objective=self.objective,
            admission=AdmissionSettings(max_inflight=16_384, max_queued=16_384),
            report_period_s=0.25,
            decode_report_period_s=0.25,
            handoff=HandOff(bytes_per_s=6e9),
        )

    @property
    def specs(self) -> dict[PoolName, WorkerSpec]:
        """Separated pools of one kind of machine."""
        return {PoolName.PREFILL: self.spec, PoolName.DECODE: self.spec}

    def _steady(self, traces: Path | None, copy: int) -> Iterator[Arrival]:
        """Without end."""
        name, where = PUBLISHED[self.name]
        path = None if traces is None else traces / name
        if path is None or not path.is_file():
            if not copy:
                say(f"{self.name}: no {name} (it is published: {where}); generated lengths stand in for it")
            return poisson(self.rate_per_s, log_normal(*MEANS[self.name], 0.9), seed=self.num_copies * self.seed + copy)
        rows = list(READERS[self.name](str(path)))
        rotated = _rotated(rows, random.Random(1000 * self.seed + copy).random())
        return simulator_arrivals.repeated(lambda: rotated, sys.maxsize)


def surge(start_s: float, length_s: float, factor: float, rise_s: float = RISE_S) -> simulator_arrivals.Warp:
    """A steady stream gets `factor` times its rate from `start_s` + `rise_s` on for `length_s`, rising and falling linearly."""
    times = [0.0, start_s, start_s + rise_s, start_s + rise_s + length_s, start_s + 2 * rise_s + length_s]
    rates = [1.0, 1.0, factor, factor, 1.0]
    counts = [0.0]
    for (begin_s, end_s), (first, last) in zip(pairwise(times), pairwise(rates), strict=True):
        counts.append(counts[-1] + (end_s - begin_s) * (first + last) / 2)

    def warp(steady_s: float) -> float:
        piece = max((number for number in range(len(times)) if counts[number] <= steady_s), default=0)
        left = steady_s - counts[piece]
        if piece == len(times) - 1:
            return times[piece] + left
        slope = (rates[piece + 1] - rates[piece]) / (times[piece + 1] - times[piece])
        return times[piece] + 2 * left / (rates[piece] + math.sqrt(max(0.0, rates[piece] ** 2 + 2 * slope * left)))

    return warp


def objective(ttft_ms: int, tpot_ms: int, quantile: float = 0.98) -> ModelObjective:
    """Of every request."""
    return ModelObjective(MODEL, ttft_ms, tpot_ms, quantile)


SCENARIOS = (
    Scenario("azure-conv", FOUR_L4, 5.4, 3, objective(12_000, 120)),
    Scenario("azure-code", H200, 2.6, 12, objective(3000, 100)),
    Scenario("mooncake", H200, 3.4, 2, objective(30_000, 100)),
)


def quick(scenario: Scenario) -> Scenario:
    """Some minutes of it."""
    return replace(scenario, day_s=300.0, burst_s=150.0, burst_length_s=30.0)


def _rotated(rows: list[Arrival], share: float) -> list[Arrival]:
    """From another place of the trace on, round: the same requests in the same order, at another time of the day."""
    first = int(share * len(rows))
    length_s = rows[-1].at_s + rows[-1].at_s / len(rows)
    begin_s = rows[first].at_s
    later = [row._replace(at_s=row.at_s - begin_s) for row in rows[first:]]
    return later + [row._replace(at_s=row.at_s - begin_s + length_s) for row in rows[:first]]
