"""The stages of a request, in order. `STAGES` is the list; `Pipeline` at the end makes its stages from it, and runs them.

    validate ─ tokenize ─ admit ─┬─ place ─ reserve ─ prefill ─ decode      in a task of its own, until every choice has ended
                                 └─ stream ─ account                        in the client's task, beside it

    reserve, refused          re-enters at place, which excludes that worker
    prefill, failed           re-enters at reserve: the next attempt at the same reservation, elsewhere or LOCAL
    prefill, late (a hedge)   re-enters at prefill, once the decode worker has taken the next attempt
    decode worker lost        re-enters at place, with the prompt and the emitted output: indexes go on, tokens are the same
    decode, asked to migrate  runs place, reserve and prefill for a further session beside the present one

Each stage is a class with one method, `run`, and without state, which `Request` and `Dispatch` (`request.py`) hold. A LOCAL
request passes through prefill, too, which does nothing. However a request ends, account comes last.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from pdmesh.runtime import failpoints, log
from pdmesh.runtime.errors import DeadlineExceeded, InvalidArgument, MeshError, ResourceExhausted, Unavailable
from pdmesh.v1 import common_pb2, mesh_pb2
from router.context import RouterContext
from router.fleet.change_notifier import unless
from router.fleet.circuit_breaker import Role
from router.flow_control.ttft_predictor import flow_item_of, num_emitted
from router.lifecycle.decode_session import DecodeSession, GivenBack, WorkerLost
from router.lifecycle.decode_stage import DecodeStage, end_session, remember_turn
from router.lifecycle.embed_stage import EmbedStage
from router.lifecycle.output import ResumeMismatch
from router.lifecycle.placement import PlaceStage, ReserveStage
from router.lifecycle.prefill_stage import PrefillStage
from router.lifecycle.request import DispatchStage, Finished, OpenRequests, Request, run_in_order
from router.routing.cost_model import Overhead, Prediction
from router.routing.decisions import Decision
from router.routing.routing_request import goals_ms, kind_of_resumed
from router.routing.worker_reports import kind_of
from router.telemetry.timings import now_ns
from router.telemetry.traffic import ModelTraffic
from router.tokenization.prepared_request import PreparedRequest
from router.tokenization.preprocessor import Preprocessor

SETTLE_S = 0.1
"""Time that a complete answer waits for the rest of its timings. The report is on its way: it takes a millisecond or two."""

logger = logging.getLogger(__name__)


class ValidateStage:
    """Set `validated` from the message. Raises InvalidArgument naming the field, NotFound, DeadlineExceeded."""

    def __init__(self, core: RouterContext, preprocessor: Preprocessor) -> None:
        self._releases = core.releases
        self._preprocessor = preprocessor

    async def run(self, request: Request) -> None:
        """Find the model, and check every field that needs no tokens. From now on a release of its session reaches it."""
        request.validated = self._preprocessor.validate(request.message, request.time_left_s)
        request.session_state = request.validated.session_state()
        self._releases.enter(request.session_state)


class TokenizeStage:
    """Set `prepared` from `validated`. Raises InvalidArgument naming the field, ResourceExhausted, DeadlineExceeded."""

    def __init__(self, core: RouterContext, preprocessor: Preprocessor) -> None:
        self._max_buffered_tokens = core.config.max_buffered_tokens
        self._preprocessor = preprocessor

    async def run(self, request: Request) -> None:
        """Tokenize, long prompts in a fair queue; check and complete the fields that depend on the number of tokens."""
        prepared = await self._preprocessor.prepare(request.validated)
        await failpoints.hit_async("router.route")
        request.open_stream(prepared, self._max_buffered_tokens)


class AdmitStage:
    """Set `ticket`, the right to be dispatched. Raises ResourceExhausted with a retry delay, Unavailable while draining."""

    def __init__(self, core: RouterContext, open_requests: OpenRequests) -> None:
        self._core = core
        self._open_requests = open_requests

    async def run(self, request: Request) -> None:
        """Count the request, check the output that it resumes, wait for its turn."""
        self._open_requests.admit(request)
        request.trace.admitted(request.prepared)
        request.replayed = _replay(request)
        if num_emitted(request.prepared) and not request.output.done:
            self._stay_with_kind(request)
        self._note_arrival(request)
        began_ns = now_ns()
        try:
            entering = self._core.flow_control.enter(flow_item_of(self._core, request.prepared))
            request.ticket = await unless(request.aborted, entering)
            await failpoints.hit_async("router.admission")
        finally:
            request.timings.queued(began_ns)

    def _stay_with_kind(self, request: Request) -> None:
        """Set the kind with which the resumed stream began. Raises Unavailable: a worker of another kind would go on with another
        answer, and the right one may come back."""
        request.kind = kind_of_resumed(self._core, request.prepared)
        if request.kind is None and request.prepared.system_fingerprint:
            raise Unavailable("no worker has the weights and formats with which this answer began; resume it later, or ask anew")

    def _note_arrival(self, request: Request) -> None:
        prepared = request.prepared
        request.visit = self._core.traffic.of(prepared.model.name).arrive(
            len(prepared.prompt),
            time.monotonic(),
            is_batch=prepared.priority == common_pb2.PRIORITY_BATCH,
            is_new=prepared.attempt == 0,
        )


def _replay(request: Request) -> list[mesh_pb2.GenerateResponse]:
    try:
        return request.output.replay(request.prepared.emitted)
    except ResumeMismatch as error:
        field = f"resume.emitted[{error.choice}].token_ids"
        raise InvalidArgument(field, f"{field}: {error}; send what was received, no more") from error


class StreamStage:
    """Yield `started`, deltas and `completed` in the client's task. Raises the MeshError that has ended the request."""

    async def run(self, request: Request) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        """Yield messages as fast as the client takes them. Per-token path."""
        yield _started(request.prepared)
        for message in request.replayed:
            yield message
        output, take, handed = request.output, request.client_stream.take, request.timings.handed
        is_named = False
        while not output.done:
            for message in await take():
                delta = message.delta
                if not is_named and delta.token_ids:
                    delta.system_fingerprint, is_named = request.system_fingerprint, True
                handed(delta.choice, len(delta.token_ids))
                yield message
        if request.dispatching is not None and request.is_winding_up:
            # A short answer can end before prefill's report of the hand-off has been read: the timings of `completed` need it.
            await asyncio.wait((request.dispatching,), timeout=SETTLE_S)
        yield _completed(request)


