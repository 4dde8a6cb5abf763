"""How much longer vLLM's steps take than the roofline says, measured before the worker serves: a few steps of one request.

The latency model begins with the limits of the machine. vLLM on a CPU, or without compiled graphs, is several times slower, and a
router that believed the limits would give up on prefills that are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from pdmesh.engine.outputs import StepResult
from pdmesh.engine.request import EngineRequest
from pdmesh.planning.latency_model import LatencyModel, Work
from pdmesh.sampling_params import SamplingParams
from pdmesh_vllm.core import VllmCore
from pdmesh_vllm.stats import Counters

PROMPT_TOKENS = 256
OUTPUT_TOKENS = 8
ROUNDS = 2  # the first one warms up: kernels are chosen, memory is touched


@dataclass(frozen=True)
class Slowdown:
    """Hold measured over predicted times of steps; 1: as the model says."""

    prefill: float = 1.0
    decode: float = 1.0

    def applied(self, prior: LatencyModel) -> LatencyModel:
        """Return the prior with the times that were measured."""
        return replace(
            prior,
            fixed_s=prior.fixed_s * self.decode,
            per_prefill_token_s=prior.per_prefill_token_s * self.prefill,
            per_prefill_context_s=prior.per_prefill_context_s * self.prefill,
            per_sequence_s=prior.per_sequence_s * self.decode,
            per_context_token_s=prior.per_context_token_s * self.decode,
        )


def measured_steps(core: VllmCore, num_tokens: int, vocab_size: int) -> list[StepResult]:
    """Return the steps of a prompt that is computed whole, and of its answer, the last of `ROUNDS`. Call it before the engine's
    thread starts; the counts begin anew behind it."""
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    steps: list[StepResult] = []
    for number in range(ROUNDS):
        prompt = tuple((7 * each + number) % vocab_size for each in range(num_tokens))
        core.add(EngineRequest("calibration", prompt, sampling, cache_root=b"calibration %d" % number))
        steps = []
        while (result := core.step()) is not None:
            steps.append(result)
    core.counters = Counters()
    return steps


def slowdown(steps: list[StepResult], prior: LatencyModel) -> Slowdown:
    """Return how much slower these steps are than `prior` says; never below 1, because a few steps may have been lucky."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for step in steps:
        predicted_s = prior.step_s(Work(*step.work))
        if predicted_s > 0:
            ratios[step.work.prefill_tokens > 0].append((step.ended_ns - step.started_ns) / 1e9 / predicted_s)
    prefill, decode = (max(1.0, median(ratios[kind])) if ratios[kind] else 1.0 for kind in (True, False))
    return Slowdown(prefill, decode)
