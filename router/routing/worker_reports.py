"""Conversion of a worker's messages (WorkerInfo, LoadReport) to the snapshot that the policy reads."""

import hashlib
import math
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from kvtransfer.layout import Layout, Reach, Transports
from pdmesh.adapter_id import AdapterId
from pdmesh.planning.latency_message import reported_drafts, reported_latency
from pdmesh.planning.latency_model import LatencyModel
from pdmesh.v1 import common_pb2, worker_pb2
from router.routing.fleet_snapshot import is_usable
from router.routing.worker_snapshot import WorkerSnapshot

MAX_PACE_S, MAX_SLACK_S = 1e4, 3600.0
"""Limits of the reported TPOT objective and slack of a worker's sequences; a report above them is ignored."""
MAX_FETCH_S = 1.0
"""Limit of the reported times to fetch and to restore a token's KV; a worker that reports more is taken for one that fetches
none, or has no tiers."""
NO_ADAPTERS: frozenset[AdapterId] = frozenset()


def identity_of(identity: common_pb2.Identity) -> tuple[object, ...]:
    """Return all fields in order: a pair must have equal ones."""
    return tuple(getattr(identity, field.name) for field in identity.DESCRIPTOR.fields)


def kind_of(info: worker_pb2.WorkerInfo) -> tuple[object, ...] | None:
    """Return the `WorkerSnapshot.kind` that a request has to stay with once it has tokens of this decode worker; None: no kind,
    because the worker's weights are not known, as with a stock engine. Then only the model's name counts."""
    if not info.identity.weights_hash:
        return None
    return (identity_of(info.identity), info.layout.kv_dtype)


def fingerprint_of(info: worker_pb2.WorkerInfo) -> str:
    """Return what names the kind to a client, which may resume on another router; empty where there is no kind."""
    if not info.identity.weights_hash:
        return ""
    digest = hashlib.sha256(info.identity.SerializeToString(deterministic=True))
    digest.update(info.layout.kv_dtype.encode())
    return f"fp_{digest.hexdigest()[:16]}"


class Described(NamedTuple):
    """Hold the constant part of a worker's snapshot: it is read from WorkerInfo once, not with each report."""

    worker_id: str
    address: str
    epoch: int
    model: str
    identity: tuple[object, ...]
    layout: Layout
    transports: Transports
    host_id: str
    max_context: int
    max_num_seqs: int
    num_blocks: int
    max_num_batched_tokens: int
    engine: str = ""
    hands_over_choices: bool = True
    keeps_pace: bool = True
    is_reproducible: bool = True
    shares_prompts: bool = True
    can_embed: bool = True
    fetch_token_s: float = 0.0
    restore_token_s: float = 0.0
    private_tiers: bool = False
    system_fingerprint: str = ""
    revision: str = ""


def fingerprint_for(described: Described, adapter: AdapterId | None) -> str:
    """Return what names to a client what computes its tokens there: the kind, and its adapter; empty where there is no kind."""
    kind = described.system_fingerprint
    return f"{kind}_{adapter.digest[:16]}" if kind and adapter is not None else kind


def tightest(pace_s: float, other_s: float) -> float:
    """Return the smaller of two paces, of which 0 is none."""
    return min(pace_s, other_s) if pace_s and other_s else pace_s or other_s


class Counted(NamedTuple):
    """Sum what was sent to a worker and its report may not contain: `WorkerSnapshot.dispatched_*`, and the tightest pace.

    `since`: monotonic seconds at which the first prompt of it came there; infinite: not known, or there is none; `latest_at` that
    of the latest, which has `latest` tokens."""

    seqs: int = 0
    blocks: int = 0
    tokens: int = 0
    decodes: int = 0
    context: int = 0
    longest: int = 0
    pace_s: float = 0.0
    since: float = math.inf
    latest: int = 0
    latest_at: float = -math.inf


NOTHING = Counted()


def describe(info: worker_pb2.WorkerInfo) -> Described:
    """Return the constant part of this worker's snapshots."""
    return Described(
        worker_id=info.worker_id,
        address=info.address,
        epoch=info.epoch,
        model=info.identity.model,
        identity=_identity(identity_of(info.identity)),
        layout=_layout(Layout.of(info.layout)),
        transports=_transports(_reach_of(info)),
        host_id=info.host_id,
        max_context=info.max_context,
        max_num_seqs=info.max_num_seqs,
        num_blocks=info.num_blocks,
        max_num_batched_tokens=info.max_num_batched_tokens,
        engine=info.engine,
        hands_over_choices=worker_pb2.ENGINE_LACK_CHOICES_HANDOFF not in info.lacks,
        keeps_pace=worker_pb2.ENGINE_LACK_PACES not in info.lacks,
        is_reproducible=worker_pb2.ENGINE_LACK_REPRODUCIBLE not in info.lacks,
        shares_prompts=worker_pb2.ENGINE_LACK_PROMPT_SHARES not in info.lacks,
        can_embed=worker_pb2.ENGINE_LACK_EMBEDDINGS not in info.lacks,
        fetch_token_s=_token_s(info.fetch_token_s),
        restore_token_s=_token_s(info.restore_token_s),
        private_tiers=info.private_tiers,
        system_fingerprint=fingerprint_of(info),
        revision=info.revision,
    )


