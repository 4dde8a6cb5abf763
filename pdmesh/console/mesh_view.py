"""What routers say of the mesh, as plain values for the page. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdmesh.commands.status import role_names
from pdmesh.v1 import mesh_pb2, worker_pb2

MAX_CANDIDATES = 4
_BREAKERS = {
    mesh_pb2.BREAKER_STATE_CLOSED: "closed",
    mesh_pb2.BREAKER_STATE_OPEN: "open",
    mesh_pb2.BREAKER_STATE_HALF_OPEN: "half-open",
}


def router_view(address: str, status: mesh_pb2.GetStatusResponse | None, problem: str) -> dict[str, Any]:
    """One router; `problem` says why it does not answer, "" while it does. `status` is the latest that it gave."""
    seen = status or mesh_pb2.GetStatusResponse()
    return {
        "address": address,
        "id": seen.router_id,
        "problem": problem,
        "inflight": seen.num_inflight,
        "max_inflight": seen.max_inflight,
        "queued": seen.num_queued,
        "max_queued": seen.max_queued,
        "registry_connected": seen.registry_connected,
        "prediction": _prediction(seen.prediction) if seen.prediction.num_requests else None,
        "refused": sum(refusal.count for tally in seen.admission for refusal in tally.refused),
    }


def _prediction(seen: mesh_pb2.PredictionStatus) -> dict[str, float]:
    return {"num_requests": seen.num_requests, "ttft_error": seen.ttft_error, "tpot_error": seen.tpot_error}


def worker_views(statuses: Iterable[mesh_pb2.GetStatusResponse]) -> list[dict[str, Any]]:
    """Every worker once, as the router says that has heard of it last; by name."""
    found: dict[str, mesh_pb2.WorkerStatus] = {}
    for worker in (worker for status in statuses for worker in status.workers):
        known = found.get(worker.info.worker_id)
        if known is None or (not worker.alive, worker.report_age_ms) < (not known.alive, known.report_age_ms):
            found[worker.info.worker_id] = worker
    return [worker_view(found[name]) for name in sorted(found)]


def worker_view(worker: mesh_pb2.WorkerStatus) -> dict[str, Any]:
    """Load, KV pool, prefix cache and speculation of one."""
    info, load = worker.info, worker.load
    return {
        "id": info.worker_id,
        "address": info.address,
        "model": info.identity.model,
        "roles": role_names(load.roles or info.roles).split(","),
        "state": "lost" if not worker.alive else "draining" if load.draining else "alive",
        "age_ms": worker.report_age_ms,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "reserved": load.num_reserved,
        "decoding": load.num_decoding,
        "prefilling": load.num_prefilling,
        "waiting_tokens": load.num_waiting_tokens,
        "max_seqs": load.max_num_seqs or info.max_num_seqs,
        "blocks": {"total": load.num_total_blocks, "free": load.num_free_blocks, "cached": load.num_cached_blocks},
        "prefilled_tokens": load.num_prefilled_tokens,
        "hit_tokens": load.num_prefix_hit_tokens,
        "generated_tokens": load.num_generated_tokens,
        "preemptions": load.num_preemptions,
        "handoff_failures": load.num_handoff_failures,
        "speculation": _speculation(load.speculation) if load.HasField("speculation") else None,
        "breakers": [_breaker(each) for each in worker.breakers if each.state != mesh_pb2.BREAKER_STATE_CLOSED],
    }


def _speculation(report: worker_pb2.SpeculationReport) -> dict[str, Any]:
    verified = sum(sum(proposer.verified) for proposer in report.proposers)
    return {
        "tokens_per_step": report.tokens_per_row,
        "verified": verified,
        "kept": sum(sum(proposer.kept) for proposer in report.proposers),
        "proposers": [proposer.name for proposer in report.proposers],
    }


def _breaker(breaker: mesh_pb2.BreakerStatus) -> dict[str, Any]:
    return {
        "role": role_names([breaker.role]),
        "state": _BREAKERS.get(breaker.state, ""),
        "left_out": breaker.left_out,
        "reason": breaker.reason,
    }


def objective_views(statuses: Iterable[mesh_pb2.GetStatusResponse]) -> dict[str, dict[str, float]]:
    """What is promised, by model."""
    return {
        each.model: {"ttft_ms": each.ttft_ms, "tpot_ms": each.tpot_ms, "quantile": each.quantile}
        for status in statuses
        for each in status.objectives
    }


def policy_views(router: str, decisions: Iterable[mesh_pb2.Decision], now_s: float) -> list[dict[str, Any]]:
    """Decisions as the router of that id told them at `now_s`; that and `at_s` since 1970."""
    return [_policy_view(now_s - each.age_ms / 1000, router, each) for each in decisions]


def _policy_view(at_s: float, router: str, decision: mesh_pb2.Decision) -> dict[str, Any]:
    return {
        "at_s": round(at_s, 1),
        "router": router,
        "request_id": decision.request_id,
        "policy": decision.policy,
        "num_tokens": decision.num_tokens,
        "num_workers": decision.num_workers,
        "reason": decision.reason,
        "observed_ttft_ms": decision.observed_ttft_ms,
        "candidates": [_candidate(each) for each in decision.candidates[:MAX_CANDIDATES]],
    }


def _candidate(candidate: mesh_pb2.Candidate) -> dict[str, Any]:
    return {
        "decode": candidate.decode_worker_id,
        "prefill": candidate.prefill_worker_id,
        "ttft_ms": candidate.ttft_ms,
        "cached_tokens": candidate.decode_cached_tokens + candidate.prefill_cached_tokens,
        "cost": candidate.cost,
        "chosen": candidate.chosen,
        "note": candidate.note,
    }
