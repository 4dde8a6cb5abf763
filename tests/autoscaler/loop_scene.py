"""A loop against routers on real sockets, with a clock that the test turns and a platform that it sees."""

from __future__ import annotations

from collections.abc import Mapping

from pdmesh.autoscaler.collect.collect import Collector
from pdmesh.autoscaler.collect.workers import Pools
from pdmesh.autoscaler.forecasting.forecast import State
from pdmesh.autoscaler.loop import Loop, LoopSettings, Parts
from pdmesh.autoscaler.platform import Asked, PlatformError
from pdmesh.autoscaler.policy.policy import Policy
from pdmesh.autoscaler.roles import RoleChanger
from pdmesh.autoscaler.settings import AutoscalerSettings
from pdmesh.autoscaler.views import Decision, PoolDecision, PoolName
from tests.autoscaler.collected import D, P, worker
from tests.autoscaler.routers import ToldRouter, told_router
from tests.autoscaler.scenes import GOALS

PREFILL, DECODE = PoolName.PREFILL, PoolName.DECODE
SETTINGS = AutoscalerSettings(forecast="last", forecast_sigmas=0.0, flips=False, stale_after_s=6.0, cool_down_s=30.0)


class MemoryPlatform:
    """Remembers what it is asked for."""

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        self.asked = {PREFILL: prefill, DECODE: decode}
        self.scaled: list[tuple[PoolName, int, str]] = []
        self.failed_starts: list[tuple[PoolName, str]] = []
        self.saved: State | None = None
        self.broken: str = ""
        self.is_leader = True

    async def leads(self, now_s: float) -> bool:
        return self.is_leader

    async def observe(self, now_s: float) -> Mapping[PoolName, Asked]:
        return {name: Asked(replicas) for name, replicas in self.asked.items()}

    async def scale(self, decision: PoolDecision, replicas: int, now_s: float) -> None:
        if self.broken:
            raise PlatformError(self.broken)
        self.scaled.append((decision.name, replicas, decision.reason))
        self.asked[decision.name] = replicas

    async def starts_failed(self, name: PoolName, problem: str) -> None:
        self.failed_starts.append((name, problem))

    async def load(self) -> State | None:
        return self.saved

    async def save(self, state: State) -> None:
        self.saved = state

    async def close(self) -> None:
        pass


class Scene:
    """A loop whose clock the test turns."""

    def __init__(self, router: ToldRouter, platform: MemoryPlatform, settings: AutoscalerSettings = SETTINGS) -> None:
        self.now_s = 1000.0
        self.router, self.platform = router, platform
        self.decisions: list[Decision] = []
        self.parts = Parts(
            policy=Policy(settings, GOALS),
            collector=Collector([router.address], "m", window_s=10.0),
            platform=platform,
            roles=RoleChanger(drain_timeout_s=5.0),
            scaling=settings,
            on_decision=[lambda decision, now_s: self.decisions.append(decision)],
            clock=lambda: self.now_s,
        )
        self.loop = Loop(self.parts, LoopSettings())

    async def rounds(self, number: int, requests: int = 0) -> None:
        """Two seconds apart; so many requests come in each."""
        for _ in range(number):
            self.now_s += 2.0
            self.router.more(requests)
            await self.loop.round()

    async def pools(self) -> Pools:
        return Pools(await self.platform.observe(self.now_s), self.parts.collector.workers)

    def texts(self, kind: str) -> list[str]:
        return [entry.text for entry in self.loop.history.entries if entry.kind == kind]


def usual_router() -> ToldRouter:
    return told_router(1, worker("p0", (P,)), worker("d0", (D,)))
