"""The common part of policies by a single signal: they predict nothing and compare all workers. Pure.

The decode worker is the one with the least cost by the signal; the prefill worker is the one with the least cost among those
that fit it. LOCAL is chosen for prompts that are nearly cached, and when no prefill worker fits.
"""

from collections.abc import Sequence
from typing import Protocol

from router.routing.filters import (
    Candidate,
    NoPlacement,
    Placement,
    RoutingRequest,
    can_decode,
    can_hand_over,
    can_prefill,
    compatible,
    explain_no_candidate,
    has_room,
    is_away,
    no_partner,
    same_kind,
)
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.worker_snapshot import Mode, WorkerSnapshot


class Signal(Protocol):
    """Give the costs by which one of these policies compares workers; the least wins."""

    name: str

    def decode_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """Return the cost of decoding the request on `worker`."""

    def prefill_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """Return the cost of computing the prompt on `worker`."""

    def placed(self, decode: WorkerSnapshot, prefill: WorkerSnapshot | None) -> None:
        """Note that a request was sent to these workers."""


class SingleSignalPolicy:
    """Choose the decode worker first, then a prefill worker for it; LOCAL below `local_prefill_tokens` uncached tokens."""

    def __init__(self, signal: Signal, local_prefill_tokens: int) -> None:
        self.name = signal.name
        self._signal = signal
        self._local_prefill_tokens = local_prefill_tokens

    def choose(self, fleet_snapshot: FleetSnapshot, routing_request: RoutingRequest, now: float) -> Placement | NoPlacement:
        """Return the placement of one request; `now` has no effect."""
        kind = [worker for worker in fleet_snapshot.views() if same_kind(worker, routing_request)]
        decodes = [worker for worker in kind if can_decode(worker, routing_request)]
        if not decodes:
            return explain_no_candidate(kind, routing_request)
        if routing_request.mode is Mode.REMOTE:
            decodes = [worker for worker in decodes if can_hand_over(worker, routing_request)] or decodes
        candidates = [
            Candidate(w, None, self._signal.decode_cost(w, routing_request), has_room(w, routing_request)) for w in decodes
        ]
        decode = min(candidates, key=lambda each: (*each.order[:2], is_away(each.decode, routing_request), each.order)).decode
        return self._with_prefill(decode, kind, routing_request)

    def choose_prefill(
        self, fleet_snapshot: FleetSnapshot, decode: WorkerSnapshot, routing_request: RoutingRequest, now: float
    ) -> Placement | None:
        """Return the worker with the least cost among those that fit `decode`; None without one."""
        prefill = self._prefill(decode, list(fleet_snapshot.views()), routing_request)
        return None if prefill is None else Placement(decode, prefill, f"REMOTE: {prefill.worker_id} is tried next")

    def placed(self, decode: WorkerSnapshot, prefill: WorkerSnapshot | None) -> None:
        """Note that a request was sent to these workers."""
        self._signal.placed(decode, prefill)

    def _with_prefill(
        self, decode: WorkerSnapshot, kind: Sequence[WorkerSnapshot], routing_request: RoutingRequest
    ) -> Placement | NoPlacement:
        if routing_request.mode is Mode.LOCAL:
            return Placement(decode, None, "LOCAL as asked for")
        uncached = routing_request.uncached(decode)
        if routing_request.mode is None and uncached < self._local_prefill_tokens:
            few = f"LOCAL: {uncached} uncached tokens on {decode.worker_id} are fewer than {self._local_prefill_tokens}"
            return Placement(decode, None, few)
        prefill = self._prefill(decode, kind, routing_request)
        if prefill is not None:
            ahead = prefill.tokens_ahead
            reason = f"REMOTE: {uncached} tokens for {decode.worker_id}, {ahead} ahead on {prefill.worker_id}"
            return Placement(decode, prefill, reason)
        if routing_request.mode is Mode.REMOTE:
            return no_partner([decode], kind, routing_request)
        return Placement(decode, None, f"LOCAL: no prefill worker fits {decode.worker_id}")

    def _prefill(
        self, decode: WorkerSnapshot, workers: Sequence[WorkerSnapshot], routing_request: RoutingRequest
    ) -> WorkerSnapshot | None:
        if not can_hand_over(decode, routing_request):
            return None
        candidates = [worker for worker in workers if can_prefill(worker, routing_request) and compatible(worker, decode)]

        def cost(worker: WorkerSnapshot) -> tuple[bool, float, bool, str]:
            # KV of another element type than the decode worker's changes the tokens: it is the last resort.
            cost = self._signal.prefill_cost(worker, routing_request)
            return (worker.kind != decode.kind, cost, is_away(worker, routing_request), worker.address)

        return min(candidates, key=cost, default=None)
