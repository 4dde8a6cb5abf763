"""All workers that this router knows: those of the registry, and static peers.

The registry only says where to look. A worker whose stream lives is alive whatever the registry says, and an empty or unreachable
registry removes no worker; a worker is dropped when it is unregistered, not static, and has been silent for a while.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from pdmesh.runtime.rpc.channel import Channels
from pdmesh.v1 import worker_pb2
from router.fleet.change_notifier import ChangeNotifier, wait_at_most
from router.fleet.decode_stream import StreamSettings
from router.fleet.incarnation import Incarnation
from router.fleet.worker import Worker
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.worker_snapshot import WorkerKey, WorkerSnapshot

# The largest context of any worker of a model, without a look at every worker: each request asks.


class ContextLimits:
    """Hold the maximum context of workers by address. Few of thousands differ, so the sizes are counted."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, int]] = {}
        self._sizes: dict[str, Counter[int]] = {}

    def put(self, address: str, model: str, max_context: int) -> None:
        """Record that the worker serves `model` with contexts of up to `max_context` tokens."""
        self.drop(address)
        self._of[address] = (model, max_context)
        self._sizes.setdefault(model, Counter())[max_context] += 1

    def drop(self, address: str) -> None:
        """Remove the worker at the address."""
        known = self._of.pop(address, None)
        if known is None:
            return
        model, max_context = known
        sizes = self._sizes[model]
        sizes[max_context] -= 1
        if not sizes[max_context]:
            del sizes[max_context]
        if not sizes:
            del self._sizes[model]

    def largest(self, model: str) -> int | None:
        """Return the maximum over the workers of `model`, in tokens; None without one."""
        return max(self._sizes.get(model, ()), default=None)


SWEEP_PERIOD_S = 1.0
STOPPED_FOR_S = 0.05
"""For how long the list of stopped workers is good."""
MIN_SWEEP_GAP_S = 0.05

logger = logging.getLogger(__name__)


