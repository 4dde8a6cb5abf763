"""One simulated router's picture of the fleet, as old as reports are, and what the real policy answers to it."""

from typing import NamedTuple

from pdmesh.simulator.request import Request
from pdmesh.simulator.routers.ledger import MODEL, Ledger
from pdmesh.simulator.routers.prefixes import Prefixes
from pdmesh.simulator.settings import MeshSettings
from pdmesh.simulator.workers.spec import WorkerSpec
from pdmesh.simulator.workers.stats import Figures
from router.fleet.worker import Dispatched
from router.flow_control.forecast import Forecast
from router.routing.cost_policy import Policy, PredictPolicy
from router.routing.filters import Demand, NoPlacement, Placement
from router.routing.fleet_snapshot import Roster
from router.routing.output_lengths import OutputLengths
from router.routing.overheads import Overheads
from router.routing.policies.single_signal import PreferencePolicy, preference
from router.routing.worker_snapshot import WorkerKey, WorkerView

IDLE_FOR_S, MAX_IDLE, CONTEXT_STEP = 1.0, 256, 256
"""As router/forecaster.py."""
NOBODY: frozenset[WorkerKey] = frozenset()


class Decided(NamedTuple):
    """What the policy was asked, and its answer."""

    demand: Demand
    choice: Placement | NoPlacement


