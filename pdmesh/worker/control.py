"""WorkerControl on the wire, which every worker serves, whatever its roles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from pdmesh.runtime.errors import InvalidArgument
from pdmesh.v1 import common_pb2, worker_pb2
from pdmesh.v1.worker_pb2_grpc import WorkerControlServicer
from pdmesh.worker.adapters import WorkerAdapters
from pdmesh.worker.roles import Role, check_roles
from pdmesh.worker.token_request import check_session

if TYPE_CHECKING:
    from pdmesh.v1.worker_pb2_grpc import _MaybeAsyncIterator, _ServicerContext

DEFAULT_DRAIN_S = 30.0
DEFAULT_PERIOD_S = 0.2
MIN_PERIOD_MS, MAX_PERIOD_MS = 20, 10_000
MAX_TRACES, TRACE_ID_BYTES = 1024, 16


class RoleChanges:
    """Wake tasks that wait for the next change of roles or draining; closed when the worker stops."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self.closed = False

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` synchronously at every change."""
        self._listeners.append(listener)

    def notify(self) -> None:
        self._next.set()
        self._next = asyncio.Event()
        for listener in self._listeners:
            listener()

    def close(self) -> None:
        self.closed = True
        self.notify()

    @property
    def next(self) -> asyncio.Event:
        """Return an event that is set at the next change: take it before reading the state, then `wait` for it."""
        return self._next

    async def wait(self, change: asyncio.Event, timeout_s: float) -> None:
        """Wait until `change` is set, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await change.wait()
        except TimeoutError:
            return


class ControlServicer(WorkerControlServicer):
    """Serve GetInfo, Watch, SetRoles, ListBlocks, WatchBlocks, KeepTraces, ReleaseRetained, SendBlocks, WarmPrefix, SetServing,
    and what loads adapters and weights, and passes weights on."""

    def __init__(
        self,
        *,
        info: Callable[[], worker_pb2.WorkerInfo],
        report: Callable[[], worker_pb2.LoadReport],
        changes: RoleChanges,
        set_roles: Callable[[frozenset[Role], float], Awaitable[None]],
        list_blocks: Callable[[], AsyncIterator[worker_pb2.BlockList]],
        watch_blocks: Callable[[], AsyncIterator[worker_pb2.BlockEvents]],
        keep_traces: Callable[[Sequence[int]], None],
        release_retained: Callable[[str, str], Awaitable[int]],
        send_blocks: Callable[[worker_pb2.SendBlocksRequest], Awaitable[worker_pb2.SendBlocksResponse]],
        warm_prefix: Callable[[worker_pb2.WarmPrefixRequest], Awaitable[worker_pb2.WarmPrefixResponse]],
        adapters: WorkerAdapters,
        update_weights: Callable[[worker_pb2.UpdateWeightsRequest], Awaitable[worker_pb2.UpdateWeightsResponse]],
        send_weights: Callable[[AsyncIterator[worker_pb2.SendWeightsRequest]], Awaitable[worker_pb2.UpdateWeightsResponse]],
        read_weights: Callable[[str], AsyncGenerator[worker_pb2.ReadWeightsResponse, None]],
        set_serving: Callable[[worker_pb2.SetServingRequest], Awaitable[worker_pb2.SetServingResponse]],
    ) -> None:
        """Create the servicer. `set_roles(roles, drain_timeout_s)` returns when removed roles have no work left;
        `release_retained(tenant, session)` returns the number of blocks."""
        self._info = info
        self._report = report
        self._changes = changes
        self._set_roles = set_roles
        self._list_blocks = list_blocks
        self._watch_blocks = watch_blocks
        self._keep_traces = keep_traces
        self._release_retained = release_retained
        self._send_blocks = send_blocks
        self._warm_prefix = warm_prefix
        self._adapters = adapters
        self._update_weights = update_weights
        self._send_weights = send_weights
        self._read_weights = read_weights
        self._set_serving = set_serving

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: _ServicerContext) -> worker_pb2.WorkerInfo:
        return self._info()

    async def Watch(self, request: worker_pb2.WatchRequest, context: _ServicerContext) -> AsyncIterator[worker_pb2.LoadReport]:
        if request.period_ms and not MIN_PERIOD_MS <= request.period_ms <= MAX_PERIOD_MS:
            raise InvalidArgument("period_ms", f"{request.period_ms} is not 0 (200) or {MIN_PERIOD_MS} to {MAX_PERIOD_MS}")
        period_s = request.period_ms / 1000 or DEFAULT_PERIOD_S
        while True:
            is_last, change = self._changes.closed, self._changes.next
            yield self._report()
            if is_last:
                return
            await self._changes.wait(change, period_s)

    async def SetRoles(self, request: worker_pb2.SetRolesRequest, context: _ServicerContext) -> worker_pb2.WorkerInfo:
        roles = check_roles(request.roles)
        await self._set_roles(roles, request.drain_timeout_ms / 1000 or DEFAULT_DRAIN_S)
        return self._info()

    async def ListBlocks(
        self, request: worker_pb2.ListBlocksRequest, context: _ServicerContext
    ) -> AsyncIterator[worker_pb2.BlockList]:
        async for part in self._list_blocks():
            yield part

    async def WatchBlocks(
        self, request: worker_pb2.WatchBlocksRequest, context: _ServicerContext
    ) -> AsyncIterator[worker_pb2.BlockEvents]:
        async for message in self._watch_blocks():
            yield message

    async def KeepTraces(self, request: worker_pb2.KeepTracesRequest, context: _ServicerContext) -> worker_pb2.KeepTracesResponse:
        if len(request.trace_ids) > MAX_TRACES:
            raise InvalidArgument("trace_ids", f"{len(request.trace_ids)} are too many; send at most {MAX_TRACES}")
        for index, trace_id in enumerate(request.trace_ids):
            if len(trace_id) != TRACE_ID_BYTES:
                raise InvalidArgument(f"trace_ids[{index}]", f"has {len(trace_id)} bytes; a trace id has {TRACE_ID_BYTES}")
        self._keep_traces([int.from_bytes(trace_id, "big") for trace_id in request.trace_ids])
        return worker_pb2.KeepTracesResponse()

    async def ReleaseRetained(
        self, request: worker_pb2.ReleaseRetainedRequest, context: _ServicerContext
    ) -> worker_pb2.ReleaseRetainedResponse:
        if not request.session_id:
            raise InvalidArgument("session_id", "empty; give that of the session's requests")
        check_session("session_id", request.session_id)
        return worker_pb2.ReleaseRetainedResponse(num_blocks=await self._release_retained(request.tenant, request.session_id))

    async def SendBlocks(self, request: worker_pb2.SendBlocksRequest, context: _ServicerContext) -> worker_pb2.SendBlocksResponse:
        return await self._send_blocks(request)

    async def WarmPrefix(self, request: worker_pb2.WarmPrefixRequest, context: _ServicerContext) -> worker_pb2.WarmPrefixResponse:
        return await self._warm_prefix(request)

    async def LoadAdapter(self, request: worker_pb2.LoadAdapterRequest, context: _ServicerContext) -> common_pb2.AdapterInfo:
        return await self._adapters.load(request)

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: _ServicerContext
    ) -> worker_pb2.UnloadAdapterResponse:
        return await self._adapters.unload(request)

    async def ListAdapters(self, request: worker_pb2.ListAdaptersRequest, context: _ServicerContext) -> worker_pb2.AdapterList:
        return self._adapters.listed()

    async def UpdateWeights(
        self, request: worker_pb2.UpdateWeightsRequest, context: _ServicerContext
    ) -> worker_pb2.UpdateWeightsResponse:
        return await self._update_weights(request)

    async def SetServing(self, request: worker_pb2.SetServingRequest, context: _ServicerContext) -> worker_pb2.SetServingResponse:
        return await self._set_serving(request)

    async def SendWeights(
        self, request_iterator: _MaybeAsyncIterator[worker_pb2.SendWeightsRequest], context: _ServicerContext
    ) -> worker_pb2.UpdateWeightsResponse:
        return await self._send_weights(request_iterator)

    async def ReadWeights(
        self, request: worker_pb2.ReadWeightsRequest, context: _ServicerContext
    ) -> AsyncIterator[worker_pb2.ReadWeightsResponse]:
        async with aclosing(self._read_weights(request.weights_hash)) as messages:
            async for message in messages:
                yield message
