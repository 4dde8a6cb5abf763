"""Replicas that nobody starts or stops: a dry run prints what it would ask for, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from pdmesh.autoscaler.collect.workers import Pools, SeenWorker
from pdmesh.autoscaler.forecasting.forecast import State
from pdmesh.autoscaler.platform import Asked, PlatformError
from pdmesh.autoscaler.roles import Flipped
from pdmesh.autoscaler.views import AGGREGATED, SEPARATED, Flip, PoolDecision, PoolName


class DryRunRoles:
    """As `pdmesh.autoscaler.roles.Roles` says. Nobody changes roles."""

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self._say = say
        self._said = ""

    async def flip(self, flip: Flip, pools: Pools) -> Flipped:
        """Says it once, until something else is right."""
        if self._said != str(flip):
            self._said = str(flip)
            self._say(f"would change roles: {flip}")
        return Flipped(pools, ())

    async def close(self) -> None:
        pass


class DryRunPlatform:
    """As `pdmesh.autoscaler.platform.Platform` says. What is there counts as asked for; nothing that is asked for comes."""

    def __init__(self, workers: Callable[[], Collection[SeenWorker]], say: Callable[[str], None] = print) -> None:
        """`workers`: those that routers hear now."""
        self._workers, self._say = workers, say
        self._said: dict[PoolName, int] = {}

    async def leads(self, now_s: float) -> bool:
        """Whoever only prints stands in nobody's way."""
        return True

    async def observe(self, now_s: float) -> Mapping[PoolName, Asked]:
        """Raises PlatformError while there is nobody to be counted."""
        homes = [worker.home for worker in self._workers() if worker.serves]
        if not homes:
            raise PlatformError("no router has told of a worker of this model so far; see that some run")
        pools = AGGREGATED if set(homes) == AGGREGATED else SEPARATED
        return {name: Asked(homes.count(name)) for name in PoolName if name in pools}

    async def scale(self, decision: PoolDecision, replicas: int, now_s: float) -> None:
        """Says it once, until something else is right."""
        if self._said.get(decision.name) != replicas:
            self._said[decision.name] = replicas
            self._say(f"would ask for {replicas} of {decision.name}. {decision}")

    async def starts_failed(self, name: PoolName, problem: str) -> None:
        """Of what others have asked for."""
        self._say(f"{name}: {problem}")

    async def load(self) -> State | None:
        return None

    async def save(self, state: State) -> None:
        pass

    async def close(self) -> None:
        pass