def snapshot_of(
    described: Described, load: worker_pb2.LoadReport, *, decode: bool, reported_at: float = 0.0, sent: Counted = NOTHING
) -> WorkerSnapshot:
    """Return the worker's snapshot. `decode`: its Attach stream is open, so it may decode, if it has the role. `reported_at`:
    monotonic seconds of the report's arrival; `sent`: what the report may not contain. What has ended was there before: a report
    that shows it gone already is not made less than empty."""
    latency, roles, num_running, num_prefilling = latency_of(load), load.roles, load.num_running, load.num_prefilling
    drafts = reported_drafts(load)
    num_seqs = num_running + load.num_waiting + load.num_reserved + load.num_held
    num_total_blocks = load.num_total_blocks or described.num_blocks
    return WorkerSnapshot(
        worker_id=described.worker_id,
        address=described.address,
        epoch=described.epoch,
        model=described.model,
        prefill=worker_pb2.ROLE_PREFILL in roles,
        decode=decode and worker_pb2.ROLE_DECODE in roles,
        identity=described.identity,
        layout=described.layout,
        transports=described.transports,
        host_id=described.host_id,
        block_size=described.layout.block_size,
        max_context=described.max_context,
        max_num_seqs=load.max_num_seqs or described.max_num_seqs,
        num_total_blocks=num_total_blocks,
        num_free_blocks=load.num_free_blocks,
        num_seqs=num_seqs,
        num_waiting_tokens=load.num_waiting_tokens,
        num_prefilling=num_prefilling,
        num_oldest_tokens=load.oldest_prompt_tokens,
        num_decoding=load.num_decoding if latency is not None else num_running,
        decode_context=load.decode_context if latency is not None else _used_tokens(described, load),
        num_starting=load.num_reserved + (num_prefilling if latency is not None else 0),
        max_num_batched_tokens=described.max_num_batched_tokens,
        latency=latency,
        pace_s=tightest(load.pace_s if 0 < load.pace_s <= MAX_PACE_S else 0.0, sent.pace_s) if described.keeps_pace else 0.0,
        slack_s=load.slack_s if abs(load.slack_s) <= MAX_SLACK_S else 0.0,
        tokens_per_row=drafts.tokens_per_row,
        computed_per_row=drafts.computed_per_row,
        figures_at=reported_at - load.age_ms / 1000,
        dispatched_seqs=max(sent.seqs, -num_seqs),
        dispatched_blocks=max(sent.blocks, min(0, load.num_free_blocks - num_total_blocks)),
        dispatched_tokens=sent.tokens,
        dispatched_decodes=sent.decodes,
        dispatched_context=sent.context,
        dispatched_longest=sent.longest,
        dispatched_since=sent.since,
        dispatched_latest=sent.latest,
        dispatched_latest_at=sent.latest_at,
        adapters=adapters_of(load),
        engine=described.engine,
        hands_over_choices=described.hands_over_choices,
        keeps_pace=described.keeps_pace,
        is_reproducible=described.is_reproducible,
        shares_prompts=described.shares_prompts,
        can_embed=described.can_embed,
        fetch_token_s=described.fetch_token_s,
        restore_token_s=_restore_token_s(described, load),
        private_tiers=described.private_tiers,
        revision=described.revision,
    )


def _restore_token_s(described: Described, load: worker_pb2.LoadReport) -> float:
    """Return what the worker has measured, else what it assumed when it started."""
    return _token_s(load.restore_token_s) if load.HasField("restore_token_s") else described.restore_token_s


def _token_s(reported_s: float) -> float:
    return reported_s if 0 < reported_s <= MAX_FETCH_S else 0.0


def latency_of(load: worker_pb2.LoadReport) -> LatencyModel | None:
    """Return the speed that the worker reports; None without one, or when its numbers are unusable."""
    model = reported_latency(load)
    return model if model is not None and is_usable(model) else None


def adapters_of(load: worker_pb2.LoadReport) -> frozenset[AdapterId]:
    """Return the LoRA adapters that requests on this worker may have."""
    return _adapters(tuple(AdapterId(each.name, each.digest) for each in load.adapters)) if load.adapters else NO_ADAPTERS


@lru_cache(maxsize=256)
def _adapters(adapters: tuple[AdapterId, ...]) -> frozenset[AdapterId]:
    return frozenset(adapters)


def _used_tokens(described: Described, load: worker_pb2.LoadReport) -> int:
    """Return an upper bound of the tokens that sequences attend to, for a worker that does not report them."""
    return (load.num_total_blocks - load.num_free_blocks) * described.layout.block_size if load.num_running else 0


@lru_cache(maxsize=256)
def _layout(layout: Layout) -> Layout:
    """Return one object for equal layouts, so that comparing them takes no time; the next two functions do the same."""
    return layout


@lru_cache(maxsize=256)
def _identity(identity: tuple[object, ...]) -> tuple[object, ...]:
    return identity


@lru_cache(maxsize=256)
def _transports(reach: tuple[tuple[str, Reach | None], ...]) -> Transports:
    return Transports.of(dict(reach))


def _reach_of(info: worker_pb2.WorkerInfo) -> tuple[tuple[str, Reach | None], ...]:
    """Return each transport with its reach, None where the worker does not report it; those of unknown scope are left out."""
    said = {each.transport: each for each in info.transport_reach}
    known = []
    for name in info.transports:
        with suppress(ValueError):  # a scope of a later version
            known.append((name, Reach.of(said[name]) if name in said else None))
    return tuple(known)


def problem_of(info: worker_pb2.WorkerInfo) -> str | None:
    """Return why a worker with this WorkerInfo cannot be used; None when it can."""
    for name in ("worker_id", "epoch", "max_context", "max_num_seqs", "num_blocks"):
        if not getattr(info, name):
            return f"{name} is not set"
    if not info.identity.model:
        return "identity.model is not set"
    problem = Layout.of(info.layout).problem(info.identity.num_kv_heads, info.identity.head_dim)
    return None if problem is None else f"layout.{problem[0]}: {problem[1]}"
