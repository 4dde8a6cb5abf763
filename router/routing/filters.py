"""Which workers could take a request, and which of them are worth a closer look. Pure.

Whatever a policy prefers, it chooses among what this module lets through: the right model and kind, large enough, not excluded,
and pairs whose KV can be handed over.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from kvtransfer.layout import Layout, Transports
from pdmesh.adapter_id import AdapterId
from router.routing.cost_model import Prediction, WorkerEstimate
from router.routing.worker_snapshot import Mode, WorkerKey, WorkerSnapshot


@dataclass(slots=True)
class RoutingRequest:
    """What a request needs. `cached_tokens` by worker; `kind` pins the kind of worker that the request started on.

    It is never changed: it is not frozen because that takes three times as long to make, and each decision makes one.

    `expected_tokens` it is thought to generate for each choice; the goals are seconds, None without
    an objective: its own, and the TPOT of what runs beside it.
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

    def uncached(self, worker: WorkerSnapshot) -> int:
        """Tokens that `worker` would have to compute or receive: at least one, as a whole prompt is never served from cache."""
        return max(1, self.num_tokens - self.cached_tokens.get(worker.key, 0))


class Candidate(NamedTuple):
    """A pair that was looked at; LOCAL without `prefill`. `prediction` is None under policies that predict nothing."""

    decode: WorkerSnapshot
    prefill: WorkerSnapshot | None
    cost: float
    has_room: bool
    prediction: Prediction | None = None

    @property
    def order(self) -> tuple[bool, float, bool, str, str]:
        """The least is taken: those with room first, then by cost; equals in the same order always."""
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
    """Decode worker, and prefill worker unless LOCAL, with the reason in words and what it was compared with."""

    decode: WorkerSnapshot
    prefill: WorkerSnapshot | None
    reason: str
    candidates: Sequence[Candidate] = ()

    @property
    def mode(self) -> Mode:
        """LOCAL without a prefill worker."""
        return Mode.LOCAL if self.prefill is None else Mode.REMOTE

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that was taken; None under policies that keep none."""
        decode, prefill = self.decode, self.prefill
        for candidate in self.candidates:
            if candidate.decode is decode and candidate.prefill is prefill:
                return candidate
        return None


@dataclass(frozen=True)
class NoPlacement:
    """No worker can take it now. `full`: some worker fits and would, had it room. `never`: too large for any of them."""

    reason: str
    full: bool = False
    never: bool = False


def same_kind(worker: WorkerSnapshot, routing_request: RoutingRequest) -> bool:
    """The model, and the kind of worker that the request started on, if it has."""
    is_kind = worker.model == routing_request.model and routing_request.kind in (None, worker.kind)
    return is_kind and has_adapter(worker, routing_request)


def has_adapter(worker: WorkerSnapshot, routing_request: RoutingRequest) -> bool:
    """Has the worker the LoRA adapter that the request needs, if it needs one?"""
    return routing_request.adapter is None or routing_request.adapter in worker.adapters


def can_decode(worker: WorkerSnapshot, routing_request: RoutingRequest) -> bool:
    """May `worker` be the request's decode worker, room aside?"""
    return worker.decode and worker.key not in routing_request.excluded_decode and can_ever_hold(worker, routing_request)


def can_prefill(worker: WorkerSnapshot, routing_request: RoutingRequest) -> bool:
    """May `worker` compute the prompt for another one, if it reaches it?"""
    is_candidate = worker.prefill and worker.key not in routing_request.excluded_prefill
    return is_candidate and has_adapter(worker, routing_request)


def can_ever_hold(worker: WorkerSnapshot, routing_request: RoutingRequest) -> bool:
    """Is the worker large enough, were it empty?"""
    fits_context = max(routing_request.num_tokens, routing_request.max_total_tokens) <= worker.max_context
    return (
        fits_context
        and blocks_for(routing_request.num_tokens, worker) <= worker.num_total_blocks
        and routing_request.num_choices <= worker.max_num_seqs
    )


def has_room(worker: WorkerSnapshot, routing_request: RoutingRequest) -> bool:
    """Does the last report, with what was dispatched since, leave room? The worker's own answer is the truth."""
    free = worker.num_free_blocks - worker.dispatched_blocks
    seqs = worker.num_seqs + worker.dispatched_seqs
    return blocks_for(routing_request.num_tokens, worker) <= free and seqs + routing_request.num_choices <= worker.max_num_seqs


def blocks_for(num_tokens: int, worker: WorkerSnapshot) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // worker.block_size)


def compatible(prefill: WorkerSnapshot, decode: WorkerSnapshot) -> bool:
    """May these two hand over KV? Equal identity, a layout that converts, and a transport that reaches."""
    if prefill.identity != decode.identity or (prefill.address == decode.address and prefill.epoch == decode.epoch):
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
    """Why no worker can own the request; to be asked only when that is so."""
    decodes = [worker for worker in workers if worker.decode and same_kind(worker, routing_request)]
    if not decodes and routing_request.adapter is not None:
        name, model = routing_request.adapter.name, routing_request.model
        return NoPlacement(f"no decode worker of model {model!r} that is reachable has adapter {name!r} loaded")
    if not decodes:
        return NoPlacement(f"no decode worker of model {routing_request.model!r} is reachable")
    large_enough = [worker for worker in decodes if can_ever_hold(worker, routing_request)]
    if not large_enough:
        return NoPlacement(
            f"{routing_request.num_tokens} tokens exceed the KV pool or context of every decode worker", never=True
        )
    return NoPlacement(f"all {len(large_enough)} decode workers of model {routing_request.model!r} refused or were lost")


def no_partner(decode: Iterable[WorkerSnapshot]) -> NoPlacement:
    """Return that REMOTE was asked for and cannot be done."""
    names = ", ".join(worker.worker_id for worker in decode)
    return NoPlacement(f"REMOTE was asked for and no prefill worker fits {names}")


def first(engines: Iterable[WorkerEstimate], routing_request: RoutingRequest, count: int) -> list[WorkerEstimate]:
    """The first `count` of `engines` that can own the request and have room; if none has, those without."""
    roomy: list[WorkerEstimate] = []
    full: list[WorkerEstimate] = []
    for engine in engines:
        if not _fits(engine, routing_request):
            continue
        if has_room_now(engine, routing_request):
            roomy.append(engine)
            if len(roomy) == count:
                break
        elif len(full) < count:
            full.append(engine)
    return roomy or full


def has_room_now(engine: WorkerEstimate, routing_request: RoutingRequest) -> bool:
    """As `has_room`, from what has been computed already."""
    return routing_request.num_tokens <= engine.free_tokens and routing_request.num_choices <= engine.free_seqs


def _fits(engine: WorkerEstimate, routing_request: RoutingRequest) -> bool:
    """As `can_own` and `same_kind` within a group."""
    view = engine.view
    if (
        routing_request.max_total_tokens > view.max_context or routing_request.num_tokens > engine.largest
    ):  # that is at most max_context
        return False
    if not has_adapter(view, routing_request):
        return False
    if routing_request.kind is not None and view.kind != routing_request.kind:
        return False
    return routing_request.num_choices <= view.max_num_seqs and engine.key not in routing_request.excluded_decode
