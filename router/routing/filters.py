"""Filters: which workers can take a request, and which of them a policy scores. Pure.

Every policy chooses among the workers that pass: they have the right model and kind, are large enough and not excluded. A pair
passes if it can hand KV over.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from kvtransfer.layout import Layout, Transports
from pdmesh.adapter_id import AdapterId
from pdmesh.runtime.errors import CONTEXT_OVERFLOW, TOO_MANY_CHOICES
from router.routing.cost_model import RESTORE_S, Prediction, PromptWays, WorkerEstimate, is_saturated
from router.routing.worker_snapshot import Mode, WorkerKey, WorkerSnapshot


@dataclass(slots=True)
class RoutingRequest:
    """Hold what a request needs. `cached_tokens` by worker; `restorable_tokens`: those that it has in its pool or its tiers;
    empty while no worker has tiers; `kind` pins the kind of worker that the request started on;
    `session_workers`: the last ones of its session, the decode worker first, which are taken among equals. `revision`: the one to
    which the split of traffic sends it; None: any.

    It is never changed. It is not frozen, because each decision makes one and freezing takes three times as long.

    `expected_tokens`: estimated output of each choice. The goals are seconds, None without an objective: the request's own, and
    the TPOT of the requests that run beside it.
    """

    model: str
    num_tokens: int
    num_choices: int = 1
    max_total_tokens: int = 0
    cached_tokens: Mapping[WorkerKey, int] = field(default_factory=dict)
    mode: Mode | None = None
    kind: tuple[object, ...] | None = None
    excluded_decode: frozenset[WorkerKey] = frozenset()
    excluded_prefill: frozenset[WorkerKey] = frozenset()
    expected_tokens: float = 128.0
    ttft_goal_s: float | None = None
    tpot_goal_s: float | None = None
    running_tpot_goal_s: float | None = None
    adapter: AdapterId | None = None
    session_workers: tuple[WorkerKey, ...] = ()
    restorable_tokens: Mapping[WorkerKey, int] = field(default_factory=dict)
    revision: str | None = None

    def uncached(self, worker: WorkerSnapshot) -> int:
        """Return the tokens that `worker` has to compute or receive: at least one, as the last is never served from cache."""
        return max(1, self.num_tokens - self.cached_tokens.get(worker.key, 0))

    def computed(self, worker: WorkerSnapshot, ways: PromptWays | None) -> int:
        """Return the tokens that `worker` will have to compute, at least one: what it restores or fetches, where that is the
        quickest of its `ways`, is none of them."""
        held, taken = self.cached_tokens.get(worker.key, 0), "compute" if ways is None else ways.taken
        if taken == "restore":
            held = max(held, self.restorable_tokens.get(worker.key, 0))
        elif taken == "fetch" and ways is not None:
            held = max((held, ways.num_fetched, *self.cached_tokens.values()))
        return max(1, self.num_tokens - held)


def is_away(worker: WorkerSnapshot | None, routing_request: RoutingRequest) -> bool:
    """Return whether `worker` is none of those on which the request's session was last."""
    return worker is None or worker.key not in routing_request.session_workers


class Candidate(NamedTuple):
    """Hold a scored pair; LOCAL without `prefill`. `prediction` is None under policies that predict nothing, `ways` where there
    is nothing to fetch or to restore."""

    decode: WorkerSnapshot
    prefill: WorkerSnapshot | None
    cost: float
    has_room: bool
    prediction: Prediction | None = None
    ways: PromptWays | None = None

    @property
    def workers(self) -> tuple[WorkerSnapshot, ...]:
        """Return the workers that take part."""
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)

    @property
    def order(self) -> tuple[bool, float, bool, str, str]:
        """Return the sort key; the least wins: candidates with room first, then by cost, ties in a fixed order."""
        prefill = self.prefill
        return (
            not self.has_room,
            self.cost,
            prefill is not None,
            self.decode.address,
            "" if prefill is None else prefill.address,
        )


