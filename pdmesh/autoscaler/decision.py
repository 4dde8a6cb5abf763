"""What the policy decides. Pure values."""

from dataclasses import dataclass

from pdmesh.autoscaler.views import PoolName


@dataclass(frozen=True)
class PoolDecision:
    """`replicas` that the pool is to have, flips included, of which it has `before`; `reason` in a sentence or two.

    `held`: why nothing may change, although the figures might ask for it; None: nothing holds it."""

    name: PoolName
    before: int
    replicas: int
    reason: str
    held: str | None = None

    def __str__(self) -> str:
        change = f"{self.before} → {self.replicas}" if self.replicas != self.before else f"stays at {self.replicas}"
        return f"{self.name} {change}: {self.reason}"


@dataclass(frozen=True)
class Flip:
    """So many idle workers of one pool take the role of the other."""

    giver: PoolName
    taker: PoolName
    num: int

    def __str__(self) -> str:
        return f"{self.num} of {self.giver} become {self.taker}"


@dataclass(frozen=True)
class Decision:
    """Of all pools. `held`: why nothing at all was decided, None otherwise."""

    pools: tuple[PoolDecision, ...]
    flips: tuple[Flip, ...] = ()
    held: str | None = None

    def replicas(self, name: PoolName) -> int:
        """Of one pool."""
        return next(pool.replicas for pool in self.pools if pool.name == name)

    @property
    def reason(self) -> str:
        """In words, for logs and people."""
        return "; ".join(str(part) for part in (*self.pools, *self.flips))
