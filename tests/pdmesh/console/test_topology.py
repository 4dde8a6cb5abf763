"""What the console asks routers, and what it remembers of an autoscaler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdmesh.autoscaler.views import Decision, PoolDecision, PoolName
from pdmesh.console import topology
from pdmesh.console.topology import Topology
from pdmesh.launcher import local_state
from pdmesh.launcher.local_state import DecisionFile
from pdmesh.v1 import mesh_pb2, worker_pb2
from tests.pdmesh.console.made import Script, made_router


@asynccontextmanager
async def asking(*routers: str) -> AsyncIterator[Callable[..., Any]]:
    """A way to wait until the view is so."""
    changed = asyncio.Event()
    asked = Topology(routers, None, None, on_change=changed.set)
    asked.start()

    async def until(condition: Callable[[Any], object]) -> Any:
        async with asyncio.timeout(15):
            while not condition(seen := asked.view()):
                asked.watch()
                changed.clear()
                await changed.wait()
        return seen

    try:
        yield until
    finally:
        await asked.stop()


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nobody's decisions but the test's; and no long waits."""
    monkeypatch.setattr(local_state, "decisions_folder", lambda: tmp_path)
    monkeypatch.setattr(topology, "WATCHED_PERIOD_S", 0.02)
    return tmp_path


async def test_a_router_that_goes_away_is_said_to_and_its_workers_stay_as_it_knew_them() -> None:
    script = Script()
    async with made_router(script) as router, asking(router) as until:
        seen = await until(lambda seen: seen["policy"])
        assert seen["routers"][0]["problem"] == "" and len(seen["workers"]) == 4
        assert {(each["engine"], each["reproducible"]) for each in seen["workers"]} == {("pdmesh", True), ("other", False)}
        assert time.time() - 15 < seen["policy"][0]["at_s"] < time.time() - 0.7 and seen["policy"][0]["candidates"][0]["chosen"]
        script.problem = grpc.StatusCode.UNAVAILABLE
        seen = await until(lambda seen: seen["routers"][0]["problem"])
        assert "on purpose" in seen["routers"][0]["problem"] and len(seen["workers"]) == 4
        script.problem = None
        await until(lambda seen: not seen["routers"][0]["problem"])


async def test_one_router_of_two_is_enough() -> None:
    async with made_router() as gone:
        pass
    async with made_router() as router, asking(gone, router) as until:
        seen = await until(lambda seen: seen["workers"])
        assert [bool(each["problem"]) for each in seen["routers"]] == [True, False]


def decided(before: int, after: int, reason: str) -> Decision:
    return Decision((PoolDecision(PoolName.PREFILL, before, after, reason),))


async def test_changes_of_the_autoscaler_are_remembered_and_steady_rounds_are_not() -> None:
    async with made_router() as router, asking(router) as until:
        file = DecisionFile(lambda: ["127.0.0.1:40000"])
        for before, after, reason in ((1, 1, "calm"), (1, 1, "still calm"), (1, 2, "a queue"), (2, 2, "calm again")):
            file.decided(decided(before, after, reason), 0.0)
            seen = await until(lambda seen, reason=reason: seen["autoscaler"] and seen["autoscaler"][0]["reason"] == reason)
        assert [each["reason"] for each in seen["autoscaler"]] == ["calm again", "a queue", "still calm"]


def _status(name: str, *, alive: bool, age_ms: int) -> mesh_pb2.GetStatusResponse:
    worker = mesh_pb2.WorkerStatus(info=worker_pb2.WorkerInfo(worker_id=name), alive=alive, report_age_ms=age_ms)
    return mesh_pb2.GetStatusResponse(workers=[worker])


def test_of_several_routers_the_one_counts_that_heard_of_a_worker_last() -> None:
    views = topology.worker_views(
        [_status("w", alive=False, age_ms=1), _status("w", alive=True, age_ms=90), _status("w", alive=True, age_ms=40)]
    )
    assert [(view["state"], view["age_ms"]) for view in views] == [("alive", 40)]


def test_what_a_worker_fetched_and_restored_is_summed_over_routers() -> None:
    """Each router counts for its own requests; what an earlier process of the worker did is not counted."""

    def status(epoch: int, age_ms: int, fetched: int, restored: int, saved_s: float) -> mesh_pb2.GetStatusResponse:
        info = worker_pb2.WorkerInfo(worker_id="w", epoch=epoch)
        return mesh_pb2.GetStatusResponse(
            workers=[
                mesh_pb2.WorkerStatus(
                    info=info, alive=True, report_age_ms=age_ms, fetched_tokens=fetched, restored_tokens=restored, saved_s=saved_s
                )
            ]
        )

    (view,) = topology.worker_views([status(2, 90, 10, 5, 1.5), status(2, 40, 7, 0, -0.5), status(1, 95, 900, 900, 9.0)])
    assert (view["fetched_tokens"], view["restored_tokens"], view["saved_s"]) == (17, 5, 1.0)


def test_only_breakers_that_are_not_closed_are_told() -> None:
    breakers = [
        mesh_pb2.BreakerStatus(role=worker_pb2.ROLE_PREFILL, state=mesh_pb2.BREAKER_STATE_CLOSED),
        mesh_pb2.BreakerStatus(role=worker_pb2.ROLE_DECODE, state=mesh_pb2.BREAKER_STATE_OPEN, left_out=True, reason="slow"),
    ]
    view = topology.worker_view(mesh_pb2.WorkerStatus(alive=True, breakers=breakers))
    assert view["breakers"] == [{"role": "decode", "state": "open", "left_out": True, "reason": "slow"}]
