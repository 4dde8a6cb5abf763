"""The stage prefill: one Prefill call, or nothing if the decode worker computes the prompt itself (LOCAL).

    REMOTE ─► Prefill ─┬─ committed ─► decode
                       ├─ failed ────► reserve: Submit(attempt + 1), for another prefill worker or LOCAL
                       └─ late ──────► a hedge: the same Submit beside the late call, then prefill again
    LOCAL ───────────────────────────► decode

A hedge (`hedging.py` says when) submits the next attempt while the late call still runs. If the decode worker takes it, the late
worker is fenced and told to stop. If it refuses, because the late worker has just committed, that call goes on.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

import grpc
import grpc.aio

from pdmesh.runtime import failpoints
from pdmesh.runtime.errors import MeshError, error_from_rpc
from pdmesh.runtime.telemetry.propagation import Metadata
from pdmesh.runtime.telemetry.spans import Attributes
from pdmesh.v1 import common_pb2, prefill_pb2
from router.context import RouterContext, time_left_ms, time_left_s
from router.fleet.change_notifier import unless
from router.fleet.circuit_breaker import Role
from router.lifecycle.decode_session import WorkerLost
from router.lifecycle.kv_holder import find_holder, local_holder
from router.lifecycle.output import TokenChunk
from router.lifecycle.placement import ReserveStage, give_up, is_sooner_elsewhere, next_prefill
from router.lifecycle.request import Assignment, Dispatch, PrefillTarget
from router.routing.routing_request import ttft_left_ms

OUTCOME_GRACE_S = 1.0
"""Time in which a Prefill call may still report its hand-off after every choice has ended."""
WATCH_PERIOD_S = 0.1
VERY_LATE = 2.0
"""A prompt is hedged after so many times the bound, though its worker goes on and is expected to be done sooner."""

_NO_FAULT = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.FAILED_PRECONDITION)

_UNANSWERED = (grpc.StatusCode.DEADLINE_EXCEEDED.value[0], grpc.StatusCode.UNAVAILABLE.value[0])

logger = logging.getLogger(__name__)


class PrefillStage:
    """Bring the prompt's KV to the decode worker, which then decodes by itself; or return when the decode session has ended.

    A call that fails re-enters at reserve, a hedge at prefill. Raises WorkerLost when the first tokens are lost.
    """

    def __init__(self, core: RouterContext) -> None:
        self._core = core

    async def run(self, dispatch: Dispatch) -> type[ReserveStage | PrefillStage] | None:
        """Make one Prefill call. Cancelling this cancels the call."""
        assignment = dispatch.assigned
        again = None if assignment.prefill is None else await PrefillCall(self._core, dispatch, assignment.prefill).run()
        if again is None:
            dispatch.timings.spans.filled()
        return again


@dataclass(frozen=True)
class PrefillEnd:
    """Hold the end of a call: `outcome` as reported (None: the call broke), and the problem in words unless it succeeded.

    `at_fault`: the worker caused the problem; one that is full or drains did not."""

    outcome: prefill_pb2.HandoffOutcome | None
    problem: str | None
    retryable: bool = True
    at_fault: bool = True


class PrefillCall:
    """Make one Prefill call of a dispatch: first tokens, then the outcome of the hand-off, or the loss of the worker."""

    def __init__(self, core: RouterContext, dispatch: Dispatch, prefill: PrefillTarget) -> None:
        self._core = core
        self._dispatch = dispatch
        self._prefill = prefill
        self._request = dispatch.request
        self._timings = dispatch.timings
        self._session = dispatch.assigned.session
        self._began = asyncio.get_running_loop().time()
        self._got_first_tokens = False
        self._holder: prefill_pb2.KVHolder | None = None  # that the worker may fetch KV from

    async def run(self) -> type[ReserveStage | PrefillStage] | None:
        """Return the stage of the next attempt; None when none is needed.

        If first tokens end every choice, the call may still report: then the decode worker knows and needs no Cancel.
        """
        spans = self._timings.spans
        self._timings.prefilling(self._worker_id)
        spans.took_part(self._prefill.worker)
        call = self._call(self._dispatch.assigned, spans.prefill_metadata)
        running = asyncio.create_task(call, name=f"prefill {self._session.wire_id}")
        try:
            is_hedged = await self._watch(running)
            if is_hedged:
                return PrefillStage
            if not running.done():
                return None
            end = running.result()
            spans.prefilled(_moved(end), end.problem)
            return None if self._is_committed(end) else self._after_failure(end)
        finally:
            is_over = self._request.is_winding_up or self._session.ended.done()
            spans.prefilled({}, None if is_over else "it was given up")
            running.cancel()

    async def _call(self, attempt: Assignment, metadata: Metadata | None) -> PrefillEnd:
        """Make the call. Raises nothing but CancelledError and DataLoss: any other failure is a reason to try another worker."""
        prepared = self._request.prepared
        self._holder = self._find_holder(attempt.reservation)
        message = prefill_pb2.PrefillRequest(
            request_id=self._session.wire_id,
            request=prepared.token_request(attempt.emitted),
            reservation=attempt.reservation,
            identity=self._session.info.identity,
            time_left_ms=time_left_ms(prepared.deadline),
            holder=self._holder,
            ttft_left_ms=0 if attempt.emitted else ttft_left_ms(self._core, prepared, self._timings.received_ns),
        )
        timeout_s = time_left_s(prepared.deadline)
        call = self._prefill.worker.prefill.Prefill(message, timeout=timeout_s, metadata=metadata)
        try:
            end = await unless(self._prefill.incarnation.lost, self._read(call))
            return end or PrefillEnd(None, f"prefill worker {self._worker_id} fell silent")
        finally:
            call.cancel()
            self._prefill.computed()

    def _find_holder(self, reservation: common_pb2.Reservation | None) -> prefill_pb2.KVHolder | None:
        """Return the worker that has KV which the prefill worker may fetch: the decode worker, of an earlier turn, which has it
        pinned, or another one that has more by the index."""
        pinned = (self._session.key, reservation.num_cached_tokens if reservation is not None else 0)
        return find_holder(self._core, self._dispatch, self._prefill.incarnation.info, self._session.wire_id, pinned)

    async def _read(self, call: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]) -> PrefillEnd:
        try:
            async for event in call:
                if event.HasField("first_tokens"):
                    await failpoints.hit_async("router.first_token")
                    self._got_first_tokens = True
                    self._prefill.computed()
                    self._take_first_tokens(event.first_tokens)
                elif event.HasField("outcome"):
                    return self._end_of(event.outcome)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DATA_LOSS:  # every worker would compute the same
                raise error_from_rpc(error) from error
            problem = f"prefill worker {self._worker_id} answered {error.code().name}: {error.details()}"
            return PrefillEnd(None, problem, at_fault=error.code() not in _NO_FAULT and not self._is_draining)
        return PrefillEnd(None, f"prefill worker {self._worker_id} ended its stream without an outcome")

    def _end_of(self, outcome: prefill_pb2.HandoffOutcome) -> PrefillEnd:
        if outcome.status in (prefill_pb2.HANDOFF_STATUS_COMMITTED, prefill_pb2.HANDOFF_STATUS_FINISHED):
            return PrefillEnd(outcome, None)
        return PrefillEnd(outcome, f"hand-off from {self._worker_id} failed: {outcome.message}", outcome.retryable)

    async def _watch(self, running: asyncio.Task[PrefillEnd]) -> bool:
        """Wait until the call or the session has ended. Return True when the call was hedged before."""
        hedging, loop, prefill = self._core.hedging, asyncio.get_running_loop(), self._prefill
        hedging.budget.earn()
        bound_s = hedging.bound_s(prefill.sent.tokens, prefill.predicted_s)
        may_hedge = True
        while not running.done() and not self._session.ended.done():
            is_due = may_hedge and self._waits_for_first()
            await asyncio.wait(
                (running, self._session.ended),
                timeout=WATCH_PERIOD_S if is_due else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            is_silent = prefill.worker.is_suspect
            if self._was_stopped:
                may_hedge = False  # its time says nothing
            if not is_due or running.done() or self._session.ended.done() or not self._waits_for_first():
                continue
            waited_s = loop.time() - self._began
            if may_hedge and not is_silent and self._is_done_sooner_here(waited_s, bound_s):
                continue
            if may_hedge and hedging.may_hedge(waited_s, bound_s, silent=is_silent):
                if await self._hedge(waited_s, silent=is_silent):
                    return True
                may_hedge = False
        if self._request.is_winding_up:
            await asyncio.wait((running,), timeout=OUTCOME_GRACE_S)
        return False

    def _is_done_sooner_here(self, waited_s: float, bound_s: float) -> bool:
        """Return whether a late prompt is given more time, as its worker is only busy."""
        may_hedge = bound_s <= waited_s < VERY_LATE * bound_s and self._core.hedging.budget.has_one
        return may_hedge and not is_sooner_elsewhere(self._core, self._dispatch, self._prefill)

    @property
    def _worker_id(self) -> str:
        return self._prefill.incarnation.info.worker_id

    @property
    def _is_draining(self) -> bool:
        return self._prefill.incarnation.load.draining or self._prefill.incarnation.is_stopped

    def _waits_for_first(self) -> bool:
        return not self._got_first_tokens and not self._session.started

    async def _hedge(self, waited_s: float, *, silent: bool) -> bool:
        """Submit the next attempt while the late one runs. Return False when the decode worker refuses: the late one goes on."""
        prefill, session = self._prefill, self._session
        late = f"no first token from {self._worker_id} within {waited_s:.2f} s"
        if silent:
            self._core.health_recorder.failed(prefill.key, Role.PREFILL, late, lost=True)
            self._request.lost_on.add(prefill.info.revision)
        else:
            self._core.health_recorder.took(prefill.key, Role.PREFILL, self._slowness(waited_s))
            self._fetch_failed()  # it may be why the worker is late: the next one is not to wait for it, too
        self._dispatch.tried |= {prefill.key}
        hedge = self._next_attempt()
        try:
            holder = local_holder(self._core, self._dispatch, session.info, session.wire_id, hedge.mode)
            reservation = await session.submit(hedge.mode, hedge.emitted, because=f"{late}; it is fenced", holder=holder)
        except MeshError as error:
            give_up(hedge.prefill)
            self._timings.withdrawn(error.message)
            logger.info("%s: %s; it stays there all the same: %s", session.wire_id, late, error.message)
            return False
        except asyncio.CancelledError:
            give_up(hedge.prefill)
            raise
        self._core.num_hedges += 1
        self._count_retry(f"{late}; it is fenced")
        self._dispatch.assignment = replace(hedge, reservation=reservation)
        return True

    def _after_failure(self, end: PrefillEnd) -> type[ReserveStage]:
        """Choose the next attempt at the same reservation: another prefill worker, or the decode worker itself."""
        self._note_failure(end)
        self._dispatch.tried |= {self._prefill.key}
        self._timings.failed(end.problem or "")
        self._count_retry(end.problem or "")
        self._dispatch.assignment = self._next_attempt(retryable=end.retryable)
        return ReserveStage

    def _next_attempt(self, *, retryable: bool = True) -> Assignment:
        """Return the next attempt. With output of several choices it can only be LOCAL."""
        tracker, target = self._request.tracker, None
        if retryable and not (self._request.prepared.num_choices > 1 and tracker.anything_emitted):
            target = next_prefill(self._core, self._dispatch)
        return replace(self._dispatch.assigned, prefill=target, emitted=tracker.history())

    def _is_committed(self, end: PrefillEnd) -> bool:
        """Return whether the decode worker goes on by itself. Raises WorkerLost if it does without the first tokens, which only
        the prefill worker had."""
        if end.problem is None:
            if not self._got_first_tokens:
                raise WorkerLost(f"prefill worker {self._worker_id} reported a hand-off without first tokens")
            self._note_handoff(end)
            return True
        if self._session.ended.done():
            return True
        if self._session.started and not self._got_first_tokens:
            raise WorkerLost(f"{end.problem}; the hand-off was done, its first tokens are lost")
        return self._session.started

    def _take_first_tokens(self, first: prefill_pb2.FirstTokens) -> None:
        prefill, fetch_s = self._prefill, first.timings.fetch_ns / 1e9
        seconds = max(0.0, asyncio.get_running_loop().time() - self._began - fetch_s)  # a slow holder makes it no slow worker
        self._request.was_stopped |= self._was_stopped
        if not self._was_stopped:
            self._core.health_recorder.took(prefill.key, Role.PREFILL, self._slowness(seconds))
            if not self._dispatch.started and not fetch_s and not first.timings.restore_ns:  # else an unknown part is cached
                self._core.hedging.times.record(prefill.sent.tokens, seconds)
        self._timings.prefilled(first.timings)
        prefill.incarnation.prefilled(first.timings)
        if first.timings.fetch_failed:
            self._fetch_failed()
        wants_logprobs = self._request.prepared.sampling.HasField("logprobs")
        self._session.deliver_first([_chunk_of(token, wants_logprobs=wants_logprobs) for token in first.tokens])

    def _fetch_failed(self) -> None:
        if self._holder is not None:
            self._request.fetch_failed(self._holder)

    def _slowness(self, seconds: float) -> float:
        """Return observed ÷ expected seconds. Times below the least bound of a hedge are harmless and count as that bound."""
        prefill, hedging = self._prefill, self._core.hedging
        expected_s = prefill.predicted_s or hedging.expected_s(prefill.sent.tokens) or seconds
        least_s = hedging.limits.min_s
        return max(seconds, least_s) / max(expected_s, least_s)

    def _note_handoff(self, end: PrefillEnd) -> None:
        prefill, session = self._prefill, self._session
        self._core.health_recorder.succeeded(prefill.key, Role.PREFILL)
        if end.outcome is None:
            return
        if end.outcome.status == prefill_pb2.HANDOFF_STATUS_FINISHED:
            if not end.outcome.message:  # else the decode worker does not know, and keeps its blocks until the router cancels
                session.finished()
            return
        parts = self._timings.parts
        parts.kv_exposed_ns = end.outcome.kv_exposed_ns
        parts.kv_bytes, parts.transport = end.outcome.kv_bytes, end.outcome.transport
        self._core.prefixes.remember(self._request.prepared, (prefill.info, session.info))

    def _count_retry(self, problem: str) -> None:
        self._timings.parts.num_retries += 1
        logger.warning("%s attempt %d: %s", self._session.wire_id, self._session.attempt, problem)

    def _note_failure(self, end: PrefillEnd) -> None:
        """Record a failure. A failed hand-off counts against both workers: the faulty one takes part in more, and is ejected. One
        that was not answered in time counts only if both kept their heartbeats up: a machine that is busy is not broken."""
        if self._was_stopped:
            logger.info("%s: %s, and a worker was paused or asleep: it counts against none", self._session.wire_id, end.problem)
            return
        if end.outcome is not None and end.outcome.code in _UNANSWERED and self._was_late():
            logger.info("%s: %s, and heartbeats were late, too: it counts against no worker", self._session.wire_id, end.problem)
            return
        self._request.lost_on.add(self._session.info.revision)  # of the prefill worker as well
        if end.at_fault:
            is_lost = self._prefill.incarnation.lost.is_set()
            self._core.health_recorder.failed(self._prefill.key, Role.PREFILL, end.problem or "", lost=is_lost)
        if end.outcome is not None:
            self._core.health_recorder.failed(self._session.key, Role.DECODE, end.problem or "")

    @property
    def _was_stopped(self) -> bool:
        workers = (self._prefill.incarnation, self._session.incarnation)
        return any(each.was_stopped_since(self._began) for each in workers)

    def _was_late(self) -> bool:
        return any(each.was_late_since(self._began) for each in (self._prefill.incarnation, self._session.incarnation))


def _moved(end: PrefillEnd) -> Attributes:
    """Return the span attributes of what a hand-off moved."""
    outcome = end.outcome
    if outcome is None:
        return {}
    return {"pdmesh.kv.bytes": outcome.kv_bytes, "pdmesh.kv.transport": outcome.transport}


def _chunk_of(token: prefill_pb2.FirstToken, *, wants_logprobs: bool) -> TokenChunk:
    logprobs = (token.logprobs,) if wants_logprobs else ()
    return TokenChunk(token.choice, token.index, [token.token_id], logprobs, token.finish_reason, token.prompt_logprobs[:])
