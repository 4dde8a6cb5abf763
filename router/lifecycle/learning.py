"""What a request that has ended teaches the policy: how far predictions were off, what hand-offs cost, how long outputs get."""

from pdmesh.v1 import mesh_pb2
from router.context import Core
from router.routing.cost_model import Overhead, Prediction
from router.routing.decisions import Decision
from router.telemetry.traffic import ModelTraffic
from router.tokenization.prepared_request import Job


def learn(core: Core, job: Job, decision: Decision | None, timings: mesh_pb2.Timings, num_tokens: int) -> None:
    """`num_tokens` of all choices. A request that was tried again or lost teaches nothing about a smooth one."""
    core.output_lengths.observe(job.model.name, job.tenant, num_tokens // job.num_choices)
    if decision is None or timings.num_retries or timings.num_resubmissions or job.emitted:
        return
    core.decisions.compare(decision)
    chosen, tpot_s = decision.placement.chosen, decision.observed_tpot_s
    if chosen is not None and chosen.prediction is not None:
        _count(core.traffic.of(job.model.name), decision, chosen.prediction)
        if tpot_s:
            core.overheads.observe_tpot(chosen.decode, chosen.prediction.steps_tpot_s, tpot_s)
    seen = _overhead(decision, timings)
    if seen is not None:
        core.overheads.observe(decision.placement.prefill, decision.placement.decode, seen)


def _count(traffic: ModelTraffic, decision: Decision, predicted: Prediction) -> None:
    """What came beside what had been predicted, for the autoscaler."""
    if decision.observed_ttft_s is not None:
        traffic.ttft.add(decision.observed_ttft_s, predicted.ttft_s)
    if decision.observed_tpot_s is not None:
        traffic.tpot.add(decision.observed_tpot_s, predicted.tpot_s)


def _overhead(decision: Decision, timings: mesh_pb2.Timings) -> Overhead | None:
    """All of TTFT that the worker's queue and steps did not take, and what the hand-off added behind it."""
    ttft_s = decision.observed_ttft_s
    if ttft_s is None:
        return None
    on_worker_ns = timings.prefill_queue_ns + timings.prefill_compute_ns
    after_ns = timings.kv_exposed_ns + timings.decode_queue_ns if decision.placement.prefill is not None else 0
    return Overhead(max(0.0, ttft_s - on_worker_ns / 1e9), after_ns / 1e9)
