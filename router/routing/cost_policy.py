"""Where a request goes: what each candidate would cost in seconds, of the request's own time and of all others'. Pure.

    cost = TTFT + (tokens expected - 1) · TPOT      of the request itself
         + delay                                    of the sequences that run already, summed
         + pressure · work                          of those that come next: worker seconds, by the share of busy workers
         + MISS_PENALTY_S · misses                  objectives thought to be missed, its own and those of the running

The candidates are LOCAL on a decode worker, and pairs with a prefill worker that reaches it; of a large fleet the best few of
each by the rankings of `router/routing/fleet_snapshot.py`, and those that hold a part of the prompt already. `docs/routing.md`
says more.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from pdmesh.planning.latency_model import PACE_TARGET
from router.routing.cost_model import (
    SPARED,
    Goals,
    OutputSide,
    Overhead,
    Overheads,
    Prediction,
    PromptSide,
    WorkerEstimate,
    is_saturated,
    miss,
)
from router.routing.filters import (
    Candidate,
    NoPlacement,
    Placement,
    RoutingRequest,
    can_prefill,
    compatible,
    explain_no_candidate,
    first,
    has_room_now,
    no_partner,
)
from router.routing.fleet_snapshot import FleetSnapshot, Pool, Ranking
from router.routing.worker_snapshot import Mode, WorkerSnapshot

# What a candidate would do, from what each of its two sides means alone: bit for bit the numbers of `local` and `remote` in
# `router/routing/cost_model.py`. Dozens of candidates are compared for a request, and each worker is part of several. Pure.


_new = tuple.__new__  # as in router/routing/cost_model.py


class PromptPart(NamedTuple):
    """What of a prediction hangs on the worker that computes the prompt alone. `work_s`: the steps of the prompt; `more_s`: what
    it adds to each token of those that run there, `misses` of theirs."""

    ahead_s: float
    compute_s: float
    own_s: float
    work_s: float
    lost_s: float
    more_s: float
    misses: float
    spares: bool


class OutputPart(NamedTuple):
    """What of a prediction hangs on the decode worker alone. `own_s`: the time of its steps; `own_misses` of its own pace,
    `misses` of the `rows` that run there."""

    tpot_s: float
    queue_s: float
    missing: float
    own_s: float
    slowed_s: float
    rows: int
    own_misses: float
    misses: float
    tpot_bound_s: float


def prompt_part(prompt: PromptSide, expected: float, goals: Goals) -> PromptPart:
    """For `whole` and `paired`."""
    ahead_s, compute_s, own_s, rows, tpot_s, fixed_s, is_paced = prompt
    more_s = 0.0 if is_paced else own_s / (expected if expected > 1.0 else 1.0)
    misses = rows * miss(tpot_s + more_s, goals.running_tpot_s) if rows else 0.0
    lost = rows * own_s * (SPARED if is_paced else 1.0)
    return _new(PromptPart, (ahead_s, compute_s, own_s, own_s + fixed_s, lost, more_s, misses, is_paced or not rows))


def output_part(output: OutputSide, expected: float, goals: Goals) -> OutputPart:
    """For `whole` and `paired`."""
    tpot_s, row_s, rows, queue_s, missing, alone_s, is_paced = output
    goal_s, bound_s = goals.tpot_s, 0.0
    misses = rows * miss(tpot_s, goals.running_tpot_s) if rows else 0.0
    if goal_s is not None:
        bound_s = max(tpot_s, PACE_TARGET * goal_s)
    slowed = rows * expected * row_s * (SPARED if is_paced else 1.0)
    own_s = expected * (row_s + alone_s)
    return _new(OutputPart, (tpot_s, queue_s, missing, own_s, slowed, rows, miss(tpot_s, goal_s), misses, bound_s))


def whole_prediction(prompt: PromptPart, output: OutputPart, over: Overhead, gaps: float, goals: Goals) -> Prediction:
    """What `local` says; `gaps` as for `paired`."""
    before_s, after_s, stretch = over
    ttft_s, steps_tpot_s = prompt.compute_s + before_s, output.tpot_s + after_s / gaps
    tpot_s = steps_tpot_s * stretch
    if goals.tpot_s is not None and tpot_s > output.tpot_bound_s:
        tpot_s = output.tpot_bound_s
    misses = miss(ttft_s, goals.ttft_s) + output.own_misses
    if output.rows:
        misses += output.rows * miss(output.tpot_s + prompt.more_s, goals.running_tpot_s)
    delay_s, work_s = prompt.lost_s + output.slowed_s, prompt.work_s + output.own_s
    return _new(Prediction, (ttft_s, tpot_s, delay_s, work_s, prompt.ahead_s, misses, steps_tpot_s, prompt.spares))


def paired(prompt: PromptPart, output: OutputPart, over: Overhead, gaps: float, goals: Goals) -> Prediction:
    """What `remote` says; `gaps`: between the expected tokens, at least 1."""
    before_s, after_s, stretch = over
    ttft_s, after_s = prompt.compute_s + before_s, after_s * output.missing
    behind_s = output.queue_s - prompt.own_s
    steps_tpot_s = output.tpot_s + (after_s + (behind_s if behind_s > 0.0 else 0.0)) / gaps
    tpot_s = steps_tpot_s * stretch
    if goals.tpot_s is not None and tpot_s > output.tpot_bound_s:
        tpot_s = output.tpot_bound_s
    misses = miss(ttft_s, goals.ttft_s) + miss(tpot_s if tpot_s < steps_tpot_s else steps_tpot_s, goals.tpot_s)
    misses = misses + prompt.misses + output.misses
    work_s = prompt.work_s + output.own_s + before_s + after_s
    delay_s = prompt.lost_s + output.slowed_s
    return _new(Prediction, (ttft_s, tpot_s, delay_s, work_s, prompt.ahead_s, misses, steps_tpot_s, prompt.spares))


# as in router/routing/cost_model.py

MISS_PENALTY_S = 10.0
MISSES_MORE = 0.1
LATER = 1.5
"""What a candidate that can begin at once may cost more than the best, which has to wait: in misses, and times its TTFT."""
SHORTLIST, LARGE_FLEET, SHORTLIST_OF_LARGE = 4, 64, 2
"""Of so many workers, the best two of a ranking differ little from the next."""

THOROUGH = 256
MAX_HOLDERS = 64
"""Where more workers than this hold a part of the prompt, the shortlists contain good ones anyway."""


class PredictPolicy:
    """The least predicted cost. Fewer uncached tokens than `local_prefill_tokens` are never worth a hand-off."""

    name = "predict"

    def __init__(self, overheads: Overheads, *, local_prefill_tokens: int = 0, shortlist: int | None = None) -> None:
        self._overheads = overheads
        self._local_prefill_tokens = local_prefill_tokens
        self._shortlist = shortlist

    def choose(self, fleet_snapshot: FleetSnapshot, routing_request: RoutingRequest, now: float) -> Placement | NoPlacement:
        """Return the placement of one request; equal snapshots get equal answers."""
        candidates: list[Candidate] = []
        owners: list[WorkerEstimate] = []
        for group in fleet_snapshot.groups(routing_request.model, routing_request.kind):
            could, found = self._look(group, routing_request, now)
            owners += could
            candidates += found
        if not owners:
            return explain_no_candidate(fleet_snapshot.views(), routing_request)
        if not candidates:
            return self._look_everywhere(fleet_snapshot, routing_request, now) or no_partner(owner.view for owner in owners)
        best = _least(candidates)
        return Placement(best.decode, best.prefill, "", candidates)

    def choose_prefill(
        self, fleet_snapshot: FleetSnapshot, decode: WorkerSnapshot, routing_request: RoutingRequest, now: float
    ) -> WorkerSnapshot | None:
        """Return the prefill worker of the cheapest pair with this decode worker; None without one."""
        group = fleet_snapshot.group_of(decode)
        owner = group.engines[decode.address]
        count = self._count(group)
        look = _Look(group, routing_request, now, self._overheads, count)
        candidates = look.remote([owner], look.fillers([owner]))
        return _least(candidates).prefill if candidates else None

    def placed(self, decode: WorkerSnapshot, prefill: WorkerSnapshot | None) -> None:
        """Remember nothing: the snapshots count what was dispatched."""

    def _look_everywhere(
        self, fleet_snapshot: FleetSnapshot, routing_request: RoutingRequest, now: float
    ) -> Placement | NoPlacement | None:
        """Return the choice among all workers where REMOTE was asked for and no pair of the shortlists fits; None if all were on
        them."""
        if self._shortlist is not None or len(fleet_snapshot) <= SHORTLIST:
            return None
        thorough = PredictPolicy(self._overheads, shortlist=min(len(fleet_snapshot), THOROUGH))
        return thorough.choose(fleet_snapshot, routing_request, now)

    def _look(self, group: Pool, routing_request: RoutingRequest, now: float) -> tuple[list[WorkerEstimate], list[Candidate]]:
        """The workers that could own the request, and the candidates among them."""
        count = self._count(group)
        look = _Look(group, routing_request, now, self._overheads, count)
        holders = [engine for engine in look.holders(group.owners) if engine.view.decode]
        owners = _together(first(_engines(group, group.owners), routing_request, count), first(holders, routing_request, count))
        if routing_request.mode is Mode.REMOTE:
            return owners, look.remote(owners, look.fillers(owners))
        wholes = _together(first(_engines(group, group.wholes), routing_request, count), owners)
        candidates = look.local(wholes)
        long = (
            [o for o in owners if routing_request.uncached(o.view) >= self._local_prefill_tokens]
            if routing_request.mode is None
            else []
        )
        if long:
            candidates += look.remote(long, look.fillers(long))
        return wholes, candidates

    def _count(self, group: Pool) -> int:
        """How many of each ranking are worth a look."""
        if self._shortlist is not None:
            return self._shortlist
        return SHORTLIST if len(group.engines) <= LARGE_FLEET else SHORTLIST_OF_LARGE


class _Look:
    """One request at one group: what computing it and owning it mean, for each worker once; then pairs."""

    __slots__ = (
        "_count",
        "_expected",
        "_gaps",
        "_goals",
        "_group",
        "_holders",
        "_now",
        "_outputs",
        "_overheads",
        "_pressure",
        "_prompts",
        "_routing_request",
    )  # fmt: skip

    def __init__(self, group: Pool, routing_request: RoutingRequest, now: float, overheads: Overheads, count: int) -> None:
        self._group, self._routing_request, self._now, self._overheads, self._count = (
            group,
            routing_request,
            now,
            overheads,
            count,
        )
        self._pressure, self._expected = group.pressure, routing_request.expected_tokens
        self._gaps = max(1.0, self._expected - 1)
        self._goals = Goals(routing_request.ttft_goal_s, routing_request.tpot_goal_s, routing_request.running_tpot_goal_s)
        self._prompts: dict[WorkerEstimate, PromptPart] = {}
        self._outputs: dict[WorkerEstimate, OutputPart] = {}
        self._holders: list[WorkerEstimate] | None = None

    def holders(self, ranking: Ranking) -> list[WorkerEstimate]:
        """Workers with the most of the prompt; where there are very many of them, of those that `ranking` puts first."""
        cached, engines = self._routing_request.cached_tokens, self._group.engines
        if not cached:
            return []
        if len(cached) > MAX_HOLDERS:
            some = islice(_engines(self._group, ranking), MAX_HOLDERS)
            return self._most([(cached[engine.key], engine.key[0]) for engine in some if engine.key in cached])
        if self._holders is None:
            known = ((tokens, engines.get(key[0]), key) for key, tokens in cached.items())
            self._holders = self._most([(tokens, key[0]) for tokens, engine, key in known if engine and engine.key == key])
        return self._holders

    def fillers(self, decodes: Sequence[WorkerEstimate]) -> list[WorkerEstimate]:
        """The best to compute the prompt for any of `decodes`, and those of the holders that can."""
        group, routing_request = self._group, self._routing_request

        def fits(engine: WorkerEstimate) -> bool:
            view = engine.view
            return can_prefill(view, routing_request) and _reaches(view, decodes)

        # One more than asked for: with both roles, the best of them may be the best decode worker itself.
        best = islice(filter(fits, _engines(group, group.fillers)), self._count + 1)
        return _together(best, filter(fits, self.holders(group.fillers)))

    def local(self, decodes: Iterable[WorkerEstimate]) -> list[Candidate]:
        """Each of them by itself."""
        found, goals, gaps = list[Candidate](), self._goals, self._gaps
        for engine in decodes:
            view = engine.view
            over = self._overheads.between(None, view)
            predicted = whole_prediction(self._prompt_part(engine), self._output_part(engine), over, gaps, goals)
            cost = cost_s(predicted, self._expected, self._pressure) + view.penalty_s
            found.append(_new(Candidate, (view, None, cost, has_room_now(engine, self._routing_request), predicted)))
        return found

    def remote(self, decodes: Iterable[WorkerEstimate], prefills: Iterable[WorkerEstimate]) -> list[Candidate]:
        """Pairs of the best by what each side costs alone: together they cost little more than the sum.

        KV of another element type gives other tokens than decode's own: it is the last resort."""
        prompts, outputs = sorted(prefills, key=self._prompt_order), sorted(decodes, key=self._output_order)
        found, goals, gaps, parts = list[Candidate](), self._goals, self._gaps, self._prompts
        expected, pressure, between = self._expected, self._pressure, self._overheads.between
        for decode in outputs[: self._count]:
            has_room, view, output = has_room_now(decode, self._routing_request), decode.view, self._outputs[decode]
            for prefill in self._partners(prompts, view):
                other = prefill.view
                predicted = paired(parts[prefill], output, between(other, view), gaps, goals)
                cost = cost_s(predicted, expected, pressure) + view.penalty_s + other.penalty_s
                found.append(_new(Candidate, (view, other, cost, has_room, predicted)))
        return found

    def _partners(self, prompts: Sequence[WorkerEstimate], decode: WorkerSnapshot) -> list[WorkerEstimate]:
        same, others = list[WorkerEstimate](), list[WorkerEstimate]()
        kv_dtype, count = decode.layout.kv_dtype, self._count
        for engine in prompts:
            if compatible(engine.view, decode):
                (same if engine.view.layout.kv_dtype == kv_dtype else others).append(engine)
                if len(same) == count:
                    break
        return same or others[:count]

    def _most(self, holders: list[tuple[int, str]]) -> list[WorkerEstimate]:
        """The first few of (tokens, address)."""
        holders.sort(reverse=True)
        engines = self._group.engines
        return [engines[address] for _, address in holders[: self._count]]

    def _prompt_order(self, engine: WorkerEstimate) -> tuple[float, str]:
        alone_s = _prompt_alone(self._prompt_part(engine), self._goals)
        return alone_s + engine.view.penalty_s, engine.view.address

    def _output_order(self, engine: WorkerEstimate) -> tuple[bool, float, str]:
        alone_s = _alone(self._output_part(engine), self._expected)
        return not has_room_now(engine, self._routing_request), alone_s + engine.view.penalty_s, engine.view.address

    def _prompt_part(self, engine: WorkerEstimate) -> PromptPart:
        known = self._prompts.get(engine)
        if known is None:
            routing_request = self._routing_request
            side = engine.prompt_side(routing_request.num_tokens, routing_request.cached_tokens.get(engine.key, 0), self._now)
            known = self._prompts[engine] = prompt_part(side, self._expected, self._goals)
        return known

    def _output_part(self, engine: WorkerEstimate) -> OutputPart:
        known = self._outputs.get(engine)
        if known is None:
            routing_request = self._routing_request
            cached = routing_request.cached_tokens.get(engine.key, 0)
            side = engine.output_side(
                routing_request.num_tokens, cached, routing_request.num_choices, routing_request.expected_tokens, self._now
            )
            known = self._outputs[engine] = output_part(side, self._expected, self._goals)
        return known


