"""What the autoscaler sees at one moment. Pure values; seconds of one clock, which the caller chooses and passes in."""

import enum
from dataclasses import dataclass, field

from pdmesh.planning.capacity_load import Lengths, Limits, Worker
from pdmesh.planning.latency_model import LatencyModel


class PoolName(enum.StrEnum):
    """Named by the roles that its workers have."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


SEPARATED = frozenset({PoolName.PREFILL, PoolName.DECODE})
AGGREGATED = frozenset({PoolName.BOTH})


@dataclass(frozen=True)
class Measured:
    """A latency at the objectives' quantile, over the latest window: what came, and what routers had predicted for the same
    requests. None: nothing was measured."""

    observed_s: float | None = None
    predicted_s: float | None = None


@dataclass(frozen=True)
class Traffic:
    """What routers together see. `rate_per_s`: requests that arrived in the latest `window_s`, refused ones too, each second.

    `lengths` None: nobody has come yet. `num_queued` requests wait at routers for a worker, the latest of them for
    `queue_wait_s`. `burstiness`: the squared coefficient of variation of the gaps. `age_s`: of the oldest of these figures."""

    rate_per_s: float
    lengths: Lengths | None
    window_s: float = 15.0
    burstiness: float = 1.0
    num_queued: int = 0
    queue_wait_s: float = 0.0
    ttft: Measured = field(default_factory=Measured)
    tpot: Measured = field(default_factory=Measured)
    age_s: float = 0.0


@dataclass(frozen=True)
class Hold:
    """Somebody set a pool's replicas, and they are to stay until `until_s`."""

    by: str
    until_s: float


@dataclass(frozen=True)
class PoolView:
    """The workers that have these roles now. `starting_ages_s`: seconds since each was asked for that does not serve yet, those
    included that nobody has created so far. `num_draining` finish what they have and take nothing new.

    `latency` and `limits` are those of a typical worker; None: no worker has told yet. `kv_occupancy`: share of the pool's KV
    that is in use. `num_borrowed` of the ready ones belong to the other pool. `age_s`: of the oldest of these figures."""

    name: PoolName
    num_ready: int
    starting_ages_s: tuple[float, ...] = ()
    num_draining: int = 0
    latency: LatencyModel | None = None
    limits: Limits | None = None
    kv_occupancy: float = 0.0
    num_borrowed: int = 0
    age_s: float = 0.0
    hold: Hold | None = None

    @property
    def num_replicas(self) -> int:
        """Asked for and not to be taken away: they serve, or will."""
        return self.num_ready + len(self.starting_ages_s)

    @property
    def worker(self) -> Worker | None:
        """A typical one; None while its speed or its limits are not known."""
        return Worker(self.latency, self.limits) if self.latency is not None and self.limits is not None else None


@dataclass(frozen=True)
class Snapshot:
    """Everything that one decision rests on. A mesh has a pool of workers with both roles, or one for each role."""

    now_s: float
    traffic: Traffic
    pools: tuple[PoolView, ...]

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names) or frozenset(names) not in (SEPARATED, AGGREGATED):
            raise ValueError(f"pools: {', '.join(names) or 'none'}; a mesh has prefill and decode, or both on each worker")


# What the policy decides. Pure values.


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
