"""A mesh that is paused and put to sleep under load: no request is lost, and every answer is the same."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio

from pdmesh.client.client import AsyncClient
from pdmesh.client.stream import AsyncStream
from pdmesh.client.types import Delta, FinishReason
from pdmesh.errors import DeadlineExceeded
from pdmesh.launcher.mesh import LocalMesh
from pdmesh.launcher.plan import LocalMeshConfig
from pdmesh.v1 import mesh_pb2, mesh_pb2_grpc, worker_pb2
from tests.mesh.checks import Footprint, assert_whole
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]
PROMPTS = [f"{number}. The history of the city begins with" for number in range(6)]
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 11, "max_tokens": 160, "ignore_eos": True}
LONG: dict[str, Any] = {**SAMPLED, "max_tokens": 1500}
"""So long that it runs still when something is done to the mesh."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights of one model."""
    parent = tmp_path_factory.mktemp("serving")
    return make_tiny_model(parent / "first", seed=1), make_tiny_model(parent / "second", seed=2)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(folders: tuple[Path, Path]) -> AsyncIterator[LocalMesh]:
    config = LocalMeshConfig(
        model=str(folders[0]), model_name="tiny", num_prefill=1, num_decode=1, num_both=1, port=0, http_port=0, num_threads=1
    )
    async with LocalMesh(config) as mesh:
        footprint = Footprint.of(mesh)
        yield mesh
        footprint.grow(mesh)
    footprint.assert_gone()


async def ask(client: AsyncClient, place: int, mode: str | None = None) -> tuple[int, ...]:
    answer = await client.generate(PROMPTS[place], mode=mode, timeout=90, **SAMPLED)  # type: ignore[arg-type]
    return answer.token_ids


async def tokens_of(stream: AsyncStream, begun: asyncio.Queue[None]) -> tuple[tuple[int, ...], FinishReason | None]:
    """Return what came, and why no more did. `begun` gets an entry at the first of it."""
    tokens, reason = tuple[int, ...](), None
    async for event in stream:
        if isinstance(event, Delta):
            if not tokens:
                begun.put_nowait(None)
            tokens, reason = tokens + event.token_ids, event.finish_reason or reason
    return tokens, reason


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
            await client.generate(PROMPTS[1], timeout=0.5, **SAMPLED)
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
        whole = (await client.generate(PROMPTS[0], timeout=90, **LONG)).token_ids
        await client.update_weights(str(folders[1]), timeout=60)
        new = await ask(client, 0)
        await client.update_weights(str(folders[0]), timeout=60)
        begun = asyncio.create_task(client.generate(PROMPTS[0], timeout=90, **LONG))
        await asyncio.sleep(0.1)
        await client.set_serving("paused", timeout=60)
        await client.update_weights(str(folders[1]), timeout=60)
        assert not begun.done()
        await client.set_serving("running", timeout=60)
        assert ((await begun).token_ids, await ask(client, 0)) == (whole, new)
        await client.set_serving("asleep", finish_running=True, timeout=60)
        done = await client.set_serving("paused", timeout=60)
        assert {worker.serving.state for worker in done.workers} == {worker_pb2.SERVING_STATE_PAUSED}
        await client.update_weights(str(folders[0]), timeout=60)
        await client.set_serving("running", timeout=60)
        assert await ask(client, 0) == old
    await assert_whole(mesh)


async def test_every_router_ends_what_is_aborted_with_what_it_has(folders: tuple[Path, Path]) -> None:
    """The one that was told, and the one that hears of it from the workers."""
    config = LocalMeshConfig(
        model=str(folders[0]), model_name="tiny", num_prefill=1, num_both=1, num_routers=2, port=0, num_threads=1
    )
    async with LocalMesh(config) as mesh, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient((address,))) for address in mesh.router_addresses]
        expected = (await clients[0].generate(PROMPTS[0], timeout=90, **LONG)).token_ids
        for state in ("paused", "asleep"):
            begun = asyncio.Queue[None]()
            asking = [
                asyncio.create_task(tokens_of(client.generate_stream(PROMPTS[0], mode=mode, timeout=90, **LONG), begun))  # type: ignore[arg-type]
                for client in clients
                for mode in ("remote", "local", None)
            ]
            for _ in asking:  # what waits for a place when the mesh is stopped goes on waiting
                await begun.get()
            await clients[0].set_serving(state, abort_running=True, timeout=60)
            later = asyncio.create_task(ask(clients[0], 0))
            answers = await asyncio.gather(*asking)
            aborted = [reason is FinishReason.ABORT for _, reason in answers]
            assert any(aborted)  # on a busy machine others were whole before
            assert all(is_aborted or tokens == expected for is_aborted, (tokens, _) in zip(aborted, answers, strict=True))
            assert [tokens for tokens, _ in answers] == [expected[: len(tokens)] for tokens, _ in answers]
            await asyncio.sleep(1.0)  # two reports
            assert not later.done()
            await clients[1].set_serving("running", timeout=60)
            assert await later == expected[: SAMPLED["max_tokens"]]
        await assert_whole(mesh)


