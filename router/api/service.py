"""The service pdmesh.v1.Mesh on the wire: thin handlers around the frontend."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from pdmesh.runtime.rpc.server import GrpcServer
from pdmesh.v1 import mesh_pb2, worker_pb2
from pdmesh.v1.mesh_pb2_grpc import MeshServicer, add_MeshServicer_to_server
from router.api.frontend import Frontend, fill_options

if TYPE_CHECKING:
    from pdmesh.v1.mesh_pb2_grpc import _MaybeAsyncIterator, _ServicerContext


SERVICE_NAME = "pdmesh.v1.Mesh"


def add_services(server: GrpcServer, frontend: Frontend) -> None:
    """Add the service to a router's gRPC server."""
    server.register(add_MeshServicer_to_server, MeshService(frontend), SERVICE_NAME)


class MeshService(MeshServicer):
    """Serve `pdmesh.v1.Mesh`."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    def Generate(
        self, request: mesh_pb2.GenerateRequest, context: _ServicerContext
    ) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        metadata = context.invocation_metadata()
        fill_options(request.options, metadata)
        return self._frontend.generate(request, context.time_remaining(), metadata=metadata)

    def Chat(self, request: mesh_pb2.ChatRequest, context: _ServicerContext) -> AsyncGenerator[mesh_pb2.GenerateResponse, None]:
        fill_options(request.options, context.invocation_metadata())
        return self._frontend.chat(request, context.time_remaining(), metadata=context.invocation_metadata())

    async def Tokenize(self, request: mesh_pb2.TokenizeRequest, context: _ServicerContext) -> mesh_pb2.TokenizeResponse:
        return await self._frontend.tokenize(request, context.time_remaining())

    async def Embed(self, request: mesh_pb2.EmbedRequest, context: _ServicerContext) -> mesh_pb2.EmbedResponse:
        metadata = context.invocation_metadata()
        fill_options(request.options, metadata)
        return await self._frontend.embed(request, context.time_remaining(), metadata=metadata)

    async def ListModels(self, request: mesh_pb2.ListModelsRequest, context: _ServicerContext) -> mesh_pb2.ListModelsResponse:
        return self._frontend.models()

    async def GetStatus(self, request: mesh_pb2.GetStatusRequest, context: _ServicerContext) -> mesh_pb2.GetStatusResponse:
        return self._frontend.status()

    async def Explain(self, request: mesh_pb2.ExplainRequest, context: _ServicerContext) -> mesh_pb2.ExplainResponse:
        return await self._frontend.explain(request)

    async def ReleaseSession(
        self, request: mesh_pb2.ReleaseSessionRequest, context: _ServicerContext
    ) -> mesh_pb2.ReleaseSessionResponse:
        return await self._frontend.release_session(request)

    async def LoadAdapter(self, request: worker_pb2.LoadAdapterRequest, context: _ServicerContext) -> mesh_pb2.MeshAdapter:
        return await self._frontend.load_adapter(request)

    async def UnloadAdapter(self, request: worker_pb2.UnloadAdapterRequest, context: _ServicerContext) -> mesh_pb2.MeshAdapter:
        return await self._frontend.unload_adapter(request)

    async def ListAdapters(
        self, request: worker_pb2.ListAdaptersRequest, context: _ServicerContext
    ) -> mesh_pb2.ListMeshAdaptersResponse:
        return self._frontend.adapters()

    async def UpdateWeights(
        self, request: mesh_pb2.MeshUpdateWeightsRequest, context: _ServicerContext
    ) -> mesh_pb2.MeshUpdateWeightsResponse:
        return await self._frontend.update_weights(request)

    async def SetTrafficSplit(
        self, request: mesh_pb2.SetTrafficSplitRequest, context: _ServicerContext
    ) -> mesh_pb2.SetTrafficSplitResponse:
        return await self._frontend.set_traffic_split(request)

    async def SetServing(
        self, request: mesh_pb2.MeshSetServingRequest, context: _ServicerContext
    ) -> mesh_pb2.MeshSetServingResponse:
        return await self._frontend.set_serving(request)

    async def SendWeights(
        self, request_iterator: _MaybeAsyncIterator[worker_pb2.SendWeightsRequest], context: _ServicerContext
    ) -> mesh_pb2.MeshUpdateWeightsResponse:
        return await self._frontend.send_weights(request_iterator)
