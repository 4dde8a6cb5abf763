"""Placement decisions as messages, with the reason in words: why a request went to its workers, or where it would go now. They
hold nothing of a prompt but its length."""

import time
from collections.abc import Sequence
from typing import Any

from pdmesh.runtime.errors import InvalidArgument, NotFound
from pdmesh.v1 import mesh_pb2
from router.context import RouterContext
from router.routing.cost_model import Prediction, PromptWays
from router.routing.decisions import Decision, cached_of
from router.routing.filters import Candidate, NoPlacement, Placement, RoutingRequest
from router.routing.routing_request import choose, kind_of_resumed, routing_request_of
from router.routing.worker_snapshot import WorkerKey
from router.telemetry import timings
from router.tokenization.prepared_request import PreparedRequest

MAX_LATEST = 100
MAX_CANDIDATES = 32


def latest(core: RouterContext, count: int) -> mesh_pb2.ExplainResponse:
    """Return the newest `count` decisions. Raises InvalidArgument."""
    if not 1 <= count <= MAX_LATEST:
        raise InvalidArgument("latest", f"latest: must be between 1 and {MAX_LATEST}, not {count}")
    return _response(core.decisions.latest(count))


def of_request(core: RouterContext, request_id: str) -> mesh_pb2.ExplainResponse:
    """Return all decisions about one request. Raises NotFound, InvalidArgument."""
    if not request_id:
        raise InvalidArgument("request_id", "request_id: must not be empty")
    found = core.decisions.of_request(request_id)
    if not found:
        raise NotFound(
            f"request_id: this router knows no decision about {request_id[:64]!r}; it keeps the latest {core.decisions.capacity}",
            field="request_id",
        )
    return _response(found)


def dry_run(core: RouterContext, prepared: PreparedRequest) -> mesh_pb2.ExplainResponse:
    """Return where the request would go now. Nothing is reserved or counted, and a round-robin policy does not advance."""
    began_ns = timings.now_ns()
    routing_request = routing_request_of(core, prepared, prepared.emitted, kind_of_resumed(core, prepared))
    fleet_snapshot = core.fleet.fleet_snapshot
    choice, routing_request = choose(core, prepared, routing_request, time.monotonic())
    made_ns = timings.now_ns()
    if isinstance(choice, NoPlacement):
        return mesh_pb2.ExplainResponse(decisions=[_nothing(core, prepared, routing_request, choice)])
    cached = cached_of(choice, routing_request)
    decision = Decision(
        prepared.request_id,
        core.policy.name,
        made_ns,
        made_ns - began_ns,
        routing_request.num_tokens,
        len(fleet_snapshot),
        choice,
        cached,
        session_workers=routing_request.session_workers,
    )
    return _response([decision])


def reason_of(placement: Placement) -> str:
    """Return in words why this candidate was chosen, and not the next best one."""
    chosen = placement.chosen
    if placement.reason or chosen is None or chosen.prediction is None:
        return placement.reason or "as asked for"
    return f"{_route(chosen)}: {_reason(chosen, placement)}"


def _reason(chosen: Candidate, placement: Placement) -> str:
    rivals = [c for c in placement.candidates if (c.prefill is None) is not (chosen.prefill is None)]
    if not rivals:
        others = [c for c in placement.candidates if c is not chosen]
        return _against(chosen, min(others, key=lambda c: c.order)) if others else "there is no other candidate"
    return _against(chosen, min(rivals, key=lambda c: c.order))


def _against(chosen: Candidate, rival: Candidate) -> str:
    """Name the largest advantage of `chosen`."""
    if chosen.has_room and not rival.has_room:
        return f"{rival.decode.worker_id} has no room"
    ours, theirs = chosen.prediction, rival.prediction
    assert ours is not None and theirs is not None  # one policy made both
    gains = {
        "fewer objectives are missed": theirs.misses - ours.misses if theirs.misses > ours.misses else 0.0,
        f"sequences that run lose {_ms(ours.delay_s)} instead of {_ms(theirs.delay_s)}": theirs.delay_s - ours.delay_s,
        f"the first token comes after {_ms(ours.ttft_s)} instead of {_ms(theirs.ttft_s)}": theirs.ttft_s - ours.ttft_s,
        f"a token takes {_ms(ours.tpot_s)} instead of {_ms(theirs.tpot_s)}": 100 * (theirs.tpot_s - ours.tpot_s),
    }
    best = max(gains, key=lambda words: gains[words])
    words = best if gains[best] > 0 else "the sum of its parts is less"
    return f"{words} with {_route(rival)}" if "instead" in words else f"{words} than with {_route(rival)}"


def _response(decisions: list[Decision]) -> mesh_pb2.ExplainResponse:
    return mesh_pb2.ExplainResponse(decisions=[message_of(decision) for decision in decisions])


