"""PrefillService on the wire: checks of its requests, and the hand-offs and embeddings that run."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from kvtransfer.kv_sources import check_holder
from kvtransfer.manifest import check_identity, check_layout
from pdmesh.engine.errors import EngineStopped, InvalidRequest, NotLoaded, RequestTooLarge
from pdmesh.engine.request import EngineRequest, unpaced_from_ns
from pdmesh.runtime import log
from pdmesh.runtime.errors import FailedPrecondition, InvalidArgument, Unavailable
from pdmesh.runtime.telemetry.spans import StepLog
from pdmesh.runtime.telemetry.tracing import OFF, Tracing
from pdmesh.v1 import common_pb2, prefill_pb2
from pdmesh.v1.prefill_pb2_grpc import PrefillServiceServicer
from prefill_service.embedding import embed, embedding_request
from prefill_service.first_tokens import Spans, open_spans
from prefill_service.handoff import Assignment, Handoff, HandoffTools, named

if TYPE_CHECKING:
    from pdmesh.v1.prefill_pb2_grpc import _ServicerContext


# Checks of a PrefillRequest. Each error names the field.

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

Translate = Callable[[common_pb2.TokenRequest], Awaitable[EngineRequest]]


@dataclass(frozen=True)
class PrefillValidator:
    """Check requests against this worker's identity. `translate` checks their TokenRequest, and raises InvalidArgument itself."""

    identity: common_pb2.Identity
    layout: common_pb2.KVLayout
    translate: Translate

    async def check(self, request: prefill_pb2.PrefillRequest, engine_id: str, *, now: float, received_ns: int) -> Assignment:
        """Return the assignment. Raises InvalidArgument, or FailedPrecondition naming the field of identity or layout that
        differs."""
        if not _ID.fullmatch(request.request_id):
            raise InvalidArgument("request_id", f"{request.request_id[:80]!r} is not 1 to 64 of [A-Za-z0-9_-]")
        for field in ("request", "reservation", "identity"):
            if not request.HasField(field):
                raise InvalidArgument(field, "missing")
        check_identity(self.identity, request.identity)
        check_layout(self.identity, self.layout, request.reservation.layout)
        engine_request = await self.translate(request.request)
        num_tokens = _num_kv_tokens(engine_request)
        self._check_reservation(request.reservation, num_tokens)
        _check_adapter(request.reservation, engine_request)
        if request.HasField("holder"):
            check_holder(request.holder, num_tokens)
        return Assignment(
            engine_request=replace(
                named(engine_request, engine_id), unpaced_from_ns=unpaced_from_ns(received_ns, request.ttft_left_ms)
            ),
            reservation=request.reservation,
            num_tokens=num_tokens,
            deadline=now + request.time_left_ms / 1000 if request.time_left_ms else None,
            received_ns=received_ns,
            holder=request.holder if request.HasField("holder") else None,
        )

    def _check_reservation(self, reservation: common_pb2.Reservation, num_tokens: int) -> None:
        for name, given in (
            ("reservation_id", reservation.reservation_id),
            ("epoch", reservation.epoch),
            ("attempt", reservation.attempt),
            ("token", reservation.token),
            ("endpoints", reservation.endpoints),
        ):
            if not given:
                raise InvalidArgument(f"reservation.{name}", "missing; give the reservation as decode granted it")
        num_cached = reservation.num_cached_tokens
        block_size = reservation.layout.block_size
        if num_cached % block_size or num_cached >= num_tokens:
            raise InvalidArgument(
                "reservation.num_cached_tokens",
                f"{num_cached} must be whole blocks of {block_size}, fewer than the request's {num_tokens} tokens",
            )


def _check_adapter(reservation: common_pb2.Reservation, request: EngineRequest) -> None:
    """Refuse to fill blocks that were reserved for another adapter's KV, or for the model's alone."""
    name, digest = request.adapter or ("", "")
    if (reservation.adapter, reservation.adapter_digest) != (name, digest):
        theirs, ours = reservation.adapter or "no adapter", name or "none"
        raise FailedPrecondition(
            "reservation.adapter",
            f"the blocks are for {theirs} {reservation.adapter_digest[:8]}, this request has {ours} {digest[:8]}",
        )


def _num_kv_tokens(request: EngineRequest) -> int:
    """Return the number of tokens of the prompt and of the history of the only unfinished choice. Raises InvalidArgument for
    several choices with history."""
    finished = request.finished or (False,) * request.sampling.n
    unfinished = [choice for choice in range(request.sampling.n) if not finished[choice]]
    if not any(request.emitted):
        return len(request.prompt)
    if len(unfinished) > 1:
        raise InvalidArgument("request.emitted", "several unfinished choices with history cannot be handed off; prefill locally")
    return len(request.prompt) + len(request.emitted[unfinished[0]])


