"""Where replicas come from, as the loop sees it: Kubernetes, this machine's processes, or nothing at all (a dry run)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pdmesh.autoscaler.forecasting.forecast import State
from pdmesh.autoscaler.views import Hold, PoolDecision, PoolName


class PlatformError(Exception):
    """It does not answer, or refuses. Says what was tried and what to do; the loop holds and tries again in its next round."""


@dataclass(frozen=True)
class Asked:
    """What a platform was last asked for, of one pool: `replicas` that were started for it, whatever roles they have now.

    `hold`: a person has set them, or forbids changes; None: the autoscaler may."""

    replicas: int
    hold: Hold | None = None


class Platform(Protocol):
    """Owner of the replicas. Each method raises PlatformError; times are those of the loop's clock, in seconds."""

    async def leads(self, now_s: float) -> bool:
        """May this process act? Others like it wait then. Asked at the beginning of each round."""
        ...

    async def observe(self, now_s: float) -> Mapping[PoolName, Asked]:
        """Every pool that it owns."""
        ...

    async def scale(self, decision: PoolDecision, replicas: int, now_s: float) -> None:
        """Ask for so many of the pool's own; idempotent. `decision` says why, for people. Refused where this process has ceased
        to lead."""
        ...

    async def starts_failed(self, name: PoolName, problem: str) -> None:
        """Tells people, where they look, that replicas which were asked for do not come; after `observe`. Raises nothing."""
        ...

    async def load(self) -> State | None:
        """What a former leader saved; None: nothing."""
        ...

    async def save(self, state: State) -> None:
        """For the next leader."""
        ...

    async def close(self) -> None:
        """Gives up the lead. Idempotent; raises nothing."""
        ...
