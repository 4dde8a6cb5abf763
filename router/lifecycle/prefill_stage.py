"""How the KV of one stay comes into being: Prefill calls, one after another, until decode goes on by itself.

    REMOTE ─► Prefill ─┬─ committed ─────────────────────────────────────────► decode goes on
                ▲      ├─ failed ─► Submit(attempt + 1) ─┬─ another prefill worker ─┐
                │      └─ late ───► the same: a hedge    └─ LOCAL ─────────────────►│ decode goes on
                └───────────────────────────────────────────────────────────────────┘

A hedge (router/fleet/hedging.py says when) submits the next attempt while the late call still runs. Decode takes it: the late
worker is fenced, and told to stop. Decode refuses it, because the late one has just committed: then that call just goes on.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from pdmesh.runtime.errors import FailedPrecondition, MeshError
from pdmesh.runtime.telemetry.spans import Attributes
from pdmesh.v1 import common_pb2, prefill_pb2
from router.config import RouterConfig
from router.context import RouterContext
from router.fleet.circuit_breaker import Role
from router.fleet.heartbeat import HeartbeatClock
from router.lifecycle.decode_session import WorkerLost
from router.lifecycle.output import OutputTracker, TokenChunk
from router.lifecycle.placement import Assignment, PlacementRequest, Placer
from router.lifecycle.prefill_call import PrefillCall, PrefillEnd, PrefillTarget
from router.routing.worker_snapshot import Mode, WorkerKey
from router.tokenization.prepared_request import PreparedRequest

OUTCOME_GRACE_S = 1.0
"""How long a Prefill call may still report its hand-off when every choice has ended already."""
WATCH_PERIOD_S = 0.1
STALLED_SHARE = 0.6
"""Of the time after which a silent worker is lost: a request whose first token is due leaves a little earlier."""

logger = logging.getLogger(__name__)


class RequestState(Protocol):
    """The request that is being filled for."""

    @property
    def is_winding_up(self) -> bool:
        """Workers have finished every choice."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at a reservation, forced to `emitted`; `prefill` None: decode computes, and nothing is left to do here."""

    prefill: PrefillTarget | None
    reservation: common_pb2.Reservation
    emitted: list[common_pb2.EmittedChoice]


