"""The stages place and reserve: the policy chooses workers, and they accept or refuse.

place ─► reserve ─► a reservation on a decode worker
  ▲         │
  └─────────┘ refused: the next best worker; when none is left, the capacity queue, then every worker again
"""

import asyncio
import logging
import time
from collections.abc import Hashable
from dataclasses import replace

from pdmesh.runtime.errors import (
    CONTEXT_OVERFLOW,
    STOPPED,
    TOO_MANY_CHOICES,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    MeshError,
    ResourceExhausted,
    Unavailable,
)
from pdmesh.step_sharing import PACE_TARGET
from pdmesh.v1 import worker_pb2
from router.context import RouterContext
from router.fleet.change_notifier import wait_at_most
from router.fleet.circuit_breaker import Role
from router.fleet.incarnation import Incarnation
from router.fleet.worker import Dispatched, Worker
from router.lifecycle.decode_session import DecodeSession, GivenBack, WorkerLost
from router.lifecycle.kv_holder import local_holder
from router.lifecycle.request import Assignment, Dispatch, Finished, PrefillTarget, Request, WaitsFor
from router.routing import worker_reports
from router.routing.cost_model import WorkerEstimate
from router.routing.decisions import Decision, cached_of
from router.routing.filters import NoPlacement, Placement, RoutingRequest, blocks_for, can_hand_over, compatible, has_room
from router.routing.routing_request import NO_WORKERS, choose, routing_request_of
from router.routing.worker_reports import fingerprint_for, kind_of
from router.routing.worker_snapshot import Mode, WorkerKey, WorkerSnapshot
from router.telemetry import timings

RETRY_PERIOD_S = 0.25
MIN_RETRY_GAP_S = 0.02
ROOM_RETRY_DELAY_S = 1.0

_UNFIT_FIELDS = {CONTEXT_OVERFLOW: "prompt", TOO_MANY_CHOICES: "sampling.n"}
"""The field to change in a request that never fits, by the error's `reason`."""

logger = logging.getLogger(__name__)


class NoRoomElsewhere(Exception):
    """Report that no other worker has room for a request that should migrate: it stays on its worker."""


