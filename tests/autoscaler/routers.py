"""Routers and workers as the autoscaler meets them on the wire: real servers on loopback that tell what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio

from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc, worker_pb2, worker_pb2_grpc
from pdmesh.v1.worker_pb2 import ROLE_DECODE
from tests.autoscaler.collected import worker


@dataclass(eq=False)
class ToldRouter(mesh_pb2_grpc.MeshServicer):
    """Answers with `status`; `num_asked` counts. `hang`: it does not. `key`: what callers have to show."""

    status: mesh_pb2.GetStatusResponse
    hang: bool = False
    key: str = ""
    num_asked: int = 0
    address: str = ""

    # Nobody asks for these here.
    Generate = Chat = Tokenize = ListModels = Explain = None  # type: ignore[assignment]

    Embed = LoadAdapter = UnloadAdapter = ListAdapters = ReleaseSession = UpdateWeights = None  # type: ignore[assignment]
    SetTrafficSplit = SetServing = SendWeights = None  # type: ignore[assignment]

    async def GetStatus(
        self, request: mesh_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> mesh_pb2.GetStatusResponse:
        self.num_asked += 1
        if self.hang:
            await asyncio.sleep(60)
        if self.key and ("authorization", f"Bearer {self.key}") not in (context.invocation_metadata() or ()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the API key is missing")
        return self.status

    @property
    def traffic(self) -> mesh_pb2.TrafficStatus:
        return self.status.traffic[0]

    def more(self, requests: int, seconds: float = 2.0) -> None:
        """So many have come and been answered meanwhile."""
        told = self.traffic
        told.up_ms += round(seconds * 1000)
        told.num_arrived += requests
        told.num_answered += requests
        told.input_tokens += 1000.0 * requests
        told.answered_input_tokens += 1000.0 * requests
        told.input_squared += 2e6 * requests
        told.output_tokens += 200.0 * requests
        told.output_squared += 8e4 * requests


def told_router(epoch: int = 1, *workers: mesh_pb2.WorkerStatus, **fields: object) -> ToldRouter:
    """That serves "m" and has counted nothing yet."""
    told = mesh_pb2.GetStatusResponse(
        router_id="r",
        epoch=epoch,
        workers=workers,
        registry_connected=True,
        traffic=[mesh_pb2.TrafficStatus(model="m", up_ms=10**6)],
    )
    return ToldRouter(told, **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def serving(*routers: ToldRouter, port: int = 0) -> AsyncIterator[int]:
    """All of them on one port; the kernel deals connections out."""
    servers = []
    for router in routers:
        server = grpc.aio.server()
        mesh_pb2_grpc.add_MeshServicer_to_server(router, server)
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        router.address = f"127.0.0.1:{port}"
        await server.start()
        servers.append(server)
    try:
        yield port
    finally:
        await asyncio.gather(*(server.stop(None) for server in servers))


@dataclass(eq=False)
class ToldWorker(worker_pb2_grpc.WorkerControlServicer):
    """Takes roles."""

    info: worker_pb2.WorkerInfo
    asked: list[worker_pb2.SetRolesRequest] = field(default_factory=list)

    # Nobody asks for these here.
    Watch = ListBlocks = KeepTraces = None  # type: ignore[assignment]

    LoadAdapter = UnloadAdapter = ListAdapters = ReleaseRetained = SendBlocks = WatchBlocks = WarmPrefix = None  # type: ignore[assignment]
    UpdateWeights = SetServing = SendWeights = ReadWeights = None  # type: ignore[assignment]

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: object) -> worker_pb2.WorkerInfo:
        return self.info

    async def SetRoles(self, request: worker_pb2.SetRolesRequest, context: object) -> worker_pb2.WorkerInfo:
        self.asked.append(request)
        self.info.roles[:] = request.roles
        return self.info


@asynccontextmanager
async def serving_worker(name: str, **fields: object) -> AsyncIterator[tuple[ToldWorker, mesh_pb2.WorkerStatus]]:
    """A decode worker, and what routers tell of it."""
    status = worker(name, (ROLE_DECODE,), **fields)  # type: ignore[arg-type]
    told = ToldWorker(status.info)
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerControlServicer_to_server(told, server)
    status.info.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield told, status
    finally:
        await server.stop(None)
