"""How often gRPC itself tries again under our service config, and how long it waits: attempts are counted where they arrive."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from pdmesh.client import service_config
from pdmesh.runtime.errors import FailedPrecondition, MeshError, ResourceExhausted, Unavailable
from pdmesh.runtime.rpc.server import GrpcServer
from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc

STARTED = mesh_pb2.GenerateResponse(started=mesh_pb2.Started(seed=7))


class FailingMesh(mesh_pb2_grpc.MeshServicer):
    """Fails its first `num_failures` attempts in the same way: before the first message, or after it."""

    Chat = ListModels = GetStatus = Explain = None  # type: ignore[assignment]

    Embed = LoadAdapter = UnloadAdapter = ListAdapters = ReleaseSession = UpdateWeights = None  # type: ignore[assignment]
    SetTrafficSplit = SetServing = SendWeights = None  # type: ignore[assignment]

    def __init__(self, error: MeshError, *, after_started: bool = False, num_failures: int = 1000) -> None:
        self.error, self.after_started, self.num_failures = error, after_started, num_failures
        self.arrivals: list[float] = []

    async def Generate(self, request: mesh_pb2.GenerateRequest, context: object) -> AsyncIterator[mesh_pb2.GenerateResponse]:
        self._arrived(fails=not self.after_started)
        yield STARTED
        self._fail_if_due(fails=self.after_started)

    async def Tokenize(self, request: mesh_pb2.TokenizeRequest, context: object) -> mesh_pb2.TokenizeResponse:
        self._arrived(fails=True)
        return mesh_pb2.TokenizeResponse(token_ids=[1])

    def _arrived(self, *, fails: bool) -> None:
        self.arrivals.append(time.monotonic())
        self._fail_if_due(fails=fails)

    def _fail_if_due(self, *, fails: bool) -> None:
        if fails and len(self.arrivals) <= self.num_failures:
            raise self.error


@asynccontextmanager
async def serving(mesh: FailingMesh) -> AsyncIterator[mesh_pb2_grpc.MeshAsyncStub]:
    server = GrpcServer("127.0.0.1", 0)
    server.register(mesh_pb2_grpc.add_MeshServicer_to_server, mesh, "pdmesh.v1.Mesh")
    await server.start()
    await server.set_serving(True)
    async with grpc.aio.insecure_channel(server.address, options=service_config.channel_options()) as channel:
        stub: mesh_pb2_grpc.MeshAsyncStub = mesh_pb2_grpc.MeshStub(channel)
        yield stub
    await server.drain(0)


async def generate(stub: mesh_pb2_grpc.MeshAsyncStub) -> int:
    """Number of messages."""
    return len([message async for message in stub.Generate(mesh_pb2.GenerateRequest(text="a"), timeout=20)])


@pytest.mark.parametrize(
    ("error", "after_started", "num_attempts"),
    [
        (Unavailable("the router is going"), False, 5),
        (ResourceExhausted("full", retry_delay_s=0.01), False, 5),
        (ResourceExhausted("too large for ever"), False, 1),
        (FailedPrecondition(None, "does not fit"), False, 1),
        (Unavailable("the router is going"), True, 1),
    ],
)
async def test_number_of_attempts(error: MeshError, after_started: bool, num_attempts: int) -> None:
    mesh = FailingMesh(error, after_started=after_started)
    async with serving(mesh) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generate(stub)
        assert raised.value.code() is error.code
        assert len(mesh.arrivals) == num_attempts


async def test_it_waits_as_long_as_the_refusal_says() -> None:
    mesh = FailingMesh(ResourceExhausted("full", retry_delay_s=0.7), num_failures=1)
    async with serving(mesh) as stub:
        assert await generate(stub) == 1
        first, second = mesh.arrivals
        # The backoff by itself would be 0.1 s, give or take a fifth.
        assert 0.69 <= second - first < 3


async def test_it_backs_off_where_nothing_is_said() -> None:
    mesh = FailingMesh(Unavailable("the router is going"), num_failures=3)
    async with serving(mesh) as stub:
        assert await generate(stub) == 1
        # 0.1, 0.2 and 0.4 s, each with up to a fifth off.
        assert mesh.arrivals[-1] - mesh.arrivals[0] > 0.8 * 0.7


async def test_unary_calls_are_tried_again_when_a_router_goes() -> None:
    mesh = FailingMesh(Unavailable("the router is going"), num_failures=1)
    async with serving(mesh) as stub:
        assert (await stub.Tokenize(mesh_pb2.TokenizeRequest(text="a"))).token_ids == [1]
        assert len(mesh.arrivals) == 2
