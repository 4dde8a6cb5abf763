"""The default policy: the candidate with the least predicted cost in seconds, of this request and all others. Pure.

    cost = TTFT + (tokens expected - 1) · TPOT      of the request itself
         + delay                                    of the running sequences, summed
         + pressure · work                          of later requests: worker seconds, times the share of busy workers
         + MISS_PENALTY_S · misses                  objectives expected to be missed, by it and by running requests

The candidates are LOCAL on a decode worker (aggregated), and REMOTE on a decode worker with a prefill worker that reaches it. In
a large fleet they are the best few by the rankings of `router/routing/fleet_snapshot.py`, and the workers with the longest cached
prefix. Among candidates that cost the same the last workers of the request's session are taken. `docs/routing.md` says more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from router.routing.cost_model import FETCH_S, RESTORE_S, Goals, Prediction, PromptWays, WorkerEstimate, is_saturated, miss
from router.routing.filters import (
    Candidate,
    NoPlacement,
    PeerTiers,
    Placement,
    RoutingRequest,
    can_hand_over,
    can_prefill,
    compatible,
    explain_no_candidate,
    first,
    has_room_now,
    is_away,
    no_partner,
    peer_tiers,
)
from router.routing.fleet_snapshot import FleetSnapshot, Pool, Ranking
from router.routing.learned import Overheads
from router.routing.prediction_parts import OutputPart, PromptPart, local_prediction, output_part, prompt_part, remote_prediction
from router.routing.worker_snapshot import Mode, WorkerKey, WorkerSnapshot

_new = tuple.__new__  # as in router/routing/cost_model.py
MISS_PENALTY_S = 10.0
MISSES_MORE = 0.1
LATER = 1.5
"""When the best candidate has to wait, one that can begin at once wins with up to so many more misses and times its TTFT."""
ALIKE = 0.02
"""Costs that differ by less than this share are the same to a request with a session: predictions are no more exact."""
SHORTLIST, LARGE_FLEET, SHORTLIST_OF_LARGE = 4, 64, 2
"""In a pool of more than LARGE_FLEET workers, the best two of a ranking differ little from the next."""

THOROUGH = 256
MAX_CACHED_ON = 64
"""When more workers than this have a part of the prompt cached, the shortlists contain good ones anyway."""


class PredictPolicy:
    """Choose the least predicted cost. Fewer uncached tokens than `local_prefill_tokens` are not worth a hand-off."""

    name = "predict"

    def __init__(self, overheads: Overheads, *, local_prefill_tokens: int = 0, shortlist: int | None = None) -> None:
        self._overheads = overheads
        self._local_prefill_tokens = local_prefill_tokens
        self._shortlist = shortlist

    def choose(self, fleet_snapshot: FleetSnapshot, routing_request: RoutingRequest, now: float) -> Placement | NoPlacement:
        """Return the placement of one request; equal snapshots get equal answers."""
        candidates: list[Candidate] = []
        decodes: list[WorkerEstimate] = []
        for pool in fleet_snapshot.pools(routing_request.model, routing_request.kind, routing_request.revision):
            shortlisted, found = self._search(pool, routing_request, now)
            decodes += shortlisted
            candidates += found
        if not decodes:
            return explain_no_candidate(fleet_snapshot.views(), routing_request)
        if not candidates:
            searched = self._search_all(fleet_snapshot, routing_request, now)
            return searched or no_partner([decode.view for decode in decodes], fleet_snapshot.views(), routing_request)
        best = _least(candidates, routing_request)
        return Placement(best.decode, best.prefill, "", candidates)

    def choose_prefill(
        self, fleet_snapshot: FleetSnapshot, decode: WorkerSnapshot, routing_request: RoutingRequest, now: float
    ) -> Placement | None:
        """Return the cheapest pair with this decode worker; None without one."""
        pool = fleet_snapshot.pool_of(decode)
        decodes = [pool.estimates[decode.address]]
        search = _CandidateSearch(pool, routing_request, now, self._overheads, self._count(pool))
        candidates = search.remote(decodes, search.prefills(decodes))
        if not candidates:
            return None
        best = _least(candidates, routing_request)
        return Placement(best.decode, best.prefill, "", candidates)

    def placed(self, decode: WorkerSnapshot, prefill: WorkerSnapshot | None) -> None:
        """Remember nothing: the snapshots count what was dispatched."""

    def _search_all(
        self, fleet_snapshot: FleetSnapshot, routing_request: RoutingRequest, now: float
    ) -> Placement | NoPlacement | None:
        """Return the choice among all workers when REMOTE was asked for and no pair of the shortlists fits; None if they already
        held all workers."""
        if self._shortlist is not None or len(fleet_snapshot) <= SHORTLIST:
            return None
        thorough = PredictPolicy(self._overheads, shortlist=min(len(fleet_snapshot), THOROUGH))
        return thorough.choose(fleet_snapshot, routing_request, now)

    def _search(self, pool: Pool, routing_request: RoutingRequest, now: float) -> tuple[list[WorkerEstimate], list[Candidate]]:
        """Return the shortlisted workers that can decode the request, and the candidates."""
        count = self._count(pool)
        search = _CandidateSearch(pool, routing_request, now, self._overheads, count)
        cached_on = [estimate for estimate in search.cached_on(pool.decode_ranking) if estimate.view.decode]
        ranked = first(_ranked(pool, pool.decode_ranking), routing_request, count)
        decodes = _union(ranked, first(cached_on, routing_request, count))
        decodes = _union(decodes, first(search.of_session(), routing_request, 1))
        if routing_request.mode is Mode.REMOTE:
            return decodes, search.remote(decodes, search.prefills(decodes))
        aggregated = _union(first(_ranked(pool, pool.aggregated_ranking), routing_request, count), decodes)
        candidates = search.local(aggregated)
        long = (
            [decode for decode in decodes if routing_request.uncached(decode.view) >= self._local_prefill_tokens]
            if routing_request.mode is None
            else []
        )
        if long:
            candidates += search.remote(long, search.prefills(long))
        return aggregated, candidates

    def _count(self, pool: Pool) -> int:
        """Return how many workers of each ranking are scored."""
        if self._shortlist is not None:
            return self._shortlist
        return SHORTLIST if len(pool.estimates) <= LARGE_FLEET else SHORTLIST_OF_LARGE


class _CandidateSearch:
    """Score one request in one pool: the prompt part and the output part of each worker once, then pairs."""

    __slots__ = (
        "_cached_on",
        "_count",
        "_expected",
        "_fetching",
        "_from_tiers",
        "_gaps",
        "_goals",
        "_held",
        "_now",
        "_outputs",
        "_overheads",
        "_pool",
        "_pressure",
        "_prompts",
        "_restorable",
        "_restoring",
        "_routing_request",
    )  # fmt: skip

    def __init__(self, pool: Pool, routing_request: RoutingRequest, now: float, overheads: Overheads, count: int) -> None:
        self._pool, self._routing_request, self._now = pool, routing_request, now
        self._overheads, self._count = overheads, count
        self._pressure, self._expected = pool.pressure, routing_request.expected_tokens
        self._gaps = max(1.0, self._expected - 1)
        self._goals = Goals(routing_request.ttft_goal_s, routing_request.tpot_goal_s, routing_request.running_tpot_goal_s)
        self._prompts: dict[WorkerEstimate, PromptPart] = {}
        self._outputs: dict[WorkerEstimate, OutputPart] = {}
        self._cached_on: list[WorkerEstimate] | None = None
        self._fetching: dict[WorkerEstimate, PromptPart] = {}
        self._restoring: dict[WorkerEstimate, PromptPart] = {}
        cached, self._restorable = routing_request.cached_tokens, routing_request.restorable_tokens
        held = cached if routing_request.revision is None else {key: cached[key] for key in cached if key[0] in pool.estimates}
        self._held = min(max(held.values(), default=0), routing_request.num_tokens - 1) if len(cached) <= MAX_CACHED_ON else 0
        self._from_tiers: PeerTiers | None = None
        if 0 < len(self._restorable) <= MAX_CACHED_ON:
            self._from_tiers = peer_tiers(routing_request, self._view_of, self._held, routing_request.num_tokens - 1)

    def _view_of(self, key: WorkerKey) -> WorkerSnapshot | None:
        estimate = self._pool.estimates.get(key[0])
        return estimate.view if estimate is not None and estimate.key == key else None

    def cached_on(self, ranking: Ranking) -> list[WorkerEstimate]:
        """Return the workers with the longest cached prefix, and those with the longest one in pool and tiers; if very many have
        one, only of those that `ranking` puts first."""
        cached = self._routing_request.cached_tokens
        if not cached and not self._restorable:
            return []
        if len(cached) > MAX_CACHED_ON or len(self._restorable) > MAX_CACHED_ON:
            return self._with_prefix(cached, ranking)
        if self._cached_on is None:
            self._cached_on = self._with_prefix(cached, ranking)
        return self._cached_on

    def _with_prefix(self, cached: Mapping[WorkerKey, int], ranking: Ranking) -> list[WorkerEstimate]:
        found = self._most_of(cached, ranking)
        return _union(found, self._most_of(self._restorable, ranking)) if self._restorable else found

    def _most_of(self, tokens_of: Mapping[WorkerKey, int], ranking: Ranking) -> list[WorkerEstimate]:
        """Return the workers with most tokens."""
        estimates = self._pool.estimates
        if len(tokens_of) > MAX_CACHED_ON:
            some = islice(_ranked(self._pool, ranking), MAX_CACHED_ON)
            return self._longest([(tokens_of[estimate.key], estimate.key[0]) for estimate in some if estimate.key in tokens_of])
        known = ((tokens, estimates.get(key[0]), key) for key, tokens in tokens_of.items())
        return self._longest([(tokens, key[0]) for tokens, worker, key in known if worker and worker.key == key])

    def of_session(self) -> list[WorkerEstimate]:
        """Return the decode worker on which the request's session was last, if it is in this pool."""
        key, *_ = self._routing_request.session_workers or (None,)
        estimate = None if key is None else self._pool.estimates.get(key[0])
        return [estimate] if estimate is not None and estimate.key == key and estimate.view.decode else []

    def prefills(self, decodes: Sequence[WorkerEstimate]) -> list[WorkerEstimate]:
        """Return the best prefill workers for any of `decodes`, and those with the longest cached prefix."""
        pool, routing_request = self._pool, self._routing_request

        def fits(estimate: WorkerEstimate) -> bool:
            view = estimate.view
            return can_prefill(view, routing_request) and _reaches(view, decodes)

        # One more than asked for: a worker with both roles may be the best decode worker, too.
        best = islice(filter(fits, _ranked(pool, pool.prefill_ranking)), self._count + 1)
        return _union(best, filter(fits, self.cached_on(pool.prefill_ranking)))

    def local(self, decodes: Iterable[WorkerEstimate]) -> list[Candidate]:
        """Return a LOCAL candidate for each decode worker."""
        found, goals, gaps = list[Candidate](), self._goals, self._gaps
        part_of = self._fetching_part if self._held or self._restorable else self._prompt_part
        for estimate in decodes:
            view, part = estimate.view, part_of(estimate)
            over = self._overheads.between(None, view, self._now)
            predicted = local_prediction(part, self._output_part(estimate), over, gaps, goals)
            cost = cost_s(predicted, self._expected, self._pressure) + view.penalty_s
            has_room = has_room_now(estimate, self._routing_request)
            found.append(_new(Candidate, (view, None, cost, has_room, predicted, part.ways)))
        return found

    def remote(self, decodes: Iterable[WorkerEstimate], prefills: Iterable[WorkerEstimate]) -> list[Candidate]:
        """Return REMOTE candidates: pairs of the workers that are best alone, as a pair costs little more than the sum.

        KV of another element type than the decode worker's changes the tokens: it is the last resort."""
        able = [decode for decode in decodes if can_hand_over(decode.view, self._routing_request)]
        prompts, outputs = sorted(prefills, key=self._prompt_order), sorted(able, key=self._output_order)
        found, goals, gaps, parts = list[Candidate](), self._goals, self._gaps, self._fetching
        expected, pressure, between, now = self._expected, self._pressure, self._overheads.between, self._now
        for decode in outputs[: self._count]:
            has_room, view, output = has_room_now(decode, self._routing_request), decode.view, self._outputs[decode]
            for prefill in self._partners(prompts, view):
                other, part = prefill.view, parts[prefill]
                predicted = remote_prediction(part, output, between(other, view, now), gaps, goals)
                cost = cost_s(predicted, expected, pressure) + view.penalty_s + other.penalty_s
                found.append(_new(Candidate, (view, other, cost, has_room, predicted, part.ways)))
        return found

    def _partners(self, prompts: Sequence[WorkerEstimate], decode: WorkerSnapshot) -> list[WorkerEstimate]:
        same, others = list[WorkerEstimate](), list[WorkerEstimate]()
        kv_dtype, count = decode.layout.kv_dtype, self._count
        for estimate in prompts:
            if compatible(estimate.view, decode):
                (same if estimate.view.layout.kv_dtype == kv_dtype else others).append(estimate)
                if len(same) == count:
                    break
        return same or others[:count]

    def _longest(self, cached: list[tuple[int, str]]) -> list[WorkerEstimate]:
        """Return the workers with the greatest (cached tokens, address)."""
        cached.sort(reverse=True)
        estimates = self._pool.estimates
        return [estimates[address] for _, address in cached[: self._count]]

    def _prompt_order(self, estimate: WorkerEstimate) -> tuple[float, str]:
        alone_s = _prompt_alone(self._fetching_part(estimate), self._goals)
        return alone_s + estimate.view.penalty_s, estimate.view.address

    def _output_order(self, estimate: WorkerEstimate) -> tuple[bool, float, str]:
        alone_s = _output_alone(self._output_part(estimate), self._expected)
        return not has_room_now(estimate, self._routing_request), alone_s + estimate.view.penalty_s, estimate.view.address

    def _prompt_part(self, estimate: WorkerEstimate) -> PromptPart:
        known = self._prompts.get(estimate)
        if known is None:
            routing_request = self._routing_request
            cached = routing_request.cached_tokens.get(estimate.key, 0)
            side = estimate.prompt_side(routing_request.num_tokens, cached, self._now)
            known = self._prompts[estimate] = prompt_part(side, self._expected, self._goals)
        return known

    def _fetching_part(self, estimate: WorkerEstimate) -> PromptPart:
        """Return the prompt part of a worker that may fetch what another worker has cached, or restore what its tiers hold."""
        known = self._fetching.get(estimate)
        if known is None:
            known = self._restoring_part(estimate) if self._restorable else self._prompt_part(estimate)
            view = estimate.view
            missing = self._held - self._routing_request.cached_tokens.get(estimate.key, 0)
            if view.fetch_token_s and missing >= view.block_size:
                fetched = self._part_after(estimate, self._held, FETCH_S + missing * view.fetch_token_s)
                ways = known.ways or PromptWays(known.compute_s)
                known = min(known, fetched, key=_compute_s)._replace(ways=ways._replace(fetch_s=fetched.compute_s))
            if self._from_tiers is not None and view.fetch_token_s:
                known = self._fetching_from_tiers(estimate, known, self._from_tiers)
            self._fetching[estimate] = known
        return known

    def _fetching_from_tiers(self, estimate: WorkerEstimate, known: PromptPart, holder: PeerTiers) -> PromptPart:
        """Return the prompt part of a worker that may fetch what another worker restores first; `known` without that."""
        routing_request, view = self._routing_request, estimate.view
        missing = holder.num_tokens - routing_request.cached_tokens.get(estimate.key, 0)
        own = self._restorable.get(estimate.key, 0)
        if estimate.key == holder.key or own >= holder.num_tokens or missing < view.block_size:
            return known
        fetched = self._part_after(estimate, holder.num_tokens, FETCH_S + missing * view.fetch_token_s + holder.restore_s)
        ways = known.ways or PromptWays(known.compute_s)
        if ways.fetch_s is not None and ways.fetch_s <= fetched.compute_s:
            return known
        ways = ways._replace(fetch_s=fetched.compute_s, num_fetched=holder.num_tokens)
        return min(known, fetched, key=_compute_s)._replace(ways=ways)

    def _restoring_part(self, estimate: WorkerEstimate) -> PromptPart:
        """Return the prompt part of a worker that may restore what its tiers hold."""
        known = self._restoring.get(estimate)
        if known is None:
            known = self._prompt_part(estimate)
            routing_request, view = self._routing_request, estimate.view
            restorable = min(self._restorable.get(estimate.key, 0), routing_request.num_tokens - 1)
            missing = restorable - routing_request.cached_tokens.get(estimate.key, 0)
            if view.restore_token_s and missing >= view.block_size:
                restored = self._part_after(estimate, restorable, RESTORE_S + missing * view.restore_token_s)
                ways = PromptWays(known.compute_s, restored.compute_s)
                known = min(known, restored, key=_compute_s)._replace(ways=ways)
            self._restoring[estimate] = known
        return known

    def _part_after(self, estimate: WorkerEstimate, num_cached: int, seconds: float) -> PromptPart:
        """Return the prompt part of a worker on which `num_cached` tokens will be cached after these seconds."""
        side = estimate.prompt_side(self._routing_request.num_tokens, num_cached, self._now)
        return prompt_part(side._replace(compute_s=side.compute_s + seconds), self._expected, self._goals)

    def _output_part(self, estimate: WorkerEstimate) -> OutputPart:
        known = self._outputs.get(estimate)
        if known is None:
            routing_request = self._routing_request
            cached = routing_request.cached_tokens.get(estimate.key, 0)
            side = estimate.output_side(
                routing_request.num_tokens, cached, routing_request.num_choices, routing_request.expected_tokens, self._now
            )
            known = self._outputs[estimate] = output_part(side, self._expected, self._goals)
        return known