def _prompt_alone(prompt: PromptPart, goals: Goals) -> float:
    """Return what computing the prompt costs, on whatever decode worker."""
    misses = miss(prompt.compute_s, goals.ttft_s) + prompt.misses
    return prompt.compute_s + prompt.lost_s + MISS_PENALTY_S * misses


def _alone(output: OutputPart, expected: float) -> float:
    """Return what decoding the request costs, whatever worker computes the prompt."""
    misses = output.own_misses + output.misses
    return output.queue_s + expected * output.tpot_s + output.slowed_s + MISS_PENALTY_S * misses


def cost_s(predicted: Prediction, expected_tokens: float, pressure: float) -> float:
    """The seconds by which candidates are compared."""
    own_s = predicted.ttft_s + max(0.0, expected_tokens - 1) * predicted.tpot_s
    return own_s + predicted.delay_s + pressure * predicted.work_s + MISS_PENALTY_S * predicted.misses


def _least(candidates: list[Candidate]) -> Candidate:
    """Return the first by `Candidate.order`. Where that would have to wait, and others can begin without one more missed
    objective, return the first of those: no worker is idle while requests wait."""
    roomy = [candidate for candidate in candidates if candidate.has_room] or candidates
    best = _first(roomy)
    if best.prediction is None or not is_saturated(best.prediction.ttft_s, best.prediction.ahead_s):
        return best
    free = [candidate for candidate in roomy if _is_free(candidate, best.prediction)]
    return _first(free) if free else best


def _is_free(candidate: Candidate, best: Prediction) -> bool:
    mine = candidate.prediction
    if mine is None or not mine.spares or mine.misses > best.misses + MISSES_MORE or mine.ttft_s > LATER * best.ttft_s:
        return False
    return not is_saturated(mine.ttft_s, mine.ahead_s)


def _first(candidates: list[Candidate]) -> Candidate:
    least = min([candidate.cost for candidate in candidates])
    equals = [candidate for candidate in candidates if candidate.cost == least]
    return equals[0] if len(equals) == 1 else min(equals, key=lambda candidate: candidate.order)


def _reaches(prefill: WorkerSnapshot, decodes: Iterable[WorkerEstimate]) -> bool:
    for decode in decodes:  # noqa: SIM110 - it is asked for every worker that is looked at, and a generator takes twice as long
        if compatible(prefill, decode.view):
            return True
    return False


def _engines(group: Pool, ranking: Ranking) -> Iterator[WorkerEstimate]:
    return map(group.engines.__getitem__, ranking.names)


def _together(some: Iterable[WorkerEstimate], more: Iterable[WorkerEstimate]) -> list[WorkerEstimate]:
    """Each once."""
    return list(dict.fromkeys([*some, *more]))
