"""Finds a decode worker that takes a request, and a prefill worker for it: policy decides, the workers' answers correct it."""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from pdmesh.runtime.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, MeshError, ResourceExhausted, Unavailable
from pdmesh.v1 import common_pb2
from router.context import RouterContext
from router.fleet.change_notifier import wait_at_most
from router.fleet.circuit_breaker import Role
from router.fleet.worker import Dispatched, Incarnation, Worker
from router.flow_control.ttft_predictor import num_emitted
from router.lifecycle.capacity_queue import Waiter
from router.lifecycle.decode_session import DecodeSession, Sink
from router.lifecycle.prefill_call import PrefillTarget
from router.routing import worker_reports
from router.routing.decisions import Decision, cached_of
from router.routing.filters import NoPlacement, Placement, RoutingRequest, blocks_for, compatible, has_room
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.routing_request import NOBODY, routing_request_of
from router.routing.worker_snapshot import Mode, WorkerKey, WorkerSnapshot
from router.telemetry import timings
from router.telemetry.timings import RequestTimings
from router.tokenization.prepared_request import PreparedRequest

RETRY_PERIOD_S = 0.25
MIN_RETRY_GAP_S = 0.02
ROOM_RETRY_DELAY_S = 1.0

logger = logging.getLogger(__name__)
Ejected = Callable[[FleetSnapshot, Role], frozenset[WorkerKey]]


@dataclass(frozen=True)
class Assignment:
    """A reservation on a decode worker, and who is to fill it: None if decode itself does. `sent` counts as decode's load."""

    session: DecodeSession
    reservation: common_pb2.Reservation
    prefill: PrefillTarget | None
    sent: Dispatched

    def finished(self) -> None:
        """The worker has generated everything: its next report may not know yet."""
        self.session.worker.released(self.sent, time.monotonic())


@dataclass(frozen=True)
class PlacementRequest:
    """What one placement is for. `avoid`: workers to leave out at first, as the request was just lost there."""

    prepared: PreparedRequest
    emitted: list[common_pb2.EmittedChoice]
    sink: Sink
    timings: RequestTimings
    kind: tuple[object, ...] | None = None
    avoid: frozenset[WorkerKey] = frozenset()

    @property
    def started(self) -> bool:
        """Tokens are out already."""
        return bool(self.emitted)

    @property
    def line_key(self) -> Hashable:
        """Requests with the same key could run on the same workers."""
        return (self.prepared.model.name, self.kind, self.prepared.mode)

    @property
    def interrupted(self) -> bool:
        """This router has generated some of it: more than a client says to have from elsewhere."""
        return sum(len(choice.token_ids) for choice in self.emitted) > num_emitted(self.prepared)