def message_of(decision: Decision) -> mesh_pb2.Decision:
    """Return a decision with its candidates, the chosen one first."""
    now_ns = timings.now_ns()
    placement = decision.placement
    chosen = placement.chosen
    candidates = sorted(placement.candidates, key=lambda c: (c is not chosen, c.order))[:MAX_CANDIDATES]
    if chosen is None:
        candidates = [Candidate(placement.decode, placement.prefill, 0.0, True), *candidates]
    return mesh_pb2.Decision(
        request_id=decision.request_id,
        age_ms=(now_ns - decision.made_ns) // 1_000_000,
        policy=decision.policy,
        num_tokens=decision.num_tokens,
        reason=reason_of(placement),
        candidates=[
            _candidate(c, decision, chosen=(c.decode, c.prefill) == (placement.decode, placement.prefill)) for c in candidates
        ],
        num_workers=decision.num_workers,
        decision_us=decision.decision_ns / 1e3,
        observed_ttft_ms=1e3 * (decision.observed_ttft_s or 0.0),
        observed_tpot_ms=1e3 * (decision.observed_tpot_s or 0.0),
        **_reused(decision),
    )


def _reused(decision: Decision) -> dict[str, Any]:
    """Return what the prompt's worker had, fetched and restored, once it has said so; nothing for a decision made after that."""
    took = decision.timings.prefill if decision.timings is not None else None
    if took is None or decision.observed_ttft_s is None:
        return {}
    return {
        "cached_tokens": took.num_cached_tokens,
        "fetched_tokens": took.num_fetched_tokens,
        "fetch_ms": took.fetch_ns / 1e6,
        "restored_tokens": took.num_restored_tokens,
        "restore_ms": took.restore_ns / 1e6,
    }


def _candidate(candidate: Candidate, decision: Decision, *, chosen: bool) -> mesh_pb2.Candidate:
    decode, prefill, predicted, cached = candidate.decode, candidate.prefill, candidate.prediction, decision.cached_tokens
    message = mesh_pb2.Candidate(
        decode_worker_id=decode.worker_id,
        prefill_worker_id="" if prefill is None else prefill.worker_id,
        decode_cached_tokens=cached.get(decode.key, 0),
        prefill_cached_tokens=0 if prefill is None else cached.get(prefill.key, 0),
        cost=candidate.cost,
        chosen=chosen,
        note=_note(candidate, decision.session_workers),
        engine=decode.engine,
        may_redraw=not all(view.is_reproducible for view in candidate.workers),
    )
    if predicted is not None:
        message.ttft_ms, message.tpot_ms = 1e3 * predicted.ttft_s, 1e3 * predicted.tpot_s
        message.delay_ms = 1e3 * predicted.delay_s
        _add_ways(message, candidate.ways, predicted.ttft_s)
    return message


def _add_ways(message: mesh_pb2.Candidate, ways: PromptWays | None, ttft_s: float) -> None:
    """Set the TTFT that was predicted for each way to have the prompt computed. All ways have the same calls around them."""
    if ways is None:
        message.compute_ms = 1e3 * ttft_s
        return
    least_s = ways.least_s
    message.compute_ms = 1e3 * (ttft_s + ways.compute_s - least_s)
    if ways.restore_s is not None:
        message.restore_ms = 1e3 * (ttft_s + ways.restore_s - least_s)
    if ways.fetch_s is not None:
        message.fetch_ms = 1e3 * (ttft_s + ways.fetch_s - least_s)


def _note(candidate: Candidate, session_workers: Sequence[WorkerKey]) -> str:
    notes = [] if candidate.has_room else ["no room"]
    if session_workers and candidate.decode.key == session_workers[0]:
        notes.append("the session's last worker")
    if candidate.ways is not None and candidate.ways.taken != "compute":
        notes.append({"fetch": "fetches KV", "restore": "restores KV"}[candidate.ways.taken])
    if candidate.prediction is not None:
        notes += _predicted_notes(candidate.prediction)
    if any(view.latency is None for view in candidate.workers):
        notes.append("speed not reported")
    return ", ".join(notes)


def _predicted_notes(predicted: Prediction) -> list[str]:
    notes = [f"{_ms(predicted.ahead_s)} of queue"] if predicted.ahead_s > 0 else []
    return notes + ([f"{predicted.misses:.1f} objectives missed"] if predicted.misses >= 0.05 else [])


def _nothing(
    core: RouterContext, prepared: PreparedRequest, routing_request: RoutingRequest, nothing: NoPlacement
) -> mesh_pb2.Decision:
    return mesh_pb2.Decision(
        request_id=prepared.request_id,
        policy=core.policy.name,
        num_tokens=routing_request.num_tokens,
        reason=f"nowhere: {nothing.reason}",
        num_workers=len(core.fleet.fleet_snapshot),
    )


def _route(candidate: Candidate) -> str:
    if candidate.prefill is None:
        return f"LOCAL on {candidate.decode.worker_id}"
    return f"REMOTE {candidate.prefill.worker_id} → {candidate.decode.worker_id}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"
