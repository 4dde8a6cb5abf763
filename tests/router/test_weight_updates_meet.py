"""Updates of weights that meet: another update, a client that goes, a worker that comes or is lost; and many of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdmesh.v1 import mesh_pb2, worker_pb2
from router.fleet.model_changes import weights
from router.fleet.model_changes.weights import MAX_REPLACED, NOTHING, Replacement
from tests.router.mesh import Mesh, config_for, running_router
from tests.router.stub_workers import StubWorker
from tests.router.test_replaced_weights import BOTH, MESH, NEW, STARTED_WITH, Loading, mesh_of, send, started, update
from tests.support.waiting import eventually

END = worker_pb2.SendWeightsRequest(sha256=b"of all")


def test_what_workers_start_with_is_never_forgotten() -> None:
    """Of the first deployment, and of a later one, whose workers are told of in each update."""
    now = NOTHING
    for number in range(3 * MAX_REPLACED):
        came = "old" if number < 20 else "new"
        now = now.pending([came, f"h{number}"]).by("f", f"h{number + 1}", [came, f"h{number}"])
        assert {came, "old", f"h{number}"} <= set(now.replaced) and len(now.replaced) <= MAX_REPLACED
    assert now.by("f", "old", ["new", "h9"]).replaced[0] == "h0"  # what is computed with again is not replaced


async def test_updates_at_the_same_time_come_one_after_the_other(model_folder: Path) -> None:
    first = await started()
    async with mesh_of(model_folder, first) as mesh:
        first.may_load.clear()
        both = [asyncio.create_task(update(mesh, folder)) for folder in ("one", "two")]
        await eventually(lambda: len(first.folders) == 1)
        await asyncio.sleep(0.2)
        assert len(first.folders) == 1
        first.may_load.set()
        await asyncio.gather(*both)
        last = first.weights_hash
        assert mesh.router.core.weights.replacement("tiny") == Replacement(last, last, (STARTED_WITH, first.folders[0]))
    await first.kill()


async def test_an_update_goes_on_where_the_client_has_gone(model_folder: Path) -> None:
    first = await started()
    async with mesh_of(model_folder, first) as mesh:
        first.may_load.clear()
        gone = asyncio.create_task(update(mesh))
        await eventually(lambda: first.folders == [NEW])
        gone.cancel()
        await asyncio.sleep(0.2)
        first.may_load.set()
        await eventually(lambda: mesh.router.core.weights.replacement("tiny") == Replacement(NEW, NEW, (STARTED_WITH,)))
    await first.kill()


async def test_weights_whose_sender_has_gone_are_not_expected(model_folder: Path) -> None:
    first = await started()
    async with mesh_of(model_folder, first) as mesh:
        await update(mesh)
        known = mesh.router.core.weights.replacement("tiny")
        begun = asyncio.Event()

        async def pieces() -> AsyncIterator[worker_pb2.SendWeightsRequest]:
            yield worker_pb2.SendWeightsRequest(data=b"a part")
            begun.set()
            await asyncio.Event().wait()

        gone = asyncio.create_task(_sent(mesh, pieces()))
        await begun.wait()
        await eventually(lambda: mesh.router.core.weights.replacement("tiny") != known)
        gone.cancel()
        await eventually(lambda: mesh.router.core.weights.replacement("tiny") == known)
        await send(mesh, "whole")  # nothing is in its way
        assert first.weights_hash == "whole"
    await first.kill()


async def _sent(mesh: Mesh, pieces: AsyncIterator[worker_pb2.SendWeightsRequest]) -> mesh_pb2.MeshUpdateWeightsResponse:
    return await mesh.stub.SendWeights(pieces)


@pytest.mark.parametrize("change", ["lost", "comes"])
async def test_workers_that_change_as_weights_begin_to_come_hold_up_nothing(
    model_folder: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await started("w0"), await started("w1")
    if change == "comes":
        await second.kill()
    present: list[StubWorker] = [first] if change == "comes" else [first, second]
    put = weights.WeightsKeeper.put
    config = config_for(model_folder, [first, second], mesh=MESH)
    async with running_router(config) as (router, stub):
        await eventually(lambda: sum(view.decode for view in router.core.fleet.views()) == len(present))

        async def changing(keeper: weights.WeightsKeeper, model: str, replacement: Replacement) -> None:
            monkeypatch.setattr(weights.WeightsKeeper, "put", put)
            if change == "lost":
                await present.pop().kill()
            else:
                present.append(await Loading("w1", BOTH, port=second.port).start())
            await eventually(lambda: sum(view.decode for view in router.core.fleet.views()) == len(present))
            await put(keeper, model, replacement)

        monkeypatch.setattr(weights.WeightsKeeper, "put", changing)
        pieces = [*(worker_pb2.SendWeightsRequest(data=letter.encode()) for letter in "longer"), END]
        done = await stub.SendWeights(iter(pieces))
        assert done.weights_hash == first.weights_hash == "longer"
        for worker in present:
            await worker.kill()