class Placer:
    """Places requests of one router."""

    def __init__(self, core: RouterContext) -> None:
        self._core = core

    async def place(self, need: PlacementRequest) -> Assignment:
        """Waits for room or for a worker within the configured limits. Raises MeshError."""
        line, key = self._core.room, need.line_key
        if line.is_empty(key):
            placed = await self._try_all(need, need.avoid)
            if isinstance(placed, Assignment):
                return placed
        turn = line.enter(key, need.prepared.priority, need.prepared.tenant, interrupted=need.interrupted)
        found: Assignment | None = None
        try:
            found = await self._wait_for_place(need, turn)
            return found
        finally:
            line.leave(key, turn, placed=found is not None)

    def next_prefill(self, session: DecodeSession, need: PlacementRequest, tried: frozenset[WorkerKey]) -> PrefillTarget | None:
        """Another prefill worker for a reservation that stands; None if there is none that was not tried."""
        fleet_snapshot = self._core.fleet.fleet_snapshot
        engine = fleet_snapshot.get(session.worker.address)
        if engine is None or engine.view.epoch != session.info.epoch:
            return None
        excluded = tried | self._core.health_recorder.ejected(fleet_snapshot, Role.PREFILL)
        routing_request = self._routing_request(need, prefill=excluded)
        prefill = self._core.policy.choose_prefill(fleet_snapshot, engine.view, routing_request, time.monotonic())
        return self._prefill_target(prefill, routing_request)

    async def place_elsewhere(self, need: PlacementRequest, leaving: DecodeSession) -> Assignment | None:
        """One try, for a request that runs and may as well stay: None without room. Where it can, the worker that it leaves hands
        the KV over: its cache holds nearly all of it. Raises MeshError."""
        fleet_snapshot, ejected = self._core.fleet.fleet_snapshot, self._core.health_recorder.ejected
        routing_request = self._routing_request(
            need, decode=ejected(fleet_snapshot, Role.DECODE) | {leaving.key}, prefill=ejected(fleet_snapshot, Role.PREFILL)
        )
        choice = self._core.policy.choose(fleet_snapshot, routing_request, time.monotonic())
        if isinstance(choice, NoPlacement) or not has_room(choice.decode, routing_request):
            return None
        source = worker_reports.snapshot_of(leaving.incarnation.described, leaving.incarnation.load, decode=False)
        if routing_request.mode is not Mode.LOCAL and compatible(source, choice.decode):
            choice = Placement(choice.decode, source, f"it leaves {source.worker_id}, which holds its KV")
        placed = await self._submit(need, choice, routing_request)
        return placed if isinstance(placed, Assignment) else None

    def remember(self, prepared: PreparedRequest, incarnations: Iterable[Incarnation]) -> None:
        """The prompt's blocks are on these workers now."""
        self._core.prefixes.remember(prepared, incarnations)

    async def _wait_for_place(self, need: PlacementRequest, turn: Waiter) -> Assignment:
        """Among the first of the line: try at every change, until the limit for what is missing has passed."""
        loop = asyncio.get_running_loop()
        began, waiting_ns = loop.time(), timings.now_ns()
        while True:
            change = self._core.fleet.openings.next
            if await wait_at_most(turn.may_try, RETRY_PERIOD_S):
                need.timings.queued(waiting_ns)  # what the tries take is route, reserve or retry time
                placed = await self._try_all(need, frozenset())
                if isinstance(placed, Assignment):
                    return placed
                self._core.room.failed(need.line_key)
                waiting_ns = timings.now_ns()
                self._check_limit(placed, need, loop.time() - began)
                await asyncio.sleep(MIN_RETRY_GAP_S)
                await wait_at_most(change, RETRY_PERIOD_S)
            elif loop.time() - began > self._core.config.room_timeout_s:
                raise ResourceExhausted(
                    "the line for room on decode workers did not move; retry later", retry_delay_s=ROOM_RETRY_DELAY_S
                )

    def _check_limit(self, nothing: NoPlacement, need: PlacementRequest, waited_s: float) -> None:
        config = self._core.config
        if nothing.never:
            raise ResourceExhausted(f"{nothing.reason}; send a shorter prompt or start larger workers")
        if nothing.full and waited_s > config.room_timeout_s:
            raise ResourceExhausted(f"{nothing.reason}; no room for {waited_s:.0f} s", retry_delay_s=ROOM_RETRY_DELAY_S)
        limit_s = config.resubmit_timeout_s if need.started else config.place_timeout_s
        if not nothing.full and waited_s > limit_s:
            raise Unavailable(f"{nothing.reason}; waited {waited_s:.0f} s, see `pdmesh status`", retry_delay_s=ROOM_RETRY_DELAY_S)

    async def _try_all(self, need: PlacementRequest, avoid: frozenset[WorkerKey]) -> Assignment | NoPlacement:
        """One round without the workers that do badly; when nobody else takes it, one with them."""
        placed = await self._try_round(need, avoid, self._core.health_recorder.ejected)
        if isinstance(placed, NoPlacement) and self._core.health_recorder.health.suspects:
            return await self._try_round(need, avoid, _nobody)
        return placed

    async def _try_round(self, need: PlacementRequest, avoid: frozenset[WorkerKey], ejected: Ejected) -> Assignment | NoPlacement:
        """The best worker first, on a refusal the next best."""
        refused, errors = avoid, list[MeshError]()
        while True:
            fleet_snapshot = self._core.fleet.fleet_snapshot
            routing_request = self._routing_request(
                need, decode=refused | ejected(fleet_snapshot, Role.DECODE), prefill=ejected(fleet_snapshot, Role.PREFILL)
            )
            choice = self._choose(need, routing_request)
            if isinstance(choice, NoPlacement):
                return _with_answers(choice, errors)
            placed = await self._submit(need, choice, routing_request)
            if isinstance(placed, Assignment):
                return placed
            errors.append(placed)
            refused |= {choice.decode.key}

    def _choose(self, need: PlacementRequest, routing_request: RoutingRequest) -> Placement | NoPlacement:
        """The policy's answer, kept for whoever asks why."""
        began_ns = timings.now_ns()
        fleet_snapshot, policy = self._core.fleet.fleet_snapshot, self._core.policy
        choice = policy.choose(fleet_snapshot, routing_request, time.monotonic())
        need.timings.routed(began_ns)
        if isinstance(choice, Placement):
            policy.placed(choice.decode, choice.prefill)
            made_ns = timings.now_ns()
            need.timings.decision = Decision(
                request_id=need.prepared.request_id,
                policy=policy.name,
                made_ns=made_ns,
                decision_ns=made_ns - began_ns,
                num_tokens=routing_request.num_tokens,
                num_workers=len(fleet_snapshot),
                placement=choice,
                cached_tokens=cached_of(choice, routing_request),
                timings=need.timings,
            )
            self._core.decisions.record(need.timings.decision)
        return choice

    async def _submit(self, need: PlacementRequest, choice: Placement, routing_request: RoutingRequest) -> Assignment | MeshError:
        """Submit where the policy said; the error when the worker refuses. What only the caller can mend is raised."""
        decode, prefill = (
            self._incarnation(choice.decode),
            self._prefill_target(choice.prefill, routing_request, predicted_s(choice)),
        )
        if decode is None or (prefill is None and choice.prefill is not None):
            _give_up(prefill)
            return Unavailable("the worker has just been lost")
        session = DecodeSession(self._core, *decode, need.prepared, need.sink, need.timings)
        local_tokens = 0 if prefill else routing_request.uncached(choice.decode)
        sent = Dispatched(
            routing_request.num_choices,
            blocks_for(routing_request.num_tokens, choice.decode),
            local_tokens,
            decodes=routing_request.num_choices,
            context=routing_request.num_choices * routing_request.num_tokens,
        )
        decode[0].dispatched(sent)
        self._core.health_recorder.chosen(choice.decode.key, Role.DECODE)
        try:
            reservation = await session.submit(choice.mode, need.emitted)
        except MeshError as error:
            need.timings.failed(error.message)
            decode[0].done(sent)
            _give_up(prefill)
            self._note_refusal(session, error)
            return error
        except asyncio.CancelledError:
            decode[0].done(sent)
            _give_up(prefill)
            session.leave("the client left")
            raise
        sent.arrived_at = time.monotonic()
        if prefill is None:
            self.remember(need.prepared, (decode[1],))
        logger.debug("%s attempt %d: %s", session.wire_id, session.attempt, choice.reason or choice.mode.name)
        return Assignment(session, reservation, prefill, sent)

    def _note_refusal(self, session: DecodeSession, error: MeshError) -> None:
        """Leave the leg; raises the error if it is the caller's to mend."""
        if isinstance(error, (ResourceExhausted, InvalidArgument)):
            session.refused()
        else:
            logger.warning("Submit of %s to %s: %s %s", session.wire_id, session.info.worker_id, error.code.name, error.message)
            if not isinstance(error, (DeadlineExceeded, FailedPrecondition)):
                self._core.health_recorder.failed(session.key, Role.DECODE, error.message)
        session.leave("its Submit failed")
        if isinstance(error, InvalidArgument):
            raise error

    def _prefill_target(
        self, view: WorkerSnapshot | None, routing_request: RoutingRequest, predicted_s: float | None = None
    ) -> PrefillTarget | None:
        """The process behind a view, with this prompt counted as its load; None if it has gone since."""
        found = self._incarnation(view)
        if view is None or found is None:
            return None
        sent = Dispatched(1, blocks_for(routing_request.num_tokens, view), routing_request.uncached(view))
        found[0].dispatched(sent)
        self._core.health_recorder.chosen(view.key, Role.PREFILL)
        return PrefillTarget(*found, sent, predicted_s)

    def _routing_request(
        self, need: PlacementRequest, *, prefill: frozenset[WorkerKey], decode: frozenset[WorkerKey] = NOBODY
    ) -> RoutingRequest:
        """Without these workers, by role."""
        return routing_request_of(
            self._core, need.prepared, need.emitted, need.kind, excluded_decode=decode, excluded_prefill=prefill
        )

    def _incarnation(self, view: WorkerSnapshot | None) -> tuple[Worker, Incarnation] | None:
        """The living process behind a view; None if it has gone since."""
        worker = self._core.fleet.workers.get(view.address) if view is not None else None
        if view is None or worker is None or worker.current is None or worker.current.info.epoch != view.epoch:
            return None
        return worker, worker.current


def _nobody(fleet_snapshot: FleetSnapshot, role: Role) -> frozenset[WorkerKey]:
    """Is left out."""
    return frozenset()


def predicted_s(choice: Placement) -> float | None:
    """Seconds to the first token, as far as the prefill worker has measured its own steps: a prompt is not taken from it by a
    guess."""
    speed = None if choice.prefill is None else choice.prefill.latency
    if speed is None or not speed.num_steps or choice.chosen is None or choice.chosen.prediction is None:
        return None
    return choice.chosen.prediction.ttft_s


def _give_up(prefill: PrefillTarget | None) -> None:
    """It will not be asked to compute anything."""
    if prefill is not None:
        prefill.computed()


def _with_answers(nothing: NoPlacement, errors: list[MeshError]) -> NoPlacement:
    """What the workers answered says more than that nobody is left; RESOURCE_EXHAUSTED from any means that room may come."""
    if not errors:
        return nothing
    return NoPlacement(
        f"{nothing.reason} ({errors[-1].message})", full=any(isinstance(error, ResourceExhausted) for error in errors)
    )