@pytest.mark.parametrize("num_routers", [1, 2])
async def test_a_worker_that_is_started_again_sleeps_as_the_others(folders: tuple[Path, Path], num_routers: int) -> None:
    config = LocalMeshConfig(
        model=str(folders[0]),
        model_name="tiny",
        num_both=1,
        num_prefill=0,
        num_decode=0,
        num_routers=num_routers,
        port=0,
        num_threads=1,
    )
    async with LocalMesh(config) as mesh, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient((address,))) for address in mesh.router_addresses]
        expected = await ask(clients[0], 0)
        await clients[0].set_serving("asleep", timeout=60)
        waiting = asyncio.create_task(ask(clients[-1], 0))
        before = {worker.info.epoch for worker in (await clients[0].status(timeout=10)).workers}
        mesh.kill("worker-0", signal.SIGKILL)

        async def states(client: AsyncClient) -> list[int]:
            """Of the workers that have come since, and have reported to this router."""
            workers = (await client.status(timeout=10)).workers
            came = [worker.load.serving_state for worker in workers if worker.info.epoch not in before]
            return [state for state in came if state]

        for client in clients:
            for _ in range(300):
                await asyncio.sleep(0.1)
                if seen := await states(client):
                    break
            assert seen == [worker_pb2.SERVING_STATE_ASLEEP]
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await clients[-1].set_serving("running", timeout=60)
        assert await waiting == expected
        assert await ask(clients[0], 0) == expected
        await assert_whole(mesh)


async def test_trainers_call_it_by_the_names_that_they_know(mesh: LocalMesh, folders: tuple[Path, Path]) -> None:
    (url,) = mesh.http_urls
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 1500, "temperature": 0.8, "seed": 11, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def posted(path: str, sent: object = None) -> dict[str, Any]:
            answer = await (http.post(path) if sent is None else http.post(path, json=sent))
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        async def state() -> tuple[bool, bool]:
            paused, asleep = await http.get("/is_paused"), await http.get("/is_sleeping")
            return paused.json()["is_paused"], asleep.json()["is_sleeping"]

        async def cut_by(path: str) -> tuple[str, str]:
            """Return text and finish reason of an answer behind whose first piece `path` was called."""
            pieces, reason = list[str](), ""
            async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    if not pieces:
                        await posted(path)
                    pieces.append(choice["text"])
                    reason = choice["finish_reason"] or reason
            return "".join(pieces), reason

        whole = (await posted("/v1/completions", body))["choices"][0]
        calls: tuple[tuple[str, object, tuple[bool, bool]], ...] = (
            ("/pause?mode=keep", None, (True, False)),
            ("/resume", None, (False, False)),
            ("/sleep?level=2&mode=wait", None, (True, True)),
            ("/wake_up?tags=weights", None, (True, False)),
            ("/wake_up?tags=kv_cache", None, (False, False)),
            ("/pause_generation", {"mode": "retract"}, (True, False)),
            ("/continue_generation", {}, (False, False)),
            ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, (True, True)),
            ("/resume_memory_occupation", {"tags": ["weights"]}, (True, False)),
            ("/resume_memory_occupation", None, (False, False)),
        )
        for call, sent, then in calls:
            await posted(call, sent)
            assert await state() == then, call
        for path, resume in (("/pause", "/resume"), ("/pause_generation", "/continue_generation"), ("/sleep", "/wake_up")):
            text, reason = await cut_by(path)
            assert reason == "abort"
            assert text and whole["text"].startswith(text.rstrip("\ufffd"))  # it may end within a character
            await posted(resume)
        updated = await posted("/update_weights_from_disk", {"model_path": str(folders[1]), "abort_all_requests": True})
        assert updated["success"], updated
        assert await state() == (False, False)
        assert (await posted("/v1/completions", body))["choices"][0]["text"] != whole["text"]
        await posted("/update_weights_from_disk", {"model_path": str(folders[0])})
        assert (await posted("/v1/completions", body))["choices"][0]["text"] == whole["text"]
        refusals: tuple[tuple[str, object, int, str], ...] = (
            ("/pause?mode=later", None, 400, "mode"),
            ("/pause?level=1", None, 400, "level"),
            ("/sleep?level=9", None, 400, "level"),
            ("/wake_up?tags=everything", None, 400, "tags"),
            ("/pause?model=other", None, 404, "other"),
            ("/pause_generation", {"mode": "softly"}, 400, "mode"),
            ("/continue_generation", {"now": True}, 400, "now"),
            ("/update_weights_from_disk", {}, 400, "model_path"),
            ("/update_weights_from_disk", {"model_path": "/nowhere"}, 400, "/nowhere"),
        )
        for path, refused_body, status, named in refusals:
            refused = await (http.post(path) if refused_body is None else http.post(path, json=refused_body))
            assert refused.status_code == status, (path, refused.text)
            assert named in refused.text
        assert (await http.post("/sleep", headers={"Origin": "https://example.com"})).status_code == 403
        assert await state() == (False, False)
    await assert_whole(mesh)


async def test_nonsense_is_refused_by_name(mesh: LocalMesh) -> None:
    async with AsyncClient(mesh.router_addresses) as client:
        with pytest.raises(ValueError, match="'tired' is none of running, paused, asleep"):
            await client.set_serving("tired")
        with pytest.raises(ValueError, match="finish_s"):
            await client.set_serving("paused", finish_running=True, finish_s=-1.0)
        for state, finishes in (("running", False), ("paused", True)):
            with pytest.raises(ValueError, match="abort_running"):
                await client.set_serving(state, finish_running=finishes, abort_running=True)
    async with grpc.aio.insecure_channel(mesh.router_addresses[0]) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"serving.state") as caught:
            await mesh_pb2_grpc.MeshStub(channel).SetServing(mesh_pb2.MeshSetServingRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
