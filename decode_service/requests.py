"""The requests of this decode worker: reserved, filled with KV, run and released, each exactly once.

The pure state machine (`kvtransfer.reservation`) decides; this module acts on the engine. The blocks are freed, by state:

  RESERVED, RECEIVING   by this module, after a transition to another state (which fences the writer) and after `quiesce`, which
                        returns when no writer is inside a part
  COMMITTED, RUNNING    by the engine when the request finishes, or by this module when it ends it; no writer is left

A request that ends here is forgotten at once: its Cancel is answered, its router is told. It stays in `active` until the engine
has released it, which is after the step that computes it, if one does.

Every change of a request runs under its lock, in a task that the end of an RPC cannot interrupt half-way.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from decode_service.ports import ReservationSettings, in_own_task, start
from decode_service.request import CommittedTokens, DecodeRequest, DecodeSpans, Handoff, Submission, failed_event, monotonic_ns
from decode_service.token_stream import TokenStream, TokenStreams
from decode_service.validation import OUTPUT_GONE, no_room, refusal_of, released_by_worker
from kvtransfer.kv_sources import Brought, KVSources
from kvtransfer.manifest import new_token
from kvtransfer.reservation import (
    Cancelled,
    Committed,
    Event,
    Failed,
    Finished,
    InvalidTransition,
    Mode,
    NewAttempt,
    Started,
    State,
    reserved,
    transition,
)
from pdmesh.engine.interface import ReservedBlocks, ServingEngine, Sinks
from pdmesh.runtime import errors, log
from pdmesh.runtime.errors import Aborted, DataLoss, MeshError
from pdmesh.runtime.errors import Cancelled as MeshCancelled
from pdmesh.runtime.failpoints import hit_async

# Tombstones of requests that ended here, so that late messages about them have no effect.


@dataclass(frozen=True)
class Ending:
    """Hold how a request ended. `attempt` None: it was cancelled before Submit, so every attempt is refused. `until` is monotonic
    seconds."""

    attempt: int | None
    failure: MeshError
    until: float


class Tombstones:
    """Remember for one lease how requests ended. Time is passed in."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._endings: dict[str, Ending] = {}

    def __len__(self) -> int:
        return len(self._endings)

    def note(self, request_id: str, attempt: int, failure: MeshError, now: float) -> None:
        """Record that the request ended here at `attempt`; a newer attempt may still come. `failure` answers late messages about
        it."""
        self._keep(request_id, Ending(attempt, failure, now + self._keep_s))

    def note_early_cancel(self, request_id: str, now: float) -> None:
        """Record the Cancel of an unknown request, unless the request is known to have ended here."""
        if self.find(request_id, now) is None:
            self._keep(request_id, Ending(None, errors.Cancelled("it was cancelled before it was submitted"), now + self._keep_s))

    def find(self, request_id: str, now: float) -> Ending | None:
        """Return how the request ended, if it did within the last lease."""
        ending = self._endings.get(request_id)
        return ending if ending is not None and ending.until > now else None

    def check(self, request_id: str, attempt: int, now: float) -> None:
        """Raise Cancelled or Aborted if this attempt ended here already."""
        ending = self.find(request_id, now)
        if ending is None or (ending.attempt is not None and attempt > ending.attempt):
            return
        error: type[MeshError] = errors.Cancelled if isinstance(ending.failure, errors.Cancelled) else Aborted
        raise error(f"attempt {attempt} of request {request_id} ended here: {ending.failure.message}; only a newer one can go on")

    def forget_old(self, now: float) -> None:
        """Drop old endings. All are kept for the same time, so the oldest come first."""
        while self._endings:
            request_id, ending = next(iter(self._endings.items()))
            if ending.until > now:
                return
            del self._endings[request_id]

    def _keep(self, request_id: str, ending: Ending) -> None:
        self._endings.pop(request_id, None)
        self._endings[request_id] = ending


# Locks by request id.


