"""A bound on the calls that are open at a server, over all connections.

gRPC's own (`maximum_concurrent_rpcs`) would refuse health checks too, so that a full server looks dead, and without RetryInfo, so
that nobody tries again. Its bound on connections (`grpc.max_allowed_incoming_connections`) is not used either: in grpcio 1.85
some of those that it refuses keep a place for ever, and in the end nobody gets in. What bounds connections is the process's limit
of open files; at it those that are open go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar, cast

import grpc
import grpc.aio

from pdmesh.runtime.errors import ResourceExhausted

Req = TypeVar("Req")
Resp = TypeVar("Resp")
CHECK = "/grpc.health.v1.Health/Check"
NUM_CHECKS = 64
"""Places beyond the bound for health checks: a server that is full is not dead, and is not to be restarted for it."""
RETRY_DELAY_S = 1.0


class CallBound(grpc.aio.ServerInterceptor):
    """Refuses what is too much with RESOURCE_EXHAUSTED and RetryInfo. Inside the interceptor that maps errors."""

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self.num_calls = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Req, Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Req, Resp] | None:
        """The handler, or one that refuses. The call's place is its task's: it is free again when that has ended, however it
        does, and also where the client never sends its request."""
        most = self._max_calls + (NUM_CHECKS if handler_call_details.method == CHECK else 0)
        if self.num_calls >= most:
            return cast("grpc.RpcMethodHandler[Req, Resp]", grpc.stream_stream_rpc_method_handler(self._refuse))
        task = asyncio.current_task()
        assert task is not None
        self.num_calls += 1
        task.add_done_callback(self._ended)
        return await continuation(handler_call_details)

    def _ended(self, _: asyncio.Task[object]) -> None:
        self.num_calls -= 1

    async def _refuse(self, _requests: object, _context: object) -> NoReturn:
        """As if requests were streamed, whatever the method: for a request that is not, gRPC would wait before it calls this."""
        message = f"streams: {self._max_calls} calls are open here, and more are not taken (max_streams)"
        raise ResourceExhausted(message, retry_delay_s=RETRY_DELAY_S, reason="streams")
