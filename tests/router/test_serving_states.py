"""Workers that come while their model is paused or asleep: they are told so before they get a request, and told when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pdmesh.runtime.errors import FailedPrecondition, Unavailable
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.v1 import mesh_pb2, worker_pb2
from router.api.http import server_load
from router.fleet.model_changes.serving import ASLEEP, PAUSED, RUNNING, ServingState, WantedServing
from tests.router.mesh import Mesh, config_for, expected, request, running_router
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.support.waiting import eventually

BOTH = (PREFILL, DECODE)
MESH = "serving-states"


class Servable(StubWorker):
    """A stub that pauses and sleeps. `cannot`: a state that it refuses; `fails`: so many calls of all of them do."""

    cannot: ServingState = worker_pb2.SERVING_STATE_UNSPECIFIED
    fails: int = 0

    async def SetServing(  # type: ignore[override]
        self, request: worker_pb2.SetServingRequest, context: object
    ) -> worker_pb2.SetServingResponse:
        if Servable.fails:
            Servable.fails -= 1
            raise Unavailable("not now")
        if request.state == self.cannot:
            raise FailedPrecondition("state", "not on this machine")
        self.serving_state = request.state
        return worker_pb2.SetServingResponse(state=request.state)


@asynccontextmanager
async def mesh_of(folder: Path, *workers: Servable, redis: str = "") -> AsyncIterator[Mesh]:
    config = config_for(folder, workers, redis=redis, mesh=MESH)
    async with running_router(config) as (router, stub):
        await eventually(lambda: sum(view.decode for view in router.core.fleet.views()) == len(workers))
        yield Mesh(router, stub, {worker.name: worker for worker in workers})


async def told(mesh: Mesh, state: ServingState) -> mesh_pb2.MeshSetServingResponse:
    serving = worker_pb2.SetServingRequest(state=state)
    return await mesh.stub.SetServing(mesh_pb2.MeshSetServingRequest(model="tiny", serving=serving))


async def restarted(old: StubWorker) -> Servable:
    """The same address, another process."""
    await old.kill()
    new = Servable(old.name, BOTH, port=old.port)
    await new.start()
    return new


@pytest.fixture
async def redis_url() -> AsyncIterator[str]:
    async with EmbeddedRedis() as redis:
        yield redis.url


@pytest.mark.parametrize("state", [PAUSED, ASLEEP])
async def test_a_worker_that_comes_meanwhile_does_as_the_others_and_gets_nothing(model_folder: Path, state: ServingState) -> None:
    first = Servable("w0", BOTH)
    await first.start()
    async with mesh_of(model_folder, first) as mesh:
        await told(mesh, state)
        waiting = asyncio.create_task(mesh.generate(request()))
        new = await restarted(first)
        await eventually(lambda: new.serving_state == state)
        await asyncio.sleep(0.5)  # longer than what the router takes for granted
        assert not new.submits and not waiting.done()
        await told(mesh, RUNNING)
        assert (await waiting).tokens() == expected(8)
        newest = await restarted(new)
        assert (await mesh.generate(request())).tokens() == expected(8)
        assert newest.serving_state == RUNNING
    await newest.kill()


@pytest.mark.parametrize("state", [PAUSED, ASLEEP])
async def test_a_gateway_reads_of_a_mesh_that_is_stopped_that_it_is_full(model_folder: Path, state: ServingState) -> None:
    """It would look like the emptiest one."""
    worker = Servable("w0", BOTH)
    await worker.start()
    async with mesh_of(model_folder, worker) as mesh:
        running = {name: value for name, _, value in server_load.samples(mesh.router.core)}
        assert running["vllm:kv_cache_usage_perc"] == running["vllm:num_requests_waiting"] == 0
        await told(mesh, state)
        waiting = [asyncio.create_task(mesh.generate(request())) for _ in range(3)]
        await eventually(lambda: mesh.router.core.flow_control.admission.num_inflight == 3)
        said = {"vllm:num_requests_running": 0, "vllm:num_requests_waiting": 3, "vllm:kv_cache_usage_perc": 1}
        await eventually(lambda: {name: value for name, _, value in server_load.samples(mesh.router.core)} == said)
        await told(mesh, RUNNING)
        await asyncio.gather(*waiting)
    await worker.kill()


async def test_what_cannot_sleep_pauses(model_folder: Path) -> None:
    first = Servable("w0", BOTH)
    await first.start()
    async with mesh_of(model_folder, first) as mesh:
        await told(mesh, ASLEEP)
        Servable.cannot = ASLEEP
        try:
            new = await restarted(first)
            await eventually(lambda: new.serving_state == PAUSED)
            assert not new.submits
        finally:
            Servable.cannot = worker_pb2.SERVING_STATE_UNSPECIFIED
    await new.kill()


async def test_what_no_worker_could_is_not_wanted(model_folder: Path) -> None:
    worker = Servable("w0", BOTH)
    await worker.start()
    worker.cannot = PAUSED
    async with mesh_of(model_folder, worker) as mesh:
        with pytest.raises(Exception, match="not on this machine"):
            await told(mesh, PAUSED)
        assert mesh.router.core.serving.wanted("tiny") == RUNNING
        assert (await mesh.generate(request())).tokens() == expected(8)
    await worker.kill()


async def test_a_router_that_was_told_by_another_tells_its_workers(model_folder: Path, redis_url: str) -> None:
    """The other router has not met the worker. This one learns of the pause, and of its end, from Redis alone."""
    other, old = WantedServing(redis_url, MESH), Servable("w0", BOTH)
    await old.start()
    async with mesh_of(model_folder, old, redis=redis_url) as mesh:
        await other.put("tiny", PAUSED)
        await eventually(lambda: mesh.router.core.serving.wanted("tiny") == PAUSED)
        assert old.serving_state == RUNNING, "whoever said so has told those that were there"
        new = await restarted(old)
        await eventually(lambda: new.serving_state == PAUSED)
        await other.put("tiny", RUNNING)
        await eventually(lambda: new.serving_state == RUNNING)
        assert (await mesh.generate(request())).tokens() == expected(8)
    async with mesh_of(model_folder, new, redis=redis_url) as mesh:
        await other.put("tiny", ASLEEP)
    newest = await restarted(new)
    async with running_router(config_for(model_folder, [newest], redis=redis_url, mesh=MESH)):
        await eventually(lambda: newest.serving_state == ASLEEP)  # a router that was not there when it was said
    await newest.kill()
    await other.close()


async def test_what_is_told_is_written_even_where_it_seems_to_be_so(model_folder: Path, redis_url: str) -> None:
    """Another router was told to pause a moment ago, and this one does not know it yet as it is told to run."""
    other, worker = WantedServing(redis_url, MESH), Servable("w0", BOTH)
    await worker.start()
    async with mesh_of(model_folder, worker, redis=redis_url) as mesh:
        await other.put("tiny", PAUSED)
        await told(mesh, RUNNING)
        await other.refresh()
        assert other.entries["tiny"] == RUNNING == mesh.router.core.serving.wanted("tiny")
    await worker.kill()
    await other.close()


async def test_a_worker_that_cannot_be_told_at_once_is_told_again(model_folder: Path) -> None:
    first = Servable("w0", BOTH)
    await first.start()
    async with mesh_of(model_folder, first) as mesh:
        await told(mesh, PAUSED)
        Servable.fails = 1
        new = await restarted(first)
        await eventually(lambda: new.serving_state == PAUSED)
        assert Servable.fails == 0
        await told(mesh, RUNNING)
        assert (await mesh.generate(request())).tokens() == expected(8)
    await new.kill()


async def test_without_redis_workers_that_run_again_show_that_another_router_said_so(model_folder: Path) -> None:
    worker = Servable("w0", BOTH)
    await worker.start()
    async with mesh_of(model_folder, worker) as mesh:
        await told(mesh, PAUSED)
        await eventually(lambda: mesh.router.core.serving._stopped)
        worker.serving_state = RUNNING
        await eventually(lambda: mesh.router.core.serving.wanted("tiny") == RUNNING)
        new = await restarted(worker)
        assert (await mesh.generate(request())).tokens() == expected(8)
        assert new.serving_state == RUNNING
    await new.kill()


async def test_nonsense_in_redis_is_ignored(redis_url: str) -> None:
    wanted, redis = WantedServing(redis_url, MESH), Redis.from_url(redis_url)
    await redis.hset(f"pdmesh:{MESH}:serving", mapping={"a": "SERVING_STATE_UNSPECIFIED", "b": "5", "c": "ASLEEP", "d": b"\xff"})
    await wanted.put("tiny", ASLEEP)
    await wanted.refresh()
    assert dict(wanted.entries) == {"tiny": ASLEEP}
    await redis.aclose()
    await wanted.close()
