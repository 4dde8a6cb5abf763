"""The router process: it wires the parts together, serves, and drains."""

import asyncio
import gc
import logging
import os
import secrets

from pdmesh.planning import objectives
from pdmesh.runtime import config as runtime_config
from pdmesh.runtime import log, process
from pdmesh.runtime.addresses import join_address
from pdmesh.runtime.registry.block_stream import BlockStream
from pdmesh.runtime.registry.registry import Registry
from pdmesh.runtime.rpc.channel import WITHIN_MESH, Channels
from pdmesh.runtime.rpc.mesh_secret import open_secret
from pdmesh.runtime.rpc.server import Callers, ConnectionLimits, GrpcServer
from pdmesh.runtime.rpc.tls import open_tls
from pdmesh.runtime.telemetry.config import resource_of
from pdmesh.runtime.telemetry.open_metrics import open_metrics
from pdmesh.runtime.telemetry.tracing import open_tracing
from router import processes
from router.api import protocols
from router.api.frontend import Frontend
from router.auth import api_keys
from router.auth.identity import KeyInterceptor
from router.auth.tenants import Tenants
from router.config import RouterConfig
from router.context import RouterContext
from router.engine_bridge.bridge import EngineBridges
from router.fleet.decode_stream import StreamSettings
from router.fleet.migration import Migrator, Rebalancer
from router.fleet.registry import FleetRegistry
from router.fleet.shared_state import SharedState
from router.flow_control.ttft_predictor import TtftPredictor
from router.kv_index.subscriber import PrefixFollower
from router.kv_index.warming import FleetWarming
from router.telemetry.fleet_metrics import StatusReader
from router.tokenization import prepared_request

BACKGROUND_GRACE_S = 3.0
YOUNG_OBJECTS = 20_000

logger = logging.getLogger(__name__)


class Router:
    """Run a router in this process, from `start` to `stop`."""

    def __init__(self, config: RouterConfig) -> None:
        """Load the parts. Raises what loading tokenizers, objectives and certificates raises."""
        self.config = config
        router_id = config.router_id or f"router-{secrets.token_hex(4)}"
        links = StreamSettings(router_id, config.heartbeat_ms, config.stream_timeout_s, config.reattach_grace_s)
        tls, secret = open_tls(config.tls), open_secret(config.mesh_secret)
        self.channels = Channels(keepalive=WITHIN_MESH, tls=tls, secret=secret)
        self.engines = EngineBridges(config, self.channels)
        fleet = FleetRegistry(links, self.channels, report_period_ms=config.report_period_ms, forget_s=config.forget_worker_s)
        goals = objectives.load(config.objectives)
        self.tenants = Tenants(config.tenants, config.tenants_share)
        models = prepared_request.load(config.model_folders(), config.generation_config)
        self.core = RouterContext.build(config, router_id, models, fleet, goals, tenants=self.tenants)
        self.core.forecaster = TtftPredictor(self.core)
        resource = resource_of(router_id, config.mesh, ("router",), self.core.epoch)
        self.metrics = open_metrics(config.telemetry, "pdmesh-router", resource, os.environ, host=config.host)
        self.metrics_url = ""
        self.metrics.read_by(StatusReader(self.core, self._registry_connected).read)
        self.core.metrics.metrics = self.metrics
        self.core.tracing = open_tracing(config.telemetry, "pdmesh-router", resource)
        self.registry = Registry(config.redis, config.mesh, secret=secret) if config.redis else None
        self.shared: SharedState | None = None
        if config.redis:
            self.shared = SharedState(config.redis, config.mesh, router_id, fleet, self.tenants.routing_request.rates)
            self.tenants.share = self.shared.share
        stream = BlockStream(config.redis, config.mesh) if config.redis else None
        self.follower = PrefixFollower(fleet, self.core.prefixes, stream)
        self.warming = FleetWarming(fleet, self.core.prefixes)
        self.follower.on_listed = self.warming.listed
        self.mover = _mover(self.core, goals)
        self.frontend = Frontend(self.core, goals, self._registry_connected)
        self.frontend.open_requests.on_admitting = self.tenants.asked
        self.keys = api_keys.open_store(config.api_keys, config.mesh)
        checks = () if self.keys is None else (KeyInterceptor(self.keys),)
        self.server = GrpcServer(
            config.host,
            config.port,
            tls=tls,
            callers=_callers(config),
            interceptors=checks,
            limits=_limits(config),
            share_port=config.share_ports,
        )
        protocols.add_services(self.server, self.frontend)
        self.batches = protocols.open_batches(config, self.frontend)
        self.http = protocols.open_http(config, self.frontend, self.batches, tls, self.keys)
        self._health: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen and look for workers; return the address. Health is NOT_SERVING until a decode worker can take a request."""
        await self.engines.start()
        self.metrics_url = await self.metrics.start()
        if self.keys is not None:
            await self.keys.start()
        await asyncio.gather(self.core.rollouts.start(), self.core.serving.start(), self.core.weights.start())
        if self.http is not None:
            await self.http.start()
        port = await self.server.start()
        self.core.fleet.start((*self.config.workers, *self.engines.addresses))
        self.follower.start()
        self.warming.start()
        if self.registry is not None:
            self.registry.start(self.core.fleet.on_registry)
        self.mover.start()
        if self.shared is not None:
            self.shared.start()
        self.tenants.start()
        self.core.adapters.start()
        if self.batches is not None:
            await self.batches.start()
        self._health = asyncio.create_task(self._follow_readiness(), name="health")
        return join_address(self.config.host, port)

    async def stop(self) -> None:
        """Drain, then release everything."""
        if self._health is not None:
            self._health.cancel()
            await asyncio.gather(self._health, return_exceptions=True)
        await self.server.set_serving(False)
        # A call that meets the closing port ends with CANCELLED, which clients do not retry, so balancers must have stopped
        # sending by then.
        await asyncio.gather(
            self.frontend.drain(self.config.drain_grace_s), self._stop_batches(), asyncio.sleep(self.config.linger_s)
        )
        await self.mover.stop()
        await self.core.background.finish(BACKGROUND_GRACE_S)
        await self.server.drain(0.5)
        if self.http is not None:
            await self.http.stop()
        await self.frontend.close()
        if self.keys is not None:
            await self.keys.stop()
        if self.shared is not None:
            await self.shared.stop()
        await self.tenants.stop()
        await self.core.adapters.stop()
        await self.core.rollouts.stop()
        await self.core.serving.stop()
        await self.core.weights.stop()
        if self.registry is not None:
            await self.registry.stop()
        await self.follower.stop()
        await self.warming.stop()
        await self.core.fleet.stop()
        await self.engines.stop()
        await self.channels.close()
        await self.metrics.stop()
        await asyncio.to_thread(self.core.tracing.close)

    async def _stop_batches(self) -> None:
        if self.batches is not None:
            await self.batches.stop(self.config.drain_grace_s)

    def _registry_connected(self) -> bool:
        return self.registry is not None and self.registry.connected

    async def _follow_readiness(self) -> None:
        serving = False
        while True:
            change = self.core.fleet.changes.next
            if self.core.is_ready != serving:
                serving = not serving
                logger.info("ready" if serving else "not ready: no decode worker is reachable")
                await self.server.set_serving(serving)
            await change.wait()


def _callers(config: RouterConfig) -> Callers:
    """Return which callers gRPC accepts. Clients need no certificate with the mesh's name, since they are not its members."""
    return "certified" if config.tls_client_auth == "require" else "any"


