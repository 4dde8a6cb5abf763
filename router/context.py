"""The context that all requests of one router share: its parts, its background tasks, and what tells workers of traces to keep
and of sessions to release."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from pdmesh.planning.objectives import ModelObjective
from pdmesh.runtime.errors import ResourceExhausted
from pdmesh.runtime.process import new_epoch
from pdmesh.runtime.rpc.mesh_secret import open_secret
from pdmesh.runtime.telemetry.tracing import OFF, Tracing
from pdmesh.v1 import mesh_pb2, worker_pb2
from router.config import RouterConfig
from router.fleet.adapters import FleetAdapters, WantedAdapters
from router.fleet.circuit_breaker import HealthRecorder
from router.fleet.heartbeat import being_cancelled
from router.fleet.migration import Migratable
from router.fleet.model_changes.serving import ServingKeeper, WantedServing
from router.fleet.model_changes.weights import ReplacedWeights, WeightsKeeper
from router.fleet.registry import FleetRegistry
from router.fleet.rollouts import Rollouts, TrafficSplits
from router.flow_control.capacity import AdmissionSettings, TenantBook
from router.flow_control.controller import Admission, FlowController
from router.flow_control.slo_admission import Forecaster
from router.kv_index.hot_prefixes import RecentPrompts
from router.kv_index.index import PrefixIndex
from router.lifecycle.capacity_queue import CapacityQueue
from router.lifecycle.hedging import HedgeLimits, Hedging
from router.routing.decisions import Decisions, SessionMemory
from router.routing.learned import OutputLengths, Overheads
from router.routing.policy import Policy, make_policy
from router.telemetry.metrics import RequestMetrics
from router.telemetry.traffic import Traffic
from router.tokenization.prepared_request import ServedModel, SessionState

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


# The release of sessions: workers give up what they retain, and requests of the session that are open retain nothing any more. A
# client's release waits for the answers of the workers; that of a session whose last request has ended runs in the background. A
# worker that is lost, or slow, is counted and never waited for: what it retains ends with its time. One of an earlier version
# retains nothing, nor does one that has said that it ends, or that the registry has no more.
#
# One release asks every worker, so only a few run at a time, and few wait: a client cannot make much out of little.

RELEASE_TIMEOUT_S = 2.0
MAX_RELEASES = 8
"""Releases that ask workers at a time: so many for clients, and as many for sessions whose last request has ended."""
MAX_WAITING, MAX_WAITING_OF_TENANT = 64, 16
MAX_ENDED_SESSIONS = 1024
"""Releases of ended sessions that wait; those beyond are left to the time of what is retained."""
RELEASE_RETRY_S = 1.0


class ReleaseTurns:
    """Let a few at a time begin, in the order of their arrival, and bound how many wait: in all, and of each tenant."""

    def __init__(self, max_waiting: int, max_waiting_of_tenant: int) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_of_tenant = max_waiting_of_tenant
        self._places = asyncio.Semaphore(MAX_RELEASES)
        self._waiting: Counter[str] = Counter()
        self._num_waiting = 0

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place and hold it. Raises ResourceExhausted where too many wait already."""
        if self._places.locked():
            self._check(tenant)
        await self._wait(tenant)
        try:
            yield
        finally:
            self._places.release()

    def _check(self, tenant: str) -> None:
        if self._num_waiting >= self._max_waiting or self._waiting[tenant] >= self._max_waiting_of_tenant:
            raise ResourceExhausted("too many releases of sessions wait on this router; try again", retry_delay_s=RELEASE_RETRY_S)

    async def _wait(self, tenant: str) -> None:
        self._num_waiting += 1
        self._waiting[tenant] += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]


