"""The autoscaler's view of one moment, and its decisions. Pure values; seconds of one clock, which the caller passes in."""

import enum
from dataclasses import dataclass, field

from pdmesh.planning.capacity_load import Lengths, Limits, Worker
from pdmesh.planning.latency_model import NO_DRAFTS, Drafts, LatencyModel


class PoolName(enum.StrEnum):
    """Name a pool by the roles of its workers."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


SEPARATED = frozenset({PoolName.PREFILL, PoolName.DECODE})
AGGREGATED = frozenset({PoolName.BOTH})


@dataclass(frozen=True)
class Measured:
    """Hold a latency at the objectives' quantile over the latest window, as observed and as routers predicted it for the same
    requests. None: nothing was measured."""

    observed_s: float | None = None
    predicted_s: float | None = None


@dataclass(frozen=True)
class Traffic:
    """Hold the traffic of all routers. `rate_per_s`: requests a second that arrived in the latest `window_s`, rejected ones
    included.

    `lengths` None: no request yet. `num_queued` requests wait at routers for a worker, the latest of them for `queue_wait_s`.
    `burstiness`: the squared coefficient of variation of the gaps. `age_s`: of the oldest of these figures. `num_open` requests,
    of any model, have not ended: they wait at routers or are being answered."""

    rate_per_s: float
    lengths: Lengths | None
    window_s: float = 15.0
    burstiness: float = 1.0
    num_queued: int = 0
    queue_wait_s: float = 0.0
    ttft: Measured = field(default_factory=Measured)
    tpot: Measured = field(default_factory=Measured)
    age_s: float = 0.0
    num_open: int = 0


@dataclass(frozen=True)
class Hold:
    """Hold a pool's replicas until `until_s`: a person has set them."""

    by: str
    until_s: float


@dataclass(frozen=True)
class PoolView:
    """Describe the workers that have these roles now. `starting_ages_s`: seconds since each start that does not serve yet was
    asked for, including those not created yet. `num_draining` finish their work and accept nothing new.

    `latency` and `limits` are those of a typical worker; None: none has reported yet. `keeps_pace`: all of them do.
    `kv_occupancy`: share of the pool's KV in use. Of the ready ones `num_borrowed` belong to the other pool, and `num_stopped`
    are paused or asleep. `drafts`: their speculation lately. `age_s`: of the oldest of these figures."""

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
    keeps_pace: bool = True
    num_stopped: int = 0
    drafts: Drafts = NO_DRAFTS

    @property
    def num_replicas(self) -> int:
        """Return the replicas that serve or will: asked for and not to be removed."""
        return self.num_ready + len(self.starting_ages_s)

    @property
    def worker(self) -> Worker | None:
        """Return a typical worker; None while its speed or its limits are not known."""
        if self.latency is None or self.limits is None:
            return None
        return Worker(self.latency, self.limits, self.keeps_pace, self.drafts)


@dataclass(frozen=True)
class Snapshot:
    """Hold everything that one decision rests on. A mesh has one pool of workers with both roles, or one pool for each role."""

    now_s: float
    traffic: Traffic
    pools: tuple[PoolView, ...]

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names) or frozenset(names) not in (SEPARATED, AGGREGATED):
            raise ValueError(f"pools: {', '.join(names) or 'none'}; a mesh has prefill and decode, or both on each worker")


# The policy's decisions.


@dataclass(frozen=True)
class PoolDecision:
    """Decide one pool: `replicas`, role switches included, against `before`; `reason` in a sentence or two.

    `held`: why nothing may change, although the figures might ask for it; None: no hold."""

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
    """Switch `num` idle workers of one pool to the role of the other."""

    giver: PoolName
    taker: PoolName
    num: int

    def __str__(self) -> str:
        return f"{self.num} of {self.giver} become {self.taker}"


@dataclass(frozen=True)
class Decision:
    """Hold the decision for all pools. `held`: why nothing was decided, None otherwise; `held_by` names that in a word."""

    pools: tuple[PoolDecision, ...]
    flips: tuple[Flip, ...] = ()
    held: str | None = None
    held_by: str = "stale"

    def replicas(self, name: PoolName) -> int:
        """Return the replicas of one pool."""
        return next(pool.replicas for pool in self.pools if pool.name == name)

    @property
    def reason(self) -> str:
        """Return the reason in words, for logs and people."""
        return "; ".join(str(part) for part in (*self.pools, *self.flips))