def _started(prepared: PreparedRequest) -> mesh_pb2.GenerateResponse:
    started = mesh_pb2.Started(
        request_id=prepared.request_id,
        seed=prepared.sampling.seed,
        model=prepared.served_name,
        num_prompt_tokens=len(prepared.prompt),
    )
    return mesh_pb2.GenerateResponse(started=started)


def _completed(request: Request) -> mesh_pb2.GenerateResponse:
    timings, num_prompt_tokens = request.timings.message(), len(request.prepared.prompt)
    request.is_complete = True
    usage = mesh_pb2.Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=request.output.num_tokens,
        cached_tokens=min(timings.prefill_cached_tokens, num_prompt_tokens),
        drafted_tokens=request.drafts.num_drafted,
        accepted_tokens=request.drafts.num_accepted,
        reasoning_tokens=request.output.num_reasoning_tokens,
    )
    return mesh_pb2.GenerateResponse(completed=mesh_pb2.Completed(usage=usage, timings=timings))


class AccountStage:
    """Release what an ended request held, and report its end to admission, policy, trace and metrics."""

    def __init__(self, core: RouterContext) -> None:
        self._core = core

    def run(self, request: Request, error: BaseException | None) -> None:
        """Account for a request that `error` has ended, None: it was answered. Calls to workers go on in the background."""
        if not request.is_open:
            request.trace.ended(request.timings, None, error)
            self._core.metrics.ended(None, (0, 0), 0, request.timings, error)
            return
        if request.is_complete:
            error = None  # a client that closes the stream after its last message has not left early
        try:
            if request.is_complete and not request.was_stopped:
                self._learn(request)
        finally:
            self._release(request, error)
            remember_turn(self._core, request)
            end_session(self._core, request, error)
            self._report(request, error)

    def _learn(self, request: Request) -> None:
        """Compare admission's forecast and the policy's predictions with a request that had no retry."""
        first_ns, parts = request.timings.first_received_ns, request.timings.parts
        if request.ticket is not None and first_ns is not None and not (parts.num_retries or request.prepared.emitted):
            self._core.flow_control.admission.answered(request.ticket, first_ns / 1e9)
        learn(self._core, request.prepared, request.decision, parts, request.output.num_tokens)

    def _release(self, request: Request, error: BaseException | None) -> None:
        if request.dispatching is not None and not request.is_winding_up:
            request.dispatching.cancel()
        if request.visit is not None:
            if not request.is_submitted and isinstance(error, ResourceExhausted):
                request.visit.refused()
            request.visit.ended(request.num_generated, request.timings.parts.prefill_cached_tokens)
        if request.ticket is not None:
            self._core.flow_control.leave(request.ticket, _used_tokens(request, error))
            request.ticket = None
            self._core.num_token_mismatches += request.tracker.num_mismatches
            self._core.num_redrawn_tokens += request.tracker.num_redrawn
            self._core.fleet.openings.fire()

    def _report(self, request: Request, error: BaseException | None) -> None:
        prepared, trace, parts = request.prepared, request.trace, request.timings.parts
        trace.ended(request.timings, request.brought, error)
        if request.decision is not None and not request.was_stopped:
            decode = request.decision.placement.decode
            self._core.rollouts.ended(decode, error, parts.ttft_ns / 1e9, parts.tpot_ns / 1e9, request.lost_on)
        self._core.metrics.ended(
            prepared,
            goals_ms(self._core, prepared),
            request.num_generated,
            request.timings,
            error,
            decision=request.decision,
            trace=trace.sent_as,
        )


