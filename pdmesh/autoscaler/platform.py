"""The platform that runs replicas, as the loop sees it: Kubernetes, this machine's processes, or none (a dry run)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pdmesh.autoscaler.forecasting.forecast import State
from pdmesh.autoscaler.views import Hold, PoolDecision, PoolName


class PlatformError(Exception):
    """Raised when the platform does not answer or rejects a request. Says what was tried and what to do; the loop holds until its
    next round."""


@dataclass(frozen=True)
class Asked:
    """Hold what a platform was last asked for, of one pool: `replicas` that were started for it, whatever roles they have now.

    `hold`: a person has set them, or forbids changes; None: the autoscaler may change them."""

    replicas: int
    hold: Hold | None = None


class Platform(Protocol):
    """Own the replicas. Each method raises PlatformError; times are those of the loop's clock, in seconds."""

    async def leads(self, now_s: float) -> bool:
        """Return whether this process may act; other candidates then wait. Called at the beginning of each round."""
        ...

    async def observe(self, now_s: float) -> Mapping[PoolName, Asked]:
        """Return every pool that it owns."""
        ...

    async def scale(self, decision: PoolDecision, replicas: int, now_s: float) -> None:
        """Ask for `replicas` of the pool's own; idempotent. `decision` gives the reason, for people. Raises PlatformError once
        this process no longer leads."""
        ...

    async def starts_failed(self, name: PoolName, problem: str) -> None:
        """Report, where people look, that requested replicas do not start; call it after `observe`. Raises nothing."""
        ...

    async def load(self) -> State | None:
        """Return what a former leader saved; None: nothing."""
        ...

    async def save(self, state: State) -> None:
        """Save state for the next leader."""
        ...

    async def close(self) -> None:
        """Give up the lead. Idempotent; raises nothing."""
        ...