class SessionReleases:
    """Release the sessions of one router, whose open requests with a session `enter` and `leave`."""

    def __init__(self, fleet: FleetRegistry, memory: SessionMemory, recent: RecentPrompts, background: Background) -> None:
        self._fleet = fleet
        self._memory = memory
        self._recent = recent
        self._background = background
        self._open: dict[tuple[str, str], set[SessionState]] = {}
        self._asked = ReleaseTurns(MAX_WAITING, MAX_WAITING_OF_TENANT)
        self._ended = ReleaseTurns(MAX_ENDED_SESSIONS, MAX_ENDED_SESSIONS)
        self._waiting: set[tuple[str, str, str]] = set()  # ended sessions whose turn has not come

    def __len__(self) -> int:
        """Return the number of sessions that have open requests."""
        return len(self._open)

    def enter(self, state: SessionState | None) -> None:
        """Have releases of its session reach an open request; `leave` has to follow. None: it has no session."""
        if state is not None:
            self._open.setdefault(state.key, set()).add(state)

    def leave(self, state: SessionState | None) -> None:
        """Forget a request that has ended."""
        states = self._open.get(state.key) if state is not None else None
        if state is None or states is None:
            return
        states.discard(state)
        if not states:
            del self._open[state.key]

    async def release(self, tenant: str, session_id: str, model: str = "") -> mesh_pb2.ReleaseSessionResponse:
        """Return what the workers of `model` have released, empty for all models. Raises ResourceExhausted."""
        async with self._asked.turn(tenant):
            self._let_go(tenant, session_id, model)
            return await self._ask_all(tenant, session_id, model)

    def release_ended(self, tenant: str, session_id: str, model: str) -> None:
        """Release a session whose last request has ended, in the background. One that waits already is released once."""
        self._let_go(tenant, session_id, model)
        if (tenant, session_id, model) not in self._waiting:
            self._waiting.add((tenant, session_id, model))
            self._background.spawn(self._release_ended(tenant, session_id, model), "release an ended session")

    async def _release_ended(self, tenant: str, session_id: str, model: str) -> None:
        try:
            async with self._ended.turn(tenant):
                self._waiting.discard((tenant, session_id, model))
                await self._ask_all(tenant, session_id, model)
        except ResourceExhausted:
            logger.warning(
                "%d ended sessions wait for their release: what is retained for one more ends with its time", MAX_ENDED_SESSIONS
            )
        finally:
            self._waiting.discard((tenant, session_id, model))

    def _let_go(self, tenant: str, session_id: str, model: str) -> None:
        """Forget the session and its prompts, and have its open requests retain nothing, wherever they are sent from now on."""
        self._memory.forget(tenant, session_id, model)
        self._recent.forget(tenant, session_id, model)
        for state in self._open.get((tenant, session_id), ()):
            state.is_released = state.is_released or model in ("", state.model)

    async def _ask_all(self, tenant: str, session_id: str, model: str) -> mesh_pb2.ReleaseSessionResponse:
        workers = [worker for worker in self._fleet.workers.values() if _may_retain(worker, model)]
        released = await asyncio.gather(*(_ask(worker, tenant, session_id) for worker in workers))
        answered = [num_blocks for num_blocks in released if num_blocks is not None]
        return mesh_pb2.ReleaseSessionResponse(
            num_blocks=sum(answered),
            num_workers=sum(num_blocks > 0 for num_blocks in answered),
            num_unreachable=len(released) - len(answered),
        )


def _may_retain(worker: Worker, model: str) -> bool:
    """Return whether a worker may retain something of `model`: it has answered this router once, and is not known to have ended.
    One that fell silent may be alive."""
    if worker.last is None or model not in ("", worker.last.info.identity.model):
        return False
    if worker_pb2.ENGINE_LACK_RETENTION in worker.last.info.lacks:
        return False
    has_ended = worker.current is None and (worker.last.load.draining or not (worker.static or worker.registered))
    return not has_ended


async def _ask(worker: Worker, tenant: str, session_id: str) -> int | None:
    """Return the number of blocks that a worker has released; None: it did not answer."""
    if worker.current is None:
        return None
    try:
        return await worker.release_retained(tenant, session_id, RELEASE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return 0
        logger.info("%s did not release a session: %s", worker.address, error.details())
    except grpc.aio.UsageError:
        logger.info("%s did not release a session: its channel was closed", worker.address)
    except asyncio.CancelledError:
        if being_cancelled():
            raise
        logger.info("%s did not release a session: its channel was closed meanwhile", worker.address)
    return None


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
    rollouts: Rollouts
    serving: ServingKeeper
    weights: WeightsKeeper
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
        self.health_recorder = HealthRecorder(self.fleet.views, lambda: self.fleet.suspects)
        self.traffic = Traffic(self.models, time.monotonic())
        self.hedging = Hedging(HedgeLimits(share=self.config.hedge_share))
        self.trace_keeper = TraceKeeper(self.background)
        self.releases = SessionReleases(self.fleet, self.sessions, self.prefixes.recent, self.background)

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
        secret = open_secret(config.mesh_secret)
        wanted = WantedAdapters(config.redis, config.mesh, secret)
        adapters = FleetAdapters(fleet, wanted, may_change=config.lets_clients_change_adapters)
        rollouts = Rollouts(fleet, TrafficSplits(config.redis, config.mesh, secret))
        serving = ServingKeeper(fleet, WantedServing(config.redis, config.mesh, secret))
        weights = WeightsKeeper(fleet, ReplacedWeights(config.redis, config.mesh, secret))
        changes = adapters, rollouts, serving, weights
        return cls(config, router_id, models, fleet, flow_control, prefixes, policy, overheads, *changes, goals)

    @property
    def is_ready(self) -> bool:
        """Return whether requests can be taken: a decode worker serves, or they may wait for the first one."""
        return self.config.wake_timeout_s > 0 or self.fleet.ready() or self.fleet.is_any_stopped

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
