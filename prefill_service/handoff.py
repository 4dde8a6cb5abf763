"""One prefill, from the engine's queue to decode's commit; the push runs beside the computation and ends shortly after it.

The blocks belong to the engine request from `add` to `release`. `release` stands in one `finally`, after everything that reads
the blocks has ended, so it runs exactly once, however the prefill ends: finished, refused, failed, cancelled or out of time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from kvtransfer.errors import PushFailed, code_number
from kvtransfer.kv_sources import NOTHING, KVSources
from kvtransfer.sender.push import PushJob, PushResult
from kvtransfer.sender.send_queue import Ending, FirstTokensDrawn, KVReadiness, NothingToDecode, Ready
from kvtransfer.sender.sender import Sender
from kvtransfer.stream import to_its_end
from pdmesh.engine.interface import ServingEngine, Sinks
from pdmesh.engine.outputs import KVReady
from pdmesh.engine.request import EngineRequest
from pdmesh.runtime.errors import DeadlineExceeded, ResourceExhausted
from pdmesh.runtime.failpoints import hit_async
from pdmesh.v1 import common_pb2, prefill_pb2
from prefill_service.first_tokens import NO_SPANS, RETRY_DELAY_S, FirstTokens, FirstTokensSink, Spans

STUCK_S = 0.5  # between two checks whether the engine is blocked
MAX_PUSH_S = 60.0  # limit for a push that makes progress; a stuck one ends by the transport's own timeouts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assignment:
    """Hold a validated PrefillRequest. `engine_request` carries the engine's id; `deadline` is monotonic seconds."""

    engine_request: EngineRequest
    reservation: common_pb2.Reservation
    num_tokens: int  # tokens whose KV decode gets: prompt and history
    deadline: float | None
    received_ns: int
    spans: Spans = NO_SPANS
    holder: prefill_pb2.KVHolder | None = None


@dataclass(frozen=True)
class HandoffTools:
    """Hold the objects that all hand-offs of a worker share."""

    engine: ServingEngine
    sinks: Sinks
    sender: Sender
    block_size: int
    num_steps: Callable[[], int]  # the engine's steps so far
    notify_every: Callable[[int], None]  # sets the number of layers of a step between calls of `on_ready`
    pushed: Callable[[PushResult, int], None] = lambda result, exposed_ns: None  # called after each hand-off that succeeded
    longest_step_s: Callable[[], float] = lambda: 0.0  # how long a step of the engine may be expected to take; inf: it is paused
    sources: KVSources | None = None  # None: what is not in the pool is computed


