"""Where a request goes: what each candidate would cost in seconds, of the request's own time and of everybody else's. Pure.

    cost = TTFT + (tokens expected - 1) · TPOT      of the request itself
         + delay                                    of the sequences that run already, summed
         + pressure · work                          of those that come next: worker seconds, by the share of busy workers
         + MISS_PENALTY_S · misses                  objectives thought to be missed, its own and those of the running

The candidates are LOCAL on a decode worker, and pairs with a prefill worker that reaches it; of a large fleet the best few of
each by the rankings of `router/roster.py`, and those that hold a part of the prompt already. `docs/routing.md` says more.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from router import prediction
from router.candidates import (
    Candidate,
    Demand,
    NoPlacement,
    Placement,
    can_fill,
    can_own,
    compatible,
    first,
    has_room,
    no_partner,
    nobody,
)
from router.overheads import Overheads
from router.prediction import Engine, Goals, OutputSide, Prediction, PromptSide
from router.roster import Group, Ranking, Roster
from router.views import Mode, WorkerView

MISS_PENALTY_S = 10.0
SHORTLIST = 4
MAX_HOLDERS = 64
"""Where more workers than this hold a part of the prompt, the shortlists contain good ones anyway."""


class Policy(Protocol):
    """A way to choose. `now` is monotonic seconds."""

    name: str

    def choose(self, roster: Roster, demand: Demand, now: float) -> Placement | NoPlacement:
        """The placement of one request."""

    def choose_prefill(self, roster: Roster, decode: WorkerView, demand: Demand, now: float) -> WorkerView | None:
        """Another prefill worker for a request that `decode` has reserved already; None without one."""


class PredictPolicy:
    """The least predicted cost. Fewer uncached tokens than `local_prefill_tokens` are never worth a hand-off."""

    name = "predict"

    def __init__(self, overheads: Overheads, *, local_prefill_tokens: int = 0, shortlist: int = SHORTLIST) -> None:
        self._overheads = overheads
        self._local_prefill_tokens = local_prefill_tokens
        self._shortlist = shortlist

    def choose(self, roster: Roster, demand: Demand, now: float) -> Placement | NoPlacement:
        """As `Policy` says; equal snapshots get equal answers."""
        candidates: list[Candidate] = []
        owners: list[WorkerView] = []
        for group in roster.groups(demand.model, demand.kind):
            look = _Look(group, demand, now, self._overheads)
            decodes = self._owners(group, demand)
            owners += decodes
            candidates += self._candidates(look, decodes)
        if not owners:
            return nobody(roster.views(), demand)
        if not candidates:
            return self._look_everywhere(roster, demand, now) or no_partner(owners)
        best = min(candidates, key=_order)
        return Placement(best.decode, best.prefill, "", candidates)

    def choose_prefill(self, roster: Roster, decode: WorkerView, demand: Demand, now: float) -> WorkerView | None:
        """The cheapest pair with this decode worker."""
        group = roster.group_of(decode)
        look = _Look(group, demand, now, self._overheads)
        candidates = look.remote([decode], self._fillers(group, demand, [decode]))
        return min(candidates, key=_order).prefill if candidates else None

    def _look_everywhere(self, roster: Roster, demand: Demand, now: float) -> Placement | NoPlacement | None:
        """REMOTE was asked for, and nobody on the shortlists reaches anybody: None if everybody was on them."""
        if self._shortlist >= len(roster):
            return None
        thorough = PredictPolicy(self._overheads, local_prefill_tokens=0, shortlist=len(roster))
        return thorough.choose(roster, demand, now)

    def _candidates(self, look: "_Look", decodes: list[WorkerView]) -> list[Candidate]:
        mode, demand = look.demand.mode, look.demand
        remote: list[Candidate] = []
        if mode is not Mode.LOCAL:
            long_enough = [d for d in decodes if mode is Mode.REMOTE or demand.uncached(d) >= self._local_prefill_tokens]
            remote = look.remote(long_enough, self._fillers(look.group, demand, long_enough)) if long_enough else []
        return remote if mode is Mode.REMOTE else look.local(decodes) + remote

    def _owners(self, group: Group, demand: Demand) -> list[WorkerView]:
        rankings = (group.owners,) if demand.mode is Mode.REMOTE else (group.owners, group.wholes)
        found = {view.address: view for ranking in rankings for view in first(_views(group, ranking), demand, self._shortlist)}
        for view in self._holders(group, demand, group.owners):
            if can_own(view, demand) and demand.kind in (None, view.kind):
                found.setdefault(view.address, view)
        return list(found.values())

    def _fillers(self, group: Group, demand: Demand, decodes: Sequence[WorkerView]) -> list[WorkerView]:
        def fits(view: WorkerView) -> bool:
            return can_fill(view, demand) and any(compatible(view, decode) for decode in decodes)

        # One more than asked for: with both roles, the best of them may be the best decode worker itself.
        best = islice(filter(fits, _views(group, group.fillers)), self._shortlist + 1)
        found = {view.address: view for view in best}
        for view in filter(fits, self._holders(group, demand, group.fillers)):
            found.setdefault(view.address, view)
        return list(found.values())

    def _holders(self, group: Group, demand: Demand, ranking: Ranking) -> list[WorkerView]:
        """Workers with the most of the prompt."""
        cached = demand.cached_tokens
        if len(cached) <= MAX_HOLDERS:
            engines = (group.engines.get(address) for address, _ in cached)
            views = [engine.view for engine in engines if engine is not None and engine.view.key in cached]
        else:
            views = [view for view in islice(_views(group, ranking), MAX_HOLDERS) if view.key in cached]
        return heapq.nlargest(self._shortlist, views, key=lambda view: (cached[view.key], view.address))


@dataclass(slots=True)
class _Look:
    """One request at one group: what computing it and owning it mean, for each worker once; then pairs."""

    group: Group
    demand: Demand
    now: float
    overheads: Overheads

    def local(self, decodes: Iterable[WorkerView]) -> list[Candidate]:
        """Each of them by itself."""
        goals, expected = self._goals(), self.demand.expected_tokens
        found = []
        for view in decodes:
            engine = self.group.engines[view.address]
            over = self.overheads.between(None, view)
            predicted = prediction.local(self._prompt_side(engine), self._output_side(engine), over, expected, goals)
            found.append(self._candidate(view, None, predicted))
        return found

    def remote(self, decodes: Iterable[WorkerView], prefills: Iterable[WorkerView]) -> list[Candidate]:
        """All pairs that can hand over. KV of another element type gives other tokens than decode's own: only where there is
        nobody else."""
        goals, expected = self._goals(), self.demand.expected_tokens
        prompts = [(view, self._prompt_side(self.group.engines[view.address])) for view in prefills]
        found = []
        for decode in decodes:
            output = self._output_side(self.group.engines[decode.address])
            partners = [(view, prompt) for view, prompt in prompts if compatible(view, decode)]
            same = [pair for pair in partners if pair[0].layout.kv_dtype == decode.layout.kv_dtype]
            for view, prompt in same or partners:
                over = self.overheads.between(view, decode)
                found.append(self._candidate(decode, view, prediction.remote(prompt, output, over, expected, goals)))
        return found

    def _goals(self) -> Goals:
        return Goals(self.demand.ttft_goal_s, self.demand.tpot_goal_s, self.demand.running_tpot_goal_s)

    def _prompt_side(self, engine: Engine) -> PromptSide:
        demand = self.demand
        return engine.prompt_side(demand.num_tokens, demand.cached_tokens.get(engine.view.key, 0), self.now)

    def _output_side(self, engine: Engine) -> OutputSide:
        demand = self.demand
        return engine.output_side(demand.num_tokens, demand.num_choices, demand.expected_tokens, self.now)

    def _candidate(self, decode: WorkerView, prefill: WorkerView | None, predicted: Prediction) -> Candidate:
        cost = cost_s(predicted, self.demand.expected_tokens, self.group.pressure)
        cost += decode.penalty_s + (0.0 if prefill is None else prefill.penalty_s)
        return Candidate(decode, prefill, cost, has_room(decode, self.demand), predicted)


def cost_s(predicted: Prediction, expected_tokens: float, pressure: float) -> float:
    """The seconds by which candidates are compared."""
    own_s = predicted.ttft_s + max(0.0, expected_tokens - 1) * predicted.tpot_s
    return own_s + predicted.delay_s + pressure * predicted.work_s + MISS_PENALTY_S * predicted.misses


def _order(candidate: Candidate) -> tuple[bool, float, bool, str, str]:
    return candidate.order


def _views(group: Group, ranking: Ranking) -> Iterator[WorkerView]:
    engines = group.engines
    return (engines[address].view for address in ranking)