class PlaceStage:
    """Set a dispatch's `placement`: the policy's choice of workers.

    When no worker takes the request, it waits in the capacity queue and is placed again at every change of the fleet. At the time
    limit it raises ResourceExhausted (no room) or Unavailable (no worker); for a migration NoRoomElsewhere at once.
    """

    def __init__(self, core: RouterContext) -> None:
        self._core = core

    async def run(self, dispatch: Dispatch) -> None:
        """Choose workers; entered again after each refusal."""
        if dispatch.leaving is not None:
            self.place_elsewhere(dispatch, dispatch.leaving)
            return
        search = dispatch.search
        if not search.has_begun:
            search.has_begun = True
            if not self._core.capacity_queue.is_empty(self._queue_key(dispatch)):
                await self._wait_for_turn(dispatch)
        while (nothing := self._choose(dispatch)) is not None:
            self._check_fit(dispatch)
            if search.waiter is not None:
                await self._wait_for_change(dispatch, nothing)
            await self._wait_for_turn(dispatch)

    def place_elsewhere(self, dispatch: Dispatch, leaving: DecodeSession) -> None:
        """Place a running request on another worker, in one try. The worker that it leaves hands the KV over if it can: it has
        nearly all of it cached. Raises NoRoomElsewhere."""
        if dispatch.search.errors:  # the one try has failed
            raise NoRoomElsewhere(dispatch.search.errors[-1].message)
        fleet_snapshot, ejected = self._core.fleet.fleet_snapshot, self._core.health_recorder.left_out
        routing_request = routing_request_for(
            self._core,
            dispatch,
            decode=ejected(fleet_snapshot, Role.DECODE) | {leaving.key},
            prefill=ejected(fleet_snapshot, Role.PREFILL),
        )
        prepared, now, any_revision = dispatch.request.prepared, time.monotonic(), routing_request
        choice, routing_request = choose(self._core, prepared, any_revision, now)
        is_split = routing_request is not any_revision
        if is_split and (isinstance(choice, NoPlacement) or not has_room(choice.decode, routing_request)):
            choice, routing_request = self._core.policy.choose(fleet_snapshot, any_revision, now), any_revision
        if isinstance(choice, NoPlacement) or not has_room(choice.decode, routing_request):
            raise NoRoomElsewhere("no other worker has room")
        source = worker_reports.snapshot_of(leaving.incarnation.described, leaving.incarnation.load, decode=False)
        able = can_hand_over(source, routing_request) and can_hand_over(choice.decode, routing_request)
        if routing_request.mode is not Mode.LOCAL and able and compatible(source, choice.decode):
            choice = Placement(choice.decode, source, f"it leaves {source.worker_id}, which holds its KV")
        dispatch.placement, dispatch.routing_request = choice, routing_request

    def _choose(self, dispatch: Dispatch) -> NoPlacement | None:
        """Set the policy's choice among the workers that have not refused, and return None; or return why there is none."""
        search = dispatch.search
        while True:
            choice, routing_request = self._ask_policy(dispatch)
            if isinstance(choice, Placement):
                dispatch.placement, dispatch.routing_request = choice, routing_request
                return None
            nothing = _with_answers(choice, search.errors)
            if search.takes_ejected or not self._core.health_recorder.leaves_any_out:
                return nothing
            search.begin_round(takes_ejected=True)

    def _ask_policy(self, dispatch: Dispatch) -> tuple[Placement | NoPlacement, RoutingRequest]:
        """Return the policy's answer, and record it as a decision."""
        search, fleet_snapshot = dispatch.search, self._core.fleet.fleet_snapshot
        ejected_decode = ejected_prefill = NO_WORKERS
        if not search.takes_ejected:
            ejected_decode = self._core.health_recorder.left_out(fleet_snapshot, Role.DECODE)
            ejected_prefill = self._core.health_recorder.left_out(fleet_snapshot, Role.PREFILL)
        decode = search.avoid | search.refused | search.unfit | ejected_decode
        routing_request = routing_request_for(self._core, dispatch, decode=decode, prefill=ejected_prefill)
        began_ns = timings.now_ns()
        prepared, now = dispatch.request.prepared, time.monotonic()
        choice, routing_request = choose(self._core, prepared, routing_request, now, search.unfit)
        dispatch.timings.routed(began_ns)
        if isinstance(choice, Placement):
            self._note_decision(dispatch, choice, routing_request, began_ns)
        return choice, routing_request

    def _note_decision(self, dispatch: Dispatch, choice: Placement, routing_request: RoutingRequest, began_ns: int) -> None:
        policy = self._core.policy
        policy.placed(choice.decode, choice.prefill)
        made_ns = timings.now_ns()
        decision = Decision(
            request_id=dispatch.request.prepared.request_id,
            policy=policy.name,
            made_ns=made_ns,
            decision_ns=made_ns - began_ns,
            num_tokens=routing_request.num_tokens,
            num_workers=len(self._core.fleet.fleet_snapshot),
            placement=choice,
            cached_tokens=cached_of(choice, routing_request),
            timings=dispatch.timings,
            session_workers=routing_request.session_workers,
        )
        dispatch.request.decision = decision
        self._core.decisions.record(decision)

    def _check_fit(self, dispatch: Dispatch) -> None:
        """Raise the reason why no worker can serve the request, if all that decode its model have said that they never can."""
        search, model = dispatch.search, dispatch.request.prepared.model.name
        if search.unfit_error is None:
            return
        decoding = (view.key for view in self._core.fleet.views() if view.decode and view.model == model)
        if search.unfit.issuperset(decoding):
            if dispatch.started:  # asked anew, it can be served
                raise Unavailable(f"{search.unfit_error.message}, and the worker that it ran on is lost")
            raise search.unfit_error

    async def _wait_for_turn(self, dispatch: Dispatch) -> None:
        """Wait in the capacity queue until the request may try. Raises ResourceExhausted when the queue does not move."""
        search, loop = dispatch.search, asyncio.get_running_loop()
        if search.waiter is None:
            self._enter_queue(dispatch)
        assert search.waiter is not None
        while True:
            search.change = self._core.fleet.openings.next
            if await wait_at_most(search.waiter.may_try, RETRY_PERIOD_S):
                dispatch.timings.queued(search.waiting_ns)  # the time of the try is route, reserve or retry time
                search.begin_try()
                return
            if self._waits_for_stopped(dispatch, alone=True) or self._waits_for_start(dispatch):
                continue
            if search.waits(WaitsFor.ROOM, loop.time()) > self._core.config.room_timeout_s:
                raise ResourceExhausted(
                    "the line for room on decode workers did not move; retry later", retry_delay_s=ROOM_RETRY_DELAY_S
                )

    def _queue_key(self, dispatch: Dispatch) -> Hashable:
        """Return the key of the capacity queue: dispatches with the same key could run on the same workers, whose adapters count
        only where some lack the one that is asked for."""
        model, prepared = dispatch.request.model, dispatch.request.prepared
        adapter = prepared.adapter
        if adapter is not None:
            decoding = (view for view in self._core.fleet.views() if view.decode and view.model == prepared.model.name)
            adapter = None if all(adapter in view.adapters for view in decoding) else adapter
        return (model, dispatch.kind, prepared.mode, adapter)

    def _enter_queue(self, dispatch: Dispatch) -> None:
        search, prepared = dispatch.search, dispatch.request.prepared
        search.queue_key = self._queue_key(dispatch)
        search.waiter = self._core.capacity_queue.enter(
            search.queue_key,
            prepared.priority,
            prepared.tenant,
            interrupted=dispatch.interrupted,
            hint=prepared.priority_hint,
        )
        search.looked_s = asyncio.get_running_loop().time()
        search.waiting_ns = timings.now_ns()

    async def _wait_for_change(self, dispatch: Dispatch, nothing: NoPlacement) -> None:
        """Wait for the next change of the fleet after a failed try. Raises MeshError at the time limit."""
        search = dispatch.search
        self._core.capacity_queue.failed(search.queue_key)
        search.waiting_ns = timings.now_ns()
        if nothing.full or not self._waits_for_stopped(dispatch):
            self._check_limit(nothing, dispatch, asyncio.get_running_loop().time())
        await asyncio.sleep(MIN_RETRY_GAP_S)
        await wait_at_most(search.change, RETRY_PERIOD_S)

    def _waits_for_stopped(self, dispatch: Dispatch, *, alone: bool = False) -> bool:
        """Return whether a worker that is paused or asleep could take the request: then it waits for that, and for no room.
        `alone`: and no decode worker of the model runs, whose room it waits for. Raises Unavailable when it has waited for
        too long."""
        search, request, fleet = dispatch.search, dispatch.request, self._core.fleet
        name = request.prepared.model.name
        takers = [worker.last.load.roles for worker in fleet.stopped if worker.last is not None and _could_take(worker, dispatch)]
        if not takers:
            return False
        running = [view for view in fleet.views() if view.model == name]
        decodes = any(view.decode for view in running)
        prefills = request.prepared.mode is not Mode.REMOTE or any(view.prefill for view in running)
        if alone and decodes:
            return False
        lacking = [
            role for role, is_there in ((worker_pb2.ROLE_DECODE, decodes), (worker_pb2.ROLE_PREFILL, prefills)) if not is_there
        ]
        if not all(any(role in roles for roles in takers) for role in lacking or [worker_pb2.ROLE_DECODE]):
            return False
        request.was_stopped = True
        waited_s = search.waits(WaitsFor.WAKE, asyncio.get_running_loop().time())
        if waited_s > self._core.config.paused_timeout_s:
            text = f"workers of {name!r} are paused or asleep; waited {waited_s:.0f} s"
            raise Unavailable(f"{text}, see `pdmesh status`", retry_delay_s=ROOM_RETRY_DELAY_S)
        return True

    def _waits_for_start(self, dispatch: Dispatch) -> bool:
        """Return whether no worker of the model decodes where pools may be at zero: the autoscaler sees the request, and starts
        some. Raises Unavailable when it has waited for too long."""
        search, config, name = dispatch.search, self._core.config, dispatch.request.prepared.model.name
        usual_s = config.resubmit_timeout_s if dispatch.started else config.place_timeout_s
        if config.wake_timeout_s <= usual_s or self._core.fleet.decodes(name):
            return False
        waited_s = search.waits(WaitsFor.START, asyncio.get_running_loop().time())
        if waited_s > config.wake_timeout_s:
            text = f"no decode worker of {name!r} has started; waited {waited_s:.0f} s"
            raise Unavailable(f"{text}, see `pdmesh status`", retry_delay_s=ROOM_RETRY_DELAY_S)
        return True

    def _check_limit(self, nothing: NoPlacement, dispatch: Dispatch, now_s: float) -> None:
        config, search = self._core.config, dispatch.search
        if nothing.field:
            raise InvalidArgument(nothing.field, f"{nothing.field}: {nothing.reason}; {nothing.remedy}")
        if nothing.never:
            field = _UNFIT_FIELDS.get(nothing.word)
            raise ResourceExhausted(f"{nothing.reason}; {nothing.remedy}", field=field, reason=nothing.word or None)
        if nothing.full:
            waited_s = search.waits(WaitsFor.ROOM, now_s)
            if waited_s > config.room_timeout_s:
                raise ResourceExhausted(f"{nothing.reason}; no room for {waited_s:.0f} s", retry_delay_s=ROOM_RETRY_DELAY_S)
            return
        if self._waits_for_start(dispatch):
            return
        waited_s = search.waits(WaitsFor.WORKER, now_s)
        if waited_s > (config.resubmit_timeout_s if dispatch.started else config.place_timeout_s):
            raise Unavailable(f"{nothing.reason}; waited {waited_s:.0f} s, see `pdmesh status`", retry_delay_s=ROOM_RETRY_DELAY_S)


