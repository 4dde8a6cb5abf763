"""Token streams: the output that each router still has to get, and whether the router is connected.

A TokenStream belongs to a router and outlives its Attach calls: while none is attached it keeps new output, for a grace period.
An attached stream sends a frame after each engine step with output for this router, and at every heartbeat. Output that comes
while gRPC has not yet taken the last frame goes into the next one.

Silence and absence are counted in this event loop's own time: a tick adds at most MAX_TICK_S, so that a worker that stalls does
not take its own stall for silence of the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from decode_service.ports import StreamSettings
from decode_service.request import DecodeRequest, monotonic_ns
from pdmesh.runtime.errors import Aborted, MeshError, Unavailable
from pdmesh.v1 import decode_pb2, worker_pb2

MAX_TICK_S = 0.05
DEFAULT_PERIOD_S = 0.1


@dataclass(eq=False)
class Stream:
    """Hold one Attach call. `error` is the reason of its end; None while it lives, or when the router closed it."""

    generation: int
    period_s: float
    silence_s: float = 0.0
    since_frame_s: float = 0.0
    closed: bool = False
    error: MeshError | None = None
    _waiter: asyncio.Future[None] | None = field(default=None, repr=False)

    def heard(self) -> None:
        """Record that the router has sent something."""
        self.silence_s = 0.0

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self, error: MeshError | None = None) -> None:
        if not self.closed:
            self.closed, self.error = True, error
            self.wake()

    async def wait(self) -> None:
        """Wait for `wake`."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        self._waiter = None


@dataclass(frozen=True)
class Attached:
    """Report an attached stream. `abandoned`: requests that the router no longer follows. `unknown`: requests that it follows,
    but that are not here."""

    stream: Stream
    abandoned: list[DecodeRequest]
    unknown: list[str]


