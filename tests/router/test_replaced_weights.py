"""Workers that come with weights that were replaced: they load what replaced them before they get a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pdmesh.runtime.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from pdmesh.runtime.registry import shared_settings
from pdmesh.runtime.registry.redis_server import EmbeddedRedis
from pdmesh.v1 import mesh_pb2, worker_pb2
from router.fleet.model_changes import weights
from router.fleet.model_changes.weights import MAX_REPLACED, NOTHING, ReplacedWeights, Replacement
from tests.router.mesh import Mesh, config_for, expected, request, running_router
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.support.waiting import eventually

BOTH = (PREFILL, DECODE)
MESH = "replaced-weights"
STARTED_WITH, NEW = "w", "new"


class Loading(StubWorker):
    """A stub whose weights are called as the folder that they were loaded from, or as the data that was sent. It loads when
    `may_load` is set. Its machine keeps what is called `keeps`; it passes its weights on, `num_given` pieces of one letter."""

    weights_hash: str = STARTED_WITH
    keeps: str = ""
    num_given: int = 99
    num_read: int = 0
    stalls: bool = False  # after `num_given` pieces, until `goes_on`; else it breaks off
    is_full: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.folders: list[str] = []
        self.sent: list[str] = []
        self.goes_on = asyncio.Event()
        self.may_load = asyncio.Event()
        self.fails = 0

    def info(self) -> worker_pb2.WorkerInfo:
        info = super().info()
        info.identity.weights_hash = self.weights_hash
        return info

    async def UpdateWeights(  # type: ignore[override]
        self, request: worker_pb2.UpdateWeightsRequest, context: object
    ) -> worker_pb2.UpdateWeightsResponse:
        if request.sent_hash:
            if request.sent_hash != self.keeps:
                raise NotFound("this machine keeps no files of these weights")
            self.weights_hash = request.sent_hash
            return worker_pb2.UpdateWeightsResponse(identity=self.info().identity, is_new=True)
        self.folders.append(request.folder)
        await self.may_load.wait()
        if self.fails:
            self.fails -= 1
            raise Unavailable("not now")
        if request.folder == "gone":
            raise InvalidArgument("folder", "does not exist on this worker's machine")
        self.weights_hash = request.folder
        return worker_pb2.UpdateWeightsResponse(identity=self.info().identity, is_new=True)

    async def SendWeights(  # type: ignore[override]
        self, request_iterator: AsyncIterator[worker_pb2.SendWeightsRequest], context: object
    ) -> worker_pb2.UpdateWeightsResponse:
        received = [message async for message in request_iterator]
        self.sent.append(b"".join(message.data for message in received).decode())
        await self.may_load.wait()
        if not received or not received[-1].sha256:
            raise InvalidArgument("sha256", "is missing")
        if self.is_full:
            raise ResourceExhausted("there is no room")
        self.weights_hash = self.sent[-1]
        return worker_pb2.UpdateWeightsResponse(identity=self.info().identity, is_new=True)

    async def ReadWeights(  # type: ignore[override]
        self, request: worker_pb2.ReadWeightsRequest, context: object
    ) -> AsyncIterator[worker_pb2.ReadWeightsResponse]:
        self.num_read += 1
        if request.weights_hash != self.weights_hash:
            raise NotFound("this worker keeps no files of these weights")
        for number, letter in enumerate(self.weights_hash):
            if number == self.num_given and not self.stalls:
                raise Unavailable("the disk is gone")
            if number == self.num_given:
                await self.goes_on.wait()
            yield worker_pb2.ReadWeightsResponse(piece=worker_pb2.SendWeightsRequest(data=letter.encode()))
        yield worker_pb2.ReadWeightsResponse(piece=worker_pb2.SendWeightsRequest(sha256=b"of all"))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "AGAIN_AFTER_S", 0.1)
    monkeypatch.setattr(weights, "ASLEEP_PERIOD_S", 0.1)
    monkeypatch.setattr(weights, "SOURCE_PERIOD_S", 0.1)
    monkeypatch.setattr(shared_settings, "PERIOD_S", 0.1)


@pytest.fixture
async def redis_url() -> AsyncIterator[str]:
    async with EmbeddedRedis() as redis:
        yield redis.url


@asynccontextmanager
async def mesh_of(folder: Path, *workers: Loading, redis: str = "") -> AsyncIterator[Mesh]:
    config = config_for(folder, workers, redis=redis, mesh=MESH)
    async with running_router(config) as (router, stub):
        await eventually(lambda: sum(view.decode for view in router.core.fleet.views()) == len(workers))
        yield Mesh(router, stub, {worker.name: worker for worker in workers})


async def started(name: str = "w0") -> Loading:
    worker = Loading(name, BOTH)
    worker.may_load.set()
    await worker.start()
    return worker


async def restarted(old: StubWorker, weights_hash: str = STARTED_WITH, *, serving_state: int | None = None) -> Loading:
    """The same address, another process; it loads nothing before it may."""
    await old.kill()
    new = Loading(old.name, BOTH, port=old.port)
    new.weights_hash = weights_hash
    if serving_state is not None:
        new.serving_state = worker_pb2.ServingState.ValueType(serving_state)
    await new.start()
    return new


async def update(mesh: Mesh, folder: str = NEW) -> mesh_pb2.MeshUpdateWeightsResponse:
    return await mesh.stub.UpdateWeights(mesh_pb2.MeshUpdateWeightsRequest(model="tiny", folder=folder))


async def send(mesh: Mesh, name: str = NEW) -> mesh_pb2.MeshUpdateWeightsResponse:
    pieces = (worker_pb2.SendWeightsRequest(data=name.encode()), worker_pb2.SendWeightsRequest(sha256=b"of all"))
    return await mesh.stub.SendWeights(iter(pieces))


async def answers(mesh: Mesh) -> bool:
    return (await mesh.generate(request())).tokens() == expected(8)


async def test_a_worker_that_comes_again_gets_nothing_before_it_has_the_others_weights(model_folder: Path) -> None:
    first = await started()
    async with mesh_of(model_folder, first) as mesh:
        await update(mesh)
        await update(mesh, "newer")
        new = await restarted(first)
        await eventually(lambda: new.folders == ["newer"])
        waiting = asyncio.create_task(answers(mesh))
        await asyncio.sleep(0.5)
        assert not new.submits and not waiting.done()
        new.may_load.set()
        assert await waiting
        newest = await restarted(new, NEW)  # weights that were replaced as well
        newest.may_load.set()
        assert await answers(mesh)
        assert newest.folders == ["newer"]
    await newest.kill()


async def test_weights_that_were_never_replaced_are_left_alone(model_folder: Path) -> None:
    """A new deployment; and what was replaced first, once it has come back."""
    first = await started()
    async with mesh_of(model_folder, first) as mesh:
        await update(mesh)
        deployed = await restarted(first, "of a new deployment")
        assert await answers(mesh)
        deployed.may_load.set()
        await update(mesh, STARTED_WITH)
        again = await restarted(deployed)
        assert await answers(mesh)
        await asyncio.sleep(0.3)
        assert again.folders == []
    await again.kill()


async def test_a_worker_that_cannot_load_now_is_asked_again(model_folder: Path) -> None:
    first = await started()
    async with mesh_of(model_folder, first) as mesh:
        await update(mesh)
        new = await restarted(first)
        new.fails = 2
        new.may_load.set()
        assert await answers(mesh)
        assert new.folders == [NEW] * 3
    await new.kill()


async def test_a_worker_that_cannot_load_them_at_all_keeps_its_own(model_folder: Path, redis_url: str) -> None:
    other, first = ReplacedWeights(redis_url, MESH), await started()
    async with mesh_of(model_folder, first, redis=redis_url) as mesh:
        for folder in ("gone", ""):  # removed since; sent, and not kept
            await other.put("tiny", Replacement(folder, f"h{folder}", (STARTED_WITH,)))
            await eventually(lambda: mesh.router.core.weights.replacement("tiny") == other.entries["tiny"])
            assert await answers(mesh)
        assert first.folders == ["gone"]
    await first.kill()
    await other.close()


async def test_what_was_sent_comes_from_the_machine_of_the_worker(model_folder: Path) -> None:
    first, second = await started("w0"), await started("w1")
    async with mesh_of(model_folder, first, second) as mesh:
        await send(mesh)
        new = Loading(first.name, BOTH, port=first.port)
        new.keeps = NEW
        await first.kill()
        await new.start()
        await eventually(lambda: new.weights_hash == NEW)
        assert await answers(mesh)
        assert (new.sent, second.num_read) == ([], 0)
    await new.kill()
    await second.kill()


async def test_what_was_sent_is_passed_on_by_another_worker(model_folder: Path) -> None:
    first, second = await started("w0"), await started("w1")
    async with mesh_of(model_folder, first, second) as mesh:
        await send(mesh)
        await send(mesh, "newer")
        new = await restarted(first)
        await eventually(lambda: new.sent == ["newer"])
        assert all(await asyncio.gather(*(answers(mesh) for _ in range(4))))
        assert not new.submits, "it got a request before it had the weights"
        new.may_load.set()
        await eventually(lambda: new.weights_hash == "newer")
        await eventually(lambda: not mesh.router.core.fleet.workers[new.address].is_held)
        await second.kill()
        assert await answers(mesh) and new.submits
    await new.kill()


@pytest.mark.parametrize("num_given", [0, 2])
async def test_another_worker_passes_them_on_where_one_breaks_off(model_folder: Path, num_given: int) -> None:
    workers = [await started(f"w{number}") for number in range(3)]
    async with mesh_of(model_folder, *workers) as mesh:
        await send(mesh)
        workers[0].num_given = num_given
        new = await restarted(workers[2])
        new.may_load.set()
        await eventually(lambda: new.weights_hash == NEW)
        assert new.sent[-1] == NEW and set(new.sent[:-1]) <= {NEW[:num_given]}
        assert await answers(mesh)
    for worker in (*workers[:2], new):
        await worker.kill()


async def test_what_was_sent_and_is_nowhere_any_more_is_given_up(model_folder: Path) -> None:
    first, second = await started("w0"), await started("w1")
    async with mesh_of(model_folder, first, second) as mesh:
        await send(mesh)
        second.num_given = 1
        new = await restarted(first)
        new.may_load.set()
        await eventually(lambda: bool(mesh.router.core.weights._without_source))
        assert new.weights_hash == STARTED_WITH and set(new.sent) == {NEW[:1]}
        await eventually(lambda: not mesh.router.core.fleet.workers[new.address].is_held)
        assert await answers(mesh)
        await asyncio.sleep(0.5)
        assert len(new.sent) == weights.SOURCE_TRIES, "the same process is not asked again"
        third = Loading(second.name, BOTH, port=second.port)
        third.weights_hash = NEW
        await second.kill()
        await third.start()
        await eventually(lambda: new.weights_hash == NEW)
    await new.kill()
    await third.kill()


async def test_a_worker_that_is_lost_while_it_passes_them_on_is_not_waited_for(model_folder: Path) -> None:
    first, second = await started("w0"), await started("w1")
    async with mesh_of(model_folder, first, second) as mesh:
        await send(mesh)
        second.num_given, second.stalls = 2, True
        new = await restarted(first)
        new.may_load.set()
        await eventually(lambda: second.num_read == 1)
        await second.kill()
        await eventually(lambda: new.sent == [NEW[:2]])
        await eventually(lambda: bool(mesh.router.core.weights._without_source))
        assert await answers(mesh)
    await new.kill()


async def test_a_worker_that_is_lost_after_it_has_passed_all_on_ends_nothing(model_folder: Path) -> None:
    first, second = await started("w0"), await started("w1")
    async with mesh_of(model_folder, first, second) as mesh:
        await send(mesh)
        new = await restarted(first)
        await eventually(lambda: new.sent == [NEW])
        await second.kill()
        await asyncio.sleep(0.5)
        new.may_load.set()
        assert await answers(mesh)
        assert new.weights_hash == NEW and new.sent == [NEW]
    await new.kill()


async def test_newer_weights_end_what_is_passed_on(model_folder: Path) -> None:
    first, second = await started("w0"), await started("w1")
    async with mesh_of(model_folder, first, second) as mesh:
        await send(mesh)
        second.num_given, second.stalls = 2, True
        new = await restarted(first)
        new.may_load.set()
        await eventually(lambda: second.num_read == 1)
        await send(mesh, "newer")
        second.goes_on.set()
        await eventually(lambda: not mesh.router.core.weights._tasks)
        assert new.weights_hash == second.weights_hash == "newer"
        assert await answers(mesh)
    await new.kill()
    await second.kill()


async def test_a_worker_whose_disk_is_full_keeps_its_own_after_some_tries(model_folder: Path) -> None:
    first, second = await started("w0"), await started("w1")
    async with mesh_of(model_folder, first, second) as mesh:
        await send(mesh)
        new = await restarted(first)
        new.may_load.set()
        new.is_full = True
        await eventually(lambda: bool(mesh.router.core.weights._given_up))
        assert len(new.sent) == weights.FULL_TRIES
        await eventually(lambda: not mesh.router.core.fleet.workers[new.address].is_held)
        assert await answers(mesh)
    await new.kill()
    await second.kill()


async def test_a_worker_that_sleeps_loads_them_when_it_wakes(model_folder: Path) -> None:
    first = await started()
    async with mesh_of(model_folder, first) as mesh:
        await update(mesh)
        new = await restarted(first, serving_state=worker_pb2.SERVING_STATE_ASLEEP)
        waiting = asyncio.create_task(answers(mesh))
        await asyncio.sleep(0.5)
        assert new.folders == [] and not waiting.done()
        new.serving_state = worker_pb2.SERVING_STATE_RUNNING
        await eventually(lambda: new.folders == [NEW])
        assert not new.submits
        new.may_load.set()
        assert await waiting
    await new.kill()


async def test_a_router_that_was_told_by_another_brings_its_workers(model_folder: Path, redis_url: str) -> None:
    """One that was not there when the weights were replaced, too. A worker whose weights change just now is left alone."""
    other, first = ReplacedWeights(redis_url, MESH), await started()
    async with mesh_of(model_folder, first, redis=redis_url) as mesh:
        await other.put("tiny", Replacement(NEW, NEW, (STARTED_WITH,)))
        await eventually(lambda: first.folders == [NEW])
        assert await answers(mesh)
        await update(mesh, STARTED_WITH)
        await other.put("tiny", Replacement(NEW, NEW, (STARTED_WITH,)))
        await eventually(lambda: mesh.router.core.weights.replacement("tiny").folder == NEW)
        await asyncio.sleep(0.3)
        assert first.folders == [NEW, STARTED_WITH]
    new = await restarted(first)
    async with running_router(config_for(model_folder, [new], redis=redis_url, mesh=MESH)):
        await eventually(lambda: new.folders == [NEW])
        new.may_load.set()
        await eventually(lambda: new.weights_hash == NEW)
    await new.kill()
    await other.close()


async def test_an_update_that_fails_leaves_what_was_known(model_folder: Path) -> None:
    first = await started()
    async with mesh_of(model_folder, first) as mesh:
        await update(mesh)
        known = mesh.router.core.weights.replacement("tiny")
        assert known == Replacement(NEW, NEW, (STARTED_WITH,))
        with pytest.raises(Exception, match="does not exist"):
            await update(mesh, "gone")
        assert mesh.router.core.weights.replacement("tiny") == known
        first.may_load.clear()
        under_way = asyncio.create_task(update(mesh, "newer"))
        await eventually(lambda: first.folders[-1] == "newer")
        assert mesh.router.core.weights.replacement("tiny") == Replacement("", "", (STARTED_WITH, NEW))
        first.may_load.set()
        await under_way
        assert mesh.router.core.weights.replacement("tiny") == Replacement("newer", "newer", (STARTED_WITH, NEW))
    await first.kill()


def test_what_was_replaced_is_remembered_up_to_a_number() -> None:
    now = NOTHING
    for number in range(2 * MAX_REPLACED):
        now = now.by(f"f{number + 1}", f"h{number + 1}", [f"h{number}", ""])
    assert len(now.replaced) == MAX_REPLACED
    assert now.replaced[-1] == f"h{2 * MAX_REPLACED - 1}"
    assert "" not in now.replaced and now.weights_hash not in now.replaced


async def test_nonsense_in_redis_is_ignored(redis_url: str) -> None:
    wanted, redis = ReplacedWeights(redis_url, MESH), Redis.from_url(redis_url)
    nonsense = ("5", "[]", '["f", "h"]', '["f", 5, []]', '["f", "h", [5]]', '["f", "h", "abc"]', '[["f"], "h", []]', "\xff")
    long = ('["' + "f" * 5000 + '", "h", []]', '["f", "' + "h" * 300 + '", []]', '["f", "h", [' + '"a",' * 64 + '"a"]]')
    for number, text in enumerate((*nonsense, *long)):
        await redis.hset(f"pdmesh:{MESH}:weights", f"m{number}", text)
    kept = Replacement("f", "h", ("a", "b"))
    await wanted.put("tiny", kept)
    await wanted.refresh()
    assert dict(wanted.entries) == {"tiny": kept}
    await redis.aclose()
    await wanted.close()