def _compute_s(part: PromptPart) -> float:
    return part.compute_s


def _prompt_alone(prompt: PromptPart, goals: Goals) -> float:
    """Return the cost of computing the prompt, whichever worker decodes."""
    misses = miss(prompt.compute_s, goals.ttft_s) + prompt.misses
    return prompt.compute_s + prompt.lost_s + MISS_PENALTY_S * misses


def _output_alone(output: OutputPart, expected: float) -> float:
    """Return the cost of decoding the request, whichever worker computes the prompt."""
    misses = output.own_misses + output.misses
    return output.queue_s + expected * output.tpot_s + output.slowed_s + MISS_PENALTY_S * misses


def cost_s(predicted: Prediction, expected_tokens: float, pressure: float) -> float:
    """Return the seconds by which candidates are compared."""
    own_s = predicted.ttft_s + max(0.0, expected_tokens - 1) * predicted.tpot_s
    return own_s + predicted.delay_s + pressure * predicted.work_s + MISS_PENALTY_S * predicted.misses


def _least(candidates: list[Candidate], routing_request: RoutingRequest) -> Candidate:
    """Return the first by `Candidate.order`. If it has to wait and others can begin without one more missed objective, return the
    first of those: no worker is idle while requests wait."""
    roomy = [candidate for candidate in candidates if candidate.has_room] or candidates
    best = _first(roomy)
    if best.prediction is not None and is_saturated(best.prediction.ttft_s, best.prediction.ahead_s):
        free = [candidate for candidate in roomy if _is_free(candidate, best.prediction)]
        roomy, best = (free, _first(free)) if free else (roomy, best)
    return _of_session(best, roomy, routing_request) if routing_request.session_workers else best


def _of_session(best: Candidate, candidates: Iterable[Candidate], routing_request: RoutingRequest) -> Candidate:
    """Return the candidate on the last workers of the request's session where it costs the same as the best one."""
    most = best.cost * (1 + ALIKE)
    alike = [candidate for candidate in candidates if candidate.cost <= most]

    def distance(candidate: Candidate) -> tuple[bool, bool, tuple[object, ...]]:
        has_moved = candidate.prefill is not None and is_away(candidate.prefill, routing_request)
        return candidate.decode.key != routing_request.session_workers[0], has_moved, candidate.order

    return min(alike, key=distance)


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
    for decode in decodes:  # noqa: SIM110 - it runs for every worker that is scored, and a generator takes twice as long
        if compatible(prefill, decode.view):
            return True
    return False


def _ranked(pool: Pool, ranking: Ranking) -> Iterator[WorkerEstimate]:
    return map(pool.estimates.__getitem__, ranking.names)


def _union(some: Iterable[WorkerEstimate], more: Iterable[WorkerEstimate]) -> list[WorkerEstimate]:
    """Return each worker once, in order."""
    return list(dict.fromkeys([*some, *more]))
