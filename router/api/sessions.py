"""The release of a session: every worker of a model, or of all, gives up what it retains for the session.

A worker that is lost, or slow, is counted and never waited for: what it retains ends with its time. A worker without retention,
such as a stock engine or one of an earlier version, retains nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import grpc
import grpc.aio

from pdmesh.v1 import mesh_pb2
from router.api.validation import MAX_TENANT_CHARS, check_session_id, refuse
from router.auth import identity
from router.context import RouterContext
from router.fleet.heartbeat import being_cancelled
from router.fleet.worker import Worker

RELEASE_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


async def release(core: RouterContext, request: mesh_pb2.ReleaseSessionRequest, model: str) -> mesh_pb2.ReleaseSessionResponse:
    """Return what the workers of `model` have released, empty for all models. Raises InvalidArgument, PermissionDenied."""
    check_session_id("session_id", request.session_id)
    if len(request.tenant) > MAX_TENANT_CHARS:
        refuse("tenant", f"has {len(request.tenant)} characters, {MAX_TENANT_CHARS} are allowed")
    tenant = identity.claimed(request.tenant, "tenant")
    core.sessions.forget(tenant, request.session_id)
    released = await asyncio.gather(*(_ask(worker, tenant, request.session_id) for worker in _workers(core, model)))
    answered = [num_blocks for num_blocks in released if num_blocks is not None]
    return mesh_pb2.ReleaseSessionResponse(
        num_blocks=sum(answered),
        num_workers=sum(num_blocks > 0 for num_blocks in answered),
        num_unreachable=len(released) - len(answered),
    )


def _workers(core: RouterContext, model: str) -> Iterator[Worker]:
    """Yield the workers that may retain something: those that have answered this router once, also if they are lost now."""
    for worker in core.fleet.workers.values():
        if worker.last is not None and model in ("", worker.last.info.identity.model):
            yield worker


async def _ask(worker: Worker, tenant: str, session_id: str) -> int | None:
    """Return the number of blocks that a worker has released; None: it did not answer."""
    if worker.current is None:
        return None
    try:
        return await worker.release_retained(tenant, session_id, RELEASE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return 0
        logger.info("%s did not release a session: %s", worker.address, error.details())
    except grpc.aio.UsageError:
        logger.info("%s did not release a session: its channel was closed", worker.address)
    except asyncio.CancelledError:
        if being_cancelled():
            raise
        logger.info("%s did not release a session: its channel was closed meanwhile", worker.address)
    return None
