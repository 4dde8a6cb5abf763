"""Holds a platform that starts and stops nothing: a dry run prints what it would ask for, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from pdmesh.autoscaler.collect.workers import Pools, SeenWorker
from pdmesh.autoscaler.forecasting.forecast import State
from pdmesh.autoscaler.platform import Asked, PlatformError
from pdmesh.autoscaler.roles import Flipped
from pdmesh.autoscaler.views import AGGREGATED, SEPARATED, Flip, PoolDecision, PoolName


class DryRunRoles:
    """Implement `pdmesh.autoscaler.roles.Roles` without switching any roles."""

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self._say = say
        self._said = ""

    async def flip(self, flip: Flip, pools: Pools) -> Flipped:
        """Report the switch once, until a different one is due."""
        if self._said != str(flip):
            self._said = str(flip)
            self._say(f"would change roles: {flip}")
        return Flipped(pools, ())

    async def close(self) -> None:
        pass


class DryRunPlatform:
    """Implement `pdmesh.autoscaler.platform.Platform` without scaling: existing replicas count as asked for, and no others
    appear."""

    def __init__(self, workers: Callable[[], Collection[SeenWorker]], say: Callable[[str], None] = print) -> None:
        """Create the platform over the `workers` that routers hear now."""
        self._workers, self._say = workers, say
        self._said: dict[PoolName, int] = {}

    async def leads(self, now_s: float) -> bool:
        """Return True: a dry run never blocks another leader."""
        return True

    async def observe(self, now_s: float) -> Mapping[PoolName, Asked]:
        """Return the current replicas. Raises PlatformError while no worker is known."""
        homes = [worker.home for worker in self._workers() if worker.serves]
        if not homes:
            raise PlatformError("no router has reported a worker of this model yet; check that some run")
        pools = AGGREGATED if set(homes) == AGGREGATED else SEPARATED
        return {name: Asked(homes.count(name)) for name in PoolName if name in pools}

    async def scale(self, decision: PoolDecision, replicas: int, now_s: float) -> None:
        """Report the request once, until a different one is due."""
        if self._said.get(decision.name) != replicas:
            self._said[decision.name] = replicas
            self._say(f"would ask for {replicas} of {decision.name}. {decision}")

    async def starts_failed(self, name: PoolName, problem: str) -> None:
        """Ignore failed starts: nothing was asked for."""
        self._say(f"{name}: {problem}")

    async def load(self) -> State | None:
        return None

    async def save(self, state: State) -> None:
        pass

    async def close(self) -> None:
        pass
