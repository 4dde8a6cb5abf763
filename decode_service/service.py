"""The decode service: its gRPC handlers, the clock of its leases, and its assembly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from decode_service.ports import DecodeSettings, start
from decode_service.request import DecodeRequest, DecodeSpans, monotonic_ns
from decode_service.requests import Reservations
from decode_service.token_stream import Stream, TokenStream, TokenStreams
from decode_service.transfer_delegate import PushDelegate
from decode_service.validation import (
    EarlierWeights,
    SubmitValidator,
    Translate,
    check_attach,
    check_id,
    given_back,
    has_passed,
    released_by_worker,
)
from kvtransfer.kv_sources import KVSources
from kvtransfer.reservation import Cancelled, Event, Failed, LeaseExpired, Mode
from pdmesh.engine.errors import EngineStopped, InvalidRequest, NotLoaded, RequestTooLarge
from pdmesh.engine.interface import ServingEngine, Sinks
from pdmesh.runtime import log
from pdmesh.runtime.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, MeshError, Unavailable
from pdmesh.runtime.telemetry.propagation import SubmitContext, read_submit
from pdmesh.runtime.telemetry.spans import Value
from pdmesh.v1 import common_pb2, decode_pb2, worker_pb2
from pdmesh.v1.decode_pb2_grpc import DecodeServiceServicer

if TYPE_CHECKING:
    from pdmesh.v1.decode_pb2_grpc import _MaybeAsyncIterator, _ServicerContext


# DecodeService on the wire: each handler checks its message and passes it on.

Endpoints = Callable[[], list[common_pb2.TransferEndpoint]]


class DecodeServicer(DecodeServiceServicer):
    """Serve Submit, Cancel and Attach."""

    def __init__(
        self,
        reservations: Reservations,
        token_streams: TokenStreams,
        validator: SubmitValidator,
        *,
        layout: common_pb2.KVLayout,
        lease_s: float,
        stream_timeout_s: float,
        endpoints: Endpoints,
        spans: DecodeSpans | None = None,
    ) -> None:
        self._reservations = reservations
        self._token_streams = token_streams
        self._validator = validator
        self._layout = layout
        self._lease_ms = round(lease_s * 1000)
        self._stream_timeout_s = stream_timeout_s
        self._endpoints = endpoints
        self._spans = spans or DecodeSpans()

    async def Submit(self, request: decode_pb2.SubmitRequest, context: _ServicerContext) -> decode_pb2.SubmitResponse:
        received_ns = monotonic_ns()
        trace = read_submit(context.invocation_metadata()) if self._spans.tracing.is_on else None
        log.belongs_to("" if trace is None else trace.call.trace_name)
        attributes: dict[str, Value] = {"pdmesh.attempt": request.attempt}
        error: BaseException | None = None
        ended_ns: int | None = None
        try:
            record = await self._submit(request, received_ns, trace)
            attributes.update(_granted_attributes(record))
            if record.submission.mode is Mode.LOCAL:
                ended_ns = max(received_ns, record.engine_entered_ns)  # after a repeated Submit the engine had the prompt before
            return decode_pb2.SubmitResponse(reservation=self._granted(record))
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._spans.submitted(trace, received_ns, attributes, error, ended_ns)

    async def _submit(self, request: decode_pb2.SubmitRequest, received_ns: int, trace: SubmitContext | None) -> DecodeRequest:
        submission = await self._validator.check(request, now=time.monotonic(), received_ns=received_ns)
        try:
            return await self._reservations.submit(replace(submission, trace=trace))
        except NotLoaded as error:  # it was unloaded, or replaced, meanwhile
            raise FailedPrecondition(error.field, str(error)) from error
        except EngineStopped as error:
            raise Unavailable(f"this worker is stopping: {error}") from error
        except (InvalidRequest, RequestTooLarge) as error:
            field, _, problem = str(error).partition(": ")
            raise InvalidArgument(f"request.{field}", problem or field) from error

    async def Cancel(self, request: decode_pb2.CancelRequest, context: _ServicerContext) -> decode_pb2.CancelResponse:
        check_id("request_id", request.request_id)
        return decode_pb2.CancelResponse(found=await self._reservations.cancel(request.request_id, request.reason))

    async def Attach(
        self, request_iterator: _MaybeAsyncIterator[decode_pb2.AttachRequest], context: _ServicerContext
    ) -> AsyncIterator[decode_pb2.Frame]:
        first = await self._first_message(request_iterator)
        token_stream = self._token_streams.of(first.router_id)
        attached = token_stream.open(first)
        stream = attached.stream
        # The callback also runs when the call ends while gRPC holds a frame, when this generator may not be resumed for a while.
        context.add_done_callback(cast("Any", lambda _: token_stream.close(stream)))
        for request_id in attached.unknown:
            self._reservations.repeat_ending(request_id, token_stream)
        for record in attached.abandoned:
            start(self._reservations.end(record, Cancelled("its router no longer follows it")))
        reader = start(_read(request_iterator, token_stream, stream))
        try:
            async for frame in self._token_streams.frames(token_stream, stream):
                yield frame
        finally:
            reader.cancel()
            token_stream.close(stream)

    async def _first_message(self, requests: AsyncIterator[decode_pb2.AttachRequest]) -> decode_pb2.AttachRequest:
        if self._token_streams.is_closing:
            raise Unavailable("this worker is stopping; attach to another")
        try:
            async with asyncio.timeout(self._stream_timeout_s):
                first = await anext(requests)
        except StopAsyncIteration:
            raise InvalidArgument("router_id", "the stream ended before its first message") from None
        except TimeoutError:
            raise DeadlineExceeded(f"no first message within {self._stream_timeout_s} s") from None
        check_attach(first)
        return first

    def _granted(self, record: DecodeRequest) -> common_pb2.Reservation:
        blocks, adapter = record.blocks, record.submission.request.adapter
        return common_pb2.Reservation(
            reservation_id=record.reservation_id,
            epoch=self._validator.epoch,
            attempt=record.submission.attempt,
            lease_ms=self._lease_ms,
            token=record.token,
            endpoints=self._endpoints(),
            num_cached_tokens=blocks.num_cached_tokens if blocks else 0,
            layout=self._layout,
            adapter=adapter.name if adapter else "",
            adapter_digest=adapter.digest if adapter else "",
        )


def _granted_attributes(record: DecodeRequest) -> dict[str, Value]:
    blocks = record.blocks
    if blocks is None:
        return {}
    return {"pdmesh.cached_tokens": blocks.num_cached_tokens, "pdmesh.kv.blocks": len(blocks.block_ids)}


async def _read(requests: AsyncIterator[decode_pb2.AttachRequest], token_stream: TokenStream, stream: Stream) -> None:
    """Read the router's heartbeats, which keep the stream and the followed requests alive."""
    async for request in requests:
        if request.router_id != token_stream.router_id:
            stream.close(InvalidArgument("router_id", f"it was {token_stream.router_id!r} before; one stream serves one router"))
            return
        stream.heard()
        token_stream.renew_leases(request.waiting_request_ids, time.monotonic())
    stream.close()  # the router has ended its side


