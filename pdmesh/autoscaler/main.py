"""The autoscaler process: wires the parts together, runs the loop, reports its health."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from pdmesh.autoscaler.collect.collect import Collector
from pdmesh.autoscaler.collect.workers import Pools, SeenWorker
from pdmesh.autoscaler.config import AutoscalerConfig, objective_of
from pdmesh.autoscaler.forecasting.forecast import State
from pdmesh.autoscaler.forecasting.registry import forecaster_of
from pdmesh.autoscaler.loop import Listener, Loop, LoopSettings, ObjectivesFile, Parts
from pdmesh.autoscaler.loop_history import DecisionSpans, History
from pdmesh.autoscaler.metrics import SERVICE, AutoscalerMetrics
from pdmesh.autoscaler.platform import Asked, PlatformError
from pdmesh.autoscaler.policy.policy import Policy
from pdmesh.autoscaler.roles import Flipped, RoleChanger
from pdmesh.autoscaler.views import AGGREGATED, SEPARATED, Flip, PoolDecision, PoolName
from pdmesh.runtime import config as runtime_config
from pdmesh.runtime import log, process
from pdmesh.runtime.addresses import join_address
from pdmesh.runtime.rpc.mesh_secret import open_secret
from pdmesh.runtime.rpc.server import GrpcServer
from pdmesh.runtime.rpc.tls import open_tls
from pdmesh.runtime.telemetry.config import resource_of
from pdmesh.runtime.telemetry.open_metrics import open_metrics
from pdmesh.runtime.telemetry.spans import Attributes
from pdmesh.runtime.telemetry.tracing import Tracing, open_tracing

if TYPE_CHECKING:
    from pdmesh.autoscaler.kubernetes.metrics_server import MetricsServer
    from pdmesh.autoscaler.platform import Platform


# Holds a platform that starts and stops nothing: a dry run prints what it would ask for, and why.


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


SICK_PERIODS = 10
"""Periods without a completed round after which the process is not healthy."""

logger = logging.getLogger(__name__)


def open_loop(
    config: AutoscalerConfig, *listeners: Listener, history: History | None = None, spans: DecisionSpans | None = None
) -> Loop:
    """Create the loop without starting it; `listeners` receive each decision, `history` and `spans` what is done. Raises
    ConfigError."""
    objectives = ObjectivesFile(config.objectives, config.model, config.transit_ms)
    tls = open_tls(config.tls)
    collector = Collector(config.routers, objectives.model, window_s=config.window_s, tls=tls, api_key=config.api_key)
    changer = RoleChanger(drain_timeout_s=config.role_drain_s, tls=tls, secret=open_secret(config.mesh_secret))
    parts = Parts(
        policy=Policy(config.scaling, objectives.goals, forecaster_of(config.scaling, config.window_s)),
        collector=collector,
        platform=_platform(config, collector),
        roles=DryRunRoles(_say) if config.platform == "dry-run" else changer,
        scaling=config.scaling,
        objectives=objectives,
        on_decision=list(listeners),
        history=history or History(),
        spans=spans or DecisionSpans(),
    )
    return Loop(parts, LoopSettings(period_s=config.period_s))


def _platform(config: AutoscalerConfig, collector: Collector) -> Platform:
    if config.platform == "dry-run":
        return DryRunPlatform(lambda: collector.workers, _say)
    from pdmesh.autoscaler.kubernetes.platform import open_platform  # a dry run needs no Kubernetes client

    return open_platform(config.kubernetes)


async def _open_metrics(config: AutoscalerConfig) -> MetricsServer | None:
    """Return the server for HPA or KEDA, if configured. Raises ConfigError, PlatformError."""
    if not config.external_metrics.is_set:
        return None
    from pdmesh.autoscaler.kubernetes.metrics_server import MetricsServer  # imported only where it listens

    model = objective_of(config.objectives, config.model).model
    server = MetricsServer(config.external_metrics, config.kubernetes, config.host, model)
    await server.start()
    return server


def _say(text: str) -> None:
    print(text, flush=True)


async def serve(config: AutoscalerConfig, life: process.Lifecycle) -> None:
    """Run rounds until the process is to stop."""
    metrics, shown, tracing = await _open_metrics(config), _metrics_of(config), _tracing_of(config)
    listeners = [shown.decided, *([metrics.on_decision] if metrics is not None else [])]
    loop = open_loop(config, *listeners, history=History(shown.happened), spans=DecisionSpans(tracing))
    shown.watch(loop)
    server = GrpcServer(config.host, config.port, tls=open_tls(config.tls), callers="any")
    port, metrics_url = await server.start(), await shown.metrics.start()
    rounds = asyncio.create_task(loop.run(), name="rounds")
    wellness = asyncio.create_task(_follow(loop, server, config.period_s), name="health")
    try:
        life.ready(join_address(config.host, port), metrics_url=metrics_url)
        await life.wait_for_stop()
    finally:
        for task in (rounds, wellness):
            task.cancel()
        await asyncio.gather(rounds, wellness, return_exceptions=True)
        await loop.close()
        if metrics is not None:
            await metrics.close()
        await server.drain(0.5)
        await shown.metrics.stop()
        await asyncio.to_thread(tracing.close)


def _metrics_of(config: AutoscalerConfig) -> AutoscalerMetrics:
    """Return this process's metrics. Raises ConfigError."""
    return AutoscalerMetrics(open_metrics(config.telemetry, SERVICE, _resource(), os.environ, host=config.host))


def _tracing_of(config: AutoscalerConfig) -> Tracing:
    """Return this process's tracing. Raises ConfigError."""
    return open_tracing(config.telemetry, SERVICE, _resource(), os.environ)


def _resource() -> Attributes:
    return resource_of(socket.gethostname(), "", ("autoscaler",))


async def _follow(loop: Loop, server: GrpcServer, period_s: float) -> None:
    """Report serving while rounds complete, whatever they decide: a loop that holds is healthy."""
    while True:
        await server.set_serving(time.monotonic() - loop.ended_at < SICK_PERIODS * period_s)
        await asyncio.sleep(period_s / 2)


def main() -> None:
    """Run `python -m pdmesh.autoscaler`."""
    config = runtime_config.load(AutoscalerConfig, None, os.environ, prog="autoscaler")
    log.configure("autoscaler")
    process.end(process.run(lambda life: serve(config, life), exit_with_parent=config.exit_with_parent))
