"""Find the worker whose KV another worker may fetch for a request, and not compute (docs/kv_transfer.md, "Fetching KV")."""

from __future__ import annotations

import zlib

from pdmesh.v1 import prefill_pb2, worker_pb2
from router.context import RouterContext
from router.lifecycle.request import Dispatch
from router.routing.worker_snapshot import Mode, WorkerKey

MAX_HOLDERS = 256
"""When more workers than this have a part of the prompt, the decode worker of the reservation is asked alone."""


def find_holder(
    core: RouterContext,
    dispatch: Dispatch,
    ours: worker_pb2.WorkerInfo,
    request_id: str,
    pinned: tuple[WorkerKey, int] | None = None,
) -> prefill_pb2.KVHolder | None:
    """Return the worker that has most KV which the worker `ours` may fetch; None: no worker has more than it.

    `pinned`: the decode worker of the reservation with the tokens that it holds pinned, which is certain, while the index may be
    late, or name what the worker is computing for another request now. `request_id` spreads requests over equal holders.
    """
    if not ours.fetch_token_s:
        return None
    key, known = (ours.address, ours.epoch), dispatch.routing_request.cached_tokens
    found = [(pinned[1], True, 0, pinned[0])] if pinned is not None else []
    if len(known) <= MAX_HOLDERS:
        size = ours.layout.block_size
        most = (dispatch.routing_request.num_tokens - 1) // size * size
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


def _can_send(core: RouterContext, dispatch: Dispatch, ours: worker_pb2.WorkerInfo, key: WorkerKey) -> bool:
    """Return whether a worker lives, has not failed this request in any role, and has KV that `ours` can take."""
    request = dispatch.request
    if key in dispatch.tried or key in request.avoid or key in request.failed_holders or key in core.fleet.suspects:
        return False
    worker = core.fleet.workers.get(key[0])
    current = worker.current if worker is not None else None
    if current is None or current.info.epoch != key[1]:
        return False
    return current.info.identity == ours.identity and current.info.layout == ours.layout
