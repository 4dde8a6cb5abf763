"""One worker at one address: its identity, its load, and whether it is alive. Its streams decide that, not the registry."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
import grpc.aio

from pdmesh.v1 import common_pb2, decode_pb2_grpc, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.fleet.decode_stream import DecodeStream, StreamSettings
from router.fleet.heartbeat import SilenceDetector, SilenceLimits, Watchdog, being_cancelled, tick_s_of
from router.fleet.incarnation import Incarnation
from router.routing import worker_reports
from router.routing.worker_reports import tightest
from router.routing.worker_snapshot import WorkerSnapshot

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 0.25
UNUSABLE_RETRY_S = 1.0
OTHER_STREAM_S = 0.005
"""How much later the second stream of a connection or process that ended may break than the first."""
TRANSIT_S, MAX_CONFIRMED = 0.2, 256
SAME_S = 0.02
"""Figures whose times differ by less are the same, which came in two heartbeats."""
STOPPED_GRACE_S = 30.0
NOT_TOLD: "tuple[worker_pb2.ServingState.ValueType, float]" = (worker_pb2.SERVING_STATE_UNSPECIFIED, -math.inf)
LATE_PERIODS = 2.5
"""Periods of heartbeats after which the next one is late: its sender, this router or both had no time for it."""
SLOWEST = 3.0
"""A worker that is slow to answer may be silent for so many times the stream's time limit."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Dispatched:
    """Count what was sent to a worker and is not surely contained in its latest heartbeat.

    `decodes` sequences will attend to `context` tokens. `arrived_at`: monotonic seconds at which the worker surely had it; None:
    not known. `sent_at`: when it was sent, on the same clock. `pace_s`: TPOT to which it limits steps with prompts, 0: none.
    """

    seqs: int = 0
    blocks: int = 0
    tokens: int = 0
    decodes: int = 0
    context: int = 0
    arrived_at: float | None = None
    sent_at: float = -math.inf
    pace_s: float = 0.0
    num_reports: int = 0  # heartbeats with younger figures that have come since, each of its own step
    last_figures_at: float = -math.inf  # those of the latest

    @property
    def came_at(self) -> float:
        """Return since when it has been there, as far as is known; infinite: not known."""
        if self.arrived_at is not None:
            return self.arrived_at
        return self.sent_at if self.sent_at > -math.inf else math.inf

    def is_contained(self, figures_at: float) -> bool:
        """Return whether a heartbeat with figures of the time `figures_at` contains it. Where its arrival is not known, the
        second one with figures from after it was sent does: the first may have left the worker before the arrival. Figures are
        those of the latest step's end, and a step may last for many heartbeats."""
        if self.arrived_at is not None:
            return figures_at > self.arrived_at
        if figures_at > max(self.sent_at, self.last_figures_at + SAME_S):
            self.num_reports, self.last_figures_at = self.num_reports + 1, figures_at
        return self.num_reports >= 2

    def ended(self, now: float) -> "Dispatched":
        """Return the entry that takes this one back from `now` (monotonic seconds) on, while a heartbeat may still contain it.
        Its prompt is `done` by then."""
        return Dispatched(-self.seqs, -self.blocks, decodes=-self.decodes, context=-self.context, arrived_at=now)


def counted(dispatched: Iterable[Dispatched]) -> worker_reports.Counted:
    """Return the sum of all entries, the longest prompt, the tightest pace, and when the first prompt came."""
    seqs = blocks = tokens = decodes = context = longest = 0
    pace_s, since, latest, latest_at = 0.0, math.inf, 0, -math.inf
    for sent in dispatched:
        seqs += sent.seqs
        blocks += sent.blocks
        tokens += sent.tokens
        decodes += sent.decodes
        context += sent.context
        longest = max(longest, sent.tokens)
        pace_s = tightest(pace_s, sent.pace_s)
        if sent.tokens > 0:
            since = min(since, sent.came_at)
            if sent.came_at > latest_at:
                latest, latest_at = sent.tokens, sent.came_at
    return worker_reports.Counted(seqs, blocks, tokens, decodes, context, longest, pace_s, since, latest, latest_at)