class PrefillServicer(PrefillServiceServicer):
    """Serve Prefill and Embed. A worker can wait for what runs, or abandon it."""

    def __init__(
        self,
        validator: PrefillValidator,
        tools: HandoffTools,
        *,
        check_new_work: Callable[[], None],
        owns_requests: Callable[[], bool] = lambda: False,
        tracing: Tracing = OFF,
        steps: StepLog | None = None,
    ) -> None:
        """Create the servicer. `check_new_work` raises while the worker takes no new requests. While the worker `owns_requests`
        it also prefills continuations of its requests, whatever its roles and even when it drains: that is how they move away,
        and its prefix cache holds nearly all of their KV."""
        self._validator = validator
        self._tools = tools
        self._check_new_work = check_new_work
        self._owns_requests = owns_requests
        self._tracing = tracing
        self._steps = steps or StepLog()
        self._serial = itertools.count(1)
        self._running: set[Handoff] = set()
        self._embedding: set[asyncio.Task[object]] = set()
        self._given_up: set[asyncio.Task[object]] = set()  # of those, by `abandon`
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_handoff_failures = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_held(self) -> int:
        """Return what holds blocks of the engine, or waits for some: hand-offs and embeddings."""
        return len(self._running) + len(self._embedding)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: _ServicerContext
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        received_ns = time.monotonic_ns()
        call = self._tracing.extract(context.invocation_metadata())
        spans = open_spans(self._tracing, self._steps, call, received_ns, request.reservation.attempt)
        log.belongs_to(spans.trace_name)
        handoff: Handoff | None = None
        error: BaseException | None = None
        try:
            handoff = await self._accept(request, received_ns, spans)
            context.add_done_callback(cast("Any", partial(_cancel, handoff)))
            async with aclosing(_events(handoff)) as events:
                async for event in events:
                    yield event
        except BaseException as caught:
            error = caught
            raise
        finally:
            spans.end(error, handoff.problem if handoff is not None else None)

    async def Embed(self, request: prefill_pb2.EmbedPromptRequest, context: _ServicerContext) -> prefill_pb2.EmbedPromptResponse:
        received_ns, task = time.monotonic_ns(), asyncio.current_task()
        assert task is not None
        self._check_new_work()
        self._embedding.add(task)
        self._idle.clear()
        try:
            wanted = await embedding_request(request, self._validator.translate, f"e:{request.request_id}:{next(self._serial)}")
            return await embed(self._tools.engine, self._tools.sinks, wanted, received_ns, request.time_left_ms)
        except asyncio.CancelledError:
            if task not in self._given_up:
                raise
            task.uncancel()  # else the call would get no status, and its router wait for one
            self._check_new_work()
            raise Unavailable("this worker gave the embedding up; ask another", retry_delay_s=0.1) from None
        finally:
            self._given_up.discard(task)
            self._embedding.discard(task)
            self._settle()

    async def _accept(self, request: prefill_pb2.PrefillRequest, received_ns: int, spans: Spans) -> Handoff:
        """Validate a request and return its hand-off, which runs. Raises MeshError."""
        self._check(request)
        engine_id = f"p:{request.request_id}:{next(self._serial)}"
        assignment = await self._validator.check(request, engine_id, now=time.monotonic(), received_ns=received_ns)
        self._check(request)  # the roles may have changed while a constraint was compiled
        return self._begin(Handoff(replace(assignment, spans=spans), self._tools))

    def _check(self, request: prefill_pb2.PrefillRequest) -> None:
        if not (request.request.emitted and self._owns_requests()):
            self._check_new_work()

    async def wait_idle(self) -> None:
        """Wait until no hand-off runs, and no embedding."""
        await self._idle.wait()

    async def abandon(self) -> None:
        """Cancel all hand-offs and embeddings, and wait until their blocks are released."""
        for handoff in list(self._running):
            handoff.cancel()
        for embedding in self._embedding - self._given_up:
            self._given_up.add(embedding)
            embedding.cancel()
        await self._idle.wait()

    def _begin(self, handoff: Handoff) -> Handoff:
        self._running.add(handoff)
        self._idle.clear()
        handoff.task.add_done_callback(lambda _: self._ended(handoff))
        return handoff

    def _ended(self, handoff: Handoff) -> None:
        self._running.discard(handoff)
        self.num_handoff_failures += handoff.failed
        self._settle()

    def _settle(self) -> None:
        if not self._running and not self._embedding:
            self._idle.set()


def _cancel(handoff: Handoff, _: object) -> None:
    handoff.cancel()


async def _events(handoff: Handoff) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
    """Yield the events for the router. Closing the generator ends the hand-off."""
    try:
        async for event in handoff.events():
            yield event
    except NotLoaded as error:  # it was unloaded, or replaced, meanwhile
        raise FailedPrecondition(error.field, str(error)) from error
    except EngineStopped as error:
        raise Unavailable(f"this worker is stopping: {error}") from error
    except (InvalidRequest, RequestTooLarge) as error:
        field, _, problem = str(error).partition(": ")
        raise InvalidArgument(f"request.{field}", problem or field) from error
    finally:
        handoff.cancel()