class RequestLocks:
    """Serialize changes of one request; different requests do not wait for each other."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def __call__(self, request_id: str) -> AsyncIterator[None]:
        lock, num_users = self._locks.get(request_id, (asyncio.Lock(), 0))
        self._locks[request_id] = (lock, num_users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, num_users = self._locks[request_id]
            if num_users == 1:
                del self._locks[request_id]
            else:
                self._locks[request_id] = (lock, num_users - 1)

    def __len__(self) -> int:
        return len(self._locks)


logger = logging.getLogger(__name__)


class Reservations:
    """Hold the table of requests, and change its requests. Used on the event loop only."""

    def __init__(
        self,
        settings: ReservationSettings,
        *,
        engine: ServingEngine,
        sinks: Sinks,
        token_streams: TokenStreams,
        quiesce: Callable[[str], Awaitable[None]],
        check_new_work: Callable[[], None],
        spans: DecodeSpans | None = None,
        sources: KVSources | None = None,
    ) -> None:
        """Create the table. `quiesce(reservation_id)` returns once no writer writes into its blocks; `check_new_work` raises
        while the worker takes no new requests."""
        self._settings = settings
        self._engine = engine
        self._sinks = sinks
        self._token_streams = token_streams
        self._quiesce = quiesce
        self._check_new_work = check_new_work
        self._spans = spans or DecodeSpans()
        self._sources = sources
        self._by_request: dict[str, DecodeRequest] = {}
        self._by_reservation: dict[str, DecodeRequest] = {}
        self._active: dict[str, DecodeRequest] = {}  # by engine id, the requests that hold blocks or seats in the engine
        self._idle = asyncio.Event()
        self._idle.set()
        self._kept: deque[tuple[float, DecodeRequest]] = deque()  # finished requests, until their router must have all output
        self._ended = Tombstones(settings.lease_s)
        self._locks = RequestLocks()
        self._serial = itertools.count(1)
        self.num_handoff_failures = 0

    @property
    def active(self) -> list[DecodeRequest]:
        """Return the requests that hold blocks or seats in the engine."""
        return list(self._active.values())

    async def wait_idle(self) -> None:
        """Wait until no request is active."""
        await self._idle.wait()

    def find(self, reservation_id: str) -> DecodeRequest | None:
        return self._by_reservation.get(reservation_id)

    async def submit(self, submission: Submission) -> DecodeRequest:
        """Grant a reservation, or start a new attempt on an existing one. Raises MeshError; without room no state is kept."""
        return await in_own_task(self._submit(submission))

    async def cancel(self, request_id: str, reason: str) -> bool:
        """Cancel a request; return whether it was known and is released, with the end of the step that computes it."""
        return await in_own_task(self._cancel(request_id, reason))

    async def end(self, record: DecodeRequest, event: Event, failure: MeshError | None = None) -> bool:
        """Release `record` if `event` still ends it, and send a `failure` to its router; return whether it was released now."""
        return await in_own_task(self._end_under_lock(record, event, failure))

    async def commit(
        self, record: DecodeRequest, attempt: int, committed: CommittedTokens, handoff: Handoff, accept: Callable[[], None]
    ) -> None:
        """Start decoding after the first tokens, because the KV is complete. `accept` is called once the start is certain."""
        await in_own_task(self._commit(record, attempt, committed, handoff, accept))

    def sweep(self, now: float) -> None:
        """Drop tombstones and finished requests that were kept long enough."""
        self._ended.forget_old(now)
        while self._kept and self._kept[0][0] <= now:
            _, record = self._kept.popleft()
            if self._by_request.get(record.request_id) is record:
                self._forget(record, OUTPUT_GONE)

    def repeat_ending(self, request_id: str, token_stream: TokenStream) -> None:
        """Tell a router that resumes an ended request how it ended. An unknown request gets no event: its Submit may be on its
        way."""
        ending = self._ended.find(request_id, time.monotonic())
        if ending is not None:
            token_stream.post(failed_event(request_id, ending.attempt or 0, ending.failure))

    async def _submit(self, submission: Submission) -> DecodeRequest:
        async with self._locks(submission.request_id):
            record = self._by_request.get(submission.request_id)
            if record is not None and not record.is_released:
                return await self._begin_attempt(record, submission)
            self._check_not_ended(record, submission)
            self._check_new_work()
            if record is not None:
                self._forget(record, OUTPUT_GONE)
            return await self._reserve_new(submission)

    def _check_not_ended(self, record: DecodeRequest | None, submission: Submission) -> None:
        if record is not None and submission.attempt <= record.reservation.attempt:
            raise Aborted(f"request {submission.request_id} attempt {submission.attempt} has finished here")
        self._ended.check(submission.request_id, submission.attempt, time.monotonic())

    async def _reserve_new(self, submission: Submission) -> DecodeRequest:
        serial = next(self._serial)
        token_stream = self._token_streams.of(submission.router_id)
        token_stream.absent_s = 0.0  # a router that submits is not absent
        record = DecodeRequest(
            submission=submission,
            reservation_id=f"{submission.request_id}.{serial}",
            engine_id=self._engine_id(submission.request_id),
            reservation=reserved(submission.attempt, submission.mode, time.monotonic(), self._settings.lease_s),
            token=new_token(),
            token_stream=token_stream,
            stream_generation=token_stream.generation_of_submit,
            on_finished=self._on_finished,
            on_not_finite=self._on_not_finite,
            spans=self._spans,
        )
        self._remember(record)
        await self._reserve_or_drop(record, self._reserved)
        await hit_async("decode.reserved")
        return record

    async def _begin_attempt(self, record: DecodeRequest, submission: Submission) -> DecodeRequest:
        """Begin a new attempt of a known request. If the state machine refuses it, nothing changes."""
        if record.is_at(submission):
            return record
        try:
            record.reservation = transition(record.reservation, NewAttempt(submission.attempt, submission.mode), time.monotonic())
        except InvalidTransition as error:
            raise refusal_of(error) from error
        await self._quiesce(record.reservation_id)  # the earlier attempt is fenced now; wait until its writer has stopped
        await self._fit_blocks(record, submission)
        return record

    async def _fit_blocks(self, record: DecodeRequest, submission: Submission) -> None:
        """Fit the blocks to the newer attempt, whose history may be longer."""
        record.restart(submission)
        record.renew_lease(time.monotonic())
        await self._reserve_or_drop(record, self._restated)

    async def _reserve_or_drop(
        self, record: DecodeRequest, reserve: Callable[[DecodeRequest], Awaitable[ReservedBlocks | None]]
    ) -> None:
        """Reserve on the engine and, for LOCAL, start there. Without room the request is dropped."""
        is_local = record.submission.mode is Mode.LOCAL
        if is_local and record.reservation.state is State.RESERVED:
            # The transition precedes the engine's call, because the first tokens may come before the call returns.
            record.reservation = transition(record.reservation, Started(), time.monotonic())
        if is_local:
            self._spans.begin(record, record.submission.received_ns)

        try:
            record.blocks = await reserve(record)
            if record.blocks is None:
                raise no_room(self._settings.retry_delay_s)
        except Exception as error:
            self._spans.end(record, str(error))
            await self._free(record, None)
            raise

    async def _reserved(self, record: DecodeRequest) -> ReservedBlocks | None:
        if record.submission.mode is not Mode.LOCAL:
            return await self._engine.reserve(record.named_request)
        if self._sources is not None:
            record.brought = await self._brought(record, self._sources)
        granted = await self._engine.reserve_local(record.named_request)
        if granted is None:
            return None
        blocks, record.engine_entered_ns = granted
        return blocks

    async def _brought(self, record: DecodeRequest, sources: KVSources) -> Brought:
        """Bring KV for a request, unless it is cancelled meanwhile: Cancel does not wait for a disk or for another worker. Raises
        Cancelled."""
        record.bringing = bringing = asyncio.ensure_future(sources.bring(record.named_request, record.submission.holder))
        try:
            return await bringing
        except asyncio.CancelledError:
            if record.is_cancelled:
                raise MeshCancelled("it was cancelled while KV came for it") from None
            raise
        finally:
            record.bringing = None

    async def _restated(self, record: DecodeRequest) -> ReservedBlocks | None:
        if record.submission.mode is not Mode.LOCAL:
            return await self._engine.restate(record.engine_id, record.named_request)
        if self._sources is not None:  # the request has its blocks: the engine adopts what came when it plans the first step
            record.brought = await self._brought(record, self._sources)
        record.engine_entered_ns = await self._engine.run_local(record.engine_id, record.named_request)
        return record.blocks

    async def _commit(
        self, record: DecodeRequest, attempt: int, committed: CommittedTokens, handoff: Handoff, accept: Callable[[], None]
    ) -> None:
        async with self._locks(record.request_id):
            record.reservation = transition(record.reservation, Committed(attempt), time.monotonic())
            accept()
            record.handoff = handoff
            self._spans.begin(record, monotonic_ns())
            try:
                await self._start(record, committed)
            except Exception as error:
                await self._end(record, Failed(f"it could not start: {error}"), released_by_worker(str(error)))
                raise

    async def _start(self, record: DecodeRequest, committed: CommittedTokens) -> None:
        await hit_async("decode.committed")
        # The transition precedes the engine's call, because tokens may come before the call returns.
        record.reservation = transition(record.reservation, Started(), time.monotonic())
        await self._engine.start(record.engine_id, committed.tokens, committed.draft_states, is_exact=committed.is_exact)
        await hit_async("decode.running")

    async def _cancel(self, request_id: str, reason: str) -> bool:
        coming = self._by_request.get(request_id)
        if coming is not None and coming.bringing is not None:
            coming.is_cancelled = True
            coming.bringing.cancel()
        async with self._locks(request_id):
            record = self._by_request.get(request_id)
            if record is None:
                self._ended.note_early_cancel(request_id, time.monotonic())
                return False
            if record.is_released:
                self._forget(record, OUTPUT_GONE)
                return False
            return await self._end(record, Cancelled(reason or "cancelled"), None)

    async def _end_under_lock(self, record: DecodeRequest, event: Event, failure: MeshError | None) -> bool:
        async with self._locks(record.request_id):
            if record.is_released:
                return False
            return await self._end(record, event, failure)

    async def _end(self, record: DecodeRequest, event: Event, failure: MeshError | None) -> bool:
        after = transition(record.reservation, event, time.monotonic())
        if after.state is not State.RELEASED:
            return False  # the lease was renewed meanwhile
        record.reservation = after
        reason = after.released_reason or "released"
        self._spans.end(record, reason, failure)
        with log.about(record.trace_name):  # log under the request's own trace, not under that of the caller
            logger.info("request %s attempt %d released: %s", record.request_id, record.submission.attempt, reason)
        await self._free(record, failure or MeshCancelled(reason))
        if failure is not None:
            record.token_stream.post(failed_event(record.request_id, record.submission.attempt, failure))
        return True

    async def _free(self, record: DecodeRequest, ending: MeshError | None) -> None:
        self._forget(record, ending)
        await self._quiesce(record.reservation_id)
        start(self._release(record))

    async def _release(self, record: DecodeRequest) -> None:
        """Release a request in the engine, which may have to end a step before."""
        try:
            await self._engine.release(record.engine_id)
        finally:  # an engine that has stopped holds nothing
            self._set_inactive(record)

    def _set_inactive(self, record: DecodeRequest) -> None:
        """Record that the request holds nothing in the engine any more."""
        self._active.pop(record.engine_id, None)
        if not self._active:
            self._idle.set()

    def _on_finished(self, record: DecodeRequest) -> None:
        """Handle the last token; the engine has freed the blocks. The output is kept for a router that lost its stream."""
        record.reservation = transition(record.reservation, Finished(), time.monotonic())
        self._spans.end(record)
        self._sinks.remove(record.engine_id)
        self._set_inactive(record)
        self._kept.append((time.monotonic() + self._settings.keep_output_s, record))

    def _on_not_finite(self, record: DecodeRequest) -> None:
        """End a request for which no token could be drawn, with all of its choices; others go on."""
        if not record.is_ending and not record.is_released:
            record.is_ending = True
            start(self.end(record, Failed("its logits are not finite"), DataLoss.of_logits()))

    def _remember(self, record: DecodeRequest) -> None:
        self._by_request[record.request_id] = self._active[record.engine_id] = record
        self._idle.clear()
        self._by_reservation[record.reservation_id] = record
        record.token_stream.records[record.request_id] = record
        self._sinks.add(record.engine_id, record)

    def _forget(self, record: DecodeRequest, ending: MeshError | None) -> None:
        """Drop a request. `ending` is kept as a tombstone for late messages; None: no tombstone is needed."""
        self._by_request.pop(record.request_id, None)
        self._by_reservation.pop(record.reservation_id, None)
        record.token_stream.forget(record)
        self._sinks.remove(record.engine_id)
        if ending is not None:
            self._ended.note(record.request_id, record.submission.attempt, ending, time.monotonic())

    def _engine_id(self, request_id: str) -> str:
        return f"d:{request_id}:{next(self._serial)}"
