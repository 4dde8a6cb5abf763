"""How many replicas the policy wants of each pool, for whoever scales them instead. Pure: the time is passed in, in seconds of
any clock that only goes forward."""

from dataclasses import dataclass

from pdmesh.autoscaler.decision import Decision
from pdmesh.autoscaler.views import PoolName

METRIC = "pdmesh_wanted_replicas"


@dataclass(frozen=True)
class Value:
    """Of one pool; `wall_s`, since 1970, is when it was decided."""

    pool: PoolName
    replicas: int
    wall_s: float


class Wanted:
    """The latest decision, while it is fresh. One that only says that nothing is known (`held`) makes none fresh: silence is not
    what anybody wants."""

    def __init__(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s
        self._values: tuple[Value, ...] = ()
        self._decided_s = float("-inf")

    def decided(self, decision: Decision, now_s: float, wall_s: float) -> None:
        """Another decision."""
        if decision.held is None:
            self._values = tuple(Value(pool.name, pool.replicas, wall_s) for pool in decision.pools)
            self._decided_s = now_s

    def fresh(self, now_s: float) -> tuple[Value, ...]:
        """Of all pools; none where the latest is too old."""
        return self._values if now_s - self._decided_s <= self._max_age_s else ()
