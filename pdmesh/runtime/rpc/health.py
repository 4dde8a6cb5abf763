"""The standard gRPC health service, with watches that end when the server does.

grpc_health's own servicer keeps a watch open until the end of a drain's grace period, and holds its lock while it writes, so
that one client that does not read would stop every change of state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

from grpc_health.v1 import health_pb2

from pdmesh.runtime.errors import NotFound, Unavailable

HEALTH_SERVICE = "grpc.health.v1.Health"
Response: TypeAlias = health_pb2.HealthCheckResponse


class HealthServicer:
    """Serves Check, List and Watch (grpc.health.v1.Health). On one event loop."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._closed = False
        self._changed = asyncio.Event()

    def set(self, service: str, serving: bool) -> None:
        """Sets the state of a service; "" is the whole server. After `close`, nothing is serving any more."""
        self._serving[service] = serving and not self._closed
        self._announce()

    def close(self) -> None:
        """Everything NOT_SERVING for good; watches are told and then end with UNAVAILABLE."""
        self._serving = dict.fromkeys(self._serving, False)
        self._closed = True
        self._announce()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: object) -> Response:
        """The state now; NOT_FOUND for an unknown service."""
        if request.service not in self._serving:
            raise NotFound(f"no service {request.service[:200]!r} here", field="service")
        return Response(status=self._status(request.service))

    async def List(self, request: health_pb2.HealthListRequest, context: object) -> health_pb2.HealthListResponse:
        """The state now of every service, and of the server under ""."""
        return health_pb2.HealthListResponse(statuses={name: Response(status=self._status(name)) for name in self._serving})

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: object) -> AsyncIterator[Response]:
        """The state now and after each change; of several quick changes the last."""
        told: int | None = None
        while True:
            changed, closed, status = self._changed, self._closed, self._status(request.service)
            if status != told:
                told = status
                yield Response(status=status)
            elif closed:
                raise Unavailable("the server stops")
            else:
                await changed.wait()

    def _status(self, service: str) -> int:
        serving = self._serving.get(service)
        if serving is None:
            return int(Response.SERVICE_UNKNOWN)
        return int(Response.SERVING if serving else Response.NOT_SERVING)

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