@dataclass(frozen=True)
class Placement:
    """Hold the chosen decode worker, and prefill worker unless LOCAL, with the reason in words and the candidates compared."""

    decode: WorkerSnapshot
    prefill: WorkerSnapshot | None
    reason: str
    candidates: Sequence[Candidate] = ()

    @property
    def workers(self) -> tuple[WorkerSnapshot, ...]:
        """Return the workers that take part."""
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)

    @property
    def mode(self) -> Mode:
        """Return LOCAL without a prefill worker, else REMOTE."""
        return Mode.LOCAL if self.prefill is None else Mode.REMOTE

    @property
    def chosen(self) -> Candidate | None:
        """Return the chosen candidate; None under policies that keep none."""
        decode, prefill = self.decode, self.prefill
        for candidate in self.candidates:
            if candidate.decode is decode and candidate.prefill is prefill:
                return candidate
        return None


@dataclass(frozen=True)
class NoPlacement:
    """Report that no worker can take the request now. `full`: some worker fits but has no room. `never`: none of them ever will;
    `remedy` says what to do then, `word` is the `reason` of the error, and `field` names the field of the request that rules all
    of them out."""

    reason: str
    full: bool = False
    never: bool = False
    remedy: str = ""
    field: str = ""
    word: str = ""


def free_elsewhere(placement: Placement, routing_request: RoutingRequest) -> Prediction | None:
    """Return the prediction of the candidate with the shortest queue that would begin at once, where the chosen one has to wait
    for a worker that has more of the prompt cached, and has the first token sooner all the same. None: it has not, or every
    candidate waits."""
    best = placement.chosen
    if best is None or best.prediction is None or not is_saturated(best.prediction.ttft_s, best.prediction.ahead_s):
        return None
    most, first_s = _cached(best, routing_request), best.prediction.ttft_s
    others = [each.prediction for each in placement.candidates if each.has_room and _cached(each, routing_request) < most]
    slower = [other for other in others if other is not None and other.ttft_s >= first_s]
    free = [other for other in slower if not is_saturated(other.ttft_s, other.ahead_s)]
    return min(free, key=lambda other: (other.ahead_s, other.ttft_s), default=None)


def _cached(candidate: Candidate, routing_request: RoutingRequest) -> int:
    """Return the tokens of the prompt that its worker has, in its pool or its tiers."""
    computing = candidate.prefill or candidate.decode
    held = routing_request.cached_tokens.get(computing.key, 0)
    return max(held, routing_request.restorable_tokens.get(computing.key, 0))


def same_kind(worker: WorkerSnapshot, routing_request: RoutingRequest) -> bool:
    """Return True if `worker` serves the model, is of the kind that the request started on, if any, and of its revision."""
    is_kind = worker.model == routing_request.model and routing_request.kind in (None, worker.kind)
    return is_kind and routing_request.revision in (None, worker.revision) and has_adapter(worker, routing_request)


def has_adapter(worker: WorkerSnapshot, routing_request: RoutingRequest) -> bool:
    """Has the worker the LoRA adapter that the request needs, if it needs one?"""
    return routing_request.adapter is None or routing_request.adapter in worker.adapters


def can_decode(worker: WorkerSnapshot, routing_request: RoutingRequest) -> bool:
    """Return True if `worker` may be the decode worker, room aside."""
    return worker.decode and worker.key not in routing_request.excluded_decode and can_ever_hold(worker, routing_request)


def can_prefill(worker: WorkerSnapshot, routing_request: RoutingRequest) -> bool:
    """Return True if `worker` may compute the prompt for a decode worker that it reaches."""
    is_candidate = worker.prefill and worker.key not in routing_request.excluded_prefill
    return is_candidate and has_adapter(worker, routing_request) and can_hand_over(worker, routing_request)


def can_hand_over(worker: WorkerSnapshot, routing_request: RoutingRequest) -> bool:
    """Return True if `worker` may be either end of the request's hand-off, as far as its engine goes."""
    return routing_request.num_choices == 1 or worker.hands_over_choices


