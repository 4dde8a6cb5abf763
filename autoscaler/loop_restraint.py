"""What the loop knows besides the figures, put into views and decisions. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autoscaler.decision import Decision, Flip, PoolDecision
from autoscaler.views import Hold, PoolName, PoolView


def with_hold(views: Iterable[PoolView], by: str, until_s: float) -> tuple[PoolView, ...]:
    """All of them stay as they are. A person's hold goes before."""
    return tuple(view if view.hold is not None else replace(view, hold=Hold(by, until_s)) for view in views)


def restrained(decision: Decision, hopeless: Mapping[PoolName, str]) -> Decision:
    """Without the growth of pools whose replicas do not start. Flips need no start, and stay."""
    pools = tuple(_restrained(pool, decision.flips, hopeless.get(pool.name)) for pool in decision.pools)
    return replace(decision, pools=pools)


def _restrained(pool: PoolDecision, flips: Iterable[Flip], why: str | None) -> PoolDecision:
    taken = sum(flip.num for flip in flips if flip.taker is pool.name)
    most = pool.before + taken
    if why is None or pool.replicas <= most:
        return pool
    return replace(pool, replicas=most, reason=f"{pool.reason}; but {why}", held="failed starts")