# Time limits: deadlines, leases, absent routers. One tick checks all of them; time is passed in.

TICK_S = 0.02


class LeaseKeeper:
    """End requests whose deadline, lease or router's grace period has passed."""

    def __init__(self, reservations: Reservations, token_streams: TokenStreams) -> None:
        self._reservations = reservations
        self._token_streams = token_streams
        self.num_expired = 0  # expired leases

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self.tick(time.monotonic())
            await asyncio.sleep(TICK_S)

    def tick(self, now: float) -> None:
        for record in self._token_streams.tick(now):
            self._end(record, Cancelled(f"router {record.token_stream.router_id} is gone"), None)
        for record in self._reservations.active:
            if has_passed(record.submission.deadline, now):
                self._end(record, Cancelled("deadline exceeded"), DeadlineExceeded("the request's deadline has passed"))
            elif has_passed(record.reservation.lease_deadline, now):
                self._end(record, LeaseExpired(), released_by_worker("its lease expired without progress"))
        self._reservations.sweep(now)

    def _end(self, record: DecodeRequest, event: Event, failure: MeshError | None) -> None:
        """End a request in a task, one task at a time for each request: ending waits for writers and the engine, longer than a
        tick."""
        if not record.is_ending and not record.is_released:
            self.num_expired += isinstance(event, LeaseExpired)
            record.is_ending = True
            start(self._reservations.end(record, event, failure)).add_done_callback(lambda _: _ended(record))


def _ended(record: DecodeRequest) -> None:
    record.is_ending = False


@dataclass(frozen=True)
class Dependencies:
    """Hold what the worker provides to the service. `quiesce` and `endpoints` belong to the KV receiver."""

    epoch: int
    identity: common_pb2.Identity
    layout: common_pb2.KVLayout
    translate: Translate
    engine: ServingEngine
    sinks: Sinks
    quiesce: Callable[[str], Awaitable[None]]
    endpoints: Endpoints
    check_new_work: Callable[[], None]
    num_steps: Callable[[], int]
    load_report: Callable[[], worker_pb2.LoadReport]
    spans: DecodeSpans = field(default_factory=DecodeSpans)
    sources: KVSources | None = None  # None: what is not in the pool is computed
    earlier_weights: EarlierWeights | None = None


class DecodeService:
    """Hold the parts that the worker registers and runs: `servicer`, `delegate` for the receiver, `keeper.run()` as a task."""

    def __init__(self, settings: DecodeSettings, dependencies: Dependencies) -> None:
        self._token_streams = TokenStreams(
            settings.stream, epoch=dependencies.epoch, num_steps=dependencies.num_steps, load_report=dependencies.load_report
        )
        self.reservations = Reservations(
            settings.reservation,
            engine=dependencies.engine,
            sinks=dependencies.sinks,
            token_streams=self._token_streams,
            quiesce=dependencies.quiesce,
            check_new_work=dependencies.check_new_work,
            spans=dependencies.spans,
            sources=dependencies.sources,
        )
        self.delegate = PushDelegate(self.reservations, epoch=dependencies.epoch, block_size=dependencies.layout.block_size)
        self.keeper = LeaseKeeper(self.reservations, self._token_streams)
        self.servicer = DecodeServicer(
            self.reservations,
            self._token_streams,
            SubmitValidator(dependencies.epoch, dependencies.identity, dependencies.translate, dependencies.earlier_weights),
            layout=dependencies.layout,
            lease_s=settings.reservation.lease_s,
            stream_timeout_s=settings.stream.stream_timeout_s,
            endpoints=dependencies.endpoints,
            spans=dependencies.spans,
        )

    async def wait_idle(self) -> None:
        """Wait until no request holds anything in the engine."""
        await self.reservations.wait_idle()

    async def abandon(self, reason: str, *, is_fault: bool = True) -> None:
        """Give up running requests: routers get UNAVAILABLE, or ABORTED where that is no fault of the worker, and continue on
        other workers. Returns when everything is released."""
        failure = released_by_worker(reason) if is_fault else given_back(reason)
        for record in self.reservations.active:
            await self.reservations.end(record, Failed(reason), failure)
        await self.reservations.wait_idle()

    def close_streams(self) -> None:
        """End the routers' streams, each after a last frame."""
        self._token_streams.close()