class ReserveStage:
    """Set a placed dispatch's `assignment`: the Submit call, which the decode worker answers with a reservation.

    It is first entered from place; a refusal re-enters there. Prefill re-enters it for the next attempt at the same reservation:
    then a refusal is WorkerLost. Raises InvalidArgument, which any other worker would answer, too.
    """

    def __init__(self, core: RouterContext) -> None:
        self._core = core

    async def run(self, dispatch: Dispatch) -> type[PlaceStage] | None:
        """Submit. Return PlaceStage when the worker refuses. Raises Finished where all tokens came, and its answer was lost."""
        if dispatch.assignment is not None:
            dispatch.assignment = await self._submit_again(dispatch, dispatch.assignment)
            return None
        answer = await self._submit(dispatch, dispatch.placement, dispatch.routing_request)
        if isinstance(answer, MeshError):
            if dispatch.request.tracker.all_finished:
                raise Finished
            dispatch.search.refuse(dispatch.placement.decode.key, answer)
            return PlaceStage
        dispatch.assignment = answer
        dispatch.leave_queue(self._core.capacity_queue, placed=True)
        return None

    async def _submit(self, dispatch: Dispatch, choice: Placement, routing_request: RoutingRequest) -> Assignment | MeshError:
        """Submit to the chosen worker. Return its error when it refuses; raise an error that only the client can correct."""
        request, decode = dispatch.request, _incarnation(self._core, choice.decode)
        ways = None if choice.chosen is None else choice.chosen.ways
        prefill = _prefill_target(self._core, choice, routing_request)
        if decode is None or (prefill is None and choice.prefill is not None):
            give_up(prefill)
            return Unavailable("the worker has just been lost")
        worker, incarnation = decode
        request.tracker.may_redraw |= not all(view.is_reproducible for view in choice.workers)
        session = DecodeSession(self._core, worker, incarnation, request.prepared, request, dispatch.timings)
        sent = Dispatched(
            routing_request.num_choices,
            blocks_for(routing_request.num_tokens, choice.decode),
            0 if prefill else routing_request.computed(choice.decode, ways),
            decodes=routing_request.num_choices,
            context=routing_request.num_choices * routing_request.num_tokens,
            pace_s=PACE_TARGET * (routing_request.tpot_goal_s or 0.0),
        )
        worker.dispatched(sent)
        self._core.health_recorder.chosen(choice.decode.key, Role.DECODE)
        request.submitting(self._core.flow_control.placed)
        request.system_fingerprint = fingerprint_for(incarnation.described, request.prepared.adapter)
        try:
            holder = local_holder(self._core, dispatch, session.info, session.wire_id, choice.mode)
            reservation = await session.submit(choice.mode, dispatch.emitted, holder=holder)
        except MeshError as error:
            dispatch.timings.failed(error.message)
            worker.done(sent)
            give_up(prefill)
            self._note_refusal(request, session, error)
            if request.num_generated:  # its tokens were faster than the answer to Submit, which was lost
                request.kind = dispatch.kind = kind_of(session.info)
                dispatch.emitted = request.tracker.history()
            return error
        except asyncio.CancelledError:
            worker.done(sent)
            give_up(prefill)
            session.leave("the client left")
            raise
        sent.arrived_at = time.monotonic()
        if prefill is None:
            self._core.prefixes.remember(request.prepared, (session.info,))
        self._core.sessions.note(request.prepared, tuple(view.key for view in choice.workers))
        logger.debug("%s attempt %d: %s", session.wire_id, session.attempt, choice.reason or choice.mode.name)
        return Assignment(session, sent, reservation, prefill, dispatch.emitted)

    async def _submit_again(self, dispatch: Dispatch, failed: Assignment) -> Assignment:
        """Submit the next attempt, for the prefill worker that the stage prefill has chosen, or LOCAL. Raises WorkerLost."""
        session, emitted = failed.session, dispatch.request.tracker.history()
        try:
            holder = local_holder(self._core, dispatch, session.info, session.wire_id, failed.mode)
            reservation = await session.submit(failed.mode, emitted, holder=holder)
        except BaseException as error:
            give_up(failed.prefill)
            if not isinstance(error, MeshError):
                raise
            if isinstance(error, FailedPrecondition) and session.delivered:
                return replace(failed, prefill=None)  # decoding runs already: the attempt before has succeeded after all
            said = "was refused" if isinstance(error, FailedPrecondition) else "failed"
            ended = session.ended.result() if session.ended.done() else None
            if isinstance(ended, GivenBack) or session.incarnation.is_stopped:
                raise GivenBack(f"{session.info.worker_id} is paused or asleep: {error.message}") from error
            raise WorkerLost(f"attempt {session.attempt} on {session.info.worker_id} {said}: {error.message}") from error
        return replace(failed, reservation=reservation, emitted=emitted)

    def _note_refusal(self, request: Request, session: DecodeSession, error: MeshError) -> None:
        """Leave the session; raise the error if only the client can correct it."""
        if isinstance(error, (ResourceExhausted, InvalidArgument)):
            session.refused()
        else:
            logger.warning("Submit of %s to %s: %s %s", session.wire_id, session.info.worker_id, error.code.name, error.message)
            if not isinstance(error, (DeadlineExceeded, FailedPrecondition)) and not (
                error.reason == STOPPED or session.incarnation.is_stopped
            ):
                is_lost = session.incarnation.lost.is_set()
                request.lost_on.add(session.info.revision)
                self._core.health_recorder.failed(session.key, Role.DECODE, error.message, lost=is_lost)
        session.leave("its Submit failed")
        if isinstance(error, InvalidArgument):
            raise error


