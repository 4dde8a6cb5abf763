"""The embedding of one prompt: validate, tokenize and admit are those of every request; then one prefill worker computes it.

A worker that refuses, or is lost, is left out, and another one is asked; when none is left the request waits for a change of the
fleet, for at most `place_timeout_s`, or longer where workers are paused. Nothing is reserved anywhere, so that there is nothing
to free.
"""

import asyncio
from collections.abc import Container, Sequence

import grpc.aio

from pdmesh.runtime.errors import (
    STOPPED,
    DeadlineExceeded,
    MeshError,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
    error_from_rpc,
)
from pdmesh.v1 import common_pb2, mesh_pb2, prefill_pb2, worker_pb2
from router.context import RouterContext, time_left_ms, time_left_s
from router.fleet.change_notifier import unless, wait_at_most
from router.fleet.circuit_breaker import Role
from router.fleet.incarnation import Incarnation
from router.fleet.worker import Dispatched, Worker
from router.lifecycle.request import Request
from router.routing.filters import blocks_for
from router.routing.revisions import key_of, order
from router.routing.worker_snapshot import WorkerKey, WorkerSnapshot

LOOK_AGAIN_S = 0.25
ROOM_RETRY_DELAY_S = 1.0
_CODE = grpc.StatusCode
_ELSEWHERE = frozenset(
    {_CODE.UNAVAILABLE, _CODE.RESOURCE_EXHAUSTED, _CODE.FAILED_PRECONDITION, _CODE.UNIMPLEMENTED, _CODE.CANCELLED, _CODE.INTERNAL}
)
"""Answers after which another worker may do better."""
_NO_FAULT = frozenset({_CODE.RESOURCE_EXHAUSTED, _CODE.FAILED_PRECONDITION, _CODE.UNIMPLEMENTED})

Found = tuple[WorkerSnapshot, Worker, Incarnation]


