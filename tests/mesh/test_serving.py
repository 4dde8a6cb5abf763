"""A mesh that is paused and put to sleep under load: no request is lost, and every answer is the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient
from pdmesh.errors import DeadlineExceeded
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc, worker_pb2
from tests.mesh.checks import Footprint, assert_whole
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]
PROMPTS = [f"{number}. The history of the city begins with" for number in range(6)]
SAMPLED = {"temperature": 0.8, "seed": 11, "max_tokens": 160, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights of one model."""
    parent = tmp_path_factory.mktemp("serving")
    return make_tiny_model(parent / "first", seed=1), make_tiny_model(parent / "second", seed=2)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(folders: tuple[Path, Path]) -> AsyncIterator[LocalMesh]:
    config = LocalMeshConfig(
        model=str(folders[0]), model_name="tiny", num_prefill=1, num_decode=1, num_both=1, port=0, num_threads=1
    )
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


async def ask(client: AsyncClient, place: int, mode: str | None = None) -> tuple[int, ...]:
    answer = await client.generate(PROMPTS[place], mode=mode, timeout=90, **SAMPLED)  # type: ignore[arg-type]
    return answer.token_ids


async def all_of(client: AsyncClient, mode: str | None = None) -> list[tuple[int, ...]]:
    return list(await asyncio.gather(*(ask(client, place, mode) for place in range(len(PROMPTS)))))


@pytest.mark.parametrize("state", ["paused", "asleep"])
async def test_nothing_is_lost_and_every_answer_is_the_same(mesh: LocalMesh, state: str) -> None:
    async with AsyncClient(mesh.router_addresses) as client:
        expected = await all_of(client)
        stop, seen = asyncio.Event(), list[tuple[int, tuple[int, ...]]]()

        async def keep_asking(number: int) -> None:
            while not stop.is_set():
                place = (number + len(seen)) % len(PROMPTS)
                seen.append((place, await ask(client, place, (None, "remote", "local")[number % 3])))

        asking = [asyncio.create_task(keep_asking(number)) for number in range(6)]
        for finish in (False, True, False):
            await asyncio.sleep(0.4)
            done = await client.set_serving(state, finish_running=finish, timeout=60)
            assert [worker.error for worker in done.workers] == [""] * 3
            if state == "asleep":
                assert all(worker.serving.freed_bytes for worker in done.workers)
            status = await client.status(timeout=10)
            wanted = worker_pb2.ServingState.Value(f"SERVING_STATE_{state.upper()}")
            assert [worker.load.serving_state for worker in status.workers] == [wanted] * 3
            await asyncio.sleep(0.5)  # what was on its way when they stopped has come
            before = len(seen)
            await asyncio.sleep(0.5)
            assert len(seen) == before
            await client.set_serving("running", timeout=60)
        stop.set()
        await asyncio.gather(*asking)
        assert len(seen) >= 12
        assert not [place for place, tokens in seen if tokens != expected[place]]
        status = await client.status(timeout=10)
        assert not [breaker for worker in status.workers for breaker in worker.breakers], "no worker was at fault"
    await assert_whole(mesh)


async def test_requests_that_come_meanwhile_wait(mesh: LocalMesh) -> None:
    async with AsyncClient(mesh.router_addresses) as client:
        expected = await ask(client, 0)
        await client.set_serving("asleep", timeout=60)
        waiting = asyncio.create_task(ask(client, 0))
        embedding = asyncio.create_task(client.embed(["a text"], timeout=60))
        with pytest.raises(DeadlineExceeded):
            await client.generate(PROMPTS[1], timeout=0.5, **SAMPLED)  # type: ignore[arg-type]
        await asyncio.sleep(6.0)  # longer than it would wait for a worker that is not there
        assert not waiting.done() and not embedding.done()
        await client.set_serving("running", timeout=60)
        assert await waiting == expected
        assert len(await embedding) == 1
    await assert_whole(mesh)


async def test_new_weights_while_it_is_paused(mesh: LocalMesh, folders: tuple[Path, Path]) -> None:
    """What a trainer does after a step: sleep, wake paused, new weights, run. What ran before ends on its own weights."""
    async with AsyncClient(mesh.router_addresses) as client:
        old = await ask(client, 0)
        await client.update_weights(str(folders[1]), timeout=60)
        new = await ask(client, 0)
        await client.update_weights(str(folders[0]), timeout=60)
        begun = asyncio.create_task(ask(client, 0))
        await asyncio.sleep(0.1)
        await client.set_serving("paused", timeout=60)
        await client.update_weights(str(folders[1]), timeout=60)
        assert not begun.done()
        await client.set_serving("running", timeout=60)
        assert (await begun, await ask(client, 0)) == (old, new)
        await client.set_serving("asleep", finish_running=True, timeout=60)
        done = await client.set_serving("paused", timeout=60)
        assert {worker.serving.state for worker in done.workers} == {worker_pb2.SERVING_STATE_PAUSED}
        await client.update_weights(str(folders[0]), timeout=60)
        await client.set_serving("running", timeout=60)
        assert await ask(client, 0) == old
    await assert_whole(mesh)


async def test_nonsense_is_refused_by_name(mesh: LocalMesh) -> None:
    async with AsyncClient(mesh.router_addresses) as client:
        with pytest.raises(ValueError, match="'tired' is none of running, paused, asleep"):
            await client.set_serving("tired")
        with pytest.raises(ValueError, match="finish_s"):
            await client.set_serving("paused", finish_running=True, finish_s=-1.0)
    async with grpc.aio.insecure_channel(mesh.router_addresses[0]) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"serving.state") as caught:
            await mesh_pb2_grpc.MeshStub(channel).SetServing(mesh_pb2.MeshSetServingRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