class FleetRegistry:
    """Watch workers by address."""

    def __init__(self, settings: StreamSettings, channels: Channels, *, report_period_ms: int, forget_s: float) -> None:
        self.changes = ChangeNotifier()  # fires when workers come, go and send heartbeats
        self.arrivals = ChangeNotifier()  # fires when a worker has come, or come back
        self.openings = ChangeNotifier()  # fires when there may be room: as `changes`, and whenever a request has ended
        self.on_dispatch: Callable[[], None] | None = None  # called whenever something was sent to a worker
        self.on_weights: Callable[[], None] | None = None  # called whenever a worker has other weights
        self.on_arrival: list[Callable[[Worker], None]] = []  # called when a worker has come, before it gets requests
        self.on_abort: Callable[[str, int], None] | None = None  # model and id: somebody has ended all of the model's requests
        self._settings = settings
        self._channels = channels
        self._report_period_ms = report_period_ms
        self._forget_s = forget_s
        self._workers: dict[str, Worker] = {}
        self._stopped: tuple[float, list[Worker]] = (-math.inf, [])  # when they were last looked for (monotonic seconds)
        self._fleet_snapshot = FleetSnapshot()
        self._outdated: set[str] = set()
        self._decodes_at = ""  # the address of a worker that could take a request when that was asked last
        self._suspects: set[str] = set()
        self._contexts = ContextLimits()
        self._sweeper: asyncio.Task[None] | None = None

    def start(self, static: Iterable[str]) -> None:
        """Watch static peers, given as host:port."""
        for address in static:
            self._add(address, static=True)
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="sweep lost workers")

    async def stop(self) -> None:
        """Stop watching all workers."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))
        self._outdated |= self._workers.keys()
        self._workers.clear()
        self._contexts = ContextLimits()

    def on_registry(self, registered: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Take over the workers that the registry holds now."""
        addresses = {info.address for info in registered}
        for address in addresses - self._workers.keys():
            self._add(address, static=False)
        for worker in self._workers.values():
            worker.registered = worker.address in addresses

    @property
    def workers(self) -> Mapping[str, Worker]:
        """Return workers by address, alive or lately lost."""
        return self._workers

    @property
    def fleet_snapshot(self) -> FleetSnapshot:
        """Return the snapshot of workers that are alive and take requests. It applies what changed since the last call: a worker
        may send many heartbeats between two decisions."""
        while self._outdated:
            address = self._outdated.pop()
            worker = self._workers.get(address)
            self._fleet_snapshot.put(address, None if worker is None else worker.view)
        return self._fleet_snapshot

    def views(self) -> list[WorkerSnapshot]:
        """Return the workers that are alive and take requests."""
        return list(self.fleet_snapshot.views())

    def is_gone(self, key: WorkerKey) -> bool:
        """Return whether a worker was forgotten, or is another process now. One that is silent for a while is not gone."""
        worker = self.workers.get(key[0])
        return worker is None or (worker.last is not None and worker.last.info.epoch != key[1])

    @property
    def suspects(self) -> frozenset[WorkerKey]:
        """Return the workers that have been silent for a while and are not lost yet: what can go elsewhere does."""
        if not self._suspects:
            return frozenset()
        alive = ((address, self._workers[address].current) for address in self._suspects if address in self._workers)
        return frozenset((address, current.info.epoch) for address, current in alive if current is not None)

    def ready(self) -> bool:
        """Return whether a decode worker can take a request. A decode worker can also prefill, so it suffices alone."""
        # Every heartbeat asks: most often a look at the worker that could last time is enough, and the snapshot stays as it is.
        worker = self._workers.get(self._decodes_at)
        if worker is not None and worker.takes_decodes:
            return True
        self._decodes_at = self.fleet_snapshot.a_decode_worker or ""
        return bool(self._decodes_at)

    def serves(self, model: str) -> bool:
        """Return whether any worker of `model` is alive, in whatever role."""
        return any(view.model == model for view in self.views())

    def decodes(self, model: str) -> bool:
        """Return whether a worker of `model` decodes: one that has just joined does not before its decode stream is open."""
        return any(view.decode and view.model == model for view in self.views())

    @property
    def stopped(self) -> list[Worker]:
        """Return the workers that are paused or asleep."""
        now = time.monotonic()
        if now - self._stopped[0] > STOPPED_FOR_S:  # each request that waits asks
            self._stopped = now, [worker for worker in self._workers.values() if worker.is_stopped]
        return self._stopped[1]

    @property
    def is_any_stopped(self) -> bool:
        """Return whether some decode worker is paused or asleep, and requests may wait for it."""
        return any(has_role(worker, worker_pb2.ROLE_DECODE) for worker in self.stopped)

    def is_stopped(self, model: str, role: "worker_pb2.Role.ValueType") -> bool:
        """Return whether a worker of `model` with this role is paused or asleep."""
        stopped = (worker.last for worker in self.stopped if has_role(worker, role))
        return any(last is not None and last.info.identity.model == model for last in stopped)

    def max_context(self, model: str) -> int | None:
        """Return the largest context of any known worker of `model`; None without one."""
        return self._contexts.largest(model)

    async def forget_lost(self, now: float) -> None:
        """Drop lost workers that are neither static nor registered: at once if they came back elsewhere, else after long silence.

        `now` is monotonic seconds.
        """
        for worker in list(self._workers.values()):
            if self._is_forgotten(worker, now):
                await self._drop(worker)

    async def reopen_outdated(self, now: float) -> None:
        """Reconnect to lost workers that may have refused an old certificate of ours: a channel keeps the certificate with which
        it was opened.

        `now` is monotonic seconds. It waits for the grace period, because requests may still wait for the stream.
        """
        for worker in list(self._workers.values()):
            is_lost = worker.current is None and now - worker.lost_at > self._settings.grace_s
            if is_lost and self._channels.is_outdated(worker.address):
                await self._drop(worker)
                if worker.address not in self._workers:  # the registry may have been faster
                    again = self._add(worker.address, static=worker.static)
                    again.registered, again.last, again.lost_at = worker.registered, worker.last, worker.lost_at
                    if again.last is not None:
                        self._is_up(again.last)

    async def _drop(self, worker: Worker) -> None:
        channel = self._channels.take(worker.address)  # before the first await: its successor has a channel of its own
        del self._workers[worker.address]
        self._outdated.add(worker.address)
        self._contexts.drop(worker.address)
        await worker.stop()
        if channel is not None:
            await channel.close()

    def _is_forgotten(self, worker: Worker, now: float) -> bool:
        if worker.static or worker.registered or worker.current is not None:
            return False
        return self._is_replaced(worker) or now - worker.lost_at > self._forget_s

    def _is_replaced(self, worker: Worker) -> bool:
        """Return whether a worker of the same id is alive at another address, where it was restarted."""
        alive = {other.current.info.worker_id for other in self._workers.values() if other.current is not None}
        return worker.last is not None and worker.last.info.worker_id in alive

    async def _sweep_forever(self) -> None:
        while True:
            came = self.arrivals.next
            await asyncio.sleep(MIN_SWEEP_GAP_S)  # many may come at the same time
            await wait_at_most(came, SWEEP_PERIOD_S)  # what came may replace what is lost
            try:
                await self.forget_lost(time.monotonic())
                await self.reopen_outdated(time.monotonic())
            except Exception:  # a bug with one worker must not stop the sweep for all others
                logger.exception("sweeping lost workers failed")

    def _add(self, address: str, *, static: bool) -> Worker:
        worker = Worker(
            address,
            self._channels.get(address),
            self._settings,
            report_period_ms=self._report_period_ms,
            static=static,
            on_change=lambda: self._changed(worker),
            on_view=lambda: self._outdated.add(address),
            on_dispatch=self._was_dispatched,
            on_up=lambda incarnation: self._is_up(incarnation, worker),
            on_weights=self._has_weights,
            on_abort=self._has_aborted,
            on_suspect=lambda: self._suspected(worker),
        )
        self._workers[address] = worker
        worker.start()
        return worker

    def _is_up(self, incarnation: Incarnation, arrived: Worker | None = None) -> None:
        described = incarnation.described
        self._contexts.put(described.address, described.model, described.max_context)
        if arrived is not None:
            for look in self.on_arrival:
                look(arrived)
        self.arrivals.fire()

    def _suspected(self, worker: Worker) -> None:
        """Take over whether the worker is a suspect."""
        if worker.is_suspect:
            self._suspects.add(worker.address)
        else:
            self._suspects.discard(worker.address)
            self.openings.fire()

    def _has_weights(self) -> None:
        if self.on_weights is None:
            return
        try:
            self.on_weights()
        except Exception:  # a bug there must not cost the worker whose report this is
            logger.exception("taking over a worker's weights failed")

    def _has_aborted(self, model: str, abort_id: int) -> None:
        if self.on_abort is not None:
            self.on_abort(model, abort_id)

    def _was_dispatched(self) -> None:
        if self.on_dispatch is not None:
            self.on_dispatch()

    def _changed(self, worker: Worker) -> None:
        worker.stream_changed()
        self.changes.fire()
        self.openings.fire()


def has_role(worker: Worker, role: "worker_pb2.Role.ValueType") -> bool:
    """Return whether its last report says so."""
    return worker.last is not None and role in worker.last.load.roles
