"""All workers this router knows: those of the registry and static peers.

The registry only says where to look. A worker whose stream lives is alive whatever stands there, and an empty or unreachable
registry takes nobody away; a worker is forgotten when it is unregistered, not static, and has been silent for a while.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from pdmesh.runtime.rpc.channel import Channels
from pdmesh.v1 import worker_pb2
from router.fleet.change_notifier import ChangeNotifier
from router.fleet.decode_stream import StreamSettings
from router.fleet.worker import Incarnation, Worker
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.worker_snapshot import WorkerSnapshot

# The largest context of any worker of a model, without a look at every worker: each request asks. Pure.


class ContextLimits:
    """What workers can hold at most, by address. Few of thousands differ: the sizes are counted."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, int]] = {}
        self._sizes: dict[str, Counter[int]] = {}

    def put(self, address: str, model: str, max_context: int) -> None:
        """The worker there serves `model` with contexts of up to `max_context` tokens."""
        self.drop(address)
        self._of[address] = (model, max_context)
        self._sizes.setdefault(model, Counter())[max_context] += 1

    def drop(self, address: str) -> None:
        """Nothing is known of the worker there, any more."""
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
        """Of the workers of `model`, in tokens; None without one."""
        return max(self._sizes.get(model, ()), default=None)


SWEEP_PERIOD_S = 1.0

logger = logging.getLogger(__name__)


class FleetRegistry:
    """Watches workers by address."""

    def __init__(self, settings: StreamSettings, channels: Channels, *, report_period_ms: int, forget_s: float) -> None:
        self.changes = ChangeNotifier()  # of workers: they come, go and report
        self.openings = ChangeNotifier()  # there may be room now: the same, and whenever a request has ended
        self.on_dispatch: Callable[[], None] | None = None  # called whenever something was sent to a worker
        self._settings = settings
        self._channels = channels
        self._report_period_ms = report_period_ms
        self._forget_s = forget_s
        self._workers: dict[str, Worker] = {}
        self._fleet_snapshot = FleetSnapshot()
        self._outdated: set[str] = set()
        self._contexts = ContextLimits()
        self._sweeper: asyncio.Task[None] | None = None

    def start(self, static: Iterable[str]) -> None:
        """Watch static peers, given as host:port."""
        for address in static:
            self._add(address, static=True)
        self._sweeper = asyncio.create_task(self._sweep_forever(), name="sweep lost workers")

    async def stop(self) -> None:
        """Stop watching everybody."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))
        self._outdated |= self._workers.keys()
        self._workers.clear()
        self._contexts = ContextLimits()

    def on_registry(self, registered: Iterable[worker_pb2.WorkerInfo]) -> None:
        """What the registry holds now."""
        addresses = {info.address for info in registered}
        for address in addresses - self._workers.keys():
            self._add(address, static=False)
        for worker in self._workers.values():
            worker.registered = worker.address in addresses

    @property
    def workers(self) -> Mapping[str, Worker]:
        """Workers by address, alive or lately lost."""
        return self._workers

    @property
    def fleet_snapshot(self) -> FleetSnapshot:
        """Those that are alive and take work, ranked. What changed since the last look is brought up to date now: a worker may
        report often between two decisions."""
        while self._outdated:
            address = self._outdated.pop()
            worker = self._workers.get(address)
            self._fleet_snapshot.put(address, None if worker is None else worker.view)
        return self._fleet_snapshot

    def views(self) -> list[WorkerSnapshot]:
        """Those that are alive and take work."""
        return list(self.fleet_snapshot.views())

    def ready(self) -> bool:
        """Is there a worker that can own a request? It can always prefill by itself, so a pair needs no more than that."""
        return self.fleet_snapshot.owned  # asked at every report and request, so nobody goes through all workers

    def max_context(self, model: str) -> int | None:
        """The largest context of any worker of `model` that is known; None without one."""
        return self._contexts.largest(model)

    async def forget_lost(self, now: float) -> None:
        """Drop lost workers that nobody names: at once if they came back elsewhere, else after long silence.

        `now` is monotonic seconds."""
        for worker in list(self._workers.values()):
            if self._is_forgotten(worker, now):
                await self._drop(worker)

    async def reopen_outdated(self, now: float) -> None:
        """Look again for lost workers that may have refused a certificate of ours which has been replaced meanwhile: a channel
        keeps its own.

        `now` is monotonic seconds. Not within the grace period: requests may still wait for the stream."""
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
        channel = self._channels.take(worker.address)  # before anything is awaited: its successor has one of its own
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
        """Does a worker of the same id live at another address? It was restarted there."""
        alive = {other.current.info.worker_id for other in self._workers.values() if other.current is not None}
        return worker.last is not None and worker.last.info.worker_id in alive

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            try:
                await self.forget_lost(time.monotonic())
                await self.reopen_outdated(time.monotonic())
            except Exception:  # a bug with one worker must not keep all others for ever
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
            on_up=self._is_up,
        )
        self._workers[address] = worker
        worker.start()
        return worker

    def _is_up(self, incarnation: Incarnation) -> None:
        who = incarnation.described
        self._contexts.put(who.address, who.model, who.max_context)

    def _was_dispatched(self) -> None:
        if self.on_dispatch is not None:
            self.on_dispatch()

    def _changed(self, worker: Worker) -> None:
        worker.link_changed()
        self.changes.fire()
        self.openings.fire()
