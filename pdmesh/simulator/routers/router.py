"""One simulated router: a request from its arrival to its end, on the real admission and policy.

arrive ─► admission ─► place ─► Submit to decode ─► Prefill, or LOCAL ─► first token ─► commit ─► last token
               │         └─ no room: capacity queue              (lease.py)
               └─ rejected
"""

from collections.abc import Callable

from pdmesh.planning.objectives import PRIORITIES, Bounds
from pdmesh.simulator.events import EventQueue
from pdmesh.simulator.request import End, Request, Stay
from pdmesh.simulator.routers.admission import SimulatedAdmission, SimulatedQueue
from pdmesh.simulator.routers.lease import Floor, SimulatedLease
from pdmesh.simulator.routers.routing import MODEL, Decided, SimulatedRouting
from pdmesh.simulator.settings import MeshSettings
from pdmesh.step_sharing import PACE_TARGET
from router.fleet.worker import Dispatched
from router.flow_control.controller import Admission
from router.flow_control.slo_admission import FlowItem
from router.flow_control.ttft_predictor import HELD_BYTES_PER_TOKEN
from router.routing.cost_model import Overhead
from router.routing.filters import NoPlacement, blocks_for
from router.routing.worker_snapshot import WorkerKey

# What the router learns from an ended request, as in `router/lifecycle/stages.py`.


def learn(outlook: SimulatedRouting, stay: Stay) -> None:
    """Learn from the request; one that was retried or lost teaches nothing about a smooth one."""
    request, placement = stay.request, stay.placement
    outlook.output_lengths.observe(MODEL, request.arrival.tenant, request.num_output)
    if request.num_resubmissions or stay.tried or request.first_at is None:
        return
    chosen, tpot_s = placement.chosen, request.tpot_s
    predicted = None if chosen is None else chosen.prediction
    if predicted is not None:
        plain_s, seen_s = predicted.plain_ttft_s, request.first_at - stay.decided_at
        outlook.overheads.observe_ttft(placement.prefill, placement.decode, plain_s, seen_s, request.last_at or 0.0)
    if tpot_s and predicted is not None:
        outlook.overheads.observe_tpot(placement.decode, predicted.steps_tpot_s, tpot_s, request.last_at or 0.0)
    on_worker_s = stay.brought_s + stay.computed_at - stay.entered_at
    before_s = max(0.0, request.first_at - stay.decided_at - on_worker_s)
    outlook.overheads.observe(placement.prefill, placement.decode, Overhead(before_s, stay.after_s))


NO_WORKERS: frozenset[WorkerKey] = frozenset()
OnEnd = Callable[[Request, End], None]


