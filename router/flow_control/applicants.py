"""From a job to what admission knows of it: what it may cost, what it was promised, what it holds while it waits."""

from pdmesh.planning.objectives import Bounds
from pdmesh.v1 import common_pb2
from router.context import Core
from router.flow_control.types import Applicant, nothing_known
from router.tokenization.prepared_request import Job

HELD_BYTES_PER_TOKEN = 44
"""A token of a prompt that waits: a number, its place in the prompt, and its text in the client's message."""


def applicant_of(core: Core, job: Job) -> Applicant:
    """What a request is at the gate. Its own objectives win over those of its model and priority."""
    promised, guarded = _bounds(core, job, job.priority), _bounds(core, job, common_pb2.PRIORITY_STANDARD)
    emitted = num_emitted(job)
    max_tokens = max(1, job.sampling.max_tokens - emitted // job.num_choices)
    forecaster = core.forecaster
    return Applicant(
        tenant=job.tenant,
        priority=job.priority,
        started=emitted > 0,
        prompt_tokens=len(job.prompt) + emitted,
        output_tokens=round(job.num_choices * core.output_lengths.expected(job.model.name, job.tenant, max_tokens)),
        num_bytes=HELD_BYTES_PER_TOKEN * (len(job.prompt) + emitted) + job.sampling.ByteSize(),
        lane=job.model.name,
        ttft_s=None if emitted else _seconds(job.slo_ttft_ms or promised.ttft_ms),  # its first token is out already
        tpot_s=_seconds(job.slo_tpot_ms or promised.tpot_ms),
        guard_ttft_s=_seconds(guarded.ttft_ms),
        guard_tpot_s=_seconds(guarded.tpot_ms),
        deadline=job.deadline,
        foresee=nothing_known if forecaster is None else lambda: forecaster.forecast(job),
    )


def num_emitted(job: Job) -> int:
    """Tokens of all choices that a client has already: the mesh computes them as if they were prompt."""
    return sum(len(choice.token_ids) for choice in job.emitted)


def _bounds(core: Core, job: Job, priority: int) -> Bounds:
    objective = core.objectives.get(job.model.name)
    return Bounds(None, None) if objective is None else objective.bounds(priority)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
