"""One request from its arrival to its last message: the state that its stages take and give. `stages.py` has their order.

Request     what the client asked for and what it has been sent; lives from validate to account
Dispatch    one passage through place, reserve, prefill and decode; a lost decode worker makes a further one, a move one beside it
"""

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdmesh.runtime.errors import MeshError, Unavailable
from pdmesh.v1 import common_pb2, mesh_pb2
from router.fleet.worker import Dispatched, Incarnation, Worker
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
from router.tokenization.prepared_request import PreparedRequest
from router.tokenization.preprocessor import ClientMessage, ValidatedRequest


class Request:
    """The state that all stages of one request share. The comments name the stage that gives a field.

    It is the sink of its decode sessions: they bring tokens, `client_stream` has them in order, each index once. It is
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
        self.is_open = False  # admit: its end is accounted with its model and tenant
        self.replayed: list[mesh_pb2.GenerateResponse] = []  # admit: ends that a resumed stream's client was not told of
        self.visit: Visit | None = None  # admit
        self.ticket: Ticket | None = None  # admit; account gives it back
        self.dispatching: asyncio.Task[None] | None = None  # runs place, reserve, prefill and decode
        self.decision: Decision | None = None  # place: the latest
        self.is_submitted = False  # reserve: a worker was asked
        self.session: DecodeSession | None = None  # decode: where the request is now
        self.move: asyncio.Future[str] | None = None  # decode: resolved with the reason to move, while it can
        self.drafts = DraftTotals()  # of all decode sessions
        self.is_winding_up = False  # workers have finished every choice; what is left to do ends by itself, soon
        self.is_complete = False  # stream: the last message was made
        self.kind: tuple[object, ...] | None = None  # workers must be of it, once tokens are out
        self.avoid: frozenset[WorkerKey] = frozenset()  # workers that have just lost it

    def open_stream(self, prepared: PreparedRequest, max_buffered_tokens: int) -> None:
        """Set what follows from the prepared request."""
        self.prepared = prepared
        self.tracker = OutputTracker(prepared.num_choices, prepared.emitted)
        self.output = Output(prepared, self.tracker)
        self.client_stream = ClientStream(max_buffered_tokens, self.output.render)

    @property
    def num_generated(self) -> int:
        """Output tokens, without those that the client had before."""
        return self.tracker.num_tokens - num_emitted(self.prepared)

    @property
    def brought(self) -> Yield:
        """What has come of it so far."""
        return Yield(self.output.num_tokens, self.tracker.finish_reasons, self.drafts.num_drafted, self.drafts.num_accepted)

    def fail(self, error: BaseException) -> None:
        """End the stream with `error` after what is queued."""
        self.client_stream.fail(error)

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

    def next_indexes(self) -> Sequence[tuple[int, int]]:
        """Return (choice, output index needed next) of each unfinished choice, for a stream that re-attaches."""
        choices = range(self.prepared.num_choices)
        return [(choice, self.tracker.next_index(choice)) for choice in choices if not self.tracker.is_finished(choice)]

    # Migratable

    @property
    def holder(self) -> WorkerKey | None:
        """The decode worker that it could leave now; None while it has none, or moves already."""
        return self.session.key if self.session is not None and self.move is not None and not self.move.done() else None

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.prepared.model.name

    @property
    def num_tokens(self) -> int:
        """Output tokens of the longest choice."""
        return max(self.tracker.next_index(choice) for choice in range(self.prepared.num_choices))

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        return self.prepared.sampling.max_tokens - self.num_tokens

    def ask_to_move(self, reason: str) -> None:
        """Have the request placed elsewhere and go there, if there is room; to be called only while it has a `holder`."""
        if self.move is not None and not self.move.done():
            self.move.set_result(reason)

    def new_dispatch(self, timings: RequestTimings, leaving: DecodeSession | None = None) -> "Dispatch":
        """Return a dispatch of the prompt and what was emitted so far."""
        return Dispatch(self, timings, self.tracker.history(), self.kind, WorkerSearch(self.avoid), leaving)


class OpenRequests:
    """The requests of one router that are under way. Once it drains, no further one is taken."""

    def __init__(self) -> None:
        self.is_draining = False
        self.on_admitting: Callable[[str, int], None] | None = None  # tenant, and tokens of prompt and output
        self.idle = asyncio.Event()
        self.idle.set()
        self._requests: set[Request] = set()

    def enter(self, request: Request) -> None:
        """Take a request that has arrived; `leave` has to follow. Raises Unavailable while draining."""
        self._check()
        self._requests.add(request)
        self.idle.clear()

    def admit(self, request: Request) -> None:
        """From now on the request counts with its model and tenant. Raises Unavailable while draining."""
        self._check()
        prepared = request.prepared
        if self.on_admitting is not None:
            self.on_admitting(prepared.tenant, len(prepared.prompt) + prepared.num_choices * prepared.sampling.max_tokens)
        request.is_open = True

    def leave(self, request: Request) -> None:
        """The request has ended; also without `enter`."""
        self._requests.discard(request)
        if not self._requests:
            self.idle.set()

    def fail(self, error: MeshError) -> None:
        """End every stream that has begun with `error`."""
        for request in self._requests:
            if request.is_open:
                request.fail(error)

    def closed(self) -> Unavailable:
        """Return the error of requests that come while draining."""
        return Unavailable("this router is going; use another one")

    def _check(self) -> None:
        if self.is_draining:
            raise self.closed()


# One passage through place, reserve, prefill and decode.


@dataclass(frozen=True)
class PrefillTarget:
    """The worker that is to compute a prompt. `sent` counts as its load until it has.

    `predicted_s`: when the policy expects the first token, from the call on; None when it does not."""

    worker: Worker
    incarnation: Incarnation
    sent: Dispatched
    predicted_s: float | None = None

    @property
    def key(self) -> WorkerKey:
        """What tells incarnations apart."""
        return (self.worker.address, self.incarnation.info.epoch)

    def computed(self) -> None:
        """The first tokens have come, or never will; idempotent."""
        self.worker.done(self.sent)


@dataclass(frozen=True)
class Assignment:
    """A reservation on a decode worker and the current attempt at filling it. `sent` counts as decode's load.

    `prefill` None: the decode worker computes the prompt itself. `emitted`: output that the attempt is forced to."""

    session: DecodeSession
    sent: Dispatched
    reservation: common_pb2.Reservation
    prefill: PrefillTarget | None
    emitted: list[common_pb2.EmittedChoice]

    @property
    def mode(self) -> Mode:
        """Where the prompt is computed."""
        return Mode.LOCAL if self.prefill is None else Mode.REMOTE

    def finished(self) -> None:
        """The worker has generated everything: its next report may not know yet."""
        self.session.worker.released(self.sent, time.monotonic())


@dataclass(eq=False)
class WorkerSearch:
    """The state of one search for a decode worker that takes the request: tries, and between them the capacity queue.

    A try leaves out the workers to `avoid`, those that have refused it (`refused`, with their `errors`) and, in its first round,
    ejected ones. When no other worker takes the request, a second round includes them (`takes_ejected`).
    """

    avoid: frozenset[WorkerKey]
    refused: frozenset[WorkerKey] = frozenset()
    errors: list[MeshError] = field(default_factory=list)
    takes_ejected: bool = False
    has_begun: bool = False
    waiter: Waiter | None = None  # the place in the capacity queue
    change: asyncio.Event = field(init=False)  # the next change of the fleet since before the try
    began_s: float = 0.0  # of the wait, in event-loop time
    waiting_ns: int = 0

    def begin_round(self, *, takes_ejected: bool) -> None:
        """Forget refusals."""
        self.refused, self.errors, self.takes_ejected = frozenset(), [], takes_ejected

    def begin_try(self) -> None:
        """Ask every worker again, after a wait."""
        self.avoid = frozenset()
        self.begin_round(takes_ejected=False)

    def refuse(self, key: WorkerKey, error: MeshError) -> None:
        """The worker has answered `error`."""
        self.refused |= {key}
        self.errors.append(error)


@dataclass(eq=False)
class Dispatch:
    """One passage of a request through place, reserve, prefill and decode.

    `timings`: the request's, or those of a move. `emitted`: output before it, to which its attempts are forced. `kind`: workers
    must be of it, None: any. `leaving`: the session that a move is to replace, None otherwise. Place gives `placement` and
    `routing_request`, reserve `assignment`, prefill `tried`: prefill workers that have failed.
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
        """The assignment. Only for stages behind reserve."""
        assert self.assignment is not None
        return self.assignment

    @property
    def started(self) -> bool:
        """Tokens are out already."""
        return bool(self.emitted)

    @property
    def queue_key(self) -> Hashable:
        """Dispatches with the same key could run on the same workers."""
        return (self.request.model, self.kind, self.request.prepared.mode)

    @property
    def interrupted(self) -> bool:
        """This router has generated some of the output: more than the client had from elsewhere."""
        return sum(len(choice.token_ids) for choice in self.emitted) > num_emitted(self.request.prepared)

    def leave_queue(self, queue: CapacityQueue, *, placed: bool = False) -> None:
        """Give the place in the capacity queue up; without one nothing happens."""
        waiter, self.search.waiter = self.search.waiter, None
        if waiter is not None:
            queue.leave(self.queue_key, waiter, placed=placed)


class DispatchStage(Protocol):
    """A stage between the router's queue and a worker."""

    async def run(self, dispatch: Dispatch, /) -> "type[DispatchStage] | None":
        """Return None to go on with the next stage, or the earlier stage to re-enter."""


async def run_in_order(stages: Sequence[DispatchStage], dispatch: Dispatch) -> None:
    """Run `stages` one after the other, and again from the one that a stage returns."""
    number = 0
    while number < len(stages):
        again = await stages[number].run(dispatch)
        number = number + 1 if again is None else [type(stage) for stage in stages].index(again)