# Helpers of the stages of a dispatch.


def _could_take(worker: Worker, dispatch: Dispatch) -> bool:
    """Return whether a worker, by its last report, could decode the request if it ran, or for REMOTE compute its prompt."""
    last, prepared = worker.last, dispatch.request.prepared
    if last is None or last.info.identity.model != prepared.model.name or dispatch.kind not in (None, kind_of(last.info)):
        return False
    if prepared.adapter is not None and prepared.adapter not in last.adapters:
        return False
    if worker_pb2.ROLE_DECODE in last.load.roles:
        return len(prepared.prompt) <= last.info.max_context and prepared.num_choices <= last.info.max_num_seqs
    return prepared.mode is Mode.REMOTE and worker_pb2.ROLE_PREFILL in last.load.roles


def next_prefill(core: RouterContext, dispatch: Dispatch) -> PrefillTarget | None:
    """Return another prefill worker for an existing reservation; None if all were tried. From then on the dispatch knows what
    workers have cached by now."""
    decode = _decode_of(core, dispatch)
    if decode is None:
        return None
    dispatch.routing_request = _another(core, dispatch, dispatch.tried)
    choice = core.policy.choose_prefill(core.fleet.fleet_snapshot, decode.view, dispatch.routing_request, time.monotonic())
    return None if choice is None else _prefill_target(core, choice, dispatch.routing_request)


