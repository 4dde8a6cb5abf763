"""Other weights for a mesh that serves: every answer is wholly of one version, and no request fails."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient, Client
from pdmesh.engine.loader.hash import cache_folder
from pdmesh.errors import MeshError
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.v1 import common_pb2, mesh_pb2, mesh_pb2_grpc
from tests.mesh.checks import Footprint, assert_whole
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]
PROMPTS = [f"{number}. The history of the city begins with" for number in range(4)]
SAMPLED = {"temperature": 0.8, "seed": 11, "max_tokens": 24, "ignore_eos": True}
NUM_SWAPS = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights of one model."""
    parent = tmp_path_factory.mktemp("weights")
    return make_tiny_model(parent / "first", seed=1), make_tiny_model(parent / "second", seed=2)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(folders: tuple[Path, Path]) -> AsyncIterator[LocalMesh]:
    """Prefill and decode separated, and a worker with both roles."""
    config = LocalMeshConfig(
        model=str(folders[0]), model_name="tiny", num_prefill=1, num_decode=1, num_both=1, port=0, num_threads=1
    )
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


async def answers(client: AsyncClient, mode: str | None = None) -> list[tuple[int, ...]]:
    asked = (client.generate(prompt, mode=mode, timeout=60, **SAMPLED) for prompt in PROMPTS)  # type: ignore[arg-type]
    return [answer.token_ids for answer in await asyncio.gather(*asked)]


async def test_every_answer_is_of_one_version(mesh: LocalMesh, folders: tuple[Path, Path]) -> None:
    async with AsyncClient(mesh.router_addresses) as client:
        expected = [await answers(client)]
        await client.update_weights(str(folders[1]), timeout=60)
        expected.append(await answers(client))
        assert expected[0] != expected[1]
        stop, seen = asyncio.Event(), list[tuple[int, tuple[int, ...]]]()

        async def ask(number: int) -> None:
            place, mode = number % len(PROMPTS), (None, "remote", "local")[number % 3]
            while not stop.is_set():
                answer = await client.generate(PROMPTS[place], mode=mode, timeout=60, **SAMPLED)  # type: ignore[arg-type]
                seen.append((place, answer.token_ids))

        asking = [asyncio.create_task(ask(number)) for number in range(6)]
        for swap in range(NUM_SWAPS):
            done = await client.update_weights(str(folders[swap % 2]), timeout=60)
            assert [worker.error for worker in done.workers] == [""] * 3
            assert {worker.weights_hash for worker in done.workers} == {done.weights_hash}
            await asyncio.sleep(0.5)
        stop.set()
        await asyncio.gather(*asking)
        assert len(seen) > 4 * NUM_SWAPS
        wrong = [(place, tokens) for place, tokens in seen if tokens not in (expected[0][place], expected[1][place])]
        assert not wrong, f"{len(wrong)} of {len(seen)} answers are of neither version: {wrong[:2]}"
        assert await answers(client, "remote") == expected[1] == await answers(client, "local")
    await assert_whole(mesh)


async def test_prefixes_are_found_under_the_new_weights(mesh: LocalMesh, folders: tuple[Path, Path]) -> None:
    """The router knows at once by which names blocks are looked up, and the workers find them. Which worker a prompt goes to is
    the policy's choice: so tiny a model computes this one in 15 ms."""
    prompt = "A long and winding story, which is told again and again. " * 12
    async with AsyncClient(mesh.router_addresses) as client, grpc.aio.insecure_channel(mesh.router_addresses[0]) as channel:
        await client.update_weights(str(folders[0]), timeout=60)
        await client.update_weights(str(folders[1]), timeout=60)
        first = await client.generate(prompt, timeout=60, **SAMPLED)  # type: ignore[arg-type]
        workers = {first.timings.decode_worker}
        for _ in range(4):
            again = await client.generate(prompt, timeout=60, **SAMPLED)  # type: ignore[arg-type]
            assert again.token_ids == first.token_ids
            answered_by = again.timings.decode_worker
            assert again.usage.cached_tokens > 600 or answered_by not in workers
            (decision,) = (await mesh_pb2_grpc.MeshStub(channel).Explain(mesh_pb2.ExplainRequest(latest=1))).decisions
            known = {each.decode_worker_id for each in decision.candidates if each.decode_cached_tokens > 600}
            assert workers <= known
            workers.add(answered_by)


