"""Divides GPUs between pools when there are fewer than they ask for. Pure.

A request needs every pool, so the pool that bears the smallest share of the demand decides how many requests keep their
objectives: each replica goes to that pool, until nobody wants one or it does not fit. As a share never falls with a replica more,
no other division has a larger smallest share.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.autoscaler.views import PoolName

WORTH_MOVING = 0.1
"""Of the demand, that more has to be borne before a pool gives up replicas that it needs itself."""


@dataclass(frozen=True)
class Claim:
    """Of one pool: `least` replicas that it keeps in any case, `least_ever` if replicas may be moved, `wanted` at most. `share`:
    of the demand that so many replicas bear. `gpus` of each; `other_gpus`: of pods that are on their way out."""

    name: PoolName
    least: int
    least_ever: int
    wanted: int
    gpus: int
    other_gpus: int
    share: Callable[[int], float]


def cost(claims: list[Claim], replicas: dict[PoolName, int]) -> int:
    """GPUs of so many replicas, and of what still drains."""
    return sum(claim.gpus * replicas[claim.name] + claim.other_gpus for claim in claims)


def divide(claims: list[Claim], max_gpus: int, *, may_move: bool) -> dict[PoolName, int]:
    """Replicas of each pool. Nobody gets more than it wants; the budget holds unless what pools keep is over it already.

    `may_move`: replicas of one pool may be taken for another, where that bears clearly more, or where all keep too many."""
    kept = _fill(claims, {claim.name: min(claim.least, claim.wanted) for claim in claims}, max_gpus)
    if not may_move:
        return kept
    moved = _fill(claims, {claim.name: min(claim.least_ever, claim.wanted) for claim in claims}, max_gpus)
    is_better = _smallest_share(claims, moved) >= _smallest_share(claims, kept) + WORTH_MOVING
    return moved if is_better or cost(claims, kept) > max_gpus else kept


def _fill(claims: list[Claim], replicas: dict[PoolName, int], max_gpus: int) -> dict[PoolName, int]:
    replicas = dict(replicas)
    while True:
        wanting = [claim for claim in claims if replicas[claim.name] < claim.wanted]
        if not wanting:
            return replicas
        neediest = min(wanting, key=lambda claim: (claim.share(replicas[claim.name]), claim.gpus))
        if cost(claims, replicas) + neediest.gpus > max_gpus:
            return replicas
        replicas[neediest.name] += 1


def _smallest_share(claims: list[Claim], replicas: dict[PoolName, int]) -> float:
    return min(claim.share(replicas[claim.name]) for claim in claims)
