"""The state of one request, which its stages read and set, from arrival to last message. `stages.py` has their order.

Request     what the client asked for and what was sent to it; lives from validate to account
Dispatch    one pass through place, reserve, prefill and decode; a lost decode worker starts another, a migration one beside it
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Protocol

from pdmesh.runtime.errors import OTHER_ENGINE, MeshError, Unavailable
from pdmesh.v1 import common_pb2, mesh_pb2, prefill_pb2, worker_pb2
from router.fleet.change_notifier import Signal
from router.fleet.incarnation import Incarnation
from router.fleet.worker import Dispatched, Worker
from router.flow_control.slo_admission import Ticket
from router.flow_control.ttft_predictor import num_emitted
from router.lifecycle.capacity_queue import CapacityQueue, Waiter
from router.lifecycle.decode_session import DecodeSession
from router.lifecycle.output import ClientStream, DraftTotals, Output, OutputTracker, TokenChunk
from router.routing.decisions import Decision
from router.routing.filters import Placement, RoutingRequest
from router.routing.worker_snapshot import Mode, WorkerKey
from router.telemetry.request_trace import RequestTrace, Yield
from router.telemetry.timings import RequestTimings
from router.telemetry.traffic import Visit
from router.tokenization.prepared_request import PreparedRequest, SessionState
from router.tokenization.preprocessor import ClientMessage, ValidatedRequest


class Request:
    """Hold the state that all stages of one request share. The comments name the stage that sets a field.

    It is the sink of its decode sessions: they deliver tokens, `client_stream` gets each index once, in order. It is
    `Migratable` while a decode worker generates for it.
    """

    validated: ValidatedRequest  # validate
    prepared: PreparedRequest  # tokenize, as the four below
    tracker: OutputTracker
    output: Output
    client_stream: ClientStream[mesh_pb2.GenerateResponse]

    def __init__(self, message: ClientMessage, time_left_s: float | None, timings: RequestTimings, trace: RequestTrace) -> None:
        self.message = message
        self.time_left_s = time_left_s
        self.timings = timings
        self.trace = trace
        self.session_state: SessionState | None = None  # validate; None without a session
        self.is_open = False  # admit: from now on it counts with its model and tenant
        self.replayed: list[mesh_pb2.GenerateResponse] = []  # admit: ends of choices that a resumed stream's client was not sent
        self.visit: Visit | None = None  # admit
        self.ticket: Ticket | None = None  # admit; account releases it
        self.dispatching: asyncio.Task[None] | None = None  # runs place, reserve, prefill and decode
        self.decision: Decision | None = None  # place: the latest
        self.lost_on: set[str] = set()  # revisions of workers where it failed, and was tried again
        self.is_submitted = False  # reserve: a Submit was sent
        self.session: DecodeSession | None = None  # decode: the present session
        self.ran_on: worker_pb2.WorkerInfo | None = None  # decode: the latest worker
        self.move: asyncio.Future[str] | None = None  # decode: resolved with the reason to migrate; None while it cannot
        self.drafts = DraftTotals()  # of all decode sessions
        self.is_winding_up = False  # workers have finished every choice; the remaining work ends soon by itself
        self.is_complete = False  # stream: the last message was made
        self.is_streamed = True  # False: an embedding's, which is one message
        self.aborted = Signal()  # it has ended because all requests of its model were to
        self.kind: tuple[object, ...] | None = None  # once tokens were sent, workers must be of this kind
        self.system_fingerprint = ""  # reserve: names the kind of the latest worker to the client
        self.avoid: frozenset[WorkerKey] = frozenset()  # workers that have just lost it, or given it back
        self.was_stopped = False  # some worker was paused or asleep meanwhile: its times say nothing
        self.num_losses = 0  # of its decode worker, but for one that goes to sleep
        self.failed_holders: frozenset[WorkerKey] = frozenset()  # reserve, prefill: workers that did not send KV to be fetched

    def open_stream(self, prepared: PreparedRequest, max_buffered_tokens: int) -> None:
        """Set the fields that follow from the prepared request."""
        self.prepared = prepared if self.session_state is None else replace(prepared, session_state=self.session_state)
        self.tracker = OutputTracker(prepared.num_choices, prepared.emitted)
        self.output = Output(self.prepared, self.tracker)
        self.client_stream = ClientStream(max_buffered_tokens, self.output.render)

    @property
    def num_generated(self) -> int:
        """Return the number of output tokens, without those that the client had before."""
        return self.tracker.num_tokens - num_emitted(self.prepared)

    @property
    def brought(self) -> Yield:
        """Return the output so far, for the trace."""
        return Yield(self.output.num_tokens, self.tracker.finish_reasons, self.drafts.num_drafted, self.drafts.num_accepted)

    def fail(self, error: BaseException) -> None:
        """End the stream with `error` after what is queued."""
        self.client_stream.fail(error)

    def abort(self) -> None:
        """End every choice with the tokens that it has, and the work for it; nothing where all have ended."""
        if self.tracker.all_finished:
            return
        self.was_stopped = True
        self.tracker.drop_early()
        for choice in range(self.prepared.num_choices):
            ended = TokenChunk(choice, self.tracker.next_index(choice), [], finish_reason=common_pb2.FINISH_REASON_ABORT)
            for new in self.tracker.accept(ended):
                self.client_stream.put(new)
        self.aborted.set()
        if self.dispatching is not None:
            self.dispatching.cancel()

    def submitting(self, placed: Callable[[Ticket], None]) -> None:
        """End the wait for a worker at the first call to one: forecasts, to which `placed` says so, and the autoscaler count the
        request there from now on."""
        if self.is_submitted:
            return
        self.is_submitted = True
        if self.visit is not None:
            self.visit.placed()
        if self.ticket is not None:
            placed(self.ticket)

    # The sink of decode sessions

    def accept(self, chunk: TokenChunk) -> bool:
        """Take tokens from any worker; return True when no more are needed. Raises OutputError. Per-token path."""
        chunks = self.tracker.accept(chunk)
        if chunks:
            self.timings.first_token()
        for new in chunks:
            self.client_stream.put(new)
            if new.finish_reason and self.tracker.all_finished:
                self.is_winding_up = True
        return self.is_winding_up or self.client_stream.failed

    def fetch_failed(self, holder: prefill_pb2.KVHolder) -> None:
        """Ask this worker no more for KV: it did not send it, or was too slow. It holds for all later attempts."""
        self.failed_holders |= {(holder.address, holder.epoch)}

    def next_indexes(self) -> Sequence[tuple[int, int]]:
        """Return (choice, output index needed next) of each unfinished choice, for a stream that re-attaches."""
        choices = range(self.prepared.num_choices)
        return [(choice, self.tracker.next_index(choice)) for choice in choices if not self.tracker.is_finished(choice)]

    # Migratable

    @property
    def decode_worker(self) -> WorkerKey | None:
        """Return the decode worker that it could leave now; None while it has none, or migrates already."""
        return self.session.key if self.session is not None and self.move is not None and not self.move.done() else None

    @property
    def model(self) -> str:
        """Return the name of the model."""
        return self.prepared.model.name

    @property
    def num_tokens(self) -> int:
        """Return the number of output tokens of the longest choice."""
        return max(self.tracker.next_index(choice) for choice in range(self.prepared.num_choices))

    @property
    def num_left(self) -> int:
        """Return the number of tokens that may still come."""
        return self.prepared.sampling.max_tokens - self.num_tokens

    def ask_to_move(self, reason: str) -> None:
        """Ask the request to migrate if another worker has room. Call it only while `decode_worker` is not None."""
        if self.move is not None and not self.move.done():
            self.move.set_result(reason)

    def new_dispatch(self, timings: RequestTimings, leaving: DecodeSession | None = None) -> "Dispatch":
        """Return a dispatch of the prompt and the output emitted so far."""
        return Dispatch(self, timings, self.tracker.history(), self.kind, WorkerSearch(self.avoid), leaving)


MAX_ABORT_IDS = 64
"""Of the last aborts: workers report the same one within a heartbeat of each other."""


class OpenRequests:
    """Hold the running requests of one router. Once it drains, it accepts no more."""

    def __init__(self) -> None:
        self.is_draining = False
        self.on_admitting: Callable[[str, int], None] | None = None  # tenant, and tokens of prompt and output
        self.idle = asyncio.Event()
        self.idle.set()
        self._requests: set[Request] = set()
        self._abort_ids: deque[int] = deque(maxlen=MAX_ABORT_IDS)

    def enter(self, request: Request) -> None:
        """Add a request that has arrived; `leave` has to follow. Raises Unavailable while draining."""
        self._check()
        self._requests.add(request)
        self.idle.clear()

    def admit(self, request: Request) -> None:
        """Count the request with its model and tenant from now on. Raises Unavailable while draining."""
        self._check()
        prepared = request.prepared
        if self.on_admitting is not None:
            self.on_admitting(prepared.tenant, len(prepared.prompt) + prepared.num_choices * prepared.sampling.max_tokens)
        request.is_open = True

    def leave(self, request: Request) -> None:
        """Remove a request that has ended; also without `enter`."""
        self._requests.discard(request)
        if not self._requests:
            self.idle.set()

    def abort(self, model: str, abort_id: int) -> None:
        """End every admitted request of a model with what it has; once for each id, which comes from several workers."""
        if abort_id in self._abort_ids:
            return
        self._abort_ids.append(abort_id)
        for request in self._requests:
            if request.is_open and request.is_streamed and request.model == model:
                request.abort()

    def fail(self, error: MeshError) -> None:
        """End every admitted request with `error`."""
        for request in self._requests:
            if request.is_open:
                request.fail(error)

    def closed(self) -> Unavailable:
        """Return the error for requests that arrive while draining."""
        return Unavailable("this router is going; use another one")

    def _check(self) -> None:
        if self.is_draining:
            raise self.closed()


# One pass through place, reserve, prefill and decode.


@dataclass(frozen=True)
class PrefillTarget:
    """Hold the prefill worker of a prompt. `sent` counts as its load until the prompt is computed.

    `info`: of the incarnation when it was chosen: a change of weights gives it another. `predicted_s`: predicted time from the
    call to the first token; None without a prediction."""

    worker: Worker
    incarnation: Incarnation
    info: worker_pb2.WorkerInfo
    sent: Dispatched
    predicted_s: float | None = None

    @property
    def key(self) -> WorkerKey:
        """Return the key of the worker's incarnation."""
        return (self.worker.address, self.incarnation.info.epoch)

    def computed(self) -> None:
        """Stop counting `sent`: the first tokens have come, or never will. Idempotent."""
        self.worker.done(self.sent)