class Router:
    """Simulate a router. `floor` finds workers by name; `on_end` is called once for every request that came."""

    def __init__(
        self, events: EventQueue, settings: MeshSettings, outlook: SimulatedRouting, floor: Floor, on_end: OnEnd
    ) -> None:
        self.outlook = outlook
        self._events, self._settings, self._on_end = events, settings, on_end
        admission = None if settings.admission is None else Admission(settings.admission)
        self._gate = SimulatedAdmission(events, admission, self._place, self._refuse)
        self._line = SimulatedQueue(events, self._try)
        self._staying = SimulatedLease(events, settings, outlook, floor, self)

    @property
    def num_waiting(self) -> int:
        """Return the requests in the request queue and in the capacity queue."""
        return self._gate.num_waiting + len(self._line)

    def arrive(self, request: Request) -> None:
        """Ask for admission."""
        self._gate.ask(request, lambda: self._applicant(request))

    def opened(self) -> None:
        """Retry waiting requests: a worker has reported."""
        self._line.opened()

    def lost(self, name: str) -> None:
        """Handle the noticed loss of a worker."""
        self.outlook.lose(name)
        self._staying.lost(name)

    # Outcomes of a placement

    def placed(self, stay: Stay) -> None:
        """Note that its worker has reserved."""
        if self._line.is_trying(stay.request):
            self._line.left(stay.request)

    def turned_down(self, stay: Stay, refused: frozenset[WorkerKey]) -> None:
        """Place it elsewhere: its worker had no room."""
        self._try(stay.request, refused)

    def interrupted(self, stay: Stay) -> None:
        """Place it elsewhere, before requests that have not begun: its decode worker is lost."""
        request = stay.request
        request.num_resubmissions += 1
        if self._line.is_trying(request):  # its Submit was under way
            self._line.failed(request)
            return
        if request.num_resubmissions > self._settings.max_resubmissions:
            self._leave(request, End.LOST, "resubmissions")
        elif len(self._line):
            self._line.join_first(request)
        else:
            self._try(request)

    def finished(self, stay: Stay) -> None:
        """End the request: its last token has arrived."""
        request = stay.request
        if request.num_resubmissions == 0 and not stay.tried:
            self._gate.answered(request)
        learn(self.outlook, stay)
        self._leave(request, End.COMPLETED)
        self._line.opened()

    # Placing

    def _applicant(self, request: Request) -> FlowItem:
        """Return the request's flow item, as router/flow_control/ttft_predictor.py builds it."""
        arrival = request.arrival
        guarded = _bounds(self._settings, PRIORITIES["standard"])
        expected = self.outlook.output_lengths.expected(MODEL, arrival.tenant, self.outlook.max_tokens(request))
        return FlowItem(
            tenant=arrival.tenant,
            priority=arrival.priority,
            prompt_tokens=request.num_input,
            output_tokens=round(expected),
            num_bytes=HELD_BYTES_PER_TOKEN * request.num_input,
            lane=MODEL,
            ttft_s=request.ttft_goal_s,
            tpot_s=request.tpot_goal_s,
            guard_ttft_s=_seconds(guarded.ttft_ms),
            guard_tpot_s=_seconds(guarded.tpot_ms),
            foresee=lambda: self.outlook.forecast(request, self._events.now),
        )

    def _place(self, request: Request) -> None:
        if len(self._line):
            self._line.join(request)
        else:
            self._try(request)

    def _try(self, request: Request, refused: frozenset[WorkerKey] = NO_WORKERS) -> None:
        """Run one round of the policy; some workers have `refused` already."""
        decided = self.outlook.choose(request, self._events.now, refused)
        if isinstance(decided.choice, NoPlacement):
            self._no_place(request, decided.choice, is_full=bool(refused))
        else:
            self._submit(request, decided, refused)

    def _no_place(self, request: Request, nothing: NoPlacement, *, is_full: bool) -> None:
        is_trying = self._line.is_trying(request)
        waited_s = self._events.now - request.waits_since if is_trying and request.waits_since is not None else 0.0
        settings, reason = self._settings, ""
        short_s = settings.resubmit_timeout_s if request.num_resubmissions else settings.place_timeout_s
        if nothing.never:
            reason = "too_large"
        elif is_full and waited_s > settings.room_timeout_s:
            reason = "room"
        elif not is_full and waited_s > short_s:
            reason = "no_worker"
        if reason:
            if is_trying:
                self._line.left(request, placed=False)
            self._leave(request, End.LOST if request.num_resubmissions else End.REFUSED, reason)
        elif is_trying:
            self._line.failed(request)
        else:
            self._line.join(request)

    def _submit(self, request: Request, decided: Decided, refused: frozenset[WorkerKey]) -> None:
        demand, placement = decided.demand, decided.choice
        assert not isinstance(placement, NoPlacement)
        decode, prefill = placement.decode, placement.prefill
        uncached = 0 if prefill is not None else demand.uncached(decode)
        num_tokens = request.num_tokens
        pace_s = PACE_TARGET * (request.tpot_goal_s or 0.0)
        sent = Dispatched(1, blocks_for(num_tokens, decode), uncached, decodes=1, context=num_tokens, pace_s=pace_s)
        stay = Stay(request, placement, decode.address, sent, self._events.now, refused)
        if prefill is not None:
            stay.prefill = prefill.address
            stay.sent_prompt = Dispatched(1, blocks_for(num_tokens, prefill), demand.uncached(prefill))
        request.is_local = prefill is None
        request.decided_at = self._events.now
        request.prediction = None if placement.chosen is None else placement.chosen.prediction
        self.outlook.policy.placed(decode, prefill)
        self._staying.begin(stay)
        self._gate.placed(request)

    def _refuse(self, request: Request, reason: str) -> None:
        request.reason = reason
        self._on_end(request, End.REFUSED)

    def _leave(self, request: Request, end: End, reason: str = "") -> None:
        used = request.num_input + request.num_output if end is End.COMPLETED else 0
        self._gate.leave(request, used)
        request.reason = reason
        self._on_end(request, end)


def _bounds(settings: MeshSettings, priority: int) -> Bounds:
    return Bounds(None, None) if settings.objective is None else settings.objective.bounds(priority)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def goals(settings: MeshSettings, priority: int) -> tuple[float | None, float | None]:
    """Return the objectives of a request of this priority: seconds of TTFT and TPOT."""
    bounds = _bounds(settings, priority)
    return _seconds(bounds.ttft_ms), _seconds(bounds.tpot_ms)
