"""`pdmesh roles`: the worker is found through the router and asked itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc
import grpc.aio
import pytest

from pdmesh import cli
from pdmesh.commands.roles import Options, find_worker
from pdmesh.errors import FailedPrecondition, NotFound
from pdmesh.v1 import common_pb2, mesh_pb2, worker_pb2
from pdmesh.v1.worker_pb2 import ROLE_DECODE, ROLE_PREFILL, WorkerInfo
from pdmesh.v1.worker_pb2_grpc import WorkerControlServicer, add_WorkerControlServicer_to_server
from tests.pdmesh.fake_mesh import FakeRouter, Script, start_router

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class FakeWorker(WorkerControlServicer):
    """Has roles, and takes others."""

    LoadAdapter = UnloadAdapter = ListAdapters = ReleaseRetained = SendBlocks = WatchBlocks = WarmPrefix = None  # type: ignore[assignment]
    UpdateWeights = SetServing = SendWeights = ReadWeights = None  # type: ignore[assignment]

    def __init__(self, worker_id: str, epoch: int) -> None:
        self.info = WorkerInfo(worker_id=worker_id, epoch=epoch, roles=[ROLE_DECODE], identity=common_pb2.Identity(model="fake"))
        self.requests: list[worker_pb2.SetRolesRequest] = []

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Context) -> WorkerInfo:
        return self.info

    async def SetRoles(self, request: worker_pb2.SetRolesRequest, context: Context) -> WorkerInfo:
        self.requests.append(request)
        self.info.roles[:] = request.roles
        return self.info

    ListBlocks = None  # type: ignore[assignment]

    async def Watch(self, request: worker_pb2.WatchRequest, context: Context) -> AsyncIterator[worker_pb2.LoadReport]:
        yield worker_pb2.LoadReport(worker_id=self.info.worker_id, epoch=self.info.epoch, roles=self.info.roles)

    async def KeepTraces(self, request: worker_pb2.KeepTracesRequest, context: Context) -> worker_pb2.KeepTracesResponse:
        return worker_pb2.KeepTracesResponse()

    async def start(self) -> None:
        self.server = grpc.aio.server()
        add_WorkerControlServicer_to_server(self, self.server)
        self.info.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()

    def status(self, *, alive: bool = True) -> mesh_pb2.WorkerStatus:
        info = WorkerInfo()
        info.CopyFrom(self.info)
        return mesh_pb2.WorkerStatus(info=info, load=worker_pb2.LoadReport(roles=info.roles), alive=alive)


async def run(router: FakeRouter, *argv: str) -> int:
    return await asyncio.to_thread(cli.run, ("roles", *argv, "--router", router.address))


async def test_roles_of_a_worker_change(capsys: pytest.CaptureFixture[str]) -> None:
    worker, other = FakeWorker("decode-0", 1), FakeWorker("decode-1", 2)
    await worker.start()
    router = await start_router(Script(workers=[worker.status(), other.status()]))
    assert await run(router, "decode-0", "prefill,decode", "--drain-timeout-s", "2") == 0
    assert "decode-0: decode -> prefill,decode" in capsys.readouterr().out
    assert list(worker.requests[0].roles) == [ROLE_PREFILL, ROLE_DECODE] and worker.requests[0].drain_timeout_ms == 2000
    assert await run(router, "decode-0", "prefill") == 0
    assert capsys.readouterr().err == ""
    await router.stop()
    await worker.server.stop(None)


async def test_taking_the_last_decoder_away_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    worker = FakeWorker("decode-0", 1)
    await worker.start()
    router = await start_router(Script(workers=[worker.status()]))
    assert await run(router, "decode-0", "prefill") == 0
    assert "no other worker decodes fake" in capsys.readouterr().err
    await router.stop()
    await worker.server.stop(None)


async def test_another_process_at_the_address_keeps_its_roles(capsys: pytest.CaptureFixture[str]) -> None:
    worker = FakeWorker("decode-0", 1)
    await worker.start()
    router = await start_router(Script(workers=[worker.status()]))
    worker.info.epoch = 2
    assert await run(router, "decode-0", "prefill") == cli.EXIT_FAILED
    assert "has just restarted" in capsys.readouterr().err and not worker.requests
    await worker.server.stop(None)
    assert await run(router, "decode-0", "prefill", "--timeout-s", "2") == cli.EXIT_FAILED
    assert "decode-0 cannot be reached at 127.0.0.1" in capsys.readouterr().err
    await router.stop()


def test_the_living_process_of_an_id_is_meant() -> None:
    lost, alive = FakeWorker("decode-0", 1).status(alive=False), FakeWorker("decode-0", 2).status()
    assert find_worker([lost, alive], "decode-0") is alive
    with pytest.raises(FailedPrecondition, match="2 living processes are called 'decode-0'"):
        find_worker([alive, FakeWorker("decode-0", 3).status()], "decode-0")
    with pytest.raises(FailedPrecondition, match="is lost"):
        find_worker([lost], "decode-0")
    with pytest.raises(NotFound, match=r"'decode-7'; there are: decode-0"):
        find_worker([lost, alive], "decode-7")


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({}, "worker"),
        ({"worker": "w"}, "roles"),
        ({"worker": "w", "roles": ("decode",), "drain_timeout_s": 0}, "drain_timeout_s"),
    ],
)
def test_options_are_checked(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Options(**wrong).validate()
