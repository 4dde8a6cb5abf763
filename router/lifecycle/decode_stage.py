"""The stage decode: a decode worker generates until every choice has ended, here or where the request has moved to meanwhile.

asked to migrate (`router/fleet/migration.py` asks) ─► place, reserve and prefill elsewhere while the present session goes on ─►
its tokens come: the present session is left. Without room elsewhere, or after any failure there, the request stays.
"""

import asyncio
import logging
from collections.abc import Sequence

from pdmesh.runtime.errors import MeshError, ResourceExhausted, Unavailable
from pdmesh.v1 import worker_pb2
from router.context import RouterContext
from router.fleet.circuit_breaker import Role
from router.lifecycle.decode_session import DecodeSession, WorkerLost
from router.lifecycle.placement import NoRoomElsewhere
from router.lifecycle.request import Assignment, Dispatch, DispatchStage, Request, run_in_order
from router.routing.worker_reports import kind_of
from router.telemetry.timings import RequestTimings, Spans, now_ns

MIN_TIMED_STEPS = 8
"""The step time of a session with fewer steps is not recorded: it says little."""

logger = logging.getLogger(__name__)


class DecodeStage:
    """Wait until every choice of a prefilled dispatch has ended. Raises WorkerLost, DeadlineExceeded.

    A migration runs `stages_before`, place to prefill, for the next session.
    """

    def __init__(self, core: RouterContext, stages_before: Sequence[DispatchStage]) -> None:
        self._core = core
        self._stages_before = stages_before

    async def run(self, dispatch: Dispatch) -> None:
        """Wait for the end of the session, or of those that follow migrations."""
        request, assignment = dispatch.request, dispatch.assigned
        if worker_pb2.ENGINE_LACK_REPRODUCIBLE not in assignment.session.info.lacks:  # the two sessions of a move must agree
            self._core.migratable.add(request)
        try:
            while not await self._is_over(request, assignment.session):
                assignment = await self._move(request, assignment)
        finally:
            self._core.migratable.discard(request)
            request.move = None
        assignment.finished()
        if request.client_stream.failed:  # the client is too slow: the tracker must not be filled further
            raise Unavailable("the client's stream has failed")

    async def _is_over(self, request: Request, session: DecodeSession) -> bool:
        """Wait for the end of `session`; return False when the request was asked to move before. Raises WorkerLost, MeshError."""
        request.session, request.ran_on = session, session.info
        since_ns, since_steps = now_ns(), _num_steps(request, session)
        asked = request.move = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait((session.ended, asked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            request.was_stopped |= session.incarnation.was_stopped_since(since_ns / 1e9)
        self._note_step_time(request, session, since_ns, since_steps)
        if session.ended.done():
            _raise(session)
            return True
        return False

    async def _move(self, request: Request, assignment: Assignment) -> Assignment:
        """Run `_try_move` in a span."""
        assert request.move is not None
        reason = request.move.result()
        spans = request.timings.spans.moving(now_ns(), assignment.session.info.worker_id, reason)
        now_at = assignment
        try:
            now_at = await self._try_move(request, assignment, reason, spans)
            return now_at
        finally:
            spans.moved(None if now_at is assignment else now_at.session.info.worker_id)

    async def _try_move(self, request: Request, assignment: Assignment, reason: str, spans: Spans) -> Assignment:
        """Prepare a session elsewhere while the present one goes on; when that one ends meanwhile, the next is needed only if it
        was lost. Return the assignment where the request is now."""
        old = assignment.session
        arriving = asyncio.create_task(self._arrive(request, old, spans), name=f"move {old.wire_id}")
        try:
            new = await _arrival(arriving, old)
        except NoRoomElsewhere:
            return assignment
        except (WorkerLost, MeshError) as error:
            logger.info("%s stays on %s: %s", old.wire_id, old.info.worker_id, error)
            return assignment
        except Exception:  # the present session is healthy: a bug in a migration must not end it
            logger.exception("%s stays on %s: its move failed", old.wire_id, old.info.worker_id)
            return assignment
        if new is None:
            return assignment
        info = new.session.info
        logger.info("%s goes on at %s: %s", old.wire_id, info.worker_id, reason)
        request.timings.parts.decode_worker = info.worker_id
        self._core.num_migrations += 1
        request.session, request.kind = new.session, kind_of(info)
        assignment.finished()
        old.leave(f"it goes on elsewhere: {reason}")
        return new

    async def _arrive(self, request: Request, old: DecodeSession, spans: Spans) -> Assignment:
        """Return the next assignment when its tokens come. It has timings of its own: the client has a first token already.

        Raises NoRoomElsewhere, WorkerLost, MeshError."""
        request.kind = kind_of(old.info)
        dispatch = request.new_dispatch(RequestTimings(now_ns(), spans=spans), leaving=old)
        try:
            await run_in_order(self._stages_before, dispatch)
            session = dispatch.assigned.session
            await _first(session.flowing, session.ended)
            if session.ended.done():
                _raise(session)
        except BaseException:
            if dispatch.assignment is not None:
                dispatch.assignment.session.leave("its move came to nothing")
            raise
        return dispatch.assigned

    def _note_step_time(self, request: Request, session: DecodeSession, since_ns: int, since_steps: int) -> None:
        """Record the time of a step, not of a token: a worker whose drafts are rejected is not slow."""
        num_steps = _num_steps(request, session) - since_steps
        since_ns = max(since_ns, request.timings.first_received_ns or 0)  # before it, the prompt may be computed here
        if session.ended.done() and session.ended.result() is not None:
            return
        self._core.health_recorder.succeeded(session.key, Role.DECODE)
        if num_steps >= MIN_TIMED_STEPS and not session.incarnation.was_stopped_since(since_ns / 1e9):
            self._core.health_recorder.took(session.key, Role.DECODE, (now_ns() - since_ns) / 1e9 / num_steps)


def _num_steps(request: Request, session: DecodeSession) -> int:
    """Return the tokens so far, without accepted drafts in `session`, which took no step of their own."""
    return request.num_tokens - request.drafts.accepted_in(session.wire_id) // request.prepared.num_choices


def _raise(session: DecodeSession) -> None:
    result = session.ended.result()
    if result is not None:
        raise result


async def _first(event: asyncio.Event, future: asyncio.Future[WorkerLost | MeshError | None]) -> None:
    """Wait until either is done."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((waiting, future), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _arrival(arriving: asyncio.Task[Assignment], old: DecodeSession) -> Assignment | None:
    """Return the next assignment; None when `old` has finished meanwhile. Unless it is returned, a session that was begun
    elsewhere is left. Raises NoRoomElsewhere, WorkerLost, MeshError."""
    taken: Assignment | None = None
    try:
        await asyncio.wait((arriving, old.ended), return_when=asyncio.FIRST_COMPLETED)
        if old.ended.done() and not isinstance(old.ended.result(), WorkerLost):
            return None
        await asyncio.wait((arriving,))
        taken = arriving.result()
        return taken
    finally:
        arriving.cancel()
        await asyncio.wait((arriving,))
        if taken is None and not arriving.cancelled() and arriving.exception() is None:
            arriving.result().session.leave("the request has ended meanwhile")


# What the next turn of a conversation finds.

CHEAP_OUTPUT_TOKENS = 512
"""So many tokens of output are hashed in some 30 microseconds."""


def remember_turn(core: RouterContext, request: Request) -> None:
    """Remember where the KV of a request is that has ended: its prompt and the output of each choice, without the last token,
    which has no KV. Those of chats without a session are remembered where that is cheap."""
    prepared, tracker, worker = request.prepared, request.tracker, request.ran_on
    is_wanted = bool(prepared.session_id) and not prepared.session_final and not prepared.is_released
    is_cheap = prepared.is_chat and tracker.num_tokens <= CHEAP_OUTPUT_TOKENS
    if worker is not None and tracker.anything_emitted and (is_wanted or is_cheap):
        outputs = [choice.token_ids[:-1] for choice in tracker.history()]
        work = core.prefixes.remember_output(prepared, outputs, worker)
        core.background.spawn(work, f"remember the output of {prepared.request_id}")


def end_session(core: RouterContext, request: Request, error: BaseException | None) -> None:
    """Release the session of a last request that has ended, however it has: workers that were no part of it retain what earlier
    requests left. One that was refused before any worker had it goes on, since its client sends it again."""
    prepared = request.prepared
    is_refused = isinstance(error, ResourceExhausted | Unavailable) and not request.is_submitted
    if prepared.session_final and not is_refused:
        core.releases.release_ended(prepared.tenant, prepared.session_id, prepared.model.name)