MOVING_PERIODS = 2.0
"""A worker whose figures are so many periods of its reports old at most goes on."""


def is_sooner_elsewhere(core: RouterContext, dispatch: Dispatch, prefill: PrefillTarget) -> bool:
    """Return whether another attempt at a prompt would be done before those that its worker still has. True also where the worker
    has told nothing new, or of no prompts to compute, or nothing is predicted: then it may be stuck."""
    now, fleet_snapshot, decode = time.monotonic(), core.fleet.fleet_snapshot, _decode_of(core, dispatch)
    busy = fleet_snapshot.get(prefill.worker.address)
    if busy is None or decode is None or busy.key != prefill.key or busy.view.latency is None:
        return True
    if not busy.view.num_waiting_tokens or now - busy.view.figures_at > MOVING_PERIODS * core.config.report_period_ms / 1e3:
        return True
    routing_request = _another(core, dispatch, dispatch.tried | {prefill.key})
    choice = core.policy.choose_prefill(fleet_snapshot, decode.view, routing_request, now)
    if choice is None:
        cached = routing_request.cached_tokens.get(decode.key, 0)
        return decode.prompt_side(routing_request.num_tokens, cached, now).compute_s < busy.ahead_s(now)
    best = choice.chosen
    return best is None or best.prediction is None or best.prediction.plain_ttft_s < busy.ahead_s(now)