@dataclass(frozen=True)
class Assignment:
    """Hold a reservation on a decode worker and the current attempt at it. `sent` counts as the decode worker's load.

    `prefill` None: the decode worker computes the prompt itself. `emitted`: output that the attempt is forced to."""

    session: DecodeSession
    sent: Dispatched
    reservation: common_pb2.Reservation
    prefill: PrefillTarget | None
    emitted: list[common_pb2.EmittedChoice]

    @property
    def mode(self) -> Mode:
        """Return where the prompt is computed."""
        return Mode.LOCAL if self.prefill is None else Mode.REMOTE

    def finished(self) -> None:
        """Count the load as ended on the decode worker, whose next report may still contain it."""
        self.session.worker.released(self.sent, time.monotonic())


class WaitsFor(Enum):
    """What a request waits for in the capacity queue. Each has a limit of its own, which no other one uses up."""

    ROOM = auto()  # on workers that decode, or its turn
    START = auto()  # none decodes, and the autoscaler starts some
    WAKE = auto()  # workers that are paused or asleep
    WORKER = auto()  # any other reason why none takes it


@dataclass(eq=False)
class WorkerSearch:
    """Hold the state of a search for a decode worker that takes the request: tries, and waits in the capacity queue between them.

    A try excludes the workers to `avoid`, those that have refused it (`refused`, with their `errors`) and, in its first round,
    ejected ones. When no other worker takes the request, a second round includes them (`takes_ejected`). Every try excludes the
    `unfit`, whose engines cannot serve it, as `unfit_error` says.
    """

    avoid: frozenset[WorkerKey]
    refused: frozenset[WorkerKey] = frozenset()
    errors: list[MeshError] = field(default_factory=list)
    unfit: frozenset[WorkerKey] = frozenset()
    unfit_error: MeshError | None = None
    takes_ejected: bool = False
    has_begun: bool = False
    waiter: Waiter | None = None  # the place in the capacity queue
    queue_key: Hashable = None  # whose queue that is: what the request may run on can change while it waits
    change: asyncio.Event = field(init=False)  # the next change of the fleet since before the try
    waited_s: dict[WaitsFor, float] = field(default_factory=lambda: dict.fromkeys(WaitsFor, 0.0))
    looked_s: float = 0.0  # event-loop time until which that is counted
    waiting_ns: int = 0

    def begin_round(self, *, takes_ejected: bool) -> None:
        """Begin a round without refusals."""
        self.refused, self.errors, self.takes_ejected = frozenset(), [], takes_ejected

    def begin_try(self) -> None:
        """Begin a try at every worker, after a wait."""
        self.avoid = frozenset()
        self.begin_round(takes_ejected=False)

    def waits(self, cause: WaitsFor, now_s: float) -> float:
        """Count the time since the last look as a wait for this, and return the seconds that it has waited for it in all."""
        self.waited_s[cause] += now_s - self.looked_s
        self.looked_s = now_s
        return self.waited_s[cause]

    def refuse(self, key: WorkerKey, error: MeshError) -> None:
        """Record that the worker has answered with `error`."""
        self.refused |= {key}
        self.errors.append(error)
        if error.reason == OTHER_ENGINE:
            self.unfit |= {key}
            self.unfit_error = error