def _nothing(*_: object) -> None:
    """Ignore a callback."""


class Worker:
    """Follow one worker: GetInfo, then Watch, again after every break. With the decode role it has a DecodeStream, too.

    Both streams are written by the worker's event loop. When both are silent for too long, the worker is lost for all of its
    requests at once; before that, while it is `suspect`, nothing more is sent to it if there is another one."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        settings: StreamSettings,
        *,
        report_period_ms: int,
        static: bool,
        on_change: Callable[[], None],
        on_view: Callable[[], None],
        on_dispatch: Callable[[], None] = _nothing,
        on_up: Callable[[Incarnation], None] = _nothing,
        on_weights: Callable[[], None] = _nothing,
        on_abort: Callable[[str, int], None] = _nothing,
        on_suspect: Callable[[], None] = _nothing,
    ) -> None:
        self.address = address
        self.static = static
        self.registered = False
        self.current: Incarnation | None = None
        self.last: Incarnation | None = None
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(channel)
        self.decode = decode_pb2_grpc.DecodeServiceStub(channel)
        self.is_suspect = False
        self.is_held = False  # it gets no requests until it is as the others of its model
        self.decode_stream = DecodeStream(
            address,
            self.decode,
            settings,
            on_change=on_change,
            on_load=self._report,
            on_heard=self._heard,
            silence_limit_s=lambda: self._silence.limit_s,
            is_silent=lambda: self.is_suspect,
        )
        self.control = worker_pb2_grpc.WorkerControlStub(channel)
        self._settings = settings
        self._report_period_ms = report_period_ms
        self._on_change = on_change
        self._on_view = on_view
        self._on_dispatch = on_dispatch
        self._on_up = on_up
        self._on_weights = on_weights
        self._on_abort = on_abort
        self._on_suspect = on_suspect
        timeout_s = settings.stream_timeout_s
        self._tick_s = tick_s_of(timeout_s)
        self._silence = SilenceDetector(SilenceLimits(timeout_s, SLOWEST * timeout_s), self._tick_s)
        self._ticking: asyncio.TimerHandle | None = None  # None: nothing was heard yet
        self._watch: grpc.aio.UnaryStreamCall[worker_pb2.WatchRequest, worker_pb2.LoadReport] | None = None
        self._told_serving = NOT_TOLD
        self._dispatched: list[Dispatched] = []
        self._confirmed: list[Dispatched] = []
        self._foreign: list[Dispatched] = []
        self._view: WorkerSnapshot | None = None
        self._stream_started = False
        self._has_news = False  # since the Watch stream began
        self._refusal = ""
        self._task: asyncio.Task[None] | None = None
        self.lost_at: float = time.monotonic()

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._run(), name=f"watch {self.address}")

    async def stop(self) -> None:
        """Stop watching; requests on the worker are lost."""
        if self._ticking is not None:
            self._ticking.cancel()
        self._set_suspect(False)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.current is not None:
            self.current.lost.set()
        self.current = None
        self._view_changed()
        if self._stream_started:
            await self.decode_stream.stop("the router stopped watching it")

    @property
    def view(self) -> WorkerSnapshot | None:
        """Return the snapshot for the routing policy; None while the worker is not alive or takes no new requests."""
        current = self.current
        if current is None or current.load.draining or self.is_stopped:
            return None
        if self._view is None:
            self._view = worker_reports.snapshot_of(
                current.described, current.load, decode=self._is_attached, reported_at=current.reported_at, sent=self._counted()
            )
        return self._view

    @property
    def takes_decodes(self) -> bool:
        """Return whether `view` is one of a worker that decodes, without making it."""
        current = self.current
        if current is None or current.load.draining or worker_pb2.ROLE_DECODE not in current.load.roles:
            return False
        return self._is_attached and not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Return whether it is paused or asleep: it takes no new requests until somebody has it run. One that has fallen silent
        is taken to be so for a while: whatever stopped it may have taken the machine's processors as well."""
        if self.current is not None:
            return self.is_held or self.current.is_stopped
        return self.last is not None and self.last.is_stopped and time.monotonic() - self.lost_at < STOPPED_GRACE_S

    def dispatched(self, sent: Dispatched) -> None:
        """Count what was just sent to the worker, until its heartbeats contain it or `done` is called."""
        sent.sent_at = time.monotonic()
        self._dispatched.append(sent)
        self._view_changed()
        self._on_dispatch()

    def sent_lately(self, now: float) -> tuple[Dispatched, ...]:
        """Return what this router sent to the worker and other routers' heartbeats may not contain yet: the heartbeats of this
        router may be newer than theirs. `now`: monotonic seconds."""
        since = now - 2 * self._report_period_ms / 1000 - TRANSIT_S
        self._confirmed = [sent for sent in self._confirmed if sent.arrived_at is not None and sent.arrived_at >= since]
        return (*self._confirmed, *self._dispatched)

    def received(self, foreign: list[Dispatched]) -> None:
        """Replace what other routers have sent to this incarnation, by their latest messages; each has an `arrived_at`."""
        figures_at = self._figures_at()
        young = [sent for sent in foreign if sent.arrived_at is None or sent.arrived_at >= figures_at]
        if young or self._foreign:
            self._foreign = young
            self._view_changed()

    def has_weights(self, weights_hash: str) -> None:
        """Take over which weights the worker computes new requests with."""
        current = self.current
        if current is not None and weights_hash not in ("", current.info.identity.weights_hash):
            current.replaced_weights(weights_hash)
            self._view_changed()
            self._on_weights()
            self._on_change()

    def released(self, sent: Dispatched, now: float) -> None:
        """Count that what was sent has ended, at `now` (monotonic seconds), while a heartbeat may still contain it."""
        self.dispatched(sent.ended(now))

    def done(self, sent: Dispatched) -> None:
        """Stop counting what was sent, because the worker's response says that it has ended there; idempotent."""
        if sent in self._confirmed:
            self._confirmed.remove(sent)
        if sent in self._dispatched:
            self._dispatched.remove(sent)
            self._view_changed()

    def list_blocks(self, timeout_s: float) -> grpc.aio.UnaryStreamCall[worker_pb2.ListBlocksRequest, worker_pb2.BlockList]:
        """Return the call that lists all blocks of the worker's prefix cache."""
        return self.control.ListBlocks(worker_pb2.ListBlocksRequest(), timeout=timeout_s)

    async def keep_traces(self, trace_ids: Iterable[int], timeout_s: float) -> None:
        """Tell the worker to export the spans that it holds of these traces. Raises AioRpcError."""
        ids = [trace_id.to_bytes(16, "big") for trace_id in trace_ids]
        await self.control.KeepTraces(worker_pb2.KeepTracesRequest(trace_ids=ids), timeout=timeout_s)

    async def release_retained(self, tenant: str, session_id: str, timeout_s: float) -> int:
        """Have the worker give up what it retains for a session; return the number of blocks. Raises AioRpcError."""
        request = worker_pb2.ReleaseRetainedRequest(tenant=tenant, session_id=session_id)
        return (await self.control.ReleaseRetained(request, timeout=timeout_s)).num_blocks

    def told_serving(self, state: "worker_pb2.ServingState.ValueType") -> None:
        """Take over the state that the worker has said it is in, before its next report does."""
        self._told_serving = (state, time.monotonic())
        if self.current is not None and self.current.load.serving_state != state:
            if self.current.is_stopped:
                self.current.stopped_at = time.monotonic()
            self.current.load.serving_state = state
            self._view_changed()
            self._on_change()

    def hold(self) -> None:
        """Send it nothing until `release`, or until it is another process."""
        self.is_held = True
        self._view_changed()

    def release(self) -> None:
        """Send it requests again."""
        self.is_held = False
        self._view_changed()
        self._on_change()

    def told_adapter(self, info: common_pb2.AdapterInfo) -> None:
        """Count an adapter that the worker has said it loaded, before its next report does."""
        if self.current is not None:
            self.current.told_adapter(info.name, info)
            self._view_changed()

    def forget_adapter(self, name: str) -> None:
        """Count an adapter that the worker has unloaded no longer."""
        if self.current is not None:
            self.current.told_adapter(name, None)
            self._view_changed()

    def stream_changed(self) -> None:
        """Record that the DecodeStream attached or broke."""
        self._view_changed()

    def _counted(self) -> worker_reports.Counted:
        sent = (*self._dispatched, *self._foreign)
        return counted(sent) if sent else worker_reports.NOTHING

    def _confirm(self, contained: list[Dispatched], figures_at: float) -> None:
        for sent in contained:
            sent.arrived_at = figures_at if sent.arrived_at is None else sent.arrived_at
        self._dispatched = [sent for sent in self._dispatched if sent not in contained]
        self._confirmed = [*self._confirmed, *contained][-MAX_CONFIRMED:]

    def _figures_at(self) -> float:
        """Return the monotonic seconds of the latest heartbeat's figures."""
        current = self.current
        return float("-inf") if current is None else current.reported_at - current.load.age_ms / 1000

    def _view_changed(self) -> None:
        self._view = None
        self._on_view()

    async def _run(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            self._has_news, began = False, time.monotonic()
            try:
                await self._session()
                problem = "it was restarted or ended the stream"
            except grpc.aio.AioRpcError as error:
                problem = error.details() or error.code().name
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    self._refused(problem)
            except Exception as error:  # a bug must not make a worker disappear for good
                logger.exception("watching %s failed", self.address)
                problem = f"internal error: {error}"
                self._has_news = False
            backoff_s = MIN_BACKOFF_S if self.current is not None else min(MAX_BACKOFF_S, 2 * backoff_s)
            if await self._speaks_elsewhere():
                logger.info("the Watch stream of %s broke, and its tokens come: %s", self.address, problem)
                is_short = time.monotonic() - began < self._report_period_ms / 1000
                await asyncio.sleep(MAX_BACKOFF_S if is_short else 0)
                continue
            self._down(problem)
            await asyncio.sleep(backoff_s)

    async def _speaks_elsewhere(self) -> bool:
        """Return whether only the Watch stream broke, which had brought heartbeats: the worker's other stream goes on. Where the
        process or the connection ended, both do, at about the same time."""
        if not self._has_news or self.is_suspect or not self._is_attached:
            return False
        await asyncio.sleep(OTHER_STREAM_S)
        return self._is_attached

    @property
    def _is_attached(self) -> bool:
        """Return whether the other stream, of tokens, is one of the present process."""
        current = self.current
        return current is not None and self.decode_stream.attached and self.decode_stream.epoch == current.info.epoch

    async def _session(self) -> None:
        """Follow one incarnation, from its first heartbeat until the stream breaks, falls silent or shows another epoch."""
        info = await self.control.GetInfo(worker_pb2.GetInfoRequest(), timeout=self._silence.limit_s)
        if self.current is not None and info.epoch != self.current.info.epoch:
            self._down("it was restarted")
        problem = worker_reports.problem_of(info)
        if problem is not None:
            logger.error("worker %s cannot be used: its GetInfo says that %s", self.address, problem)
            await asyncio.sleep(UNUSABLE_RETRY_S)
            return
        info.address = self.address
        call = self.control.Watch(worker_pb2.WatchRequest(period_ms=self._report_period_ms))
        self._watch = call
        with Watchdog(lambda: self._silence.limit_s, call.cancel, lambda: self.is_suspect) as watchdog:
            try:
                await self._follow(info, call, watchdog)
            except asyncio.CancelledError:
                if not call.cancelled() or being_cancelled():
                    raise
            finally:
                self._watch = None
                call.cancel()

    async def _follow(
        self,
        info: worker_pb2.WorkerInfo,
        call: grpc.aio.UnaryStreamCall[worker_pb2.WatchRequest, worker_pb2.LoadReport],
        watchdog: Watchdog,
    ) -> None:
        async for load in call:
            watchdog.heard()
            self._heard()
            if load.epoch != info.epoch:
                return
            if self.current is None:
                self._up(Incarnation(info, load, time.monotonic()))
            self._report(load)
            self._has_news = True

    def _up(self, incarnation: Incarnation) -> None:
        info = incarnation.info
        logger.info("worker %s is alive at %s, epoch %016x", info.worker_id, self.address, info.epoch)
        self.current = self.last = incarnation
        self._told_serving, self.is_held = NOT_TOLD, False
        self._refusal = ""
        self._dispatched.clear()
        self._foreign.clear()
        self._confirmed.clear()
        self.decode_stream.try_now()
        self._on_up(incarnation)

    def _report(self, load: worker_pb2.LoadReport) -> None:
        current = self.current
        if current is None or load.epoch != current.info.epoch:
            return
        now = time.monotonic()
        young = now - 2 * self._report_period_ms / 1000  # what it has said since then the report may have been made before
        former, replaced_at = current.former_weights
        if load.weights_hash != former or replaced_at < young:
            self.has_weights(load.weights_hash)
        load = current.corrected(load, young)
        if now - current.reported_at > LATE_PERIODS * self._report_period_ms / 1000:
            current.late_at = now
        told, told_at = self._told_serving
        if told_at >= young:
            load.serving_state = told
        if current.is_stopped:
            current.stopped_at = now
        has_aborted = load.abort_id not in (0, current.load.abort_id)
        current.load, current.reported_at = load, now
        figures_at = self._figures_at()
        if self._dispatched:
            self._confirm([sent for sent in self._dispatched if sent.is_contained(figures_at)], figures_at)
        if self._foreign:
            self._foreign = [sent for sent in self._foreign if not sent.is_contained(figures_at)]
        self._view_changed()
        if worker_pb2.ROLE_DECODE in load.roles and not self._stream_started:
            self._stream_started = True
            self.decode_stream.start()
        if has_aborted:
            self._on_abort(current.info.identity.model, load.abort_id)
        self._on_change()

    def _heard(self) -> None:
        """Record a sign of life. Per-token path."""
        self._silence.heard()
        if self.is_suspect:
            self._set_suspect(False)
        if self._ticking is None:
            self._tick()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        was_lost = self._silence.is_lost
        self._silence.tick(loop.time())
        self._set_suspect(self._silence.is_suspect)
        if self._silence.is_lost and not was_lost:
            self._fell_silent()
        self._ticking = loop.call_later(self._tick_s, self._tick)  # also of a lost one: a pause counts only if it was short

    def _set_suspect(self, is_suspect: bool) -> None:
        if is_suspect != self.is_suspect:
            self.is_suspect = is_suspect
            self._on_suspect()

    def _fell_silent(self) -> None:
        """Give the worker up, with all of its requests, and look for it again."""
        reason = f"no sign of life of {self.address} for {self._silence.silence_s:.1f} s"
        self._down(reason)
        if self._watch is not None:
            self._watch.cancel()
        self.decode_stream.fell_silent(reason)

    def _refused(self, problem: str) -> None:
        """Say once why the worker takes no calls of this router: it lives, and waiting does not help."""
        if problem != self._refusal:
            self._refusal = problem
            logger.error("worker at %s refuses this router: %s", self.address, problem)

    def _down(self, problem: str) -> None:
        current, self.current = self.current, None
        self._view_changed()
        if current is not None:
            logger.warning("worker %s at %s is lost: %s", current.info.worker_id, self.address, problem)
            self.lost_at = time.monotonic()
            current.lost.set()
            self._on_change()