class TokenStream:
    """Hold one router's requests, their unsent outputs and events, and its Attach call if there is one."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.records: dict[str, DecodeRequest] = {}
        self.stream: Stream | None = None
        self.absent_s = 0.0  # time without an attached call
        self.since_report_s = 0.0
        self._generation = 0
        self._fresh: dict[str, DecodeRequest] = {}  # requests with unsent output, in the order of that output
        self._started: dict[str, DecodeRequest] = {}
        self._events: list[decode_pb2.RequestEvent] = []

    @property
    def generation_of_submit(self) -> int:
        """Return the generation of the Attach call that follows a request submitted now: that of the attached call, else the
        next."""
        return self._generation if self.stream is not None else self._generation + 1

    @property
    def has_news(self) -> bool:
        return bool(self._fresh or self._started or self._events)

    def mark(self, record: DecodeRequest) -> None:
        self._fresh[record.request_id] = record
        self._wake()

    def mark_started(self, record: DecodeRequest) -> None:
        self._started[record.request_id] = record
        self._wake()

    def post(self, event: decode_pb2.RequestEvent) -> None:
        self._events.append(event)
        self._wake()

    def forget(self, record: DecodeRequest) -> None:
        """Drop `record`; events that were posted already are still sent."""
        if self.records.get(record.request_id) is record:
            del self.records[record.request_id]
            self._fresh.pop(record.request_id, None)
            self._started.pop(record.request_id, None)

    def open(self, first: decode_pb2.AttachRequest) -> Attached:
        """Attach a call in place of an earlier one, and send again from its resume points on."""
        if self.stream is not None:
            self.stream.close(Aborted("another stream of this router took over"))
        self._generation += 1
        self.absent_s = 0.0
        self.stream = Stream(self._generation, first.period_ms / 1000 or DEFAULT_PERIOD_S)
        resumed = resume_points_of(first)
        abandoned = [
            record
            for request_id, record in self.records.items()
            if request_id not in resumed and record.stream_generation < self._generation
        ]
        unknown = [request_id for request_id in resumed if request_id not in self.records]
        for request_id in resumed.keys() & self.records.keys():
            record = self.records[request_id]
            record.stream_generation = self._generation
            record.resume(resumed[request_id])
        return Attached(self.stream, abandoned, unknown)

    def close(self, stream: Stream) -> None:
        """Record that `stream` ended; idempotent. Absence counts from now."""
        stream.close()
        if self.stream is stream:
            self.stream = None
            self.absent_s = 0.0

    def renew_leases(self, request_ids: Iterable[str], now: float) -> None:
        """Renew the leases of requests for which the router waits, so that a request in a prefill worker's queue keeps its lease.
        The lease of a request that the router has dropped must lapse: its Submit may arrive after the tombstone of its Cancel was
        dropped."""
        for request_id in request_ids:
            record = self.records.get(request_id)
            if record is not None:
                record.renew_lease(now)

    def tick(self, elapsed_s: float, settings: StreamSettings) -> None:
        self.since_report_s += elapsed_s
        stream = self.stream
        if stream is None:
            self.absent_s += elapsed_s
            return
        stream.silence_s += elapsed_s
        stream.since_frame_s += elapsed_s
        if stream.silence_s > settings.stream_timeout_s:
            stream.close(Unavailable(f"router {self.router_id} was silent for {stream.silence_s:.2f} s"))
            self.close(stream)
        elif stream.since_frame_s >= stream.period_s:
            stream.wake()

    def take_frame(self, epoch: int, num_steps: int) -> decode_pb2.Frame:
        """Return all unsent outputs and events, and count them as sent."""
        now_ns = monotonic_ns()
        fresh, self._fresh = self._fresh, {}
        started, self._started = self._started, {}
        events, self._events = self._events, []
        outputs = [output for record in fresh.values() for output in record.output.take()]
        events.extend(record.started_event(now_ns) for record in started.values())
        if self.stream is not None:
            self.stream.since_frame_s = 0.0
        return decode_pb2.Frame(epoch=epoch, num_steps=num_steps, outputs=outputs, events=events)

    def _wake(self) -> None:
        if self.stream is not None:
            self.stream.wake()


class TokenStreams:
    """Hold the token streams of all routers."""

    def __init__(
        self,
        settings: StreamSettings,
        *,
        epoch: int,
        num_steps: Callable[[], int],
        load_report: Callable[[], worker_pb2.LoadReport],
    ) -> None:
        self._settings = settings
        self._epoch = epoch
        self._num_steps = num_steps
        self._load_report = load_report
        self._by_router: dict[str, TokenStream] = {}
        self._last_tick: float | None = None
        self._is_closing = False

    def of(self, router_id: str) -> TokenStream:
        """Return the router's token stream, which is created at its first message."""
        if router_id not in self._by_router:
            self._by_router[router_id] = TokenStream(router_id)
        return self._by_router[router_id]

    async def frames(self, token_stream: TokenStream, stream: Stream) -> AsyncIterator[decode_pb2.Frame]:
        """Yield frames for one Attach call until it is closed; the first comes at once and tells the router that it is
        attached."""
        while token_stream.stream is stream:
            is_last = stream.closed
            yield self._frame(token_stream)
            if is_last:
                break
            if not token_stream.has_news and not stream.closed:
                await stream.wait()
        if stream.error is not None:
            raise stream.error

    def tick(self, now: float) -> list[DecodeRequest]:
        """Count silence and heartbeats up to `now`; return the requests of routers that are gone."""
        elapsed_s = min(now - self._last_tick, MAX_TICK_S) if self._last_tick is not None else 0.0
        self._last_tick = now
        orphans: list[DecodeRequest] = []
        for router_id, token_stream in list(self._by_router.items()):
            token_stream.tick(elapsed_s, self._settings)
            if token_stream.stream is None and token_stream.absent_s > self._settings.grace_s:
                orphans.extend(token_stream.records.values())
                if not token_stream.records:
                    del self._by_router[router_id]
        return orphans

    def close(self) -> None:
        """End all Attach calls, each after one last frame, and attach no more."""
        self._is_closing = True
        for token_stream in self._by_router.values():
            if token_stream.stream is not None:
                token_stream.stream.close(Unavailable("this worker is stopping"))

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    def _frame(self, token_stream: TokenStream) -> decode_pb2.Frame:
        frame = token_stream.take_frame(self._epoch, self._num_steps())
        if token_stream.since_report_s >= self._settings.report_period_s:
            token_stream.since_report_s = 0.0
            frame.load.CopyFrom(self._load_report())
        return frame


def resume_points_of(first: decode_pb2.AttachRequest) -> dict[str, dict[int, int]]:
    """Return the resume points: request_id → choice → next index."""
    resumed: dict[str, dict[int, int]] = {}
    for point in first.resume_points:
        resumed.setdefault(point.request_id, {})[point.choice] = point.next_index
    return resumed
