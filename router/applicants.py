"""From a job to what admission knows of it: what it may cost, what it was promised, what it holds while it waits."""

from collections.abc import Mapping

from protos.v1 import common_pb2
from router.applicant import Applicant, nothing_known
from router.forecast import Forecast, Forecaster
from router.job import Job
from router.objectives import Bounds, ModelObjective

HELD_BYTES_PER_TOKEN = 44
"""A token of a prompt that waits: a number, its place in the prompt, and its text in the client's message."""
OUTPUT_MEMORY = 0.05
"""How much the latest answer counts in the mean length of answers."""
FIRST_GUESS_TOKENS = 64.0


class OutputEstimate:
    """How long answers are: the mean over the latest ones."""

    def __init__(self) -> None:
        self._mean = FIRST_GUESS_TOKENS

    def record(self, num_tokens: int) -> None:
        """A choice has ended with so many."""
        self._mean += OUTPUT_MEMORY * (num_tokens - self._mean)

    def expected(self, max_tokens: int) -> int:
        """Of a choice that may have `max_tokens`."""
        return min(max_tokens, round(self._mean))


class Applicants:
    """Makes applicants for one router. `forecaster` may come later, or never."""

    def __init__(self, objectives: Mapping[str, ModelObjective]) -> None:
        self.forecaster: Forecaster | None = None
        self.outputs = OutputEstimate()
        self._objectives = objectives

    def of(self, job: Job) -> Applicant:
        """What a request is at the gate. Its own objectives win over those of its model and priority."""
        promised, guarded = self._bounds(job, job.priority), self._bounds(job, common_pb2.PRIORITY_STANDARD)
        emitted = sum(len(choice.token_ids) for choice in job.emitted)
        left = max(0, job.sampling.max_tokens - emitted // job.num_choices)
        return Applicant(
            tenant=job.tenant,
            priority=job.priority,
            started=emitted > 0,
            prompt_tokens=len(job.prompt) + emitted,
            output_tokens=job.num_choices * self.outputs.expected(left),
            num_bytes=HELD_BYTES_PER_TOKEN * (len(job.prompt) + emitted) + job.sampling.ByteSize(),
            lane=job.model.name,
            ttft_s=_seconds(job.slo_ttft_ms or promised.ttft_ms),
            tpot_s=_seconds(job.slo_tpot_ms or promised.tpot_ms),
            guard_ttft_s=_seconds(guarded.ttft_ms),
            guard_tpot_s=_seconds(guarded.tpot_ms),
            deadline=job.deadline,
            foresee=nothing_known if self.forecaster is None else lambda: self._foresee(job),
        )

    def _foresee(self, job: Job) -> Forecast | None:
        return None if self.forecaster is None else self.forecaster.forecast(job)

    def _bounds(self, job: Job, priority: int) -> Bounds:
        objective = self._objectives.get(job.model.name)
        return Bounds(None, None) if objective is None else objective.bounds(priority)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
