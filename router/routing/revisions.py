"""Revisions: a split of traffic says which workers a request should go to, and the policy chooses among them. Pure.

    key ─► revisions in its order ─► the first where the policy finds room and no long queue
                                       └─ nowhere: the first with room, else the first that may have some

The order is that of weighted rendezvous hashing: each revision draws a number from the key, so shares are those of the weights,
and a weight that grows takes keys from other revisions and gives none away.
"""

from collections.abc import Container, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import log

from router.routing.cost_model import is_saturated
from router.routing.filters import (
    NoPlacement,
    Placement,
    RoutingRequest,
    can_ever_hold,
    can_hand_over,
    compatible,
    free_elsewhere,
    has_room,
    same_kind,
)
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.policy import Policy
from router.routing.worker_snapshot import Mode, WorkerKey, WorkerSnapshot
from router.tokenization.prepared_request import PreparedRequest

Weights = tuple[tuple[str, int], ...]
"""Revisions and their weights, by name; empty: no split."""

Choice = tuple[Placement | NoPlacement, RoutingRequest]
"""What the policy answers, and to what."""


def key_of(prepared: PreparedRequest) -> str:
    """Return what decides the revision of a request: its session, else its id."""
    if prepared.session_id:
        return f"session {prepared.tenant} {prepared.session_id}"
    return f"request {prepared.request_id}"


def order(weights: Sequence[tuple[str, int]], key: str) -> list[str]:
    """Return the revisions with a weight, the one that this key belongs to first."""
    return [name for _, name in sorted((_drawn(name, key) / weight, name) for name, weight in weights if weight)]


def _drawn(revision: str, key: str) -> float:
    """Return a number above 0, exponentially distributed over keys."""
    place = int.from_bytes(blake2b(f"{revision}\n{key}".encode(), digest_size=8).digest())
    return -log((place + 1) / (2**64 + 1))


def place(
    policy: Policy,
    fleet_snapshot: FleetSnapshot,
    routing_request: RoutingRequest,
    weights: Weights,
    key: str,
    now: float,
    unfit: Container[WorkerKey] = (),
) -> Choice:
    """Return the policy's choice under a split. Workers of a revision without a weight get the request only where none of those
    with one could ever take it: a revision that was taken out of traffic stays out, however full the others are. `unfit`: workers
    that have said that they never can."""
    found = list[Choice]()
    for revision in order(weights, key):
        mine = replace(routing_request, revision=revision)
        choice = policy.choose(fleet_snapshot, mine, now)
        if isinstance(choice, Placement) and _is_open(choice, mine):
            return choice, mine
        found.append((choice, mine))
    placed = [each for each in found if isinstance(each[0], Placement)]
    if placed:
        return next((each for each in placed if has_room(each[0].decode, each[1])), placed[0])  # type: ignore[union-attr]
    if any(_is_there(fleet_snapshot, mine, unfit) for _, mine in found):
        return max(found, key=lambda each: _hope(each[0]))
    return policy.choose(fleet_snapshot, routing_request, now), routing_request


def _is_open(choice: Placement, routing_request: RoutingRequest) -> bool:
    """Return whether the workers have room and no long queue, or only that of a worker which has the prompt's beginning."""
    prediction = None if choice.chosen is None else choice.chosen.prediction
    if (
        prediction is not None
        and is_saturated(prediction.ttft_s, prediction.ahead_s)
        and free_elsewhere(choice, routing_request) is None
    ):
        return False
    return has_room(choice.decode, routing_request)


def _hope(choice: Placement | NoPlacement) -> tuple[bool, bool]:
    """Return a sort key: the most promising of several reasons to wait is the greatest."""
    return (isinstance(choice, NoPlacement) and choice.full, isinstance(choice, NoPlacement) and not choice.never)


def _is_there(fleet_snapshot: FleetSnapshot, routing_request: RoutingRequest, unfit: Container[WorkerKey]) -> bool:
    """Return whether workers of the request's revision could take it when they are empty, refusals and ejections aside."""
    for pool in fleet_snapshot.pools(routing_request.model, routing_request.kind, routing_request.revision):
        decodes = (pool.estimates[address].view for address in pool.decode_ranking.names)
        prefills = [pool.estimates[address].view for address in pool.prefill_ranking.names]
        for view in decodes:
            if view.key in unfit or not same_kind(view, routing_request) or not can_ever_hold(view, routing_request):
                continue
            if routing_request.mode is not Mode.REMOTE or _has_partner(view, prefills, routing_request):
                return True
    return False


def _has_partner(decode: WorkerSnapshot, prefills: Sequence[WorkerSnapshot], routing_request: RoutingRequest) -> bool:
    if not can_hand_over(decode, routing_request):
        return False
    return any(can_hand_over(each, routing_request) and compatible(each, decode) for each in prefills)