class Outlook:
    """Ledgers by worker, and what follows from them."""

    def __init__(self, settings: MeshSettings, prefix_tokens: int) -> None:
        self.overheads, self.output_lengths = Overheads(), OutputLengths()
        self.prefixes = Prefixes(settings.prefix_index_blocks, prefix_tokens)
        self.policy = _policy(settings, self.overheads)
        self.max_context = 0
        self._settings = settings
        self._ledgers: dict[str, Ledger] = {}
        self._roster = Roster()
        self._outdated: dict[str, None] = {}
        self._latest: tuple[Request, float, Decided] | None = None
        self._idle: dict[tuple[int, int], float | None] = {}
        self._idle_until = 0.0

    # What changes it

    def meet(self, name: str, spec: WorkerSpec) -> None:
        """A worker will report."""
        self._ledgers[name] = Ledger(name, spec)
        self.max_context = max(self.max_context, spec.largest)

    def lose(self, name: str) -> None:
        """It is gone."""
        ledger = self._ledgers.pop(name, None)
        if ledger is not None:
            self.prefixes.forget(ledger.key)
            self._changed(name)

    def report(self, name: str, figures: Figures) -> None:
        """A report has come."""
        ledger = self._ledgers.get(name)
        if ledger is not None:
            ledger.report(figures)
            self._changed(name)

    def dispatched(self, name: str, sent: Dispatched) -> None:
        """This is being sent there."""
        ledger = self._ledgers.get(name)
        if ledger is not None:
            ledger.dispatched(sent)
            self._changed(name)

    def done(self, name: str, sent: Dispatched | None) -> None:
        """The worker has no more work with it; idempotent."""
        ledger = self._ledgers.get(name)
        if ledger is not None and sent is not None and ledger.done(sent):
            self._changed(name)

    def released(self, name: str, sent: Dispatched, now: float) -> None:
        """It has come to its end there; a report may still contain it."""
        ledger = self._ledgers.get(name)
        if ledger is not None:
            ledger.released(sent, now)
            self._changed(name)

    def told(self, name: str, stored: list[int], evicted: list[int]) -> None:
        """What its prefix cache has gained and lost."""
        ledger = self._ledgers.get(name)
        if ledger is not None and (stored or evicted):
            self.prefixes.tell(ledger.key, stored, evicted)
            self._latest = None

    def sent_prompt(self, name: str, request: Request, now: float) -> None:
        """Its prompt's blocks are, or will soon be, there."""
        ledger = self._ledgers.get(name)
        if ledger is not None and request.arrival.hashes:
            self.prefixes.sent(ledger.key, request.arrival.hashes, now)
            self._latest = None

    # What follows

    def is_settled(self, name: str) -> bool:
        """Do its reports contain everything that was sent there?"""
        ledger = self._ledgers.get(name)
        return ledger is None or ledger.is_settled

    @property
    def roster(self) -> Roster:
        """Brought up to date when somebody looks."""
        if self._outdated:
            for name in self._outdated:
                ledger = self._ledgers.get(name)
                self._roster.put(name, None if ledger is None else ledger.view())
            self._outdated.clear()
        return self._roster

    def choose(self, request: Request, now: float, refused: frozenset[WorkerKey] = NOBODY) -> Decided:
        """The policy's answer, without those who `refused` to own it. Asked twice about one request in one moment (its forecast,
        then its placement) it answers once."""
        latest = self._latest
        if latest is not None and latest[0] is request and latest[1] == now and not refused:
            return latest[2]
        demand = self.demand(request, now, excluded_decode=refused)
        decided = Decided(demand, self.policy.choose(self.roster, demand, now))
        self._latest = None if refused else (request, now, decided)
        return decided

    def choose_prefill(self, request: Request, decode: str, tried: frozenset[WorkerKey], now: float) -> WorkerView | None:
        """Another worker to compute the prompt of a request that `decode` has reserved; None without one."""
        engine = self.roster.get(decode)
        if engine is None:
            return None
        return self.policy.choose_prefill(self.roster, engine.view, self.demand(request, now, excluded_prefill=tried), now)

    def demand(
        self,
        request: Request,
        now: float,
        *,
        excluded_decode: frozenset[WorkerKey] = NOBODY,
        excluded_prefill: frozenset[WorkerKey] = NOBODY,
    ) -> Demand:
        """What the policy is asked: as router/demands.py."""
        max_tokens, objective = self.max_tokens(request), self._settings.objective
        expected = self.output_lengths.expected(MODEL, request.arrival.tenant, max_tokens)
        return Demand(
            model=MODEL,
            num_tokens=request.num_tokens,
            max_total_tokens=request.num_input + max_tokens,
            cached_tokens=self.prefixes.cached_tokens(request.arrival.hashes, now),
            excluded_decode=excluded_decode,
            excluded_prefill=excluded_prefill,
            expected_tokens=max(1.0, expected - request.num_emitted),
            ttft_goal_s=request.ttft_goal_s,
            tpot_goal_s=request.tpot_goal_s,
            running_tpot_goal_s=None if objective is None else objective.tpot_ms / 1e3,
        )

    def max_tokens(self, request: Request) -> int:
        """What its client asks for at most."""
        most = self.max_context - request.num_input
        asked = self._settings.max_tokens
        return max(1, most if asked is None else min(most, max(asked, request.num_output)))

    def forecast(self, request: Request, now: float) -> Forecast | None:
        """What admission asks: as router/forecaster.py."""
        choice = self.choose(request, now).choice
        best = None if isinstance(choice, NoPlacement) else choice.chosen
        if best is None or best.prediction is None:
            return None
        predicted, goal_s = best.prediction, request.tpot_goal_s
        slow = goal_s is not None and predicted.tpot_s > goal_s
        idle_tpot_s = self._idle_tpot_s(request.num_tokens, now) if slow else None
        return Forecast(predicted.ttft_s, predicted.tpot_s, best.has_room, predicted.ahead_s, idle_tpot_s)

    def cached_tokens(self, request: Request, worker: WorkerKey, now: float) -> int:
        """Of its prompt, that `worker` is thought to hold."""
        return self.prefixes.cached_tokens(request.arrival.hashes, now).get(worker, 0)

    def _idle_tpot_s(self, context: int, now: float) -> float | None:
        """Of the fastest worker with nothing else to do; remembered for a while, as it takes a look at all."""
        if now >= self._idle_until or len(self._idle) > MAX_IDLE:
            self._idle, self._idle_until = {}, now + IDLE_FOR_S
        key = (1, context // CONTEXT_STEP)
        if key not in self._idle:
            speeds = [view.idle_tpot_s(1, context) for view in self.roster.views() if view.decode]
            self._idle[key] = min([tpot_s for tpot_s in speeds if tpot_s is not None], default=None)
        return self._idle[key]

    def _changed(self, name: str) -> None:
        self._outdated[name] = None
        self._latest = None


def _policy(settings: MeshSettings, overheads: Overheads) -> Policy:
    if settings.policy == "predict":
        return PredictPolicy(overheads, local_prefill_tokens=settings.local_prefill_tokens)
    return PreferencePolicy(preference(settings.policy), settings.local_prefill_tokens)