class PrefillStage:
    """`run` to its end once for each stay. Cancelling it cancels the Prefill call under way."""

    def __init__(
        self,
        core: RouterContext,
        prepared: PreparedRequest,
        tracker: OutputTracker,
        state: RequestState,
        placed: Assignment,
        need: PlacementRequest,
    ) -> None:
        self._core = core
        self._prepared = prepared
        self._tracker = tracker
        self._state = state
        self._session = placed.session
        self._need = need
        self._timings = need.timings
        self._placer = Placer(core)
        self._first = Attempt(placed.prefill, placed.reservation, need.emitted)
        self._tried: frozenset[WorkerKey] = frozenset()

    async def run(self) -> None:
        """Returns when decode goes on by itself, or its stay has ended. Raises LegLost, MeshError."""
        attempt: Attempt | None = self._first
        while attempt is not None and attempt.prefill is not None:
            attempt = await self._prefill(attempt, attempt.prefill)

    async def _prefill(self, attempt: Attempt, prefill: PrefillTarget) -> Attempt | None:
        """One Prefill call. Returns the next attempt; None when none is needed.

        Where first tokens end every choice, the call may still report: then decode has been told already and needs no Cancel.
        """
        began = asyncio.get_running_loop().time()
        call = PrefillCall(prefill, lambda first: self._on_first_tokens(prefill, began, first))
        spans = self._timings.spans
        self._timings.prefilling(call.worker_id)
        spans.took_part(prefill.worker)
        request = self._prepared.token_request(attempt.emitted)
        running = asyncio.create_task(
            call.run(self._session, self._prepared, attempt.reservation, request, spans.prefill_metadata),
            name=f"prefill {self._session.wire_id}",
        )
        try:
            hedge = await self._watch(running, call, prefill, began)
            if hedge is not None or not running.done():
                return hedge
            end = running.result()
            spans.prefilled(_moved(end), end.problem)
            if self._is_committed(prefill, call, end):
                return None
            return await self._after_failure(prefill, end)
        finally:
            spans.prefilled({}, None if self._state.is_winding_up or self._session.ended.done() else "it was given up")
            running.cancel()

    async def _watch(
        self, running: asyncio.Task[PrefillEnd], call: PrefillCall, prefill: PrefillTarget, began: float
    ) -> Attempt | None:
        """Until the call or the stay has ended; the attempt that follows if the call was hedged."""
        hedging, loop = self._core.hedging, asyncio.get_running_loop()
        hedging.budget.earn()
        bound_s = hedging.bound_s(prefill.sent.tokens, prefill.predicted_s)
        silence = HeartbeatClock(_stalled_s(self._core.config), WATCH_PERIOD_S)
        heard_at = prefill.incarnation.reported_at
        may_hedge = True
        while not running.done() and not self._session.ended.done():
            is_due = may_hedge and not call.got_first_tokens and not self._session.started
            await asyncio.wait(
                (running, self._session.ended),
                timeout=WATCH_PERIOD_S if is_due else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if prefill.incarnation.reported_at != heard_at:
                heard_at = prefill.incarnation.reported_at
                silence.heard()
            is_silent = silence.tick(loop.time())
            if not is_due or running.done() or self._session.ended.done() or call.got_first_tokens or self._session.started:
                continue
            if hedging.may_hedge(loop.time() - began, bound_s, silent=is_silent):
                hedge = await self._hedge(prefill, loop.time() - began, silent=is_silent)
                if hedge is not None:
                    return hedge
                may_hedge = False
        if self._state.is_winding_up:
            await asyncio.wait((running,), timeout=OUTCOME_GRACE_S)
        return None

    async def _hedge(self, prefill: PrefillTarget, waited_s: float, *, silent: bool) -> Attempt | None:
        """The next attempt while the late one still runs; None when decode does not take it: the late one goes on."""
        late = f"no first token from {prefill.incarnation.info.worker_id} within {waited_s:.2f} s"
        if silent:
            self._core.health_recorder.failed(prefill.key, Role.PREFILL, late)
        else:
            self._core.health_recorder.took(prefill.key, Role.PREFILL, self._slowness(prefill, waited_s))
        self._tried |= {prefill.key}
        following, emitted = self._next_prefill(), self._tracker.history()
        try:
            reservation = await self._session.submit(_mode(following), emitted, because=f"{late}; it is fenced")
        except MeshError as error:
            _give_up(following)
            self._timings.withdrawn(error.message)
            logger.info("%s: %s; it stays there all the same: %s", self._session.wire_id, late, error.message)
            return None
        except asyncio.CancelledError:
            _give_up(following)
            raise
        self._core.num_hedges += 1
        self._count_retry(f"{late}; it is fenced")
        return Attempt(following, reservation, emitted)

    async def _after_failure(self, prefill: PrefillTarget, end: PrefillEnd) -> Attempt | None:
        """The next attempt at the same reservation; None when decode runs already: the last one has succeeded after all."""
        self._blame(prefill, end)
        self._tried |= {prefill.key}
        self._note_retry(end.problem or "")
        following, emitted = self._next_prefill() if end.retryable else None, self._tracker.history()
        session = self._session
        try:
            return Attempt(following, await session.submit(_mode(following), emitted), emitted)
        except BaseException as error:
            _give_up(following)
            if not isinstance(error, MeshError):
                raise
            if isinstance(error, FailedPrecondition) and session.delivered:
                return None
            said = "was refused" if isinstance(error, FailedPrecondition) else "failed"
            raise WorkerLost(f"attempt {session.attempt} on {session.info.worker_id} {said}: {error.message}") from error

    def _is_committed(self, prefill: PrefillTarget, call: PrefillCall, end: PrefillEnd) -> bool:
        """Does decode go on by itself? Raises LegLost when it does but the first tokens, which only prefill had, did not come."""
        if end.problem is None:
            if not call.got_first_tokens:
                raise WorkerLost(f"prefill worker {call.worker_id} reported a hand-off without first tokens")
            self._note_handoff(prefill, end)
            return True
        if self._session.ended.done():
            return True
        if self._session.started and not call.got_first_tokens:
            raise WorkerLost(f"{end.problem}; the hand-off was done, its first tokens are lost")
        return self._session.started

    def _next_prefill(self) -> PrefillTarget | None:
        """Several choices under way can only be continued LOCAL."""
        if self._prepared.num_choices > 1 and self._tracker.anything_emitted:
            return None
        return self._placer.next_prefill(self._session, self._need, self._tried)

    def _on_first_tokens(self, prefill: PrefillTarget, began: float, first: prefill_pb2.FirstTokens) -> None:
        seconds = asyncio.get_running_loop().time() - began
        self._core.health_recorder.took(prefill.key, Role.PREFILL, self._slowness(prefill, seconds))
        if not self._need.started:  # what continues is cached, who knows how much of it
            self._core.hedging.times.record(prefill.sent.tokens, seconds)
        self._timings.prefilled(first.timings)
        wants_logprobs = self._prepared.sampling.HasField("logprobs")
        spans = [
            TokenChunk(
                token.choice, token.index, [token.token_id], (token.logprobs,) if wants_logprobs else (), token.finish_reason
            )
            for token in first.tokens
        ]
        self._session.deliver_first(spans)

    def _slowness(self, prefill: PrefillTarget, seconds: float) -> float:
        """Observed ÷ expected. What lies below the least bound of a hedge hurts nobody, and its quotient says nothing."""
        expected_s = prefill.predicted_s or self._core.hedging.expected_s(prefill.sent.tokens) or seconds
        least_s = self._core.hedging.limits.min_s
        return max(seconds, least_s) / max(expected_s, least_s)

    def _note_handoff(self, prefill: PrefillTarget, end: PrefillEnd) -> None:
        self._core.health_recorder.succeeded(prefill.key, Role.PREFILL)
        if end.outcome is None:
            return
        session = self._session
        if end.outcome.status == prefill_pb2.HANDOFF_STATUS_FINISHED:
            if not end.outcome.message:  # else decode could not be told, and holds its blocks until we cancel
                session.finished()
            return
        parts = self._timings.parts
        parts.kv_exposed_ns = end.outcome.kv_exposed_ns
        parts.kv_bytes, parts.transport = end.outcome.kv_bytes, end.outcome.transport
        decode = session.worker.current
        holders = (prefill.incarnation,) if decode is None else (prefill.incarnation, decode)
        self._placer.remember(self._prepared, holders)

    def _note_retry(self, problem: str) -> None:
        self._timings.failed(problem)
        self._count_retry(problem)

    def _count_retry(self, problem: str) -> None:
        self._timings.parts.num_retries += 1
        logger.warning("%s attempt %d: %s", self._session.wire_id, self._session.attempt, problem)

    def _blame(self, prefill: PrefillTarget, end: PrefillEnd) -> None:
        """A hand-off that failed may be either side's fault: who is part of many is left out."""
        if end.at_fault:
            self._core.health_recorder.failed(prefill.key, Role.PREFILL, end.problem or "")
        if end.outcome is not None:
            self._core.health_recorder.failed(self._session.key, Role.DECODE, end.problem or "")


def _stalled_s(config: RouterConfig) -> float:
    """Seconds of silence in which at least two reports are missing."""
    return max(STALLED_SHARE * config.stream_timeout_s, 2.5 * config.report_period_ms / 1000)


def _moved(end: PrefillEnd) -> Attributes:
    """What a hand-off moved, for its span."""
    outcome = end.outcome
    if outcome is None:
        return {}
    return {"pdmesh.kv.bytes": outcome.kv_bytes, "pdmesh.kv.transport": outcome.transport}


def _mode(prefill: PrefillTarget | None) -> Mode:
    return Mode.LOCAL if prefill is None else Mode.REMOTE


def _give_up(prefill: PrefillTarget | None) -> None:
    """It will not be asked to compute anything."""
    if prefill is not None:
        prefill.computed()
