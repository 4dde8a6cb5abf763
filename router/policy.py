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
    compatible,
    first,
    has_room_now,
    no_partner,
    nobody,
)
from router.overheads import Overheads
from router.prediction import Engine, Goals, OutputSide, Prediction, PromptSide, miss
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

    def placed(self, decode: WorkerView, prefill: WorkerView | None) -> None:
        """What it chose is being done."""


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
        owners: list[Engine] = []
        for group in roster.groups(demand.model, demand.kind):
            could, found = self._look(group, demand, now)
            owners += could
            candidates += found
        if not owners:
            return nobody(roster.views(), demand)
        if not candidates:
            return self._look_everywhere(roster, demand, now) or no_partner(owner.view for owner in owners)
        best = min(candidates, key=_order)
        return Placement(best.decode, best.prefill, "", candidates)

    def choose_prefill(self, roster: Roster, decode: WorkerView, demand: Demand, now: float) -> WorkerView | None:
        """The cheapest pair with this decode worker."""
        group = roster.group_of(decode)
        owner = group.engines[decode.address]
        look = _Look(group, demand, now, self._overheads, self._shortlist)
        candidates = look.remote([owner], self._fillers(group, demand, [owner]))
        return min(candidates, key=_order).prefill if candidates else None

    def placed(self, decode: WorkerView, prefill: WorkerView | None) -> None:
        """It remembers nothing: the views do."""

    def _look_everywhere(self, roster: Roster, demand: Demand, now: float) -> Placement | NoPlacement | None:
        """REMOTE was asked for, and nobody on the shortlists reaches anybody: None if everybody was on them."""
        if self._shortlist >= len(roster):
            return None
        thorough = PredictPolicy(self._overheads, local_prefill_tokens=0, shortlist=len(roster))
        return thorough.choose(roster, demand, now)

    def _look(self, group: Group, demand: Demand, now: float) -> tuple[list[Engine], list[Candidate]]:
        """The workers that could own the request, and the candidates among them."""
        look = _Look(group, demand, now, self._overheads, self._shortlist)
        holders = [engine for engine in self._holders(group, demand, group.owners) if engine.view.decode]
        owners = _together(first(_engines(group, group.owners), demand, self._shortlist), first(holders, demand, self._shortlist))
        if demand.mode is Mode.REMOTE:
            return owners, look.remote(owners, self._fillers(group, demand, owners))
        wholes = _together(first(_engines(group, group.wholes), demand, self._shortlist), owners)
        candidates = look.local(wholes)
        long = [o for o in owners if demand.uncached(o.view) >= self._local_prefill_tokens] if demand.mode is None else []
        if long:
            candidates += look.remote(long, self._fillers(group, demand, long))
        return wholes, candidates

    def _fillers(self, group: Group, demand: Demand, decodes: Sequence[Engine]) -> list[Engine]:
        def fits(engine: Engine) -> bool:
            view = engine.view
            return can_fill(view, demand) and any(compatible(view, decode.view) for decode in decodes)

        # One more than asked for: with both roles, the best of them may be the best decode worker itself.
        best = islice(filter(fits, _engines(group, group.fillers)), self._shortlist + 1)
        return _together(list(best), list(filter(fits, self._holders(group, demand, group.fillers))))

    def _holders(self, group: Group, demand: Demand, ranking: Ranking) -> list[Engine]:
        """Workers with the most of the prompt."""
        cached = demand.cached_tokens
        if not cached:
            return []
        if len(cached) <= MAX_HOLDERS:
            known = (group.engines.get(address) for address, _ in cached)
            engines = [engine for engine in known if engine is not None and engine.key in cached]
        else:
            engines = [engine for engine in islice(_engines(group, ranking), MAX_HOLDERS) if engine.key in cached]
        return heapq.nlargest(self._shortlist, engines, key=lambda engine: (cached[engine.key], engine.view.address))