def can_ever_hold(worker: WorkerSnapshot, routing_request: RoutingRequest) -> bool:
    """Return True if the request fits the worker when it is empty."""
    fits_context = max(routing_request.num_tokens, routing_request.max_total_tokens) <= worker.max_context
    return (
        fits_context
        and blocks_for(routing_request.num_tokens, worker) <= worker.num_total_blocks
        and routing_request.num_choices <= worker.max_num_seqs
    )


def has_room(worker: WorkerSnapshot, routing_request: RoutingRequest) -> bool:
    """Return True if the last report, plus what was dispatched since, leaves room. Only the worker itself knows for sure."""
    free = worker.num_free_blocks - worker.dispatched_blocks
    seqs = worker.num_seqs + worker.dispatched_seqs
    return blocks_for(routing_request.num_tokens, worker) <= free and seqs + routing_request.num_choices <= worker.max_num_seqs


def blocks_for(num_tokens: int, worker: WorkerSnapshot) -> int:
    """Return the number of blocks that hold `num_tokens`."""
    return -(-num_tokens // worker.block_size)


def compatible(prefill: WorkerSnapshot, decode: WorkerSnapshot) -> bool:
    """Return True if the pair can hand KV over: equal identity and revision, a layout that converts, and a transport that
    reaches."""
    if prefill.identity != decode.identity or (prefill.address == decode.address and prefill.epoch == decode.epoch):
        return False
    if prefill.revision != decode.revision:
        return False
    if prefill.layout is decode.layout and prefill.transports is decode.transports and prefill.transports.reach_all:
        return True  # most pairs are alike, and most decisions ask about dozens of them
    same_process, same_host = prefill.epoch == decode.epoch, prefill.host_id == decode.host_id
    return _hands_over(prefill.layout, decode.layout, prefill.transports, decode.transports, same_process, same_host)


@lru_cache(maxsize=1024)
def _hands_over(
    prefill: Layout, decode: Layout, ours: Transports, theirs: Transports, same_process: bool, same_host: bool
) -> bool:
    if prefill.difference(decode) is not None:
        return False
    return ours.meet(theirs, same_process=same_process, same_host=same_host, same_layout=prefill == decode)


def explain_no_candidate(workers: Iterable[WorkerSnapshot], routing_request: RoutingRequest) -> NoPlacement:
    """Return why no worker can decode the request. Call it only when that is so."""
    decodes = [worker for worker in workers if worker.decode and same_kind(worker, routing_request)]
    if not decodes and routing_request.adapter is not None:
        name, model = routing_request.adapter.name, routing_request.model
        return NoPlacement(f"no decode worker of model {model!r} that is reachable has adapter {name!r} loaded")
    if not decodes:
        return NoPlacement(f"no decode worker of model {routing_request.model!r} is reachable")
    large_enough = [worker for worker in decodes if can_ever_hold(worker, routing_request)]
    if not large_enough and any(can_ever_hold(worker, replace(routing_request, num_choices=1)) for worker in decodes):
        return NoPlacement(
            f"{routing_request.num_choices} choices are more than any decode worker runs at a time",
            never=True,
            remedy="ask for fewer (n), or start workers with a larger --max-num-seqs",
            word=TOO_MANY_CHOICES,
        )
    if not large_enough:
        return NoPlacement(
            f"{routing_request.num_tokens} tokens exceed the KV pool or context of every decode worker",
            never=True,
            remedy="send a shorter prompt or start larger workers",
            word=CONTEXT_OVERFLOW,
        )
    return NoPlacement(f"all {len(large_enough)} decode workers of model {routing_request.model!r} refused or were lost")


def no_partner(
    decodes: Iterable[WorkerSnapshot], workers: Iterable[WorkerSnapshot], routing_request: RoutingRequest
) -> NoPlacement:
    """Return that REMOTE was asked for and cannot be done by any of `decodes` with any of `workers`."""
    decodes, workers = list(decodes), list(workers)
    lacking = {decode.worker_id: _lacking(decode, workers, routing_request) for decode in decodes}
    if all(lacking.values()):
        engines = ", ".join(sorted({engine or "unnamed" for engines in lacking.values() for engine in engines}))
        count, names = routing_request.num_choices, ", ".join(lacking)
        why = f"REMOTE was asked for with n = {count}, and the engine ({engines}) of {names} hands over one choice only"
        return NoPlacement(why, never=True, remedy="ask for n = 1, or leave the mode to the router", field="options.mode")
    return NoPlacement(f"REMOTE was asked for and no prefill worker fits {', '.join(lacking)}")


def _lacking(decode: WorkerSnapshot, workers: Iterable[WorkerSnapshot], routing_request: RoutingRequest) -> list[str]:
    """Return the engines that alone stand in the way of a hand-off to `decode`."""
    if not can_hand_over(decode, routing_request):
        return [decode.engine]
    partners = [worker for worker in workers if worker.prefill and compatible(worker, decode)]
    return [] if any(can_hand_over(each, routing_request) for each in partners) else [each.engine for each in partners]


def first(estimates: Iterable[WorkerEstimate], routing_request: RoutingRequest, count: int) -> list[WorkerEstimate]:
    """Return the first `count` workers that can decode the request and have room; if none has room, the first without."""
    roomy: list[WorkerEstimate] = []
    full: list[WorkerEstimate] = []
    for estimate in estimates:
        if not _fits(estimate, routing_request):
            continue
        if has_room_now(estimate, routing_request):
            roomy.append(estimate)
            if len(roomy) == count:
                break
        elif len(full) < count:
            full.append(estimate)
    return roomy or full


def has_room_now(estimate: WorkerEstimate, routing_request: RoutingRequest) -> bool:
    """Return what `has_room` does, from the estimate's stored numbers."""
    return routing_request.num_tokens <= estimate.free_tokens and routing_request.num_choices <= estimate.free_seqs


def _fits(estimate: WorkerEstimate, routing_request: RoutingRequest) -> bool:
    """Return what `can_decode` and `same_kind` do, for a worker of the right pool. `largest` is at most `max_context`."""
    view = estimate.view
    if routing_request.max_total_tokens > view.max_context or routing_request.num_tokens > estimate.largest:
        return False
    if not has_adapter(view, routing_request):
        return False
    if routing_request.kind is not None and view.kind != routing_request.kind:
        return False
    return routing_request.num_choices <= view.max_num_seqs and estimate.key not in routing_request.excluded_decode


# The worker whose tiers another one may fetch from: it restores what its pool lacks, and sends it then.


class PeerTiers(NamedTuple):
    """Hold a worker that has `num_tokens` of a prompt in its pool and its tiers together, the last `num_tier_tokens` in tiers
    alone, each of which comes in `restore_token_s`."""

    key: WorkerKey
    num_tokens: int
    num_tier_tokens: int
    restore_token_s: float

    @property
    def restore_s(self) -> float:
        """Return how long it restores."""
        return RESTORE_S + self.num_tier_tokens * self.restore_token_s


def peer_tiers(
    routing_request: RoutingRequest, view_of: Callable[[WorkerKey], WorkerSnapshot | None], least: int, most: int
) -> PeerTiers | None:
    """Return the worker with most of a prompt, and more than `least` tokens, in pool and tiers; of equal ones the one that
    restores it soonest. None: no worker has more.

    Tokens beyond `most` do not count. `view_of` returns None for workers that cannot send."""
    found = list[PeerTiers]()
    for key, tokens in routing_request.restorable_tokens.items():
        num_tokens = min(tokens, most)
        num_tier_tokens = num_tokens - min(num_tokens, routing_request.cached_tokens.get(key, 0))
        view = view_of(key) if num_tokens > least and num_tier_tokens else None
        if view is not None and view.restore_token_s and not view.private_tiers:
            found.append(PeerTiers(key, num_tokens, num_tier_tokens, view.restore_token_s))
    return max(found, key=lambda each: (each.num_tokens, -each.restore_s, each.key), default=None)