class Handoff:
    """Run one hand-off in a task of its own; `events` yields the events for the router. `cancel` ends it at any point."""

    def __init__(self, assignment: Assignment, tools: HandoffTools) -> None:
        self._assignment = assignment
        self._tools = tools
        self._events: asyncio.Queue[FirstTokens | prefill_pb2.HandoffOutcome | None] = asyncio.Queue()
        self._feed = KVReadiness()
        self._push: asyncio.Task[PushResult] | None = None
        self._cancelled = False
        self._brought = NOTHING
        self.failed = False
        self.problem: str | None = None  # why the push failed
        self.task = asyncio.create_task(self._run())
        self.task.add_done_callback(lambda _: self._events.put_nowait(None))

    def cancel(self) -> None:
        """Cancel the hand-off; idempotent, because a second cancellation must not interrupt the clean-up after the first."""
        if not self._cancelled:
            self._cancelled = True
            self.task.cancel()

    async def events(self) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        """Yield the first tokens, then the outcome. Raises the error of a hand-off that ended without an outcome."""
        while (event := await self._events.get()) is not None:
            if isinstance(event, FirstTokens):
                timings = event.timings(self._assignment.received_ns)
                self._brought.put(timings)
                yield prefill_pb2.PrefillEvent(first_tokens=prefill_pb2.FirstTokens(tokens=event.for_router(), timings=timings))
            else:
                yield prefill_pb2.PrefillEvent(outcome=event)
        self.task.result()

    async def _run(self) -> None:
        engine_id = self._assignment.engine_request.request_id
        sink = FirstTokensSink()
        self._tools.sinks.add(engine_id, sink, self._on_ready)
        try:
            async with asyncio.timeout_at(_loop_deadline(self._assignment.deadline)):
                await self._prefill_and_push(sink)
        except TimeoutError as error:
            raise DeadlineExceeded("the request's deadline has passed during its prefill") from error
        finally:
            self._tools.sinks.remove(engine_id)
            await to_its_end(self._clean_up(engine_id))

    async def _prefill_and_push(self, sink: FirstTokensSink) -> None:
        await hit_async("prefill.accepted")
        if self._tools.sources is not None:
            self._brought = await self._tools.sources.bring(self._assignment.engine_request, self._assignment.holder)
        if not await self._tools.engine.add(self._assignment.engine_request):
            raise ResourceExhausted("this worker's prefill queue is full", retry_delay_s=RETRY_DELAY_S)
        first = await self._first_tokens(sink)
        self._assignment.spans.computed(first, first.queue_ns(self._assignment.received_ns))
        self._events.put_nowait(first)
        await hit_async("prefill.computed")
        self._feed.end(_ending(first))
        self._events.put_nowait(await self._outcome(first))

    def _on_ready(self, ready: KVReady) -> None:
        """Record KV that is final; the first call begins the push."""
        block_size, num_tokens = self._tools.block_size, self._assignment.num_tokens
        num_blocks, num_step_blocks = (
            -(-num_tokens // block_size) if count >= num_tokens else count // block_size
            for count in (ready.num_tokens, ready.num_step_tokens)
        )
        if ready.num_tokens == ready.num_step_tokens:  # the step has ended
            self._assignment.spans.chunk(self._tools.num_steps(), ready.num_tokens)
        self._feed.advance(Ready(num_blocks, num_step_blocks, ready.num_layers))
        if self._feed.group:
            self._tools.notify_every(self._feed.group)
        if self._push is None:
            job = PushJob(
                self._assignment.reservation,
                ready.block_ids,
                num_tokens,
                self._feed,
                self._tools.num_steps,
                self._assignment.spans.part_moved if self._assignment.spans.is_on else None,
                self._tools.longest_step_s,
            )
            self._push = asyncio.create_task(self._tools.sender.push(job, timeout_s=MAX_PUSH_S))

    async def _clean_up(self, engine_id: str) -> None:
        if self._push is not None:  # the push reads the blocks
            self._push.cancel()
            await asyncio.wait([self._push])
            if not self._push.cancelled():
                self._push.exception()  # retrieved, so that asyncio does not log it; another error ended this hand-off
        await self._tools.engine.release(engine_id)

    async def _first_tokens(self, sink: FirstTokensSink) -> FirstTokens:
        """Wait for the first tokens. Raises ResourceExhausted when the engine stands still because reservations hold all blocks.

        Each of these reservations may wait for a worker that waits, like this one, for blocks that are reserved for our push. To
        break the deadlock this request is refused: it is prefilled on another worker, or by decode in the blocks reserved there.
        """
        num_steps: int | None = None
        while (first := await sink.wait(STUCK_S)) is None:
            before, num_steps = num_steps, await self._num_steps_if_idle()
            if num_steps is not None and num_steps == before:
                raise ResourceExhausted("reservations hold the blocks that this prompt needs", retry_delay_s=RETRY_DELAY_S)
        return first

    async def _num_steps_if_idle(self) -> int | None:
        """Return the engine's steps so far; None while a request runs, is held for a push or waits for KV that is
        fetched or restored, because that will free blocks."""
        stats = await self._tools.engine.stats()
        is_moving = self._tools.sources is not None and self._tools.sources.is_moving
        is_paused = self._tools.longest_step_s() == math.inf
        return None if stats.num_running or stats.num_held or is_moving or is_paused else stats.num_steps

    async def _outcome(self, first: FirstTokens) -> prefill_pb2.HandoffOutcome:
        assert self._push is not None, "the KV of a prefill that drew its first token is ready"
        reservation_id = self._assignment.reservation.reservation_id
        try:
            result = await asyncio.shield(self._push)
        except PushFailed as error:
            if first.all_finished:  # decode frees its blocks when the lease expires, or when the router cancels there
                return _finished(f"decode could not be told: {error}")
            self.failed, self.problem = True, str(error)
            logger.warning("hand-off to reservation %s failed: %s", reservation_id, error)
            return prefill_pb2.HandoffOutcome(
                status=prefill_pb2.HANDOFF_STATUS_FAILED,
                message=str(error),
                retryable=error.retryable,
                code=code_number(error.code),
            )
        if not result.committed:
            return _finished("")
        exposed_ns = result.ended_ns - first.drawn_ns
        self._assignment.spans.committed(first.drawn_ns, result.ended_ns)
        self._tools.pushed(result, exposed_ns)
        return prefill_pb2.HandoffOutcome(
            status=prefill_pb2.HANDOFF_STATUS_COMMITTED,
            kv_bytes=result.num_bytes,
            transport=result.transport,
            kv_exposed_ns=exposed_ns,
        )


def _ending(first: FirstTokens) -> Ending:
    if first.all_finished:
        return NothingToDecode("every choice ended with its first token")
    return FirstTokensDrawn(first.for_decode(), is_exact=first.timing.is_exact)


def _finished(message: str) -> prefill_pb2.HandoffOutcome:
    return prefill_pb2.HandoffOutcome(status=prefill_pb2.HANDOFF_STATUS_FINISHED, message=message)


def named(request: EngineRequest, engine_id: str) -> EngineRequest:
    """Return the request with the id `engine_id` in this engine, held after its first tokens until it is released."""
    return replace(request, request_id=engine_id, prefill_only=True)


def _loop_deadline(deadline: float | None) -> float | None:
    """Return the deadline on the event loop's clock. asyncio does not promise that this is time.monotonic, although it is on
    every supported platform."""
    return None if deadline is None else asyncio.get_running_loop().time() + deadline - time.monotonic()
