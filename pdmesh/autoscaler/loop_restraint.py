"""What the loop knows besides the figures, put into views and decisions. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pdmesh.autoscaler.decision import Decision, Flip, PoolDecision
from pdmesh.autoscaler.views import Hold, PoolName, PoolView


def with_hold(views: Iterable[PoolView], by: str, until_s: float) -> tuple[PoolView, ...]:
    """All of them stay as they are. A person's hold goes before."""
    return tuple(view if view.hold is not None else replace(view, hold=Hold(by, until_s)) for view in views)


@dataclass(frozen=True)
class FailedStarts:
    """Of one pool: `num_serving` replicas are there, and why no more are asked for."""

    num_serving: int
    why: str


def restrained(decision: Decision, hopeless: Mapping[PoolName, FailedStarts]) -> Decision:
    """Without the growth of pools whose replicas do not start. Flips need no start, and stay."""
    flipped = {name for flip in decision.flips for name in (flip.giver, flip.taker)}
    pools = tuple(
        _restrained(pool, decision.flips, failed, is_flipped=pool.name in flipped)
        if (failed := hopeless.get(pool.name)) is not None
        else pool
        for pool in decision.pools
    )
    return replace(decision, pools=pools)


def _restrained(pool: PoolDecision, flips: Iterable[Flip], failed: FailedStarts, *, is_flipped: bool) -> PoolDecision:
    most = pool.before + sum(flip.num for flip in flips if flip.taker is pool.name)
    if is_flipped and pool.replicas <= most:
        return pool
    replicas = min(most, _kept(pool, failed))
    if replicas < pool.before:
        return replace(pool, replicas=replicas)
    return replace(pool, replicas=replicas, reason=f"{pool.reason}; but {failed.why}", held="failed starts")


def _kept(pool: PoolDecision, failed: FailedStarts) -> int:
    """Of those that are awaited in vain one stays, unless fewer than those who serve would do: by the one it shows when starts
    succeed again, and the pool does not swing with each wish for one more that nobody will fulfil."""
    return pool.replicas if pool.replicas < failed.num_serving else max(pool.replicas, failed.num_serving + 1)
