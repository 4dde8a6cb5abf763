"""Where a request goes: a snapshot of the workers in, a placement with its reason out. Pure.

Decode: the least loaded by blocks and sequences, less a credit for the share of the prompt that it holds already.
Prefill: the fewest tokens to compute before this request's first token (waiting, dispatched since the last report, own uncached).
LOCAL: when no prefill worker fits, or so little of the prompt is uncached on decode that a hand-off cannot pay.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtransfer.layouts import Layout
from router.prefix_memory import WorkerKey

PREFIX_CREDIT = 0.25
"""A worker that holds the whole prompt may be this share of its capacity fuller and still win."""


class Mode(enum.Enum):
    """Who computes the prompt: decode itself, or a prefill worker."""

    LOCAL = "local"
    REMOTE = "remote"


@dataclass(frozen=True)
class WorkerView:
    """One worker that lives and takes work. `identity` is compared for equality only.

    `dispatched_*` is what this router sent there since the report that the other numbers come from.
    """

    worker_id: str
    address: str
    epoch: int
    model: str
    prefill: bool
    decode: bool
    identity: tuple[object, ...]
    layout: Layout
    transports: frozenset[str]
    host_id: str
    block_size: int
    max_context: int
    max_num_seqs: int
    num_total_blocks: int
    num_free_blocks: int
    num_seqs: int
    num_waiting_tokens: int
    dispatched_seqs: int = 0
    dispatched_blocks: int = 0
    dispatched_tokens: int = 0

    @property
    def key(self) -> WorkerKey:
        """What tells incarnations apart."""
        return (self.address, self.epoch)

    @property
    def kind(self) -> tuple[object, ...]:
        """What decides a request's tokens: it stays with one kind."""
        return (self.identity, self.layout.kv_dtype)

    @property
    def tokens_ahead(self) -> int:
        """Prompt tokens that this worker has still to compute."""
        return self.num_waiting_tokens + self.dispatched_tokens


@dataclass(frozen=True)
class Demand:
    """What a request needs. `cached_tokens` by worker; `kind` pins the kind of worker that the request started on."""

    model: str
    num_tokens: int
    num_choices: int = 1
    max_total_tokens: int = 0
    cached_tokens: Mapping[WorkerKey, int] = field(default_factory=dict)
    mode: Mode | None = None
    kind: tuple[object, ...] | None = None
    excluded_decode: frozenset[WorkerKey] = frozenset()
    excluded_prefill: frozenset[WorkerKey] = frozenset()

    def uncached(self, worker: WorkerView) -> int:
        """Tokens that `worker` would have to compute or receive: at least one, as a whole prompt is never served from cache."""
        return max(1, self.num_tokens - self.cached_tokens.get(worker.key, 0))


@dataclass(frozen=True)
class Placement:
    """Decode worker, and prefill worker unless LOCAL, with the reason in words."""

    decode: WorkerView
    prefill: WorkerView | None
    reason: str

    @property
    def mode(self) -> Mode:
        """LOCAL without a prefill worker."""
        return Mode.LOCAL if self.prefill is None else Mode.REMOTE


@dataclass(frozen=True)
class NoPlacement:
    """Nobody can take it now. `full`: some worker fits and would, had it room. `never`: too large for any of them."""

    reason: str
    full: bool = False
    never: bool = False


def choose(workers: Iterable[WorkerView], demand: Demand, *, local_prefill_tokens: int) -> Placement | NoPlacement:
    """The placement of one request."""
    kind = [worker for worker in workers if _same_kind(worker, demand)]
    decode = choose_decode(kind, demand)
    if isinstance(decode, NoPlacement):
        return decode
    return _with_prefill(decode, kind, demand, local_prefill_tokens)


def choose_decode(kind: Sequence[WorkerView], demand: Demand) -> WorkerView | NoPlacement:
    """The decode worker with the least cost among those that can hold the request; those with room first."""
    decodes = [worker for worker in kind if worker.decode]
    if not decodes:
        return NoPlacement(f"no decode worker of model {demand.model!r} is reachable")
    large_enough = [worker for worker in decodes if _can_ever_hold(worker, demand)]
    if not large_enough:
        return NoPlacement(f"{demand.num_tokens} tokens exceed the KV pool or context of every decode worker", never=True)
    candidates = [worker for worker in large_enough if worker.key not in demand.excluded_decode]
    if not candidates:
        return NoPlacement(f"all {len(large_enough)} decode workers of model {demand.model!r} refused or were lost")
    return min(candidates, key=lambda worker: (not has_room(worker, demand), _decode_cost(worker, demand), worker.address))


