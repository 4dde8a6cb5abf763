"""Find the worker whose KV another worker may fetch for a request, and not compute (docs/kv_transfer.md, "Fetching KV")."""

from __future__ import annotations

import zlib

from pdmesh.v1 import prefill_pb2, worker_pb2
from router.context import RouterContext
from router.lifecycle.request import Dispatch
from router.routing.cost_model import DEFAULT_CHUNK, RESTORE_S
from router.routing.filters import peer_tiers
from router.routing.worker_snapshot import Mode, WorkerKey, WorkerSnapshot

MAX_HOLDERS = 256
"""When more workers than this have a part of the prompt, the decode worker of the reservation is asked alone."""


def find_holder(
    core: RouterContext,
    dispatch: Dispatch,
    ours: worker_pb2.WorkerInfo,
    request_id: str,
    pinned: tuple[WorkerKey, int] | None = None,
) -> prefill_pb2.KVHolder | None:
    """Return the worker that has most KV which the worker `ours` may fetch; None: no worker has more than it. One that has to
    restore some of it from its tiers is taken where that is predicted to be quicker than what pools have.

    `pinned`: the decode worker of the reservation with the tokens that it holds pinned, which is certain, while the index may be
    late, or name what the worker is computing for another request now. `request_id` spreads requests over equal holders.
    """
    if not ours.fetch_token_s:
        return None
    in_pool = _in_pools(core, dispatch, ours, request_id, pinned)
    if not dispatch.routing_request.restorable_tokens:
        return in_pool
    in_tiers = _in_tiers(core, dispatch, ours, 0 if in_pool is None else in_pool.num_tokens)
    if in_tiers is None or (in_pool is not None and not _is_quicker(core, dispatch, ours, in_tiers, in_pool)):
        return in_pool
    return in_tiers


def _in_pools(
    core: RouterContext,
    dispatch: Dispatch,
    ours: worker_pb2.WorkerInfo,
    request_id: str,
    pinned: tuple[WorkerKey, int] | None,
) -> prefill_pb2.KVHolder | None:
    key, known = (ours.address, ours.epoch), dispatch.routing_request.cached_tokens
    found = [(pinned[1], True, 0, pinned[0])] if pinned is not None else []
    if len(known) <= MAX_HOLDERS:
        most = _most_blocks(dispatch, ours)
        least, decode = (pinned[1], pinned[0]) if pinned is not None else (0, None)
        others = [(other, tokens) for other, tokens in known.items() if tokens > least]
        spread = [(zlib.crc32(f"{request_id} {other}".encode()), other, tokens) for other, tokens in others]
        # What the index says of the decode worker beyond what is pinned is to come, or out of date: others are asked before.
        found += [(min(tokens, most), other != decode, place, other) for place, other, tokens in spread]
    here = known.get(key, 0)
    for num_tokens, _, _, other in sorted(found, reverse=True):
        if num_tokens > here and other != key and _can_send(core, dispatch, ours, other):
            return prefill_pb2.KVHolder(address=other[0], epoch=other[1], num_tokens=num_tokens)
    return None


def local_holder(
    core: RouterContext, dispatch: Dispatch, ours: worker_pb2.WorkerInfo, request_id: str, mode: Mode
) -> prefill_pb2.KVHolder | None:
    """Return the holder for a decode worker that computes the prompt itself; None where a prefill worker does, which fetches."""
    return find_holder(core, dispatch, ours, request_id) if mode is Mode.LOCAL else None


def _in_tiers(
    core: RouterContext, dispatch: Dispatch, ours: worker_pb2.WorkerInfo, num_in_pool: int
) -> prefill_pb2.KVHolder | None:
    """Return the worker that has most in its pool and its tiers together, of equal ones the one that restores it soonest; None:
    none has more than `num_in_pool` tokens, and than `ours` has itself."""
    demand, key = dispatch.routing_request, (ours.address, ours.epoch)
    if len(demand.restorable_tokens) > MAX_HOLDERS:
        return None
    least = max(num_in_pool, demand.cached_tokens.get(key, 0), demand.restorable_tokens.get(key, 0))

    def view_of(other: WorkerKey) -> WorkerSnapshot | None:
        return core.fleet.workers[other[0]].view if other != key and _can_send(core, dispatch, ours, other) else None

    found = peer_tiers(demand, view_of, least, _most_blocks(dispatch, ours))
    if found is None:
        return None
    return prefill_pb2.KVHolder(
        address=found.key[0],
        epoch=found.key[1],
        num_tokens=found.num_tokens,
        num_tier_tokens=found.num_tier_tokens,
        restore_token_s=found.restore_token_s,
    )


def _is_quicker(
    core: RouterContext,
    dispatch: Dispatch,
    ours: worker_pb2.WorkerInfo,
    in_tiers: prefill_pb2.KVHolder,
    in_pool: prefill_pb2.KVHolder,
) -> bool:
    """Return whether restoring there, fetching and computing the rest takes less than fetching what a pool has, and the rest."""
    view = core.fleet.workers[ours.address].view if ours.address in core.fleet.workers else None
    if view is None or view.latency is None:
        return False
    latency, num_all, chunk = view.latency, dispatch.routing_request.num_tokens, view.max_num_batched_tokens or DEFAULT_CHUNK

    def seconds(holder: prefill_pb2.KVHolder) -> float:
        restore_s = RESTORE_S + holder.num_tier_tokens * holder.restore_token_s if holder.num_tier_tokens else 0.0
        rest_s = latency.prefill_s(holder.num_tokens, num_all, chunk=chunk)
        return restore_s + holder.num_tokens * ours.fetch_token_s + rest_s

    return seconds(in_tiers) < seconds(in_pool)


def _most_blocks(dispatch: Dispatch, ours: worker_pb2.WorkerInfo) -> int:
    """Return how many tokens of the prompt whole blocks hold, without its last token, which is always computed."""
    size = ours.layout.block_size
    return (dispatch.routing_request.num_tokens - 1) // size * size


def _can_send(core: RouterContext, dispatch: Dispatch, ours: worker_pb2.WorkerInfo, key: WorkerKey) -> bool:
    """Return whether a worker lives, has not failed this request in any role, and has KV that `ours` can take."""
    request = dispatch.request
    if key in dispatch.tried or key in request.avoid or key in request.failed_holders or key in core.fleet.suspects:
        return False
    worker = core.fleet.workers.get(key[0])
    current = worker.current if worker is not None else None
    if current is None or current.info.epoch != key[1]:
        return False
    info = current.info
    return info.identity == ours.identity and info.layout == ours.layout and info.revision == ours.revision
