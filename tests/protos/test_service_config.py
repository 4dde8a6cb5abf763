"""The service config with plain grpcio: two real routers behind one channel; one goes, one is full, one is not ready."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from pdmesh.client import service_config
from pdmesh.v1 import common_pb2, mesh_pb2, mesh_pb2_grpc
from tests.router.mesh import Answer, Mesh, expected, request, running_mesh
from tests.support.waiting import eventually

EXHAUSTED, UNAVAILABLE = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE


@asynccontextmanager
async def stub_for(*meshes: Mesh) -> AsyncIterator[mesh_pb2_grpc.MeshAsyncStub]:
    """As a program of somebody else's would call: plain grpcio, the list of routers, the service config."""
    target = "ipv4:" + ",".join(mesh.router.server.address for mesh in meshes)
    async with grpc.aio.insecure_channel(target, options=service_config.channel_options()) as channel:
        stub: mesh_pb2_grpc.MeshAsyncStub = mesh_pb2_grpc.MeshStub(channel)
        yield stub


async def generate(stub: mesh_pb2_grpc.MeshAsyncStub, sent: mesh_pb2.GenerateRequest, timeout: float = 20) -> Answer:
    answer = Answer()
    async for message in stub.Generate(sent, timeout=timeout):
        answer.take(message)
    answer.check_indexes()
    return answer


def num_answered(mesh: Mesh) -> int:
    return len(mesh["d0"].submits)


async def until_both_are_used(stub: mesh_pb2_grpc.MeshAsyncStub, *meshes: Mesh) -> None:
    """The channel is connected to all of them, and has seen that they are healthy."""
    for _ in range(200):
        assert (await generate(stub, request())).tokens() == expected(8)
        if all(num_answered(mesh) for mesh in meshes):
            return
    raise AssertionError([num_answered(mesh) for mesh in meshes])


async def test_calls_go_to_all_routers_in_turn(model_folder: Path) -> None:
    async with running_mesh(model_folder) as one, running_mesh(model_folder) as other, stub_for(one, other) as stub:
        await until_both_are_used(stub, one, other)
        before = num_answered(one), num_answered(other)
        for _ in range(20):
            await generate(stub, request())
        assert (num_answered(one) - before[0], num_answered(other) - before[1]) == (10, 10)


async def test_a_router_drains_and_goes_and_no_call_fails(model_folder: Path) -> None:
    async with (
        running_mesh(model_folder, linger_s=0.3) as one,
        running_mesh(model_folder) as other,
        stub_for(one, other) as stub,
    ):
        await until_both_are_used(stub, one, other)
        gone = asyncio.Event()

        async def calls() -> int:
            num_calls = 0
            while not gone.is_set():
                assert (await generate(stub, request())).tokens() == expected(8)
                num_calls += 1
            return num_calls

        callers = [asyncio.create_task(calls()) for _ in range(4)]
        await one.router.stop()
        before = num_answered(other)
        await eventually(lambda: num_answered(other) > before + 10)
        gone.set()
        assert min(await asyncio.gather(*callers)) > 0


async def test_after_the_first_message_the_client_resumes(model_folder: Path) -> None:
    """A retry of gRPC's is over with `started`: the stream breaks, and `resume` continues it at the other router."""
    async with running_mesh(model_folder) as one, running_mesh(model_folder) as other, stub_for(one, other) as stub:
        await until_both_are_used(stub, one, other)
        for mesh in (one, other):
            mesh["d0"].pause_at = 5
        received, broken = Answer(), None
        try:
            async for message in stub.Generate(request(max_tokens=20), timeout=20):
                received.take(message)
                if len(received.tokens()) == 5:
                    served = max((one, other), key=lambda mesh: len(mesh["d0"].held))
                    await served.router.server.server.stop(None)
        except grpc.aio.AioRpcError as error:
            broken = error.code()
        assert broken is UNAVAILABLE
        for mesh in (one, other):
            mesh["d0"].resume.set()
        history = mesh_pb2.Resume(seed=received.started.seed, emitted=[common_pb2.EmittedChoice(token_ids=received.tokens())])
        rest = await generate(stub, request(max_tokens=20, resume=history))
        assert received.tokens() + rest.tokens() == expected(20)


async def test_a_refusal_is_waited_out_as_long_as_it_says(model_folder: Path) -> None:
    async with running_mesh(model_folder, max_inflight=1, max_queued=0) as mesh, stub_for(mesh) as stub:
        await until_both_are_used(stub, mesh)
        await mesh.until_whole()
        mesh["d0"].pause_at = 5
        first = asyncio.create_task(generate(stub, request(max_tokens=20)))
        await eventually(lambda: mesh["d0"].held)
        began = time.monotonic()
        second = asyncio.create_task(generate(stub, request(seed=6)))
        await asyncio.sleep(0.3)
        assert not second.done()
        mesh["d0"].resume.set()
        assert (await first).tokens() == expected(20)
        assert (await second).tokens() == expected(8, seed=6)
        # Two releases are not known yet, so the router names its default: a second. The backoff alone would be 0.1 s.
        assert time.monotonic() - began > 0.9


async def test_a_router_without_workers_gets_no_calls(model_folder: Path) -> None:
    async with running_mesh(model_folder) as one, running_mesh(model_folder) as other, stub_for(one, other) as stub:
        await until_both_are_used(stub, one, other)
        await other["d0"].kill()
        await eventually(lambda: not other.router.frontend.is_ready)
        await asyncio.sleep(0.1)  # the channel reads of it on its health stream
        for _ in range(10):
            assert (await generate(stub, request())).tokens() == expected(8)
            await stub.Tokenize(mesh_pb2.TokenizeRequest(text="a"))


async def test_unary_calls_have_a_timeout_and_streams_the_callers_own(model_folder: Path) -> None:
    methods = json.loads(service_config.text())["methodConfig"]
    names = {(name["service"], name.get("method", "")): method.get("timeout") for method in methods for name in method["name"]}
    mesh = "pdmesh.v1.Mesh"
    without = ("Generate", "Chat", "UpdateWeights", "SendWeights", "SetServing")  # how long they take is the caller's choice
    assert names == {**{(mesh, name): None for name in without}, (mesh, ""): "10s"}
    known = mesh_pb2.DESCRIPTOR.services_by_name["Mesh"]
    assert all(method in known.methods_by_name for _, method in names if method)
