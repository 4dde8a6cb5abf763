"""PrefillService on the wire."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pdmesh.engine.errors import InvalidRequest, RequestTooLarge
from pdmesh.runtime import log
from pdmesh.runtime.errors import InvalidArgument
from pdmesh.runtime.telemetry.steps import StepLog
from pdmesh.runtime.telemetry.tracing import OFF, Tracing
from pdmesh.v1 import prefill_pb2
from pdmesh.v1.prefill_pb2_grpc import PrefillServiceServicer
from prefill_service.handoff import Handoff, HandoffTools
from prefill_service.spans import Spans, open_spans
from prefill_service.validation import PrefillValidator

if TYPE_CHECKING:
    from pdmesh.v1.prefill_pb2_grpc import _ServicerContext


class PrefillServicer(PrefillServiceServicer):
    """Prefill. Knows its running hand-offs, so that a worker can wait for them or give them up."""

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
        """`check_new_work` raises when none is taken. While the worker `owns_requests` it computes what continues one, whatever
        its roles, and also when it drains: that is how they leave it, as its cache holds nearly all of their KV."""
        self._validator = validator
        self._tools = tools
        self._check_new_work = check_new_work
        self._owns_requests = owns_requests
        self._tracing = tracing
        self._steps = steps or StepLog()
        self._serial = itertools.count(1)
        self._running: set[Handoff] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_handoff_failures = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

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

    async def _accept(self, request: prefill_pb2.PrefillRequest, received_ns: int, spans: Spans) -> Handoff:
        """Its hand-off runs. Raises MeshError."""
        self._check(request)
        engine_id = f"p:{request.request_id}:{next(self._serial)}"
        assignment = await self._validator.check(request, engine_id, now=time.monotonic(), received_ns=received_ns)
        self._check(request)  # compiling a constraint takes a while
        return self._begin(Handoff(replace(assignment, spans=spans), self._tools))

    def _check(self, request: prefill_pb2.PrefillRequest) -> None:
        if not (request.request.emitted and self._owns_requests()):
            self._check_new_work()

    async def wait_idle(self) -> None:
        """Until no hand-off runs."""
        await self._idle.wait()

    async def abandon(self) -> None:
        """Gives up what runs, and waits until its blocks are released."""
        for handoff in list(self._running):
            handoff.cancel()
        await self._idle.wait()

    def _begin(self, handoff: Handoff) -> Handoff:
        self._running.add(handoff)
        self._idle.clear()
        handoff.task.add_done_callback(lambda _: self._ended(handoff))
        return handoff

    def _ended(self, handoff: Handoff) -> None:
        self._running.discard(handoff)
        self.num_handoff_failures += handoff.failed
        if not self._running:
            self._idle.set()


def _cancel(handoff: Handoff, _: object) -> None:
    handoff.cancel()


async def _events(handoff: Handoff) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
    """What the router is to be told. Whoever stops listening ends the hand-off."""
    try:
        async for event in handoff.events():
            yield event
    except (InvalidRequest, RequestTooLarge) as error:
        field, _, problem = str(error).partition(": ")
        raise InvalidArgument(f"request.{field}", problem or field) from error
    finally:
        handoff.cancel()