def _used_tokens(request: Request, error: BaseException | None) -> int:
    """Return the tokens charged to the tenant: the output, and the prompt once a worker was asked to compute it, so that leaving
    before the first token is not free. Only a request that the mesh failed to answer at all is free."""
    generated = request.tracker.num_tokens
    has_failed = isinstance(error, MeshError) and not isinstance(error, DeadlineExceeded)
    for_nothing = has_failed and generated <= num_emitted(request.prepared)
    return len(request.prepared.prompt) + generated if request.is_submitted and not for_nothing else 0


# The policy learns from requests that have ended: prediction errors, overheads of hand-offs, output lengths.


def learn(
    core: RouterContext, prepared: PreparedRequest, decision: Decision | None, timings: mesh_pb2.Timings, num_tokens: int
) -> None:
    """Learn from a request with `num_tokens` of all choices. After a retry or a loss only its output length counts."""
    core.output_lengths.observe(prepared.model.name, prepared.tenant, num_tokens // prepared.num_choices)
    if decision is None or timings.num_retries or timings.num_resubmissions or prepared.emitted:
        return
    core.decisions.compare(decision)
    chosen, tpot_s, now = decision.placement.chosen, decision.observed_tpot_s, time.monotonic()
    if chosen is not None and chosen.prediction is not None:
        _count(core.traffic.of(prepared.model.name), decision, chosen.prediction)
        if decision.observed_ttft_s is not None:
            plain_s = chosen.prediction.plain_ttft_s
            core.overheads.observe_ttft(chosen.prefill, chosen.decode, plain_s, decision.observed_ttft_s, now)
        if tpot_s:
            core.overheads.observe_tpot(chosen.decode, chosen.prediction.steps_tpot_s, tpot_s, now)
    seen = _overhead(decision, timings)
    if seen is not None:
        core.overheads.observe(decision.placement.prefill, decision.placement.decode, seen)


def _count(traffic: ModelTraffic, decision: Decision, predicted: Prediction) -> None:
    """Count observed and predicted times, for the autoscaler: of TTFT without what was learned from earlier requests, since it is
    to see how much longer prompts take than workers' speeds say."""
    if decision.observed_ttft_s is not None:
        traffic.ttft.add(decision.observed_ttft_s, predicted.plain_ttft_s)
    if decision.observed_tpot_s is not None:
        traffic.tpot.add(decision.observed_tpot_s, predicted.tpot_s)


def _overhead(decision: Decision, timings: mesh_pb2.Timings) -> Overhead | None:
    """Return the part of TTFT beyond the worker's queue and steps, and the time that the hand-off added after it."""
    ttft_s = decision.observed_ttft_s
    if ttft_s is None:
        return None
    on_worker_ns = timings.prefill_queue_ns + timings.prefill_compute_ns
    took = decision.timings.prefill if decision.timings is not None else None
    if took is not None and took.reserve_ns:  # LOCAL: restoring and fetching are parts of that, and predicted by themselves
        on_worker_ns += took.restore_ns + took.fetch_ns
    after_ns = timings.kv_exposed_ns + timings.decode_queue_ns if decision.placement.prefill is not None else 0
    return Overhead(max(0.0, ttft_s - on_worker_ns / 1e9), after_ns / 1e9)


# The list of stages


class IntakeStage(Protocol):
    """Run one stage before the request is dispatched."""

    async def run(self, request: Request, /) -> None:
        """Run the stage. Raises the MeshError that refuses the request."""


@dataclass(frozen=True)
class Parts:
    """Hold what the stages of one router are made from. `dispatch` grows: each stage of a dispatch sees those before it."""

    core: RouterContext
    preprocessor: Preprocessor
    open_requests: OpenRequests
    dispatch: list[DispatchStage] = field(default_factory=list)


T = TypeVar("T", covariant=True)


@dataclass(frozen=True)
class Stage(Generic[T]):
    """Describe one stage. `spans` of the router's traces and `timing_parts` (`Timings.*_ns`) are recorded in it; several stages
    may share one. `metrics`: those that it records, or that account records from its timing parts.

    Names of spans, timing parts and metrics are those that clients and dashboards know, so they may differ from the stage's."""

    name: str
    run_by: type[T]
    make: Callable[[Parts], T]
    spans: tuple[str, ...] = ()
    timing_parts: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()


_TTFT_PART, _HANDOFF_PART = "pdmesh.ttft.part", "pdmesh.handoff.part"

# In the client's task, one after the other.
INTAKE: Sequence[Stage[IntakeStage]] = (
    Stage(
        "validate",
        ValidateStage,
        lambda parts: ValidateStage(parts.core, parts.preprocessor),
        ("route",),
        ("route",),
        (_TTFT_PART,),
    ),
    Stage(
        "tokenize",
        TokenizeStage,
        lambda parts: TokenizeStage(parts.core, parts.preprocessor),
        ("route",),
        ("route",),
        (_TTFT_PART,),
    ),
    Stage(
        "admit",
        AdmitStage,
        lambda parts: AdmitStage(parts.core, parts.open_requests),
        ("admission",),
        ("admission_queue",),
        (_TTFT_PART, "pdmesh.arrivals", "pdmesh.admission.admitted", "pdmesh.admission.waited", "pdmesh.admission.refused"),
    ),
)
# In a task of its own, until every choice has ended.
DISPATCH: Sequence[Stage[DispatchStage]] = (
    Stage(
        "place",
        PlaceStage,
        lambda parts: PlaceStage(parts.core),
        ("route", "admission"),
        ("route", "admission_queue"),
        (_TTFT_PART, "pdmesh.policy.decision", "pdmesh.policy.decisions", "pdmesh.unplaced.requests", "pdmesh.unplaced.age"),
    ),
    Stage(
        "reserve",
        ReserveStage,
        lambda parts: ReserveStage(parts.core),
        ("attempt", "reserve", "retry"),
        ("reserve", "retry"),
        (_TTFT_PART,),
    ),
    Stage(
        "prefill",
        PrefillStage,
        lambda parts: PrefillStage(parts.core),
        ("prefill", "retry"),
        ("prefill_queue", "prefill_compute", "retry", "kv_exposed"),
        (_TTFT_PART, _HANDOFF_PART, "pdmesh.request.retries", "pdmesh.hedges"),
    ),
    Stage(
        "decode",
        DecodeStage,
        lambda parts: DecodeStage(parts.core, tuple(parts.dispatch)),
        ("migrate",),
        ("decode_queue",),
        (_HANDOFF_PART, "pdmesh.request.resubmissions", "pdmesh.migrations", "pdmesh.token.mismatches", "pdmesh.token.redrawn"),
    ),
)
# In the client's task again, beside the dispatch.
STREAM = Stage(
    "stream",
    StreamStage,
    lambda _parts: StreamStage(),
    ("first_token_return",),
    ("first_token_return", "ttft", "tpot"),
    (_TTFT_PART, "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token"),
)
ACCOUNT = Stage(
    "account",
    AccountStage,
    lambda parts: AccountStage(parts.core),
    ("generate",),
    ("total",),
    (
        "gen_ai.server.request.duration", "gen_ai.client.token.usage", "pdmesh.requests", "pdmesh.tokens",
        "pdmesh.prediction.error", "pdmesh.prediction.deviation", "pdmesh.revision.requests", "pdmesh.revision.ttft",
        "pdmesh.revision.tpot",
    ),
)  # fmt: skip
STAGES: Sequence[Stage[object]] = (*INTAKE, *DISPATCH, STREAM, ACCOUNT)


class Pipeline:
    """Run the stages of one router's requests."""

    def __init__(self, core: RouterContext, preprocessor: Preprocessor, open_requests: OpenRequests) -> None:
        self._core = core
        self._open_requests = open_requests
        parts = Parts(core, preprocessor, open_requests)
        self._intake = tuple(stage.make(parts) for stage in INTAKE)
        for stage in DISPATCH:
            parts.dispatch.append(stage.make(parts))
        self._dispatch = tuple(parts.dispatch)
        self._stream = STREAM.make(parts)
        self._account = ACCOUNT.make(parts)
        self._embed = EmbedStage(core)

    @property
    def stages(self) -> tuple[object, ...]:
        """Return all stages, in the order of `STAGES`."""
        return (*self._intake, *self._dispatch, self._stream, self._account)

    async def run(self, request: Request) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        """Yield the messages of `request`, from its arrival on. However the iteration ends, the request's work ends with it.

        Raises MeshError."""
        request.timings.routed(request.timings.received_ns)
        error: BaseException | None = None
        try:
            self._open_requests.enter(request)
            for stage in self._intake:
                await stage.run(request)
            task = f"request {request.prepared.request_id}"
            request.dispatching = self._core.background.spawn(self._run_dispatches(request), task)
            async with aclosing(self._stream.run(request)) as messages:
                async for message in messages:
                    yield message
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.end(request, error)

    async def embed(self, request: Request, pooling: common_pb2.Pooling.ValueType) -> mesh_pb2.Embedding:
        """Return the embedding of the request's prompt: the stages before the dispatch, one worker, and account.

        Raises MeshError."""
        request.timings.routed(request.timings.received_ns)
        request.is_streamed = False
        error: BaseException | None = None
        try:
            self._open_requests.enter(request)
            for stage in self._intake:
                await stage.run(request)
            return await self._embed.run(request, pooling)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.end(request, error)

    def end(self, request: Request, error: BaseException | None) -> None:
        """Account for a request that has ended, also for one that could not be parsed and so entered no other stage."""
        self._open_requests.leave(request)
        self._core.releases.leave(request.session_state)
        self._account.run(request, error)

    async def _run_dispatches(self, request: Request) -> None:
        """Dispatch until every choice has ended. Errors go to the client's stream. On cancellation, calls to workers go on in
        the background."""
        log.belongs_to(request.timings.spans.trace_name)
        limit = asyncio.timeout_at(request.prepared.deadline)
        try:
            async with limit:
                while not request.tracker.all_finished:
                    await self._run_dispatch(request)
        except MeshError as error:
            request.fail(error)
        except TimeoutError as error:
            request.fail(DeadlineExceeded("the deadline of the request has passed") if limit.expired() else error)
        except Exception as error:  # noqa: BLE001 - the client gets INTERNAL instead of a stream that hangs
            request.fail(error)

    async def _run_dispatch(self, request: Request) -> None:
        """Run place, reserve, prefill and decode. A loss is recorded, and the caller starts the next dispatch."""
        dispatch = request.new_dispatch(request.timings)
        try:
            with contextlib.suppress(Finished):
                await run_in_order(self._dispatch, dispatch)
        except WorkerLost as loss:
            self._note_loss(request, request.session or dispatch.assigned.session, loss)
        finally:
            dispatch.leave_queue(self._core.capacity_queue)
            if dispatch.assignment is not None:
                (request.session or dispatch.assignment.session).leave("the request has ended")
            request.session = None

    def _note_loss(self, request: Request, session: DecodeSession, loss: WorkerLost) -> None:
        """Record the loss; the next dispatch avoids the worker. Raises Unavailable after too many losses."""
        parts, tracker = request.timings.parts, request.tracker
        logger.warning("%s: %s; %d tokens are out, it goes on elsewhere", session.wire_id, loss, tracker.num_tokens)
        request.was_stopped |= isinstance(loss, GivenBack)
        if not isinstance(loss, GivenBack):
            self._core.health_recorder.failed(session.key, Role.DECODE, str(loss), lost=session.incarnation.lost.is_set())
            request.lost_on.add(session.info.revision)
        request.avoid = frozenset({session.key})  # one that is asleep, too: its last report may not say so yet
        request.timings.failed(str(loss))
        tracker.drop_early()
        if tracker.anything_emitted:
            request.kind = kind_of(session.info)
        parts.num_resubmissions += 1
        request.num_losses += not isinstance(loss, GivenBack)
        if request.num_losses > self._core.config.max_resubmissions:
            raise Unavailable(f"lost {request.num_losses} times (max_resubmissions), the last time because {loss}; resume it")