@dataclass(slots=True)
class _Look:
    """One request at one group: what computing it and owning it mean, for each worker once; then pairs."""

    group: Group
    demand: Demand
    now: float
    overheads: Overheads
    count: int

    def local(self, decodes: Iterable[Engine]) -> list[Candidate]:
        """Each of them by itself."""
        goals, expected = self._goals(), self.demand.expected_tokens
        found = []
        for engine in decodes:
            over = self.overheads.between(None, engine.view)
            predicted = prediction.local(self._prompt_side(engine), self._output_side(engine), over, expected, goals)
            found.append(self._candidate(engine, None, predicted))
        return found

    def remote(self, decodes: Iterable[Engine], prefills: Iterable[Engine]) -> list[Candidate]:
        """Pairs of the best by what each side costs alone: together they cost little more than the sum.

        KV of another element type gives other tokens than decode's own: only where there is nobody else."""
        goals, expected = self._goals(), self.demand.expected_tokens
        prompts = [(engine, self._prompt_side(engine)) for engine in prefills]
        prompts.sort(key=lambda pair: (_prompt_alone(pair[1], expected, goals) + pair[0].view.penalty_s, pair[0].view.address))
        outputs = [(engine, self._output_side(engine)) for engine in decodes]
        outputs.sort(
            key=lambda pair: (
                not has_room_now(pair[0], self.demand),
                _alone(pair[1], expected, goals) + pair[0].view.penalty_s,
                pair[0].view.address,
            )
        )
        found = []
        for decode, output in outputs[: self.count]:
            partners = [pair for pair in prompts if compatible(pair[0].view, decode.view)]
            kv_dtype = decode.view.layout.kv_dtype
            same = [pair for pair in partners if pair[0].view.layout.kv_dtype == kv_dtype]
            for engine, prompt in (same or partners)[: self.count]:
                over = self.overheads.between(engine.view, decode.view)
                found.append(self._candidate(decode, engine, prediction.remote(prompt, output, over, expected, goals)))
        return found

    def _goals(self) -> Goals:
        return Goals(self.demand.ttft_goal_s, self.demand.tpot_goal_s, self.demand.running_tpot_goal_s)

    def _prompt_side(self, engine: Engine) -> PromptSide:
        demand = self.demand
        return engine.prompt_side(demand.num_tokens, demand.cached_tokens.get(engine.key, 0), self.now)

    def _output_side(self, engine: Engine) -> OutputSide:
        demand = self.demand
        num_cached = demand.cached_tokens.get(engine.key, 0)
        return engine.output_side(demand.num_tokens, num_cached, demand.num_choices, demand.expected_tokens, self.now)

    def _candidate(self, decode: Engine, prefill: Engine | None, predicted: Prediction) -> Candidate:
        cost = cost_s(predicted, self.demand.expected_tokens, self.group.pressure)
        cost += decode.view.penalty_s + (0.0 if prefill is None else prefill.view.penalty_s)
        filler = None if prefill is None else prefill.view
        return Candidate(decode.view, filler, cost, has_room_now(decode, self.demand), predicted)


def _prompt_alone(prompt: PromptSide, expected: float, goals: Goals) -> float:
    """What computing the prompt costs, whoever owns it."""
    step_s = prompt.step_s + prompt.own_s / max(1.0, expected)
    misses = miss(prompt.compute_s, goals.ttft_s) + prompt.rows * miss(step_s, goals.running_tpot_s)
    return prompt.compute_s + prompt.rows * prompt.own_s + MISS_PENALTY_S * misses


def _alone(output: OutputSide, expected: float, goals: Goals) -> float:
    """What owning the request costs, whoever computes the prompt."""
    misses = miss(output.tpot_s, goals.tpot_s) + output.rows * miss(output.tpot_s, goals.running_tpot_s)
    return output.queue_s + expected * (output.tpot_s + output.rows * output.row_s) + MISS_PENALTY_S * misses


def cost_s(predicted: Prediction, expected_tokens: float, pressure: float) -> float:
    """The seconds by which candidates are compared."""
    own_s = predicted.ttft_s + max(0.0, expected_tokens - 1) * predicted.tpot_s
    return own_s + predicted.delay_s + pressure * predicted.work_s + MISS_PENALTY_S * predicted.misses


def _order(candidate: Candidate) -> tuple[bool, float, bool, str, str]:
    return candidate.order


def _engines(group: Group, ranking: Ranking) -> Iterator[Engine]:
    engines = group.engines
    return (engines[address] for _, address in ranking.entries)


def _together(some: Sequence[Engine], more: Sequence[Engine]) -> list[Engine]:
    """Each once."""
    return list({engine.key: engine for engine in (*some, *more)}.values())