def choose_prefill(decode: WorkerView, kind: Sequence[WorkerView], demand: Demand) -> WorkerView | None:
    """The prefill worker that fits `decode` and has the fewest tokens before this request's first; None without one."""
    candidates = [
        worker
        for worker in kind
        if worker.prefill
        and worker.key != decode.key
        and worker.key not in demand.excluded_prefill
        and compatible(worker, decode)
    ]

    def cost(worker: WorkerView) -> tuple[bool, int, str]:
        # KV of another element type gives other tokens than decode's own: only where there is nobody else.
        return (worker.kind != decode.kind, worker.tokens_ahead + demand.uncached(worker), worker.address)

    return min(candidates, key=cost, default=None)


def compatible(prefill: WorkerView, decode: WorkerView) -> bool:
    """May these two hand over KV? Equal identity, a layout that converts, and a transport that reaches."""
    if prefill.identity != decode.identity or prefill.layout.difference(decode.layout) is not None:
        return False
    common = prefill.transports & decode.transports
    return bool({"nixl", "tcp", "grpc"} & common) or ("shm" in common and prefill.host_id == decode.host_id)


def has_room(worker: WorkerView, demand: Demand) -> bool:
    """Does the last report, with what was dispatched since, leave room? The worker's own answer is the truth."""
    free = worker.num_free_blocks - worker.dispatched_blocks
    seqs = worker.num_seqs + worker.dispatched_seqs
    return blocks_for(demand.num_tokens, worker) <= free and seqs + demand.num_choices <= worker.max_num_seqs


def blocks_for(num_tokens: int, worker: WorkerView) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // worker.block_size)


def _same_kind(worker: WorkerView, demand: Demand) -> bool:
    return worker.model == demand.model and demand.kind in (None, worker.kind)


def _can_ever_hold(worker: WorkerView, demand: Demand) -> bool:
    fits_context = max(demand.num_tokens, demand.max_total_tokens) <= worker.max_context
    return (
        fits_context
        and blocks_for(demand.num_tokens, worker) <= worker.num_total_blocks
        and demand.num_choices <= worker.max_num_seqs
    )


def _decode_cost(worker: WorkerView, demand: Demand) -> float:
    seq_share = (worker.num_seqs + worker.dispatched_seqs + demand.num_choices) / worker.max_num_seqs
    used_blocks = (
        worker.num_total_blocks - worker.num_free_blocks + worker.dispatched_blocks + blocks_for(demand.uncached(worker), worker)
    )
    cached_share = 1 - demand.uncached(worker) / demand.num_tokens
    return max(seq_share, used_blocks / worker.num_total_blocks) - PREFIX_CREDIT * cached_share


def _with_prefill(
    decode: WorkerView, kind: Sequence[WorkerView], demand: Demand, local_prefill_tokens: int
) -> Placement | NoPlacement:
    if demand.mode is Mode.LOCAL:
        return Placement(decode, None, "LOCAL as asked for")
    uncached = demand.uncached(decode)
    if demand.mode is None and uncached < local_prefill_tokens:
        return Placement(
            decode, None, f"LOCAL: {uncached} uncached tokens on {decode.worker_id} are fewer than {local_prefill_tokens}"
        )
    prefill = choose_prefill(decode, kind, demand)
    if prefill is not None:
        ahead = prefill.tokens_ahead
        return Placement(
            decode, prefill, f"REMOTE: {uncached} tokens for {decode.worker_id}, {ahead} ahead on {prefill.worker_id}"
        )
    if demand.mode is Mode.REMOTE:
        return NoPlacement(f"REMOTE was asked for and no prefill worker fits {decode.worker_id}")
    return Placement(decode, None, f"LOCAL: no prefill worker fits {decode.worker_id}")
