"""Policies to compare with: each looks at one thing, and none predicts. Pure; they look at every worker.

least-loaded  decode with the fewest blocks and sequences, less a credit for the cached share of the prompt; the prefill worker
              with the fewest tokens before this request's first; LOCAL for prompts that are nearly cached, or when
              no prefill worker fits
round-robin   every decode worker in turn, and every prefill worker
prefix        the workers that hold most of the prompt, whatever their load
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from router.routing.filters import (
    Candidate,
    NoPlacement,
    Placement,
    RoutingRequest,
    blocks_for,
    can_decode,
    can_prefill,
    compatible,
    explain_no_candidate,
    has_room,
    no_partner,
    same_kind,
)
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.worker_snapshot import Mode, WorkerSnapshot

PREFIX_CREDIT = 0.25
"""A worker that holds the whole prompt may be this share of its capacity fuller and still win."""


class Signal(Protocol):
    """What one of these policies looks at; the least number wins."""

    name: str

    def decode_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """Of owning the request."""

    def prefill_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """Of computing its prompt."""

    def placed(self, decode: WorkerSnapshot, prefill: WorkerSnapshot | None) -> None:
        """So it was decided."""


class SingleSignalPolicy:
    """Decode first, then prefill for it; LOCAL below `local_prefill_tokens` uncached tokens."""

    def __init__(self, preference: Signal, local_prefill_tokens: int) -> None:
        self.name = preference.name
        self._preference = preference
        self._local_prefill_tokens = local_prefill_tokens

    def choose(self, fleet_snapshot: FleetSnapshot, routing_request: RoutingRequest, now: float) -> Placement | NoPlacement:
        """As `Policy` says. `now` plays no part."""
        kind = [worker for worker in fleet_snapshot.views() if same_kind(worker, routing_request)]
        owners = [worker for worker in kind if can_decode(worker, routing_request)]
        if not owners:
            return explain_no_candidate(kind, routing_request)
        candidates = [
            Candidate(w, None, self._preference.decode_cost(w, routing_request), has_room(w, routing_request)) for w in owners
        ]
        decode = min(candidates, key=lambda candidate: candidate.order).decode
        return self._with_prefill(decode, kind, routing_request)

    def choose_prefill(
        self, fleet_snapshot: FleetSnapshot, decode: WorkerSnapshot, routing_request: RoutingRequest, now: float
    ) -> WorkerSnapshot | None:
        """The one that fits `decode` and is preferred."""
        return self._prefill(decode, list(fleet_snapshot.views()), routing_request)

    def placed(self, decode: WorkerSnapshot, prefill: WorkerSnapshot | None) -> None:
        """What it chose is being done."""
        self._preference.placed(decode, prefill)

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
            return no_partner([decode])
        return Placement(decode, None, f"LOCAL: no prefill worker fits {decode.worker_id}")

    def _prefill(
        self, decode: WorkerSnapshot, workers: Sequence[WorkerSnapshot], routing_request: RoutingRequest
    ) -> WorkerSnapshot | None:
        candidates = [worker for worker in workers if can_prefill(worker, routing_request) and compatible(worker, decode)]

        def cost(worker: WorkerSnapshot) -> tuple[bool, float, str]:
            # KV of another element type gives other tokens than decode's own: only where there is nobody else.
            return (worker.kind != decode.kind, self._preference.prefill_cost(worker, routing_request), worker.address)

        return min(candidates, key=cost, default=None)


class LeastLoaded:
    """Blocks, sequences and waiting tokens."""

    name = "least-loaded"

    def decode_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """The fuller of its two shares, less the credit."""
        seq_share = (worker.num_seqs + worker.dispatched_seqs + routing_request.num_choices) / worker.max_num_seqs
        own = blocks_for(routing_request.uncached(worker), worker)
        used_blocks = worker.num_total_blocks - worker.num_free_blocks + worker.dispatched_blocks + own
        cached_share = 1 - routing_request.uncached(worker) / routing_request.num_tokens
        return max(seq_share, used_blocks / worker.num_total_blocks) - PREFIX_CREDIT * cached_share

    def prefill_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """Tokens until this prompt is done."""
        return worker.tokens_ahead + routing_request.uncached(worker)

    def placed(self, decode: WorkerSnapshot, prefill: WorkerSnapshot | None) -> None:
        """It remembers nothing: the views do."""


class Prefix:
    """Cached tokens, nothing else."""

    name = "prefix"

    def decode_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """Uncached tokens."""
        return routing_request.uncached(worker)

    def prefill_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """Uncached tokens."""
        return routing_request.uncached(worker)

    def placed(self, decode: WorkerSnapshot, prefill: WorkerSnapshot | None) -> None:
        """It remembers nothing."""


class RoundRobin:
    """Whose turn is longest ago. It remembers the turns of `MAX_REMEMBERED` addresses; a forgotten one is first again."""

    name = "round-robin"
    MAX_REMEMBERED = 65536

    def __init__(self) -> None:
        self._dispatch_order: dict[tuple[str, str], int] = {}
        self._num_turns = 0

    def decode_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """The number of its latest turn."""
        return self._dispatch_order.get(("decode", worker.address), -1)

    def prefill_cost(self, worker: WorkerSnapshot, routing_request: RoutingRequest) -> float:
        """The number of its latest turn."""
        return self._dispatch_order.get(("prefill", worker.address), -1)

    def placed(self, decode: WorkerSnapshot, prefill: WorkerSnapshot | None) -> None:
        """Their turn was now."""
        if len(self._dispatch_order) > self.MAX_REMEMBERED:
            self._dispatch_order.clear()
        self._num_turns += 1
        self._dispatch_order["decode", decode.address] = self._num_turns
        if prefill is not None:
            self._dispatch_order["prefill", prefill.address] = self._num_turns


def preference(name: str) -> Signal:
    """By its flag; raises KeyError."""
    known: dict[str, Callable[[], Signal]] = {"least-loaded": LeastLoaded, "prefix": Prefix, "round-robin": RoundRobin}
    return known[name]()