async def test_a_long_request_ends_on_the_weights_that_it_began_with(mesh: LocalMesh, folders: tuple[Path, Path]) -> None:
    async with AsyncClient(mesh.router_addresses) as client:
        await client.update_weights(str(folders[1]), timeout=60)
        options = {**SAMPLED, "max_tokens": 600}
        whole = (await client.generate(PROMPTS[0], timeout=60, **options)).token_ids  # type: ignore[arg-type]
        began = asyncio.create_task(client.generate(PROMPTS[0], timeout=60, **options))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        await client.update_weights(str(folders[0]), timeout=60)
        assert (await began).token_ids == whole
        assert (await client.generate(PROMPTS[0], timeout=60, **options)).token_ids != whole  # type: ignore[arg-type]
    await assert_whole(mesh)


async def deltas_of(channel: grpc.aio.Channel, resume: mesh_pb2.Resume | None = None) -> list[mesh_pb2.Delta]:
    """Of the same request, or of its rest."""
    sampling = common_pb2.SamplingParams(temperature=0.8, seed=11, max_tokens=24, ignore_eos=True)
    request = mesh_pb2.GenerateRequest(model="tiny", text=PROMPTS[0], sampling=sampling, resume=resume)
    return [message.delta async for message in mesh_pb2_grpc.MeshStub(channel).Generate(request) if message.HasField("delta")]


def tokens_of(deltas: list[mesh_pb2.Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_a_stream_is_resumed_only_with_the_weights_that_it_began_with(mesh: LocalMesh, folders: tuple[Path, Path]) -> None:
    async with AsyncClient(mesh.router_addresses) as client, grpc.aio.insecure_channel(mesh.router_addresses[0]) as channel:
        await client.update_weights(str(folders[1]), timeout=60)
        whole = await deltas_of(channel)
        [fingerprint] = {delta.system_fingerprint for delta in whole} - {""}
        assert whole[0].system_fingerprint == fingerprint
        tokens = tokens_of(whole)
        emitted = [common_pb2.EmittedChoice(index=0, token_ids=tokens[:9])]
        resume = mesh_pb2.Resume(seed=11, emitted=emitted, system_fingerprint=fingerprint)
        assert tokens_of(await deltas_of(channel, resume)) == tokens[9:]
        await client.update_weights(str(folders[0]), timeout=60)
        [other] = {delta.system_fingerprint for delta in await deltas_of(channel)} - {""}
        assert other != fingerprint
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await deltas_of(channel, resume)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no worker has the weights" in (refused.value.details() or "")
        ended = common_pb2.EmittedChoice(index=0, token_ids=tokens, finish_reason=common_pb2.FINISH_REASON_LENGTH)
        complete = mesh_pb2.Resume(seed=11, emitted=[ended], system_fingerprint=fingerprint)
        assert tokens_of(await deltas_of(channel, complete)) == [], "what has ended needs no worker"
        await client.update_weights(str(folders[1]), timeout=60)
        assert tokens_of(await deltas_of(channel, resume)) == tokens[9:]
        resume.system_fingerprint = "f" * 65
        with pytest.raises(grpc.aio.AioRpcError, match=r"resume\.system_fingerprint"):
            await deltas_of(channel, resume)
    await assert_whole(mesh)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda folder: folder / "nowhere", "does not exist"),
        (lambda folder: make_tiny_model(folder / "other", num_hidden_layers=3), "num_layers"),
        (lambda folder: folder, "config.json"),
        (lambda folder: "", "0 characters"),
        (lambda folder: "a\0b", "does not exist"),
        (lambda folder: "a" * 300, "does not exist"),
        (lambda folder: "a/" * 3000, "6000 characters"),
        (lambda folder: "/dev/zero", "give a model folder"),
        (lambda folder: "/", "config.json"),
    ],
)
async def test_what_cannot_be_taken_is_refused(mesh: LocalMesh, tmp_path: Path, make: object, named: str) -> None:
    assert callable(make)
    async with AsyncClient(mesh.router_addresses) as client:
        before = await answers(client)
        with pytest.raises(MeshError, match=named):
            await client.update_weights(str(make(tmp_path)), timeout=60)
        assert await answers(client) == before
    await assert_whole(mesh)