def _decode_of(core: RouterContext, dispatch: Dispatch) -> WorkerEstimate | None:
    """Return the decode worker of the reservation as it is now; None if it is gone."""
    session = dispatch.assigned.session
    decode = core.fleet.fleet_snapshot.get(session.worker.address)
    return decode if decode is not None and decode.view.epoch == session.info.epoch else None


def _another(core: RouterContext, dispatch: Dispatch, tried: frozenset[WorkerKey]) -> RoutingRequest:
    left_out = core.health_recorder.left_out(core.fleet.fleet_snapshot, Role.PREFILL)
    return routing_request_for(core, dispatch, prefill=tried | left_out)


def routing_request_for(
    core: RouterContext, dispatch: Dispatch, *, prefill: frozenset[WorkerKey], decode: frozenset[WorkerKey] = NO_WORKERS
) -> RoutingRequest:
    """Return the policy's input, with the workers that each role excludes."""
    prepared = dispatch.request.prepared
    return routing_request_of(core, prepared, dispatch.emitted, dispatch.kind, excluded_decode=decode, excluded_prefill=prefill)


def predicted_s(choice: Placement) -> float | None:
    """Return the seconds to the first token that are predicted from its speed; None unless the prefill worker has measured its
    steps: a guess must not cause a hedge, and one that becomes slow must not teach that this is usual."""
    speed = None if choice.prefill is None else choice.prefill.latency
    if speed is None or not speed.num_steps or choice.chosen is None or choice.chosen.prediction is None:
        return None
    return choice.chosen.prediction.plain_ttft_s


def give_up(prefill: PrefillTarget | None) -> None:
    """Stop counting the load of a prefill worker that gets no call."""
    if prefill is not None:
        prefill.computed()


def _prefill_target(core: RouterContext, choice: Placement, routing_request: RoutingRequest) -> PrefillTarget | None:
    """Return the process of the chosen prefill worker, with this prompt counted as its load: what it lacks, but for what it is
    predicted to restore or to fetch. None if it is gone, or the choice is LOCAL."""
    view, found = choice.prefill, _incarnation(core, choice.prefill)
    if view is None or found is None:
        return None
    ways = None if choice.chosen is None else choice.chosen.ways
    sent = Dispatched(1, blocks_for(routing_request.num_tokens, view), routing_request.computed(view, ways))
    found[0].dispatched(sent)
    core.health_recorder.chosen(view.key, Role.PREFILL)
    return PrefillTarget(*found, found[1].info, sent, predicted_s(choice))


def _incarnation(core: RouterContext, view: WorkerSnapshot | None) -> tuple[Worker, Incarnation] | None:
    """Return the live process of a snapshot; None if it is gone."""
    worker = core.fleet.workers.get(view.address) if view is not None else None
    if view is None or worker is None or worker.current is None or worker.current.info.epoch != view.epoch:
        return None
    return worker, worker.current


def _with_answers(nothing: NoPlacement, errors: list[MeshError]) -> NoPlacement:
    """Add the workers' last answer to the reason. After RESOURCE_EXHAUSTED from any of them, room may come."""
    if not errors:
        return nothing
    return NoPlacement(
        f"{nothing.reason} ({errors[-1].message})", full=any(isinstance(error, ResourceExhausted) for error in errors)
    )