@dataclass(eq=False)
class Dispatch:
    """Hold one pass of a request through place, reserve, prefill and decode.

    `timings`: the request's, or those of a migration. `emitted`: output before it, to which its attempts are forced. `kind`: the
    kind that workers must be of, None: any. `leaving`: the session that a migration replaces, None otherwise. Place sets
    `placement` and `routing_request`, reserve `assignment`, prefill `tried`: prefill workers that have failed.
    """

    request: Request
    timings: RequestTimings
    emitted: list[common_pb2.EmittedChoice]
    kind: tuple[object, ...] | None
    search: WorkerSearch
    leaving: DecodeSession | None = None
    placement: Placement = field(init=False)
    routing_request: RoutingRequest = field(init=False)
    assignment: Assignment | None = None
    tried: frozenset[WorkerKey] = frozenset()

    @property
    def assigned(self) -> Assignment:
        """Return the assignment. Only stages after reserve may ask."""
        assert self.assignment is not None
        return self.assignment

    @property
    def started(self) -> bool:
        """Return True if tokens were sent before this dispatch."""
        return bool(self.emitted)

    @property
    def interrupted(self) -> bool:
        """Return True if the request has output of this router, beyond what the client resumed with."""
        return sum(len(choice.token_ids) for choice in self.emitted) > num_emitted(self.request.prepared)

    def leave_queue(self, queue: CapacityQueue, *, placed: bool = False) -> None:
        """Leave the capacity queue, if the dispatch is in it."""
        waiter, self.search.waiter = self.search.waiter, None
        if waiter is not None:
            queue.leave(self.search.queue_key, waiter, placed=placed)


class Finished(Exception):
    """Raised within a dispatch whose request has all of its tokens: nothing is left to do."""


class DispatchStage(Protocol):
    """Run one stage between admission and the end of decoding."""

    async def run(self, dispatch: Dispatch, /) -> "type[DispatchStage] | None":
        """Run the stage. Return None to go on with the next one, or the earlier stage to re-enter."""


async def run_in_order(stages: Sequence[DispatchStage], dispatch: Dispatch) -> None:
    """Run `stages` one after the other, and again from the one that a stage returns."""
    number = 0
    while number < len(stages):
        again = await stages[number].run(dispatch)
        number = number + 1 if again is None else [type(stage) for stage in stages].index(again)