def _limits(config: RouterConfig) -> ConnectionLimits:
    return ConnectionLimits(
        max_streams=config.max_streams_per_connection,
        max_age_s=config.max_connection_age_s,
        max_idle_s=config.max_connection_idle_s,
        max_calls=config.max_streams,
    )


def spare_collector() -> None:
    """Make the garbage collector skip objects that live as long as the process, and run less often than after each hundred
    objects.

    With the defaults it walks all imported modules, for tens of milliseconds, whenever a quarter as much was allocated again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


def _mover(core: RouterContext, goals: tuple[objectives.ModelObjective, ...]) -> Migrator:
    rebalancer = Rebalancer() if core.config.rebalance == "on" else None
    tpot_s = {goal.model: goal.tpot_ms / 1000 for goal in goals if goal.tpot_ms}
    return Migrator(core.fleet, core.migratable, rebalancer=rebalancer, tpot_objectives_s=tpot_s)


async def serve(config: RouterConfig, life: process.Lifecycle) -> None:
    """Run a router until the process is to stop."""
    router = Router(config)
    address = await router.start()
    spare_collector()
    http_url = router.http.url if router.http is not None else ""
    life.ready(address, router_id=router.core.router_id, http_url=http_url, metrics_url=router.metrics_url)
    beats = asyncio.create_task(processes.beat_forever(), name="heartbeat") if config.heartbeat_on_stdout else None
    try:
        await life.wait_for_stop()
    finally:
        await router.stop()
        if beats is not None:
            beats.cancel()


def main() -> None:
    """Run `python -m router`."""
    config = runtime_config.load(RouterConfig, None, os.environ, prog="router")
    log.configure("router")
    run = serve if config.processes == 1 else processes.serve
    process.end(process.run(lambda life: run(config, life), exit_with_parent=config.exit_with_parent))