async def test_weights_that_are_sent(mesh: LocalMesh, folders: tuple[Path, Path]) -> None:
    """To workers that share no folder with the client; a worker that cannot take them does not keep the others from them."""
    async with AsyncClient(mesh.router_addresses) as client:
        await client.update_weights(str(folders[0]), timeout=60)
        first = await answers(client)
        for folder in (folders[1], folders[0], folders[1]):
            done = await client.send_weights(folder, timeout=60)
            assert [worker.error for worker in done.workers] == [""] * 3
            assert {worker.weights_hash for worker in done.workers} == {done.weights_hash}
            assert (await answers(client) == first) == (folder == folders[0])
        with pytest.raises(ValueError, match="has no"):
            await client.send_weights(folders[0].parent)
    with Client(mesh.router_addresses) as blocking:
        await asyncio.to_thread(blocking.send_weights, folders[0], timeout=60)
    await assert_whole(mesh)


async def restarted(mesh: LocalMesh, name: str) -> None:
    """Kill it, and return when every router knows the process that came in its place."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient((address,))) for address in mesh.router_addresses]
        before = {worker.info.epoch for worker in (await clients[0].status(timeout=10)).workers}
        mesh.kill(name, signal.SIGKILL)
        for client in clients:
            for _ in range(300):
                await asyncio.sleep(0.1)
                workers = (await client.status(timeout=10)).workers
                if [worker for worker in workers if worker.info.epoch not in before and worker.load.serving_state]:
                    break
            else:
                raise AssertionError(f"{name} did not come back")


async def test_a_worker_that_is_started_again_has_the_present_weights(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Whichever router is asked first, and what was sent as well. What is not there any more it cannot have: it serves with its
    own."""
    config = LocalMeshConfig(
        model=str(folders[0]), model_name="tiny", num_prefill=0, num_decode=0, num_both=1, num_routers=2, port=0, num_threads=1
    )
    async with LocalMesh(config) as mesh, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient((address,))) for address in mesh.router_addresses]
        first = await answers(clients[0])
        await clients[0].update_weights(str(folders[1]), timeout=60)
        second = await answers(clients[0])
        assert first != second
        mesh.kill("worker-0", signal.SIGKILL)
        assert await asyncio.gather(*map(answers, clients)) == [second] * 2, "not one request came before the weights"
        await clients[1].update_weights(str(folders[0]), timeout=60)
        await restarted(mesh, "worker-0")
        assert await asyncio.gather(*map(answers, clients)) == [first] * 2
        passing = make_tiny_model(tmp_path / "passing", seed=3)
        await clients[0].update_weights(str(passing), timeout=60)
        assert await answers(clients[1]) not in (first, second)
        shutil.rmtree(passing)
        await restarted(mesh, "worker-0")
        assert await answers(clients[0]) == first
        await clients[0].send_weights(folders[1], timeout=60)
        assert await answers(clients[1]) == second
        mesh.kill("worker-0", signal.SIGKILL)
        assert await asyncio.gather(*map(answers, clients)) == [second] * 2, "not one request came before what was sent"
        await assert_whole(mesh)


async def test_a_worker_of_another_machine_gets_from_its_peer_what_was_sent(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine: another cache, but for the kernels, which take minutes to compile."""
    caches, kernels = (tmp_path / "one", tmp_path / "other"), (cache_folder() / "kernels").absolute()
    for cache in caches:
        cache.mkdir()
        (cache / "kernels").symlink_to(kernels)
    monkeypatch.setenv("PDMESH_CACHE", str(caches[0]))
    config = LocalMeshConfig(
        model=str(folders[0]), model_name="tiny", num_prefill=0, num_decode=0, num_both=2, num_routers=2, port=0, num_threads=1
    )
    async with LocalMesh(config) as mesh, AsyncClient(mesh.router_addresses) as client:
        await client.send_weights(folders[1], timeout=60)
        expected = await answers(client)
        monkeypatch.setenv("PDMESH_CACHE", str(caches[1]))
        await restarted(mesh, "worker-1")
        assert await answers(client) == expected
        mesh.kill("worker-0", signal.SIGKILL)
        assert await answers(client) == expected
        await assert_whole(mesh)
    assert not list((caches[1] / "received").iterdir())
