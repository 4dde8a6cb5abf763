"""What requests wait for in the line in front of decode workers: each cause has its own limit, and a request waits for
no other that the same workers cannot serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from pdmesh.runtime.errors import Unavailable
from pdmesh.v1 import decode_pb2, mesh_pb2, worker_pb2
from tests.router.mesh import Mesh, config_for, expected, mesh_of, request, running_router
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.support.waiting import eventually

BOTH = (PREFILL, DECODE)


class Losing(StubWorker):
    """Whose first answer to Submit is lost after `loses`, while its tokens arrive; with an adapter, where it `has_adapter`."""

    loses: bool = False
    has_adapter: bool = False

    async def Submit(self, request: decode_pb2.SubmitRequest, context: object) -> decode_pb2.SubmitResponse:
        if not self.loses:
            return await super().Submit(request, context)
        self.loses = False
        self._grant(request)
        await asyncio.sleep(0.3)
        self.held.pop(request.request_id, None)
        raise Unavailable("the answer was lost")

    def load(self) -> worker_pb2.LoadReport:
        report = super().load()
        if self.has_adapter:
            report.adapters.add(name="lo", digest="x")
        return report


def in_line(mesh: Mesh) -> int:
    return sum(len(queue.waiters) for queue in mesh.router.core.capacity_queue._queues.values())


async def served(mesh: Mesh, num: int = 1) -> bool:
    answers = await asyncio.gather(*(mesh.generate(request()) for _ in range(num)))
    return all(answer.tokens() == expected(8) for answer in answers)


@asynccontextmanager
async def joining_later(folder: Path, **settings: object) -> AsyncIterator[tuple[Mesh, StubWorker]]:
    """A mesh whose only worker has not started; `port` of it is known."""
    later = await StubWorker("w", BOTH).start()
    await later.kill()
    async with running_router(config_for(folder, [later], **settings)) as (router, stub):
        yield Mesh(router, stub, {}), StubWorker("w", BOTH, port=later.port)


async def test_a_request_leaves_the_line_that_it_entered(model_folder: Path) -> None:
    """Its tokens came before the answer to Submit was lost: from then on it may run on workers of one kind only."""
    worker = Losing("d0", BOTH, full=True, pause_at=3)
    async with mesh_of(model_folder, [worker], room_timeout_s=1.0) as mesh:
        first = asyncio.create_task(mesh.generate(request()))
        await eventually(lambda: in_line(mesh) == 1)
        worker.loses = True
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await first
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert in_line(mesh) == 0
        worker.full, worker.pause_at = False, None
        worker.resume.set()
        assert await served(mesh, 2)


async def test_a_request_with_all_of_its_tokens_is_submitted_nowhere_else(model_folder: Path) -> None:
    """Only the answer to Submit was lost."""
    workers = [Losing("d0", BOTH), Losing("d1", BOTH)]
    async with mesh_of(model_folder, workers) as mesh:
        for worker in workers:
            worker.loses = True
        answer = await mesh.generate(request(mode=mesh_pb2.PREFILL_MODE_LOCAL))
        assert answer.tokens() == expected(8)
        await asyncio.sleep(0.5)
        assert sum(worker.loses for worker in workers) == 1 and not any(worker.submits for worker in workers)
        await mesh.until_whole()


async def test_a_full_worker_with_an_adapter_holds_up_no_other_requests(model_folder: Path) -> None:
    with_it = Losing("d1", BOTH)
    with_it.has_adapter = True
    async with mesh_of(model_folder, [Losing("d0", BOTH), with_it], room_timeout_s=30.0) as mesh:
        with_it.full = True
        asked = request()
        asked.model = "lo"
        waiting = asyncio.create_task(mesh.generate(asked))
        await eventually(lambda: in_line(mesh) == 1)
        assert await asyncio.wait_for(served(mesh, 3), 5.0)
        with_it.full = False
        assert (await waiting).tokens() == expected(8)


async def test_one_line_where_all_workers_have_the_adapter(model_folder: Path) -> None:
    both = [Losing("d0", BOTH, full=True), Losing("d1", BOTH, full=True)]
    for worker in both:
        worker.has_adapter = True
    async with mesh_of(model_folder, both, room_timeout_s=30.0) as mesh:
        asked = request()
        asked.model = "lo"
        waiting = [asyncio.create_task(mesh.generate(each)) for each in (request(), asked)]
        await eventually(lambda: in_line(mesh) == 2)
        assert len(mesh.router.core.capacity_queue._queues) == 1
        for worker in both:
            worker.full = False
        await asyncio.gather(*waiting)


@pytest.mark.parametrize("wake_timeout_s", [0.0, 0.7])
async def test_a_wait_for_room_outlives_a_moment_without_decode_workers(model_folder: Path, wake_timeout_s: float) -> None:
    """The wait for room was longer than what is waited for a worker, or for the first one."""
    worker = StubWorker("d0", BOTH, full=True)
    settings = {"room_timeout_s": 30.0, "place_timeout_s": 0.5, "wake_timeout_s": wake_timeout_s}
    async with mesh_of(model_folder, [worker], **settings) as mesh:
        waiting = [asyncio.create_task(mesh.generate(request())) for _ in range(4)]
        await eventually(lambda: in_line(mesh) == 4)
        await asyncio.sleep(1.0)
        worker.break_streams()
        await asyncio.sleep(0.15)
        worker.full = False
        for answer in await asyncio.gather(*waiting):
            assert answer.tokens() == expected(8)


async def test_a_first_worker_that_comes_paused_is_waited_for_as_long_as_any(model_folder: Path) -> None:
    settings = {"wake_timeout_s": 60.0, "place_timeout_s": 0.3, "paused_timeout_s": 1.0}
    async with joining_later(model_folder, **settings) as (mesh, worker):
        waiting = [asyncio.create_task(mesh.generate(request())) for _ in range(2)]
        await asyncio.sleep(1.3)
        worker.serving_state = worker_pb2.SERVING_STATE_PAUSED
        await worker.start()
        await eventually(lambda: mesh.router.core.fleet.is_any_stopped)
        await asyncio.sleep(0.3)
        worker.serving_state = worker_pb2.SERVING_STATE_RUNNING
        for answer in await asyncio.gather(*waiting):
            assert answer.tokens() == expected(8)
        await worker.kill()


def embedding() -> mesh_pb2.EmbedRequest:
    return mesh_pb2.EmbedRequest(inputs=[mesh_pb2.EmbedInput(tokens=mesh_pb2.TokenIds(ids=[64, 65, 66]))])


async def test_an_embedding_waits_for_the_first_worker(model_folder: Path) -> None:
    async with joining_later(model_folder, wake_timeout_s=60.0, place_timeout_s=0.3) as (mesh, worker):
        waiting = asyncio.ensure_future(mesh.stub.Embed(embedding()))
        await asyncio.sleep(1.0)
        await worker.start()
        assert len((await waiting).embeddings) == 1
        await worker.kill()


async def test_an_embedding_that_is_computed_waits_no_more(model_folder: Path) -> None:
    """The autoscaler would start pods for it."""
    worker = StubWorker("w", BOTH)
    worker.prefill_plan = ["mute"]
    async with mesh_of(model_folder, [worker]) as mesh:
        call = asyncio.ensure_future(mesh.stub.Embed(embedding()))
        await eventually(lambda: len(worker.embeds) == 1)
        assert mesh.router.core.traffic.of("tiny").num_queued == 0
        call.cancel()
