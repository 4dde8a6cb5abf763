"""What routers do about workers whose engine lacks something: hand-offs of choices, reproducible tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from pdmesh.v1 import mesh_pb2, worker_pb2
from router.routing.filters import NoPlacement, Placement, RoutingRequest
from router.routing.fleet_snapshot import FleetSnapshot
from router.routing.learned import Overheads
from router.routing.policy import POLICIES, make_policy
from router.routing.worker_snapshot import Mode, WorkerSnapshot
from tests.router.fleets import running, worker
from tests.router.mesh import Mesh, expected, mesh_of, request
from tests.router.stub_workers import DECODE, PREFILL, StubWorker
from tests.support.waiting import eventually

CHOICES, REDRAWS = worker_pb2.ENGINE_LACK_CHOICES_HANDOFF, worker_pb2.ENGINE_LACK_REPRODUCIBLE
LOCAL, REMOTE = mesh_pb2.PREFILL_MODE_LOCAL, mesh_pb2.PREFILL_MODE_REMOTE
TWO = RoutingRequest("m", 160, num_choices=2, max_total_tokens=200)


def of_other_engine(view: WorkerSnapshot) -> WorkerSnapshot:
    return replace(view, engine="other", hands_over_choices=False, identity=("m", "other"))


P, D = of_other_engine(worker("p0")), of_other_engine(running("d0", 12))  # busy: one choice would go REMOTE


def choose(policy: str, workers: list[WorkerSnapshot], routing_request: RoutingRequest) -> Placement | NoPlacement:
    return make_policy(policy, Overheads(), 32).choose(FleetSnapshot(workers), routing_request, 0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_several_choices_are_computed_where_they_are_decoded(policy: str) -> None:
    for routing_request, mode in ((replace(TWO, num_choices=1), Mode.REMOTE), (TWO, Mode.LOCAL)):
        placed = choose(policy, [P, D], routing_request)
        assert isinstance(placed, Placement) and placed.mode is mode
    retried = make_policy(policy, Overheads(), 32).choose_prefill(FleetSnapshot([P, D]), D, TWO, 0.0)
    assert retried is None  # a failed attempt and a hedge become LOCAL, too


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("able", ["", "p", "d"])
def test_a_hand_off_of_several_choices_is_refused_by_name(policy: str, able: str) -> None:
    """Also where one end alone could do it, as between versions of an engine."""
    workers = [replace(view, hands_over_choices=view.address[0] == able) for view in (P, D)]
    refused = choose(policy, workers, replace(TWO, mode=Mode.REMOTE))
    assert isinstance(refused, NoPlacement) and refused.never and refused.field == "options.mode"
    assert "n = 2" in refused.reason and "(other)" in refused.reason and "d0" in refused.reason
    alone = choose(policy, [D], replace(TWO, mode=Mode.REMOTE, num_choices=1))
    assert isinstance(alone, NoPlacement) and not alone.never  # that is the fleet's fault, and may pass


@pytest.mark.parametrize("policy", POLICIES)
def test_it_goes_to_workers_whose_engine_can(policy: str) -> None:
    placed = choose(policy, [P, replace(D, num_decoding=0), worker("p1"), running("d1", 20)], replace(TWO, mode=Mode.REMOTE))
    assert isinstance(placed, Placement) and placed.prefill is not None
    assert (placed.decode.worker_id, placed.prefill.worker_id) == ("d1", "p1")


def lacking(
    folder: Path, lack: worker_pb2.EngineLack.ValueType, roles: Mapping[str, tuple[worker_pb2.Role.ValueType, ...]]
) -> AbstractAsyncContextManager[Mesh]:
    """A mesh whose engine lacks this."""
    return mesh_of(folder, [StubWorker(name, those, lacks=(lack,)) for name, those in roles.items()])


async def test_choices_in_a_mesh_whose_engine_hands_over_one(model_folder: Path) -> None:
    async with lacking(model_folder, CHOICES, {"p0": (PREFILL,), "d0": (DECODE,)}) as mesh:
        assert (await mesh.generate(request())).timings.mode == REMOTE
        answer = await mesh.generate(request(n=2))
        assert answer.timings.mode == LOCAL
        assert [answer.tokens(choice) for choice in range(2)] == [expected(8, choice=choice) for choice in range(2)]
        with pytest.raises(grpc.aio.AioRpcError, match=r"options.mode: REMOTE was asked for with n = 2, .*\(pdmesh\)") as refused:
            await mesh.generate(request(n=2, mode=REMOTE))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await mesh.until_whole()


async def test_choices_that_move_before_their_first_token_are_not_handed_over(model_folder: Path) -> None:
    async with lacking(model_folder, CHOICES, {"d0": (PREFILL, DECODE), "d1": (PREFILL, DECODE)}) as mesh:
        decodes = [mesh["d0"], mesh["d1"]]
        for each in decodes:
            each.pause_at = 0
        asking = asyncio.create_task(mesh.generate(request(n=2)))
        await eventually(lambda: any(each.held for each in decodes))
        first, other = decodes if decodes[0].held else decodes[::-1]
        other.pause_at = None
        first.draining = True
        answer = await asking
        assert [answer.tokens(choice) for choice in range(2)] == [expected(8, choice=choice) for choice in range(2)]
        assert [submit.mode for submit in other.submits] == [LOCAL] and not first.prefills
        await mesh.until_whole()


async def test_tokens_that_an_engine_redraws_are_no_fault(model_folder: Path) -> None:
    async with lacking(model_folder, REDRAWS, {"p0": (PREFILL,), "d0": (DECODE,)}) as mesh:
        mesh["d0"].wrong_token_at = 0  # decode repeats the committed token as another one
        assert (await mesh.generate(request())).tokens() == expected(8)
        await mesh.until_whole()
        status = await mesh.stub.GetStatus(mesh_pb2.GetStatusRequest())
        assert (status.num_token_mismatches, status.num_redrawn_tokens) == (0, 1)
        assert all((each.info.engine, list(each.info.lacks)) == ("pdmesh", [REDRAWS]) for each in status.workers)
        [decision] = (await mesh.stub.Explain(mesh_pb2.ExplainRequest(latest=1))).decisions
        assert all(each.engine == "pdmesh" and each.may_redraw for each in decision.candidates)