class EmbedStage:
    """Compute embeddings on the workers of one router."""

    def __init__(self, core: RouterContext) -> None:
        self._core = core

    async def run(self, request: Request, pooling: common_pb2.Pooling.ValueType) -> mesh_pb2.Embedding:
        """Return the embedding of an admitted request's prompt, as the model gives it. Raises MeshError."""
        limit = asyncio.timeout_at(request.prepared.deadline)
        try:
            async with limit:
                response = await self._computed(request, pooling)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceeded("the deadline of the request has passed") from error
        cached = response.timings.num_cached_tokens
        return mesh_pb2.Embedding(values=response.values, num_tokens=len(request.prepared.prompt), num_cached_tokens=cached)

    async def _computed(self, request: Request, pooling: common_pb2.Pooling.ValueType) -> prefill_pb2.EmbedPromptResponse:
        config, model, loop = self._core.config, request.prepared.model.name, asyncio.get_running_loop()
        patience, last = loop.time() + config.place_timeout_s, loop.time() + config.paused_timeout_s
        last_start = loop.time() + config.wake_timeout_s
        refused: set[WorkerKey] = set()
        errors: list[MeshError] = []
        while True:
            found = self._choose(request, refused)
            if found is None:
                self._check_can(request)
                if self._core.fleet.is_stopped(model, worker_pb2.ROLE_PREFILL):
                    patience = min(last, loop.time() + config.place_timeout_s)
                elif config.wake_timeout_s > config.place_timeout_s and not self._prefills(model):
                    patience = min(last_start, loop.time() + config.place_timeout_s)  # the autoscaler starts some
                await self._wait(request, patience, errors)
                refused.clear()
                continue
            try:
                return await self._ask(found, request, pooling)
            except MeshError as error:
                if error.code not in _ELSEWHERE:
                    raise
                errors.append(error)
                refused.add(found[0].key)
                if error.code not in _NO_FAULT and error.reason != STOPPED and not found[2].is_stopped:
                    is_lost = found[2].lost.is_set()
                    self._core.health_recorder.failed(found[0].key, Role.PREFILL, error.message, lost=is_lost)

    def _prefills(self, model: str) -> bool:
        return any(view.prefill and view.model == model for view in self._core.fleet.views())

    def _views(self, request: Request) -> list[WorkerSnapshot]:
        """Return the prefill workers of the request's model and adapter."""
        prepared = request.prepared
        views = self._core.fleet.fleet_snapshot.views()
        ours = [view for view in views if view.prefill and view.model == prepared.model.name]
        return [view for view in ours if prepared.adapter is None or prepared.adapter in view.adapters]

    def _choose(self, request: Request, refused: set[WorkerKey]) -> Found | None:
        """Return the worker with the fewest prompt tokens ahead; one whose circuit breaker is open only if there is no other."""
        ejected = self._core.health_recorder.left_out(self._core.fleet.fleet_snapshot, Role.PREFILL)
        views = [view for view in self._views(request) if view.can_embed]
        able = [view for view in views if view.key not in refused]
        if weights := self._core.rollouts.weights(request.prepared.model.name):
            able = _of_revision(order(weights, key_of(request.prepared)), views, able, ejected)
        for view in sorted(able, key=lambda view: (view.key in ejected, view.tokens_ahead, view.num_seqs + view.dispatched_seqs)):
            worker = self._core.fleet.workers.get(view.address)
            if worker is not None and worker.current is not None and worker.current.info.epoch == view.epoch:
                return view, worker, worker.current
        return None

    def _check_can(self, request: Request) -> None:
        views = self._views(request)
        if views and not any(view.can_embed for view in views):
            engines = ", ".join(sorted({view.engine or "unknown" for view in views}))
            raise Unimplemented(
                f"no prefill worker of {request.prepared.model.name} computes embeddings: its engines ({engines}) give no hidden "
                "states; add a worker that does (docs/openai.md)"
            )

    async def _wait(self, request: Request, patience: float, errors: list[MeshError]) -> None:
        """Wait for a change of the fleet, or a moment. Raises the reason when patience is over."""
        if asyncio.get_running_loop().time() < patience:
            await wait_at_most(self._core.fleet.changes.next, LOOK_AGAIN_S)
            return
        name, last = request.prepared.model.name, errors[-1] if errors else None
        if last is None:
            raise Unavailable(f"no prefill worker serves {name} now", retry_delay_s=ROOM_RETRY_DELAY_S)
        if isinstance(last, ResourceExhausted):
            raise ResourceExhausted(f"all prefill workers of {name} are full: {last.message}", retry_delay_s=ROOM_RETRY_DELAY_S)
        raise MeshError(f"no prefill worker of {name} computed the embedding: {last.message}", code=last.code)

    async def _ask(
        self, found: Found, request: Request, pooling: common_pb2.Pooling.ValueType
    ) -> prefill_pb2.EmbedPromptResponse:
        """Make the call, with the prompt counted as the worker's load. Raises MeshError."""
        view, worker, incarnation = found
        prepared = request.prepared
        sent = Dispatched(1, blocks_for(len(prepared.prompt), view), len(prepared.prompt))
        worker.dispatched(sent)
        self._core.health_recorder.chosen(view.key, Role.PREFILL)
        request.submitting(self._core.flow_control.placed)
        request.timings.spans.took_part(worker)
        message = prefill_pb2.EmbedPromptRequest(
            request_id=prepared.request_id,
            request=prepared.token_request([]),
            pooling=pooling,
            time_left_ms=time_left_ms(prepared.deadline),
        )
        call = worker.prefill.Embed(message, timeout=time_left_s(prepared.deadline))
        try:
            response = await unless(incarnation.lost, _answer(call))
        finally:
            call.cancel()
            worker.done(sent)
        if response is None:
            raise Unavailable(f"prefill worker {view.worker_id} fell silent")
        self._core.health_recorder.succeeded(view.key, Role.PREFILL)
        return response


async def _answer(
    call: grpc.aio.UnaryUnaryCall[prefill_pb2.EmbedPromptRequest, prefill_pb2.EmbedPromptResponse],
) -> prefill_pb2.EmbedPromptResponse:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error


def _of_revision(
    names: Sequence[str], views: Sequence[WorkerSnapshot], able: Sequence[WorkerSnapshot], ejected: Container[WorkerKey]
) -> list[WorkerSnapshot]:
    """Return those of `able` that have the first revision of `names` of which one is not ejected, else the first of which there
    is one; all where none of `views` has a revision of these."""
    if not any(view.revision in names for view in views):
        return list(able)
    of_each = [[view for view in able if view.revision == name] for name in names]
    healthy = (found for found in of_each if any(view.key not in ejected for view in found))
    return next(healthy, next((found for found in of_each if found), []))
