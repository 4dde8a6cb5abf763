"""Which worker is named as the holder of KV that another one may fetch, over the attempts of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdmesh.v1 import common_pb2, mesh_pb2
from router.fleet.worker import Dispatched
from router.lifecycle.hedging import HedgeLimits
from tests.router import stub_prefill, stub_workers
from tests.router.mesh import PROMPT, Mesh, expected, mesh_of, request
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.support.waiting import eventually

REMOTE, LOCAL = mesh_pb2.PREFILL_MODE_REMOTE, mesh_pb2.PREFILL_MODE_LOCAL
NUM_CACHED = len(PROMPT) // 16 * 16


@asynccontextmanager
async def fetching_mesh(folder: Path, *, prefill: int, decode: int) -> AsyncIterator[Mesh]:
    """Workers that fetch, p0, p1, ... and d0, d1, ..."""
    workers = [StubWorker(f"p{number}", (PREFILL,), fetch_token_s=1e-6) for number in range(prefill)]
    workers += [StubWorker(f"d{number}", (DECODE,), fetch_token_s=1e-6) for number in range(decode)]
    async with mesh_of(folder, workers) as mesh:
        followed = mesh.router.follower._followed
        await eventually(lambda: len(followed) == len(workers) and all(each.position is not None for each in followed.values()))
        yield mesh


def prefer(mesh: Mesh, *names: str) -> None:
    """All others of the same role seem to be busy from now on."""
    for name, stub in mesh.workers.items():
        if name not in names and any(stub.roles == mesh[other].roles for other in names):
            mesh.router.core.fleet.workers[stub.address].dispatched(Dispatched(seqs=60, tokens=10_000))


async def held_by(mesh: Mesh, prefill: str, decode: str) -> None:
    """Have the prompt computed, so that both workers hold it, and forget which worker seemed to be busy."""
    prefer(mesh, prefill, decode)
    assert (await mesh.generate(request(mode=REMOTE))).timings.prefill_worker == prefill
    await mesh.until_whole()
    for worker in mesh.router.core.fleet.workers.values():
        worker._dispatched.clear()
        worker._view_changed()


async def drained(mesh: Mesh, name: str) -> None:
    """Have a worker take no more requests; others may still fetch from it."""
    mesh[name].draining = True
    await eventually(lambda: mesh.router.core.fleet.workers[mesh[name].address].view is None)


def holders_of(*stubs: StubWorker) -> list[str]:
    """The holders that the Prefill calls named, in the order of the workers."""
    return [call.holder.address for stub in stubs for call in stub.prefills]


async def test_a_hedge_does_not_wait_for_the_holder_for_which_the_late_worker_may_wait(model_folder: Path) -> None:
    async with fetching_mesh(model_folder, prefill=3, decode=2) as mesh:
        await held_by(mesh, "p2", "d1")
        mesh.router.core.hedging.limits = HedgeLimits(unknown_s=0.3)
        await drained(mesh, "p2")
        prefer(mesh, "p0", "d0")
        mesh["p0"].prefill_plan = ["mute"]
        answer = await mesh.generate(request(mode=REMOTE))
        assert (answer.tokens(), mesh.router.core.num_hedges) == (expected(8), 1)
        assert answer.timings.decode_worker == "d0"
        assert sorted(holders_of(mesh["p0"], mesh["p1"])) == sorted([mesh["p2"].address, mesh["d1"].address])
        await mesh.until_whole()


async def test_a_holder_that_did_not_send_is_not_named_to_the_next_worker(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fetching_mesh(model_folder, prefill=4, decode=2) as mesh:
        await held_by(mesh, "p3", "d1")
        monkeypatch.setattr(stub_prefill, "TIMINGS", common_pb2.PrefillTimings(fetch_ns=1000, fetch_failed=True))
        prefer(mesh, "p0", "p1", "p2", "d0")
        for name in ("p0", "p1"):
            mesh[name].prefill_plan = ["break_after_first"]
        mesh["p2"].prefill_plan = ["break_after_first"]
        assert (await mesh.generate(request(mode=REMOTE))).tokens() == expected(8)
        named = holders_of(mesh["p0"], mesh["p1"], mesh["p2"])
        assert len(named) == 3
        assert sorted(named) == sorted(["", mesh["p3"].address, mesh["d1"].address]), "each is named once, then none is left"
        await mesh.until_whole()


async def test_a_decode_worker_that_computes_after_a_failure_may_fetch(model_folder: Path) -> None:
    async with fetching_mesh(model_folder, prefill=1, decode=2) as mesh:
        await held_by(mesh, "p0", "d1")
        prefer(mesh, "d0")
        mesh["p0"].prefill_plan = ["break"]
        assert (await mesh.generate(request())).tokens() == expected(8)
        *_, local = mesh["d0"].submits
        assert local.mode == LOCAL
        assert (local.holder.address, local.holder.num_tokens) == (mesh["d1"].address, NUM_CACHED)
        await mesh.until_whole()


async def test_what_a_decode_worker_could_not_fetch_is_known_when_it_is_lost(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fetching_mesh(model_folder, prefill=1, decode=3) as mesh:
        await held_by(mesh, "p0", "d2")
        monkeypatch.setattr(stub_workers, "TIMINGS", common_pb2.PrefillTimings(fetch_ns=1000, fetch_failed=True))
        await drained(mesh, "d2")
        for name in ("d0", "d1"):
            mesh[name].pause_at = 5
        answering = asyncio.create_task(mesh.generate(request(max_tokens=20, mode=LOCAL)))
        await eventually(lambda: any(held.is_paused for name in ("d0", "d1") for held in mesh[name].held.values()))
        first, other = (mesh["d0"], mesh["d1"]) if mesh["d0"].held else (mesh["d1"], mesh["d0"])
        other.pause_at = None
        await first.kill()
        assert (await answering).tokens() == expected(20)
        named = [stub.submits[-1].holder.address for stub in (first, other)]
        known = {mesh["p0"].address, mesh["d2"].address}
        assert named[0] in known and named[1] in known - {named[0]}
