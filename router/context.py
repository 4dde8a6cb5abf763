"""The context that all requests of one router share: its parts, its background tasks, and the keeper of traces."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc.aio

from pdmesh.planning.objectives import ModelObjective
from pdmesh.runtime.process import new_epoch
from pdmesh.runtime.telemetry.tracing import OFF, Tracing
from router.config import RouterConfig
from router.fleet.adapters import FleetAdapters
from router.fleet.circuit_breaker import HealthRecorder
from router.fleet.hedging import HedgeLimits, Hedging
from router.fleet.migration import Migratable
from router.fleet.registry import FleetRegistry
from router.fleet.wanted_adapters import WantedAdapters
from router.flow_control.capacity import AdmissionSettings, TenantBook
from router.flow_control.controller import Admission, FlowController
from router.flow_control.slo_admission import Forecaster
from router.kv_index.index import PrefixIndex
from router.lifecycle.capacity_queue import CapacityQueue
from router.lifecycle.session_release import SessionReleases
from router.routing.cost_model import OutputLengths, Overheads
from router.routing.decisions import Decisions, SessionMemory
from router.routing.policy import Policy, make_policy
from router.telemetry.metrics import RequestMetrics
from router.telemetry.traffic import Traffic
from router.tokenization.prepared_request import ServedModel

if TYPE_CHECKING:
    from router.fleet.worker import Worker


# Background tasks may outlive the call that started them: one tells a worker that the client has left. Each bounds its duration.

logger = logging.getLogger(__name__)


class Background:
    """Keep tasks alive until they are done, and wait for them at shutdown."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Run `work` in a task; an error is logged."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def finish(self, timeout_s: float) -> None:
        """Wait for the running tasks, then cancel those that are late."""
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("background work %s failed", task.get_name(), exc_info=task.exception())


# The trace keeper tells workers which traces to export although they were not sampled: in small batches, soon, and only once.

GATHER_S = 0.2
CALL_TIMEOUT_S = 1.0
MAX_IDS = 512


class TraceKeeper:
    """Tell workers which traces to keep. A lost message is not repeated: the trace shows that a worker's part is missing."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._wanted: dict[Worker, list[int]] = defaultdict(list)
        self._is_gathering = False

    def keep(self, trace_id: int, workers: Iterable[Worker]) -> None:
        """Tell these workers, which hold a part of the trace, to export it."""
        for worker in workers:
            if len(self._wanted[worker]) < MAX_IDS:
                self._wanted[worker].append(trace_id)
        if self._wanted and not self._is_gathering:
            self._is_gathering = True
            self._background.spawn(self._tell_all(), "keep traces")

    async def _tell_all(self) -> None:
        await asyncio.sleep(GATHER_S)
        self._is_gathering = False
        wanted, self._wanted = self._wanted, defaultdict(list)
        await asyncio.gather(*(_tell(worker, trace_ids) for worker, trace_ids in wanted.items()))


async def _tell(worker: Worker, trace_ids: list[int]) -> None:
    try:
        await worker.keep_traces(trace_ids, CALL_TIMEOUT_S)
    except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
        logger.info("%s was not told of %d traces to keep: %s", worker.address, len(trace_ids), error)


@dataclass(eq=False)
class RouterContext:
    """Hold the parts of a router process.

    `epoch` tells processes with the same id apart. `migratable`: requests that have a decode worker now. Without a `forecaster`
    admission goes by counts. `num_token_mismatches` counts repeated indexes whose token differed: each is a bug, unless an engine
    may draw other tokens when it computes a request again: those are `num_redrawn_tokens`.
    """

    config: RouterConfig
    router_id: str
    models: dict[str, ServedModel]
    fleet: FleetRegistry
    flow_control: FlowController
    prefixes: PrefixIndex
    policy: Policy
    overheads: Overheads
    adapters: FleetAdapters
    objectives: Mapping[str, ModelObjective] = field(default_factory=dict)
    output_lengths: OutputLengths = field(default_factory=OutputLengths)
    decisions: Decisions = field(default_factory=Decisions)
    forecaster: Forecaster | None = None
    sessions: SessionMemory = field(default_factory=SessionMemory)
    capacity_queue: CapacityQueue = field(default_factory=CapacityQueue)
    background: Background = field(default_factory=Background)
    migratable: set[Migratable] = field(default_factory=set)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    tracing: Tracing = OFF
    epoch: int = field(default_factory=new_epoch)
    health_recorder: HealthRecorder = field(init=False)
    traffic: Traffic = field(init=False)
    hedging: Hedging = field(init=False)
    trace_keeper: TraceKeeper = field(init=False)
    releases: SessionReleases = field(init=False)
    num_token_mismatches: int = 0
    num_redrawn_tokens: int = 0
    num_hedges: int = 0
    num_migrations: int = 0

    def __post_init__(self) -> None:
        self.health_recorder = HealthRecorder(self.fleet.views)
        self.traffic = Traffic(self.models, time.monotonic())
        self.hedging = Hedging(HedgeLimits(share=self.config.hedge_share))
        self.trace_keeper = TraceKeeper(self.background)
        self.releases = SessionReleases(self.fleet, self.sessions, self.background)

    @classmethod
    def build(
        cls,
        config: RouterConfig,
        router_id: str,
        models: dict[str, ServedModel],
        fleet: FleetRegistry,
        objectives: Iterable[ModelObjective] = (),
        tenants: TenantBook | None = None,
    ) -> RouterContext:
        """Build the context from the configuration. Without `tenants` all tenants are equal and unlimited."""
        flow_control = FlowController(Admission(_settings(config), tenants))
        prefixes, overheads = PrefixIndex(config.prefix_index_blocks), Overheads()
        goals = {goal.model: goal for goal in objectives}
        policy = make_policy(config.policy, overheads, config.local_prefill_tokens)
        wanted = WantedAdapters(config.redis, config.mesh)
        adapters = FleetAdapters(fleet, wanted, may_change=config.lets_clients_change_adapters)
        return cls(config, router_id, models, fleet, flow_control, prefixes, policy, overheads, adapters, goals)

    def max_context(self, model: ServedModel) -> int:
        """Return the tokens that a request to `model` may have: those of the largest known worker, which may read the model's
        config with overrides; before there is one, the model's own limit."""
        return self.fleet.max_context(model.name) or model.max_context


def _settings(config: RouterConfig) -> AdmissionSettings:
    return AdmissionSettings(
        max_inflight=config.max_inflight,
        max_queued=config.max_queued,
        max_queued_bytes=config.max_queued_bytes,
        hold_timeout_s=config.hold_timeout_s,
        aging_s=config.aging_s,
    )


def time_left_s(deadline: float | None) -> float | None:
    """Return the seconds until `deadline` (event-loop time), at least a millisecond; None without one."""
    return None if deadline is None else max(0.001, deadline - asyncio.get_running_loop().time())


def time_left_ms(deadline: float | None) -> int:
    """Return the time left as it travels: milliseconds, 0 without a deadline."""
    left_s = time_left_s(deadline)
    return 0 if left_s is None else max(1, round(left_s * 1000))
