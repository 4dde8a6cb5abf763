"""The course of one request through the mesh, until every choice has ended.

place ─► a stay on a decode worker: its KV comes into being (prefill_stage.py) ─► tokens until the end
stay lost ─► place again, with prompt + what was emitted: indexes go on, tokens are the same
asked to move ─► the next stay is prepared while this one goes on; when its tokens come, this one is left
(router/fleet/migration.py asks)
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from pdmesh.runtime import log
from pdmesh.runtime.errors import DeadlineExceeded, MeshError, Unavailable
from pdmesh.v1 import mesh_pb2
from router.context import RouterContext
from router.fleet.circuit_breaker import Role
from router.lifecycle.client_stream import ClientStream
from router.lifecycle.decode_session import DecodeSession, DraftTotals, WorkerLost
from router.lifecycle.output import OutputTracker, TokenChunk
from router.lifecycle.placement import Assignment, PlacementRequest, Placer
from router.lifecycle.prefill_stage import PrefillStage
from router.routing.worker_reports import kind_of
from router.routing.worker_snapshot import WorkerKey
from router.telemetry.timings import RequestTimings, Spans, now_ns
from router.tokenization.prepared_request import PreparedRequest

MIN_PACE_STEPS = 8
"""Fewer steps of a stay say nothing about how fast they come."""

Render = Callable[[TokenChunk], mesh_pb2.GenerateResponse | None]
logger = logging.getLogger(__name__)


class RequestDispatcher:
    """Acts for one request; its tokens come out of `outbox`, in order, each index once, or an error does.

    `is_winding_up`: workers have finished every choice; what is left to do ends by itself, soon. `drafts`: of all its stays.
    """

    def __init__(
        self, core: RouterContext, prepared: PreparedRequest, tracker: OutputTracker, timings: RequestTimings, render: Render
    ) -> None:
        self.client_stream = ClientStream(core.config.max_buffered_tokens, render)
        self.is_winding_up = False
        self.drafts = DraftTotals()
        self._core = core
        self._prepared = prepared
        self._tracker = tracker
        self._timings = timings
        self._placer = Placer(core)
        self._avoid: frozenset[WorkerKey] = frozenset()
        self._kind: tuple[object, ...] | None = None
        self._session: DecodeSession | None = None
        self._asked: asyncio.Future[str] | None = None  # while it can move

    async def run(self) -> None:
        """To the end. Errors go to the outbox; on cancellation both legs are told in the background."""
        log.belongs_to(self._timings.spans.trace_name)
        limit = asyncio.timeout_at(self._prepared.deadline)
        try:
            async with limit:
                while not self._tracker.all_finished:
                    await self._run_leg()
        except MeshError as error:
            self.client_stream.fail(error)
        except TimeoutError as error:
            self.client_stream.fail(DeadlineExceeded("the deadline of the request has passed") if limit.expired() else error)
        except Exception as error:  # noqa: BLE001 - the client gets INTERNAL instead of a stream that hangs
            self.client_stream.fail(error)

    def accept(self, span: TokenChunk) -> bool:
        """Tokens from whichever worker; True when no more are needed. Raises BookError. Per-token path."""
        spans = self._tracker.accept(span)
        if spans:
            self._timings.first_token()
        for new in spans:
            self.client_stream.put(new)
            if new.finish_reason and self._tracker.all_finished:
                self.is_winding_up = True
        return self.is_winding_up or self.client_stream.failed

    def next_indexes(self) -> Sequence[tuple[int, int]]:
        """For a stream that re-attaches."""
        choices = range(self._prepared.num_choices)
        return [(choice, self._tracker.next_index(choice)) for choice in choices if not self._tracker.is_finished(choice)]

    # What the mover sees (migration.Movable)

    @property
    def holder(self) -> WorkerKey | None:
        """The decode worker that it could leave now; None while it has none, or moves already."""
        return self._session.key if self._session is not None and self._asked is not None and not self._asked.done() else None

    @property
    def model(self) -> str:
        """What it asks for."""
        return self._prepared.model.name

    @property
    def num_tokens(self) -> int:
        """Of the choice that is furthest."""
        return max(self._tracker.next_index(choice) for choice in range(self._prepared.num_choices))

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        return self._prepared.sampling.max_tokens - self.num_tokens

    def ask_to_move(self, reason: str) -> None:
        """Prepare a stay elsewhere and go there, if there is room; to be called only while it has a `holder`."""
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(reason)

    async def _run_leg(self) -> None:
        """From the placement until a stay ends, here or where the request has moved to meanwhile. A loss is noted, and the caller
        goes on."""
        need = self._need(self._timings)
        placed = await self._placer.place(need)
        session = self._session = placed.session
        try:
            await self._fill(placed, need)
            (await self._follow(placed)).finished()
            self._check_outbox()
        except WorkerLost as loss:
            self._note_loss(self._session or session, loss)
        finally:
            (self._session or session).leave("the request has ended")
            self._session = None

    async def _fill(self, placed: Assignment, need: PlacementRequest) -> None:
        """Raises LegLost, MeshError."""
        await PrefillStage(self._core, self._prepared, self._tracker, self, placed, need).run()
        need.timings.spans.filled()

    async def _follow(self, placed: Assignment) -> Assignment:
        """Until the stay ends, wherever it is by then; returns that one. Raises LegLost, MeshError."""
        self._core.movers.add(self)
        try:
            while True:
                session = self._session = placed.session
                pace = (now_ns(), self._num_steps(session))
                asked = self._asked = asyncio.get_running_loop().create_future()
                await asyncio.wait((session.ended, asked), return_when=asyncio.FIRST_COMPLETED)
                self._note_pace(session, *pace)
                if session.ended.done():
                    _raise(session.ended.result())
                    return placed
                placed = await self._move(placed, asked.result())
        finally:
            self._core.movers.discard(self)
            self._asked = None

    async def _move(self, placed: Assignment, reason: str) -> Assignment:
        """`_try_move`, as a span."""
        spans = self._timings.spans.moving(now_ns(), placed.session.info.worker_id, reason)
        now_at = placed
        try:
            now_at = await self._try_move(placed, reason, spans)
            return now_at
        finally:
            spans.moved(None if now_at is placed else now_at.session.info.worker_id)

    async def _try_move(self, placed: Assignment, reason: str, spans: Spans) -> Assignment:
        """To another worker while the present stay goes on; when that one ends meanwhile, the next is needed only if it was lost.
        Returns where the request is now."""
        old = placed.session
        arriving = asyncio.create_task(self._arrive(old, spans), name=f"move {old.wire_id}")
        try:
            new = await _arrival(arriving, old)
        except (WorkerLost, MeshError) as error:
            logger.info("%s stays on %s: %s", old.wire_id, old.info.worker_id, error)
            return placed
        except Exception:  # the present stay is well: a bug in a move must not end it
            logger.exception("%s stays on %s: its move failed", old.wire_id, old.info.worker_id)
            return placed
        if new is None:
            return placed
        info = new.session.info
        logger.info("%s goes on at %s: %s", old.wire_id, info.worker_id, reason)
        self._timings.parts.decode_worker = info.worker_id
        self._core.num_migrations += 1
        self._session, self._kind = new.session, kind_of(info)
        placed.finished()
        old.leave(f"it goes on elsewhere: {reason}")
        return new

    async def _arrive(self, old: DecodeSession, spans: Spans) -> Assignment | None:
        """The next stay, when its tokens come; None without room elsewhere. Its timings are nobody's: the client has a first
        token. Raises LegLost, MeshError."""
        self._kind = kind_of(old.info)
        need = self._need(RequestTimings(now_ns(), spans=spans))
        placed = await self._placer.place_elsewhere(need, old)
        if placed is None:
            return None
        session = placed.session
        try:
            await self._fill(placed, need)
            await _first(session.flowing, session.ended)
            if session.ended.done():
                _raise(session.ended.result())
        except BaseException:
            session.leave("its move came to nothing")
            raise
        return placed

    def _note_loss(self, session: DecodeSession, loss: WorkerLost) -> None:
        parts = self._timings.parts
        logger.warning("%s: %s; %d tokens are out, it goes on elsewhere", session.wire_id, loss, self._tracker.num_tokens)
        self._core.health_recorder.failed(session.key, Role.DECODE, str(loss))
        self._timings.failed(str(loss))
        self._tracker.drop_early()
        self._avoid = frozenset({session.key})
        if self._tracker.anything_emitted:
            self._kind = kind_of(session.info)
        parts.num_resubmissions += 1
        if parts.num_resubmissions > self._core.config.max_resubmissions:
            raise Unavailable(
                f"lost {parts.num_resubmissions} times (max_resubmissions), the last time because {loss}; resume it"
            )

    def _num_steps(self, session: DecodeSession) -> int:
        """Tokens so far, less those that took no step of their own on `leg`, as they were guessed."""
        return self.num_tokens - self.drafts.accepted_in(session.wire_id) // self._prepared.num_choices

    def _note_pace(self, session: DecodeSession, since_ns: int, since_steps: int) -> None:
        """How fast it stepped on `leg`. Not how fast tokens came: a worker whose outputs cannot be guessed is not slow."""
        num_steps = self._num_steps(session) - since_steps
        since_ns = max(since_ns, self._timings.first_received_ns or 0)  # before it, decode may have computed the prompt
        if session.ended.done() and session.ended.result() is not None:
            return
        self._core.health_recorder.succeeded(session.key, Role.DECODE)
        if num_steps >= MIN_PACE_STEPS:
            self._core.health_recorder.took(session.key, Role.DECODE, (now_ns() - since_ns) / 1e9 / num_steps)

    def _check_outbox(self) -> None:
        """A client that is too slow has ended the leg: the error waits in the outbox, and the book must not be filled further."""
        if self.client_stream.failed:
            raise Unavailable("the client's stream has failed")

    def _need(self, timings: RequestTimings) -> PlacementRequest:
        return PlacementRequest(
            prepared=self._prepared,
            emitted=self._tracker.history(),
            sink=self,
            timings=timings,
            kind=self._kind,
            avoid=self._avoid,
        )


def _raise(result: WorkerLost | MeshError | None) -> None:
    if result is not None:
        raise result


async def _first(event: asyncio.Event, future: asyncio.Future[WorkerLost | MeshError | None]) -> None:
    """Until one of them has come."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((waiting, future), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _arrival(arriving: asyncio.Task[Assignment | None], old: DecodeSession) -> Assignment | None:
    """The next stay; None when there is none, or `old` has brought everything meanwhile. Whatever else happens, what had been
    begun elsewhere is left. Raises LegLost, MeshError."""
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
        if taken is None and not arriving.cancelled() and arriving.exception() is None and (new := arriving.result()) is not None:
            new.session.leave("the request has ended meanwhile")
